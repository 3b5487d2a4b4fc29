#include "home_cut.h"

#include <algorithm>
#include <numeric>

namespace distca::planner {

HomeCut::HomeCut(const Pack& pack, const PlanOptions& options)
    : items(pack.segments.size()),
      first(pack.num_ranks + 1, 0),
      seconds(pack.num_ranks, 0.0),
      traffic(pack, options),
      largest_first_(pack.num_ranks) {
  for (const Segment& segment : pack.segments) ++first[segment.rank + 1];
  std::partial_sum(first.begin(), first.end(), first.begin());
  std::vector<int64_t> next(first.begin(), first.end() - 1);
  for (size_t i = 0; i < pack.documents.size(); ++i) {
    const Document& document = pack.documents[i];
    for (const Segment& segment : pack.segments_of(document)) {
      const Range rows = queries(segment, document);
      const double cost = options.cost.seconds(options.mask, rows, document.length);
      items[next[segment.rank]++] = {static_cast<int64_t>(i), rows, cost};
      seconds[segment.rank] += cost;
    }
  }
  std::vector<Range> rows;
  for (int64_t rank = 0; rank < pack.num_ranks; ++rank) {
    const std::span<const Item> own = items_of(rank);
    for (size_t i = 0; i < own.size();) {
      const int64_t document = own[i].document;
      rows.clear();
      for (; i < own.size() && own[i].document == document; ++i) rows.push_back(own[i].rows);
      traffic.add(document, rows, rank, 1);
    }
  }
}

std::span<const Item> HomeCut::items_of(int64_t rank, int64_t document) const {
  const std::span<const Item> own = items_of(rank);
  const auto begin = std::partition_point(
      own.begin(), own.end(), [&](const Item& item) { return item.document < document; });
  auto end = begin;
  while (end != own.end() && end->document == document) ++end;
  return {begin, end};
}

std::span<const Item> HomeCut::largest_first(int64_t rank) const {
  std::vector<Item>& sorted = largest_first_[rank];
  if (sorted.empty()) {
    const std::span<const Item> own = items_of(rank);
    sorted.assign(own.begin(), own.end());
    std::sort(sorted.begin(), sorted.end(), is_larger);
  }
  return sorted;
}

}  // namespace distca::planner
