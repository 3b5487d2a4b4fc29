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

static double link_seconds(int64_t bytes, int64_t node_bytes, const Links& links) {
  return kOneWay * std::max(static_cast<double>(bytes - node_bytes) / links.bytes_per_second,
                            static_cast<double>(node_bytes) / links.node_bytes_per_second);
}

double link_seconds_in(const Load& load, const Links& links) {
  return link_seconds(load.bytes_in, load.node_bytes_in, links);
}

double makespan(const std::vector<Load>& loads, const Links& links) {
  double most = 0;
  for (const Load& load : loads) {
    const double out = link_seconds(load.bytes_out, load.node_bytes_out, links);
    most = std::max({most, load.seconds, link_seconds_in(load, links), out});
  }
  return most;
}

double total_bytes(const std::vector<Load>& loads) {
  double bytes = 0;
  for (const Load& load : loads) bytes += static_cast<double>(load.bytes_in);
  return bytes;
}

std::vector<Load> loads_of(const Pack& pack, const PlanOptions& options,
                           std::span<const Task> tasks) {
  Traffic traffic(pack, options);
  std::vector<double> seconds(pack.num_ranks, 0.0);
  std::vector<Range> rows;
  for_each_visit(tasks, [&](std::span<const Task> visit) {
    const int64_t document = visit[0].document, server = visit[0].server;
    rows.clear();
    for (const Task& task : visit) {
      rows.push_back(queries(task));
      seconds[server] +=
          options.cost.seconds(options.mask, rows.back(), pack.documents[document].length);
    }
    traffic.add(document, rows, server, 1);
  });
  return traffic.loads(seconds);
}

}  // namespace distca::planner
