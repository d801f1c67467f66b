// Which kernels this library has, and where others are.

#include "kernels.h"

#include <dlfcn.h>

#include <array>
#include <csignal>
#include <map>
#include <stdexcept>

namespace {

using KernelLookup = const void*(const char* name);
// Writes the path of the library that has kernels and returns 1, or why there is none and returns
// 0. 2: the user interrupted it.
using KernelFinder = int(const char* name, char* text, size_t size);

std::atomic<KernelFinder*> kernel_finder{nullptr};

std::map<std::string, const void*>& registered_kernels() {
  static std::map<std::string, const void*> found;
  return found;
}

}  // namespace

#define EXPORTED extern "C" __attribute__((visibility("default")))

// The launchers of kernels of this library, or null.
EXPORTED const void* megasoftmax_kernels(const char* name) {
  const auto found = registered_kernels().find(name);
  return found == registered_kernels().end() ? nullptr : found->second;
}

// For ctypes: how kernels are found that this library does not have.
EXPORTED void megasoftmax_set_kernel_finder(KernelFinder* finder) { kernel_finder = finder; }

namespace megasoftmax {

void register_kernels(const std::string& name, const void* launchers) {
  registered_kernels()[name] = launchers;
}

const void* find_kernels(const std::string& name) {
  if (const void* linked = megasoftmax_kernels(name.c_str())) return linked;
  const auto refuse = [&](const char* why) {
    throw std::runtime_error("kernels of " + name + ": " + why);
  };
  if (kernel_finder == nullptr) refuse("they are not in this library");
  std::array<char, 16384> text = {};
  const int answer = kernel_finder.load()(name.c_str(), text.data(), text.size());
  if (answer == 2) {
    std::raise(SIGINT);  // Python raises KeyboardInterrupt once it runs again
    refuse("interrupted");
  }
  if (answer != 1) refuse(text.data());
  void* const library = dlopen(text.data(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) refuse(dlerror());
  auto* const lookup = reinterpret_cast<KernelLookup*>(dlsym(library, "megasoftmax_kernels"));
  const void* const found = lookup == nullptr ? nullptr : lookup(name.c_str());
  if (found == nullptr) refuse("they are not in their library");
  return found;
}

}  // namespace megasoftmax
