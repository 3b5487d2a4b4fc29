#pragma once

#include <cstdint>

namespace distca::planner {

// Counts the work that the search may still do, in steps. Handling an item or a segment, or
// estimating seconds, takes about one step. The search counts work instead of time, so that equal
// inputs stop at the same place on every rank.
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
