#pragma once
// The kernels of a family and an element type, by names such as "softmax_float16". They are linked
// to the operators, or lie in a library of their own, which is built and loaded when a call first
// needs them. Compiles without nvcc.

#include <atomic>
#include <string>

#include "dtype.h"

namespace megasoftmax {

// Says that this library has kernels. What calls them stays until it is unloaded.
void add_kernels(const std::string& name, const void* launchers);

// The launchers of the kernels of this name. Throws std::runtime_error with the reason if there are
// none.
const void* find_kernels(const std::string& name);

// The name of kernels for T.
template <class Launchers, class T>
std::string name_of_kernels() {
  return std::string(Launchers::kFamily) + "_" + kTypeName<T>;
}

// The launchers of a family for T, a struct of pointers. They are looked for once.
template <class Launchers, class T>
const Launchers& launchers() {
  // No static that is initialized once: threads would wait for each other, and the one that
  // initializes it may wait for Python's lock.
  static std::atomic<const void*> found{nullptr};
  if (found.load(std::memory_order_acquire) == nullptr)
    found.store(find_kernels(name_of_kernels<Launchers, T>()), std::memory_order_release);
  return *static_cast<const Launchers*>(found.load(std::memory_order_acquire));
}

// One file of instances for T has one of these. It sees no definitions of kernels of other files,
// since it would instantiate them.
template <class Launchers, class T>
struct HasKernelsOf {
  explicit HasKernelsOf(const Launchers& launchers) {
    add_kernels(name_of_kernels<Launchers, T>(), &launchers);
  }
};

}  // namespace megasoftmax
