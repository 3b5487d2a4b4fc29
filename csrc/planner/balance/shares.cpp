#include "shares.h"

#include <algorithm>
#include <tuple>

namespace distca::planner {

bool is_dearer(const Share& a, const Share& b) {
  return a.seconds != b.seconds
             ? a.seconds > b.seconds
             : std::tie(a.document, a.rows.begin) < std::tie(b.document, b.rows.begin);
}

bool in_order(const Share& a, const Share& b) {
  return std::tie(a.document, a.rows.begin) < std::tie(b.document, b.rows.begin);
}

std::span<const Share> shares_of(std::span<const Share> sorted, int64_t document) {
  const auto first = std::partition_point(
      sorted.begin(), sorted.end(), [&](const Share& share) { return share.document < document; });
  auto last = first;
  while (last != sorted.end() && last->document == document) ++last;
  return {first, last};
}

void DearestFirst::assign(std::span<const Share> sorted) {
  shares_.assign(sorted.begin(), sorted.end());
  first_ = 0;
}

size_t DearestFirst::find(const Share& share) const {
  const std::span<const Share> shares = all();
  return static_cast<size_t>(std::lower_bound(shares.begin(), shares.end(), share, is_dearer) -
                             shares.begin());
}

int64_t DearestFirst::insert(const Share& share) {
  const size_t idx = find(share);
  const auto begin = shares_.begin() + static_cast<std::ptrdiff_t>(first_);
  const auto at = begin + static_cast<std::ptrdiff_t>(idx);
  if (first_ == 0 || idx > size() / 2) {
    const auto num_moved = static_cast<int64_t>(size() - idx);
    shares_.insert(at, share);
    return num_moved;
  }
  std::move(begin, at, begin - 1);
  --first_;
  *(at - 1) = share;
  return static_cast<int64_t>(idx);
}

int64_t DearestFirst::erase(size_t first, size_t last) {
  const auto begin = shares_.begin() + static_cast<std::ptrdiff_t>(first_);
  const auto at = begin + static_cast<std::ptrdiff_t>(first);
  const auto end = begin + static_cast<std::ptrdiff_t>(last);
  const size_t num_after = size() - last;
  if (num_after < first) {
    shares_.erase(at, end);
    return static_cast<int64_t>(num_after);
  }
  std::move_backward(begin, at, end);
  first_ += last - first;
  return static_cast<int64_t>(first);
}

}  // namespace distca::planner
