#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "../model/pack.h"
#include "../model/plan.h"
#include "../model/ranges.h"

namespace distca::planner {

// Query rows of one document on one server. Items are packed into servers, the bins.
struct Item {
  int64_t document;
  Range rows;
  double seconds;  // at speed 1
};

bool is_larger(const Item& a, const Item& b);
bool in_order(const Item& a, const Item& b);  // by document, then position

// Returns the items of one document, among items sorted by in_order.
std::span<const Item> items_of(std::span<const Item> sorted, int64_t document);

// Items in descending order of seconds. Insertion and erasure shift the items on the shorter side,
// which is cheap because most changes are near either end.
class LargestFirst {
 public:
  void assign(std::span<const Item> sorted);
  std::span<const Item> all() const { return std::span<const Item>(items_).subspan(first_); }
  const Item& operator[](size_t idx) const { return items_[first_ + idx]; }
  size_t size() const { return items_.size() - first_; }
  bool empty() const { return size() == 0; }

  // Return how many items had to move.
  int64_t insert(const Item& item);
  int64_t erase(size_t first, size_t last);
  // Returns the index of an item that is in the list.
  size_t find(const Item& item) const;

 private:
  std::vector<Item> items_;
  size_t first_ = 0;  // items before it were erased
};

}  // namespace distca::planner
