// Which kernels this library has, and where others are.

#include "kernels.h"

#include <dlfcn.h>

#include <array>
#include <map>
#include <stdexcept>

namespace {

using OfLibrary = const void*(const char* name);
// Writes the path of the library that has kernels, or why there is none and returns 0.
using Find = int(const char* name, char* text, size_t size);

std::atomic<Find*> find{nullptr};

std::map<std::string, const void*>& of_this_library() {
  static std::map<std::string, const void*> found;
  return found;
}

}  // namespace

#define EXPORTED extern "C" __attribute__((visibility("default")))

// The launchers of kernels of this library, or null.
EXPORTED const void* megasoftmax_kernels(const char* name) {
  const auto found = of_this_library().find(name);
  return found == of_this_library().end() ? nullptr : found->second;
}

// For ctypes: how kernels are found that this library does not have.
EXPORTED void megasoftmax_find_kernels_by(Find* function) { find = function; }

namespace megasoftmax {

void add_kernels(const std::string& name, const void* launchers) {
  of_this_library()[name] = launchers;
}

const void* find_kernels(const std::string& name) {
  if (const void* linked = megasoftmax_kernels(name.c_str())) return linked;
  const auto refuse = [&](const char* why) {
    throw std::runtime_error("kernels of " + name + ": " + why);
  };
  if (find == nullptr) refuse("they are not in this library");
  std::array<char, 16384> text = {};
  if (find.load()(name.c_str(), text.data(), text.size()) == 0) refuse(text.data());
  void* const library = dlopen(text.data(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) refuse(dlerror());
  auto* const of_library = reinterpret_cast<OfLibrary*>(dlsym(library, "megasoftmax_kernels"));
  const void* const found = of_library == nullptr ? nullptr : of_library(name.c_str());
  if (found == nullptr) refuse("they are not in their library");
  return found;
}

}  // namespace megasoftmax
