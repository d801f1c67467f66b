#pragma once
// Text of strings and integers, the same in every locale. Streams are avoided: a toolchain that
// links an older static C++ library than its headers are of breaks them. Compiles without nvcc.

#include <concepts>
#include <string>
#include <string_view>

namespace megasoftmax {

inline void append(std::string& text, std::string_view part) { text += part; }

template <std::integral Integer>
void append(std::string& text, Integer part) {
  text += std::to_string(part);
}

}  // namespace megasoftmax
