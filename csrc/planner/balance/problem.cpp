#include "problem.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace distca::planner {

Problem::Problem(const Pack& pack, const PlanOptions& options, const Heuristics& heuristics)
    : pack(pack),
      options(options),
      heuristics(heuristics),
      first(pack.num_ranks + 1, 0),
      home_seconds(pack.num_ranks, 0.0),
      visiting_seconds(pack.num_ranks, 0.0),
      home_traffic(pack, options),
      largest_first_(pack.num_ranks) {
  for (const Document& document : pack.documents) {
    for (const Segment& segment : pack.segments_of(document)) {
      first[segment.rank + 1] += num_rows(queries(segment, document)) > 0;
    }
  }
  std::partial_sum(first.begin(), first.end(), first.begin());
  items.resize(first.back());
  std::vector<int64_t> next(first.begin(), first.end() - 1);
  double pairs = 0;
  for (size_t i = 0; i < pack.documents.size(); ++i) {
    const Document& document = pack.documents[i];
    const Range all{document.first_query, document.length};
    pairs += static_cast<double>(num_pairs(options.mask, all, document.length));
    for (const Segment& segment : pack.segments_of(document)) {
      const Range rows = queries(segment, document);
      if (num_rows(rows) == 0) continue;
      const double cost = seconds(static_cast<int64_t>(i), rows);
      items[next[segment.rank]++] = {static_cast<int64_t>(i), rows, cost};
      home_seconds[segment.rank] += cost;
      if (are_visiting(static_cast<int64_t>(i), rows, segment.rank)) {
        visiting_seconds[segment.rank] += cost;
      }
    }
  }
  std::vector<Range> rows;
  double lag_seconds = 0;  // of all ranks, as work at speed 1
  for (int64_t rank = 0; rank < pack.num_ranks; ++rank) {
    lag_seconds += options.lag_seconds(rank) * options.speed(rank);
    total_seconds += home_seconds[rank];
    total_speed += options.speed(rank);
    const std::span<const Item> own = home_items(rank);
    for (size_t i = 0; i < own.size();) {
      const int64_t document = own[i].document;
      rows.clear();
      for (; i < own.size() && own[i].document == document; ++i) rows.push_back(own[i].rows);
      home_traffic.add(document, rows, rank, 1);
    }
  }
  // A slice of n query rows and m keys has at most n * m pairs. It needs the fewest bytes for them
  // if queries and keys take equal bytes.
  const double bytes =
      static_cast<double>(options.row_bytes.query) * static_cast<double>(options.row_bytes.key);
  bytes_per_root_second = total_seconds > 0 ? 2 * std::sqrt(bytes * pairs / total_seconds) : 0;
  const double mean = total_seconds / total_speed;
  balanced_seconds = mean + lag_seconds / total_speed;
  hidden_seconds = options.links.hidden(mean);
  transfers_wait = options.links.forward_wait + options.links.backward_wait;
  link_room = options.links.forward_room + options.links.backward_room;
  min_relief = heuristics.min_relief * mean;
}

std::span<const Item> Problem::home_items(int64_t rank, int64_t document_idx) const {
  const std::span<const Item> own = home_items(rank);
  const auto begin = std::partition_point(
      own.begin(), own.end(), [&](const Item& item) { return item.document < document_idx; });
  const auto end = std::find_if(begin, own.end(),
                                [&](const Item& item) { return item.document != document_idx; });
  return {begin, end};
}

std::span<const Item> Problem::largest_first(int64_t rank) const {
  std::vector<Item>& sorted = largest_first_[rank];
  if (sorted.empty()) {
    const std::span<const Item> own = home_items(rank);
    sorted.assign(own.begin(), own.end());
    std::sort(sorted.begin(), sorted.end(), is_larger);
  }
  return sorted;
}

}  // namespace distca::planner
