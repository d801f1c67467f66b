#pragma once
// The regimes that launches choose from: those of limits.h, or the same with numbers of rows that
// were measured on the GPU at hand, by megasoftmax/tune.py. Plain host code.

#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

#include "regimes.h"

namespace megasoftmax {

// The regimes of a direction.
class RowTable {
 public:
  RowTable(RowRegimes built_in, int vector_bytes)
      : built_in_(built_in), vector_bytes_(vector_bytes), regimes_(built_in.data()) {}

  RowRegimes built_in() const { return built_in_; }
  // One read: it is asked once a launch.
  RowRegimes regimes() const {
    return {regimes_.load(std::memory_order_acquire), built_in_.size()};
  }

  // Gives the regimes other numbers of rows, for the whole process; none: those of limits.h. False:
  // the numbers may change bits, and nothing was replaced.
  bool replace(std::span<const int> min_rows) {
    if (min_rows.empty()) {
      regimes_.store(built_in_.data(), std::memory_order_release);
      return true;
    }
    if (min_rows.size() != built_in_.size()) return false;
    auto regimes = std::make_unique<RowRegime[]>(built_in_.size());
    for (size_t i = 0; i < built_in_.size(); ++i) {
      // A regime for any number of rows stays one: registers add a row in an order of their own.
      if (min_rows[i] < 0 || (min_rows[i] == 0) != (built_in_[i].min_rows == 0)) return false;
      regimes[i] = built_in_[i];
      regimes[i].min_rows = min_rows[i];
    }
    if (!are_consistent({regimes.get(), built_in_.size()}, vector_bytes_)) return false;
    const std::lock_guard lock(mutex_);
    regimes_.store(regimes.get(), std::memory_order_release);
    replaced_.push_back(std::move(regimes));  // other threads may still plan by earlier ones
    return true;
  }

 private:
  RowRegimes built_in_;
  int vector_bytes_;  // that shared memory keeps of a vector
  std::atomic<const RowRegime*> regimes_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<RowRegime[]>> replaced_;
};

inline RowTable forward_table(kForwardRegimes, 16), backward_table(kBackwardRegimes, 2 * 16);

}  // namespace megasoftmax
