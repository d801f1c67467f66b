#pragma once
// Launchers of kernels by names such as "softmax_forward_float16". A launcher is linked to the
// operators, or lies in a library of kernels, which is built and loaded when a call first needs it.
// Compiles without nvcc.

#include <array>
#include <atomic>
#include <string>

#include "dtype.h"

namespace megasoftmax {

void register_launcher(const std::string& name, const void* launcher);

// Throws std::runtime_error with the reason if there is none of this name.
const void* find_launcher(const std::string& name);

// Registers a launcher of this library for T. Files of instances/ have one or several.
template <class T, class Launcher>
struct Registration {
  Registration(const std::string& name, Launcher* launcher) {
    static_assert(kTypeName<T> != nullptr);
    register_launcher(name + "_" + kTypeName<T>, reinterpret_cast<const void*>(launcher));
  }
};

// The launchers of one name for all element types.
template <class Launcher>
class Launchers {
 public:
  constexpr Launchers(const char* name) : name_(name) {}

  // Of an element type, or of TF32. It is looked for once. Throws as find_launcher.
  Launcher& of(DType type, bool is_tf32 = false) {
    const char* const type_name = is_tf32 ? kTf32Name : name_of(type);
    std::atomic<const void*>& found = found_[is_tf32 ? 3 : static_cast<int>(type)];
    // A lock would make other threads wait. The first thread may wait for Python's lock, which one
    // of them may hold.
    if (found.load(std::memory_order_acquire) == nullptr)
      found.store(find_launcher(std::string(name_) + "_" + type_name), std::memory_order_release);
    const void* const launcher = found.load(std::memory_order_acquire);
    return *reinterpret_cast<Launcher*>(const_cast<void*>(launcher));
  }

 private:
  const char* name_;
  std::array<std::atomic<const void*>, 4> found_ = {};
};

}  // namespace megasoftmax
