#include "loads.h"

#include <algorithm>

namespace distca::planner {

void Traffic::send(int64_t home, int64_t server, int64_t num_bytes) {
  if (home == server) return;
  ranks_[home].bytes_out += num_bytes;
  ranks_[server].bytes_in += num_bytes;
  if (same_node(home, server)) return;
  ranks_[home].node_bytes_out += num_bytes;
  ranks_[server].node_bytes_in += num_bytes;
}

void Traffic::add(int64_t document, std::span<const Range> queries, int64_t server, int64_t times) {
  const int64_t length = pack_.documents[document].length;
  const std::span<const Segment> segments = pack_.segments_of(pack_.documents[document]);
  if (segments.size() == 1 && segments[0].rank == server) return;
  keys_.clear();
  for (const Range rows : queries) {
    const Range keys = keys_of(options_.mask, rows, length);
    if (is_home(segments, rows, keys, server)) continue;
    keys_.insert(keys);
    ranks_[server].held_bytes += times * num_rows(rows) * options_.held_bytes.query;
    for_each_segment(segments, rows, [&](const Segment& segment, Range part) {
      send(segment.rank, server, times * num_rows(part) * options_.row_bytes.query);
    });
  }
  for (const Range keys : keys_.ranges()) {
    ranks_[server].held_bytes += times * num_rows(keys) * options_.held_bytes.key;
    for_each_segment(segments, keys, [&](const Segment& segment, Range part) {
      send(segment.rank, server, times * num_rows(part) * options_.row_bytes.key);
    });
  }
}

std::vector<Load> Traffic::loads(std::span<const double> seconds) const {
  std::vector<Load> loads = ranks_;
  for (size_t rank = 0; rank < loads.size(); ++rank) {
    if (seconds[rank] > 0)
      loads[rank].seconds = seconds[rank] / options_.speed(static_cast<int64_t>(rank));
  }
  return loads;
}

double link_seconds_in(const Load& load, const Links& links) {
  const double inside = static_cast<double>(load.bytes_in - load.node_bytes_in);
  return kOneWay * std::max(inside / links.bytes_per_second,
                            static_cast<double>(load.node_bytes_in) / links.node_bytes_per_second);
}

double link_seconds(const Load& load, const Links& links) {
  const double inside = static_cast<double>(load.bytes_out - load.node_bytes_out);
  const double out =
      kOneWay * std::max(inside / links.bytes_per_second,
                         static_cast<double>(load.node_bytes_out) / links.node_bytes_per_second);
  return std::max(link_seconds_in(load, links), out);
}

std::vector<Load> loads_of(const Pack& pack, const PlanOptions& options,
                           std::span<const Task> tasks) {
  Traffic traffic(pack, options);
  std::vector<double> seconds(pack.num_ranks, 0.0);
  std::vector<Range> rows;
  for (auto task = tasks.begin(); task != tasks.end();) {
    rows.clear();
    const Task first = *task;
    const int64_t length = pack.documents[first.document].length;
    for (; task != tasks.end() && task->server == first.server && task->document == first.document;
         ++task) {
      rows.push_back(queries(*task));
      seconds[first.server] += options.cost.seconds(options.mask, rows.back(), length);
    }
    traffic.add(first.document, rows, first.server, 1);
  }
  return traffic.loads(seconds);
}

double makespan(const std::vector<Load>& loads, const Links& links) {
  double most = 0;
  for (const Load& load : loads) most = std::max({most, load.seconds, link_seconds(load, links)});
  return most;
}

double total_bytes(const std::vector<Load>& loads) {
  double bytes = 0;
  for (const Load& load : loads) bytes += static_cast<double>(load.bytes_in);
  return bytes;
}

}  // namespace distca::planner
