#pragma once
// Values with names, as text: how explain asks for a plan and reads it. Python repeats no struct.
// Compiles without nvcc.

#include <charconv>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>

#include "text.h"

namespace megasoftmax {

// Integers as lines "name value". What is not named is 0.
class NamedIntegers {
 public:
  explicit NamedIntegers(std::string_view text) {
    while (!text.empty()) {
      const std::string_view line = text.substr(0, text.find('\n'));
      const size_t space = line.find(' ');
      int64_t& value = values_[std::string(line.substr(0, space))];
      std::from_chars(line.data() + space + 1, line.data() + line.size(), value);
      text.remove_prefix(line.size() < text.size() ? line.size() + 1 : line.size());
    }
  }
  int64_t operator[](const std::string& name) const {
    const auto found = values_.find(name);
    return found == values_.end() ? 0 : found->second;
  }

 private:
  std::map<std::string, int64_t> values_;
};

// Calls fill(add), which calls add(name, value), and returns lines "name value". They last until
// the thread's next call.
template <class Fill>
const char* named_lines(Fill&& fill) {
  static thread_local std::string text;
  text.clear();
  fill([&](const char* name, const auto& value) {
    append(text, name);
    append(text, " ");
    append(text, value);
    append(text, "\n");
  });
  return text.c_str();
}

}  // namespace megasoftmax
