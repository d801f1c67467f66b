#pragma once
// Launchers of kernels by names such as "softmax_forward_float16". A launcher is linked to the
// operators, or lies in a library of kernels, which is built and loaded when a call first needs it.
// The prefix of the name decides the library: library_of in megasoftmax/build/extension.py.
// Compiles without nvcc.

#include <array>
#include <atomic>
#include <string>

#include "dtype.h"

namespace megasoftmax {

// Throws std::runtime_error with the reason if there is none of this name.
const void* find_launcher(const std::string& name);

// The launchers of one name for all element types.
template <class Launcher>
class Launchers {
 public:
  constexpr Launchers(const char* name) : name_(name) {}

  // The launcher for an element type, or for TF32. It is looked up once, without a lock: the first
  // thread may wait for Python's lock, which another one may hold. Throws what find_launcher
  // throws.
  Launcher& of(DType type, bool is_tf32 = false) {
    std::atomic<const void*>& found = found_[is_tf32 ? kTypes : static_cast<int>(type)];
    const void* launcher = found.load(std::memory_order_acquire);
    if (launcher == nullptr) {
      launcher = find_launcher(std::string(name_) + "_" + (is_tf32 ? kTf32Name : name_of(type)));
      found.store(launcher, std::memory_order_release);
    }
    return *reinterpret_cast<Launcher*>(const_cast<void*>(launcher));
  }

 private:
  static constexpr int kTypes = 3;  // of DType

  const char* name_;
  std::array<std::atomic<const void*>, kTypes + 1> found_ = {};
};

}  // namespace megasoftmax
