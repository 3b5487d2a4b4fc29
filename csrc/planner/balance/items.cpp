#include "items.h"

#include <algorithm>
#include <tuple>

namespace distca::planner {

bool is_larger(const Item& a, const Item& b) {
  return a.seconds != b.seconds
             ? a.seconds > b.seconds
             : std::tie(a.document, a.rows.begin) < std::tie(b.document, b.rows.begin);
}

bool in_order(const Item& a, const Item& b) {
  return std::tie(a.document, a.rows.begin) < std::tie(b.document, b.rows.begin);
}

std::span<const Item> items_of(std::span<const Item> sorted, int64_t document) {
  const auto first = std::partition_point(
      sorted.begin(), sorted.end(), [&](const Item& item) { return item.document < document; });
  auto last = first;
  while (last != sorted.end() && last->document == document) ++last;
  return {first, last};
}

void LargestFirst::assign(std::span<const Item> sorted) {
  items_.assign(sorted.begin(), sorted.end());
  first_ = 0;
}

size_t LargestFirst::find(const Item& item) const {
  const std::span<const Item> items = all();
  return static_cast<size_t>(std::lower_bound(items.begin(), items.end(), item, is_larger) -
                             items.begin());
}

int64_t LargestFirst::insert(const Item& item) {
  const size_t idx = find(item);
  const auto begin = items_.begin() + static_cast<std::ptrdiff_t>(first_);
  const auto at = begin + static_cast<std::ptrdiff_t>(idx);
  if (first_ == 0 || idx > size() / 2) {
    const auto num_moved = static_cast<int64_t>(size() - idx);
    items_.insert(at, item);
    return num_moved;
  }
  std::move(begin, at, begin - 1);
  --first_;
  *(at - 1) = item;
  return static_cast<int64_t>(idx);
}

int64_t LargestFirst::erase(size_t first, size_t last) {
  const auto begin = items_.begin() + static_cast<std::ptrdiff_t>(first_);
  const auto at = begin + static_cast<std::ptrdiff_t>(first);
  const auto end = begin + static_cast<std::ptrdiff_t>(last);
  const size_t num_after = size() - last;
  if (num_after < first) {
    items_.erase(at, end);
    return static_cast<int64_t>(num_after);
  }
  std::move_backward(begin, at, end);
  first_ += last - first;
  return static_cast<int64_t>(first);
}

}  // namespace distca::planner
