#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "../model/pack.h"
#include "../model/plan.h"
#include "../model/ranges.h"

namespace distca::planner {

// Query rows of one document on one server.
struct Share {
  int64_t document;
  Range rows;
  double seconds;  // at speed 1
};

bool is_dearer(const Share& a, const Share& b);
bool in_order(const Share& a, const Share& b);  // by document, then position

// Returns the shares of one document, among shares sorted by in_order.
std::span<const Share> shares_of(std::span<const Share> sorted, int64_t document);

// Shares in descending order of seconds. To insert or erase one moves the shares on its shorter
// side, which is cheap because most changes are near either end.
class DearestFirst {
 public:
  void assign(std::span<const Share> sorted);
  std::span<const Share> all() const { return std::span<const Share>(shares_).subspan(first_); }
  const Share& operator[](size_t idx) const { return shares_[first_ + idx]; }
  size_t size() const { return shares_.size() - first_; }
  bool empty() const { return size() == 0; }

  // Return how many shares had to move.
  int64_t insert(const Share& share);
  int64_t erase(size_t first, size_t last);
  // Returns the index of a share that is in the list.
  size_t find(const Share& share) const;

 private:
  std::vector<Share> shares_;
  size_t first_ = 0;  // shares before it were erased
};

}  // namespace distca::planner
