#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "pack.h"
#include "plan.h"
#include "ranges.h"

namespace distca::planner {

// Query rows of one document on one server.
struct Share {
  int64_t document;
  Range rows;
  double seconds;  // at speed 1
};

bool is_dearer(const Share& a, const Share& b);
bool in_order(const Share& a, const Share& b);  // by document, then position

// Those of one document, of shares in order.
std::span<const Share> shares_of(std::span<const Share> sorted, int64_t document);

// Shares by falling seconds. They come and go near either end for the most part, where it takes
// little: the fewer of both sides move up.
class DearestFirst {
 public:
  void assign(std::span<const Share> sorted);
  std::span<const Share> all() const { return std::span<const Share>(shares_).subspan(first_); }
  const Share& operator[](size_t idx) const { return shares_[first_ + idx]; }
  size_t size() const { return shares_.size() - first_; }
  bool empty() const { return size() == 0; }

  // These return how many shares moved up.
  int64_t insert(const Share& share);
  int64_t erase(size_t first, size_t last);
  // Where a share stands that is among them.
  size_t find(const Share& share) const;

 private:
  std::vector<Share> shares_;
  size_t first_ = 0;  // shares before it are gone
};

}  // namespace distca::planner
