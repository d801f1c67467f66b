// Which launchers this library has, and where others are.

#include "kernels.h"

#include <dlfcn.h>

#include <array>
#include <csignal>
#include <map>
#include <stdexcept>

#include "registration.h"

namespace {

using LauncherLookup = const void*(const char* name);
// Writes the path of the library that has a launcher and returns 1, or why there is none and
// returns 0. 2: the user interrupted it.
using LibraryFinder = int(const char* name, char* text, size_t size);

std::atomic<LibraryFinder*> library_finder{nullptr};

std::map<std::string, const void*>& registered() {
  static std::map<std::string, const void*> found;
  return found;
}

}  // namespace

#define EXPORTED extern "C" __attribute__((visibility("default")))

// A launcher of this library, or null.
EXPORTED const void* megasoftmax_launcher(const char* name) {
  const auto found = registered().find(name);
  return found == registered().end() ? nullptr : found->second;
}

// For ctypes: sets what finds the library of a launcher that this library lacks.
EXPORTED void megasoftmax_set_kernel_finder(LibraryFinder* finder) { library_finder = finder; }

namespace megasoftmax {

void register_launcher(const char* name, const char* type_name, const void* launcher) {
  registered()[std::string(name) + "_" + type_name] = launcher;
}

const void* find_launcher(const std::string& name) {
  if (const void* linked = megasoftmax_launcher(name.c_str())) return linked;
  const auto refuse = [&](const char* why) {
    throw std::runtime_error("kernels of " + name + ": " + why);
  };
  if (library_finder == nullptr) refuse("they are not in this library");
  std::array<char, 16384> text = {};
  const int answer = library_finder.load()(name.c_str(), text.data(), text.size());
  if (answer == 2) {
    std::raise(SIGINT);  // Python raises KeyboardInterrupt once it runs again
    refuse("interrupted");
  }
  if (answer != 1) refuse(text.data());
  void* const library = dlopen(text.data(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) refuse(dlerror());
  auto* const lookup = reinterpret_cast<LauncherLookup*>(dlsym(library, "megasoftmax_launcher"));
  const void* const found = lookup == nullptr ? nullptr : lookup(name.c_str());
  if (found == nullptr) refuse("they are not in their library");
  return found;
}

}  // namespace megasoftmax
