#pragma once
// How files of instances/ register launchers, which kernels.h finds. It is apart from kernels.h
// because <string> and <atomic> would make each of these files slower to compile.

#include "dtype.h"

namespace megasoftmax {

void register_launcher(const char* name, const char* type_name, const void* launcher);

// Registers a launcher of this library for T.
template <class T, class Launcher>
struct Registration {
  Registration(const char* name, Launcher* launcher) {
    static_assert(kTypeName<T> != nullptr);
    register_launcher(name, kTypeName<T>, reinterpret_cast<const void*>(launcher));
  }
};

}  // namespace megasoftmax
