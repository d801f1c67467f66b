#pragma once
// The kernels of a family and an element type, by names such as "softmax_float16". They are linked
// to the operators, or lie in a library of their own, which is built and loaded when a call first
// needs them. Compiles without nvcc.

#include <atomic>
#include <string>

#include "dtype.h"

namespace megasoftmax {

// Registers launchers of this library, which live as long as it.
void register_kernels(const std::string& name, const void* launchers);

// The launchers of the kernels of this name. Throws std::runtime_error with the reason if there are
// none.
const void* find_kernels(const std::string& name);

// The name of kernels for T.
template <class Launchers, class T>
std::string name_of_kernels() {
  static_assert(kTypeName<T> != nullptr);
  return std::string(Launchers::kFamily) + "_" + kTypeName<T>;
}

// The launchers of a family for T, a struct of pointers. They are looked for once.
template <class Launchers, class T>
const Launchers& launchers() {
  // A static that the first thread initializes would make the others wait. The first thread may
  // wait for Python's lock, which one of them may hold.
  static std::atomic<const void*> found{nullptr};
  if (found.load(std::memory_order_acquire) == nullptr)
    found.store(find_kernels(name_of_kernels<Launchers, T>()), std::memory_order_release);
  return *static_cast<const Launchers*>(found.load(std::memory_order_acquire));
}

// One file of instances for T has one of these. It includes no definitions of kernels that other
// files instantiate, because it would compile them once more.
template <class Launchers, class T>
struct KernelRegistration {
  explicit KernelRegistration(const Launchers& launchers) {
    register_kernels(name_of_kernels<Launchers, T>(), &launchers);
  }
};

}  // namespace megasoftmax
