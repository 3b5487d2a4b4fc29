#pragma once

#include <cstdint>

namespace distca::planner {

// Work that a plan may still take, in steps: about a share, a segment or an estimate of seconds
// each. Counted, not timed, so that equal inputs stop at the same place on every rank.
class Budget {
 public:
  explicit Budget(int64_t steps) : left_(steps) {}

  void spend(int64_t steps) { left_ -= steps; }
  bool is_spent() const { return left_ <= 0; }
  int64_t left() const { return left_; }

 private:
  int64_t left_;
};

}  // namespace distca::planner
