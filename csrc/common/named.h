#pragma once
// Values with names, as text: how explain asks for a plan and reads it. Python repeats no struct.
// Compiles without nvcc.

#include <cstdint>
#include <locale>
#include <map>
#include <sstream>
#include <string>

namespace megasoftmax {

// Integers as lines "name value". What is not named is 0.
class NamedIntegers {
 public:
  explicit NamedIntegers(const char* text) {
    std::istringstream lines(text);
    lines.imbue(std::locale::classic());  // the application's may group digits
    std::string name;
    for (int64_t value = 0; lines >> name >> value;) values_[name] = value;
  }
  int64_t operator[](const std::string& name) const {
    const auto found = values_.find(name);
    return found == values_.end() ? 0 : found->second;
  }

 private:
  std::map<std::string, int64_t> values_;
};

// Calls fill(add), which calls add(name, values...), and returns lines "name values". They last
// until the thread's next call.
template <class Fill>
const char* named_lines(Fill&& fill) {
  static thread_local std::string text;
  std::ostringstream lines;
  lines.imbue(std::locale::classic());
  fill([&](const char* name, const auto&... values) {
    lines << name;
    ((lines << ' ' << values), ...);
    lines << '\n';
  });
  text = lines.str();
  return text.c_str();
}

}  // namespace megasoftmax
