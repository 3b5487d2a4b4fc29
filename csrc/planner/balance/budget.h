#pragma once

#include <cstdint>

namespace distca::planner {

// Counts the work that a plan may still take, in steps: to handle a share or a segment, or to
// estimate seconds, is about one step. Work is counted, not timed, so that equal inputs stop at the
// same place on every rank.
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
