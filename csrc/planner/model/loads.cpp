#include "loads.h"

#include <algorithm>

namespace distca::planner {
namespace {

// Parts of a layer's seconds and bytes. The backward pass has 2.5 times the FLOPs of the forward
// pass. Forward, a query moves 2 of its 5 rows (q, out), and a key 1 of its 3 (k and v; backward k
// and v again, and their gradients). A slice has about as many bytes of queries as of keys.
struct Pass {
  double seconds_part;
  double bytes_part;
  bool is_forward = true, is_backward = true;

  double wait(const Links& links) const {
    return is_forward * links.forward_wait + is_backward * links.backward_wait;
  }
  double room(const Links& links) const {
    return (is_forward ? links.forward_room : 0) + (is_backward ? links.backward_room : 0);
  }
};

constexpr Pass kForward{2.0 / 7, 0.37, true, false};
constexpr Pass kBackward{5.0 / 7, 0.63, false, true};
constexpr Pass kBoth{1, kTransferWeight};

}  // namespace

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

std::vector<Load> Traffic::loads(std::span<const double> seconds,
                                 std::span<const double> visiting) const {
  std::vector<Load> loads = ranks_;
  for (size_t rank = 0; rank < loads.size(); ++rank) {
    loads[rank].seconds_lag = options_.lag_seconds(static_cast<int64_t>(rank));
    if (seconds[rank] <= 0) continue;
    const double speed = options_.speed(static_cast<int64_t>(rank));
    loads[rank].seconds = seconds[rank] / speed;
    loads[rank].seconds_visiting = visiting[rank] / speed;
  }
  return loads;
}

double link_seconds(int64_t bytes, int64_t node_bytes, const Links& links) {
  return std::max(static_cast<double>(bytes - node_bytes) / links.bytes_per_second,
                  static_cast<double>(node_bytes) / links.node_bytes_per_second);
}

// Returns the seconds of a rank in a pass: its lag and its visiting tasks, plus the longer of its
// home tasks and the transfers that neither other work nor visiting tasks of other parts hide. No
// visiting task runs while the first part arrives, nor while the results of the last part leave. If
// transfers and other traffic need the links for longer than the layer takes, the rank waits.
static double seconds_of(const Load& load, const Links& links, double hidden_seconds,
                         const Pass& pass) {
  const double transfers = pass.bytes_part * link_seconds(load, links);
  const double wait = transfers > 0 ? pass.wait(links) : 0;
  const double lag = pass.seconds_part * load.seconds_lag;
  const double visiting = pass.seconds_part * load.seconds_visiting;
  const double home = pass.seconds_part * load.seconds - visiting;
  const double unhidden = std::max(transfers - visiting, transfers * links.exposed_part);
  const double computing =
      lag + visiting + std::max(home, unhidden + wait - pass.seconds_part * hidden_seconds);
  return std::max(computing, transfers - pass.room(links));
}

static double slowest(const std::vector<Load>& loads, const Links& links, double hidden_seconds,
                      const Pass& pass) {
  double most = 0;
  for (const Load& load : loads) {
    most = std::max(most, seconds_of(load, links, hidden_seconds, pass));
  }
  return most;
}

double slowest(const std::vector<Load>& loads, const Links& links, double hidden_seconds) {
  return slowest(loads, links, hidden_seconds, kBoth);
}

double makespan(const std::vector<Load>& loads, const Links& links, double hidden_seconds) {
  return slowest(loads, links, hidden_seconds, kForward) +
         slowest(loads, links, hidden_seconds, kBackward);
}

double friction(const std::vector<Load>& loads, const Links& links) {
  constexpr double kPart = 0.2;  // of a mean rank's transfers
  double compute = 0, transfers = 0;
  for (const Load& load : loads) {
    compute += load.seconds;
    transfers += link_seconds(load, links);
  }
  if (transfers == 0) return 0;
  const auto num_ranks = static_cast<double>(loads.size());
  return kPart * transfers / num_ranks + links.moving(compute / num_ranks);
}

void take_off(Load& load, const Load& spared, double times) {
  const auto bytes = [times](int64_t num_bytes) {
    return static_cast<int64_t>(times * static_cast<double>(num_bytes));
  };
  load.bytes_out -= bytes(spared.bytes_out);
  load.bytes_in -= bytes(spared.bytes_in);
  load.node_bytes_out -= bytes(spared.node_bytes_out);
  load.node_bytes_in -= bytes(spared.node_bytes_in);
}

double makespan(std::vector<Load> loads, const Traffic& spared, const Links& links,
                double hidden_seconds) {
  const double forward_seconds = slowest(loads, links, hidden_seconds, kForward);
  for (size_t rank = 0; rank < loads.size(); ++rank) {
    // The pass moves only a part of a load's bytes.
    take_off(loads[rank], spared[static_cast<int64_t>(rank)], 1 / kBackward.bytes_part);
  }
  return forward_seconds + slowest(loads, links, hidden_seconds, kBackward);
}

double total_bytes(const std::vector<Load>& loads) {
  double bytes = 0;
  for (const Load& load : loads) bytes += static_cast<double>(load.bytes_in);
  return bytes;
}

std::vector<Load> loads_of(const Pack& pack, const PlanOptions& options,
                           std::span<const Task> tasks) {
  Traffic traffic(pack, options);
  std::vector<double> seconds(pack.num_ranks, 0.0), visiting(pack.num_ranks, 0.0);
  std::vector<Range> rows;
  for_each_visit(tasks, [&](std::span<const Task> visit) {
    const int64_t document = visit[0].document, server = visit[0].server;
    rows.clear();
    for (const Task& task : visit) {
      rows.push_back(queries(task));
      const double cost =
          options.cost.seconds(options.mask, rows.back(), pack.documents[document].length);
      seconds[server] += cost;
      if (!is_home(pack, options.mask, task)) visiting[server] += cost;
    }
    traffic.add(document, rows, server, 1);
  });
  return traffic.loads(seconds, visiting);
}

}  // namespace distca::planner
