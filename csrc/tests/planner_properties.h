#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include "planner/model/options.h"
#include "planner/model/pack.h"
#include "planner/model/plan.h"

// What every plan has to be, told token by token where the planner knows ranges.
// Each check returns what is wrong, or nothing.
namespace distca::planner {

struct HomeRow {
  int64_t rank;
  int64_t row;    // of keys
  int64_t q_row;  // of queries; -1: context
};

using Homes = std::vector<std::vector<HomeRow>>;  // [documents][length]

// Rows of queries: those of keys without the context before them.
inline void number_queries(int64_t num_ranks, Homes& homes) {
  std::vector<std::vector<HomeRow*>> rows(num_ranks);
  for (std::vector<HomeRow>& document : homes) {
    for (HomeRow& home : document) {
      if (home.rank >= 0) rows[home.rank].push_back(&home);
    }
  }
  for (std::vector<HomeRow*>& of_rank : rows) {
    std::sort(of_rank.begin(), of_rank.end(),
              [](const HomeRow* a, const HomeRow* b) { return a->row < b->row; });
    int64_t next = 0;
    for (HomeRow* home : of_rank) {
      if (home->q_row >= 0) home->q_row = next++;
    }
  }
}

inline Homes homes_of(const Pack& pack) {
  Homes homes;
  for (const Document& document : pack.documents) {
    homes.emplace_back(document.length, HomeRow{-1, -1, -1});
    for (const Segment& segment : pack.segments_of(document)) {
      for (int64_t i = 0; i < segment.length; ++i) {
        const bool is_query = segment.start + i >= document.first_query;
        homes.back()[segment.start + i] = {segment.rank, segment.row + i, is_query ? 0 : -1};
      }
    }
  }
  number_queries(pack.num_ranks, homes);
  return homes;
}

// Keys that any query of the task sees, query by query.
inline Range keys_seen(const Mask& mask, const Task& task, int64_t length) {
  Range keys{length, 0};
  for (int64_t q = task.q_begin; q < task.q_end; ++q) {
    const bool all_before = mask.window_left < 0 || mask.window_left > q;
    const bool all_after = mask.window_right < 0 || mask.window_right > length - 1 - q;
    keys.begin = std::min(keys.begin, all_before ? 0 : q - mask.window_left);
    keys.end = std::max(keys.end, all_after ? length : q + mask.window_right + 1);
  }
  return keys;
}

inline std::string describe(const Task& task) {
  return "document " + std::to_string(task.document) + " [" + std::to_string(task.q_begin) + ", " +
         std::to_string(task.q_end) + ") on server " + std::to_string(task.server);
}

// Calls visit(first, last) for each run of tasks of one document on one server, in plan order.
template <typename Visit>
void for_each_visit(const std::vector<Task>& tasks, Visit visit) {
  for (auto first = tasks.begin(); first != tasks.end();) {
    const auto last = std::find_if(first, tasks.end(), [&](const Task& task) {
      return task.server != first->server || task.document != first->document;
    });
    visit(first, last);
    first = last;
  }
}

// Tasks are in range and in order, none is empty, and each query is computed once, context never.
inline std::string check_cover(const Pack& pack, const Plan& plan) {
  if (plan.num_ranks != pack.num_ranks) return "num_ranks of the plan";
  const auto key = [](const Task& task) {
    return std::tie(task.server, task.document, task.q_begin);
  };
  std::vector<std::vector<bool>> computed;
  for (const Document& document : pack.documents) computed.emplace_back(document.length, false);
  for (size_t i = 0; i < plan.tasks.size(); ++i) {
    const Task& task = plan.tasks[i];
    if (task.server < 0 || task.server >= pack.num_ranks) return "server of " + describe(task);
    if (task.document < 0 || task.document >= static_cast<int64_t>(pack.documents.size()) ||
        task.q_begin < pack.documents[task.document].first_query ||
        task.q_end > pack.documents[task.document].length) {
      return "range of " + describe(task);
    }
    if (task.q_begin >= task.q_end) return "empty task: " + describe(task);
    if (i > 0 && key(plan.tasks[i - 1]) >= key(task)) return "order of " + describe(task);
    for (int64_t q = task.q_begin; q < task.q_end; ++q) {
      if (computed[task.document][q]) return "computed twice: a query of " + describe(task);
      computed[task.document][q] = true;
    }
  }
  for (size_t i = 0; i < computed.size(); ++i) {
    if (std::count(computed[i].begin(), computed[i].end(), false) !=
        pack.documents[i].first_query) {
      return "not computed: a query of document " + std::to_string(i);
    }
  }
  return plan.digest == digest_of(pack, plan.mask, plan.tasks) ? "" : "digest";
}

// Whether the keys, among them the queries themselves, are consecutive rows of the server.
inline bool in_place(const std::vector<HomeRow>& rows, Range keys, int64_t server) {
  for (int64_t key = keys.begin; key < keys.end; ++key) {
    if (rows[key].rank != server) return false;
    if (rows[key].row != rows[keys.begin].row + key - keys.begin) return false;
  }
  return true;
}

// A server keeps the inputs of all its visiting tasks of a document or of none, and of no other.
inline std::string check_kept_alike(const Pack& pack, const Plan& plan) {
  const Homes homes = homes_of(pack);
  std::string wrong;
  for_each_visit(plan.tasks, [&](auto first, auto last) {
    if (std::none_of(first, last, [](const Task& task) { return task.is_kept; })) return;
    const std::vector<HomeRow>& rows = homes[first->document];
    for (auto task = first; task != last; ++task) {
      const Range keys = keys_seen(plan.mask, *task, static_cast<int64_t>(rows.size()));
      if (task->is_kept == in_place(rows, keys, task->server)) wrong = "kept: " + describe(*task);
    }
  });
  return wrong;
}

// A row of `home` that visits `server`.
inline void count_visit(const PlanOptions& options, int64_t home, int64_t server, int64_t bytes,
                        int64_t held, std::vector<Load>& loads) {
  loads[server].held_bytes += held;
  if (home == server) return;
  loads[server].bytes_in += bytes;
  loads[home].bytes_out += bytes;
  if (home / options.links.ranks_per_node == server / options.links.ranks_per_node) return;
  loads[server].node_bytes_in += bytes;
  loads[home].node_bytes_out += bytes;
}

inline std::vector<Load> count_loads(const Pack& pack, const PlanOptions& options,
                                     const std::vector<Task>& tasks) {
  const Homes homes = homes_of(pack);
  std::vector<Load> loads(pack.num_ranks);
  for (int64_t rank = 0; rank < pack.num_ranks; ++rank) {
    loads[rank].seconds_lag = options.lag_seconds(rank);
  }
  const RowBytes &held = options.held_bytes, &once = options.kept_bytes;
  const auto seconds = [&](int64_t document, Range q, int64_t rank) {
    const double speed = options.servers.empty() ? 1 : options.servers[rank].speed;
    return options.cost.seconds(options.mask, q, pack.documents[document].length) /
           (speed > 0 ? speed : 1);
  };
  for_each_visit(tasks, [&](auto first, auto last) {
    const std::vector<HomeRow>& rows = homes[first->document];
    const bool is_kept = std::any_of(first, last, [](const Task& task) { return task.is_kept; });
    RowBytes sent = options.row_bytes;
    if (is_kept) sent = {sent.query - once.query, sent.key - once.key};
    std::vector<bool> reads(rows.size(), false);
    for (auto task = first; task != last; ++task) {
      const double cost = seconds(task->document, {task->q_begin, task->q_end}, task->server);
      loads[first->server].seconds += cost;
      const Range keys = keys_seen(options.mask, *task, static_cast<int64_t>(rows.size()));
      if (in_place(rows, keys, task->server)) continue;
      loads[first->server].seconds_visiting += cost;
      for (int64_t q = task->q_begin; q < task->q_end; ++q) {
        count_visit(options, rows[q].rank, task->server, sent.query, held.query, loads);
      }
      std::fill(reads.begin() + keys.begin, reads.begin() + keys.end, true);
    }
    for (size_t key = 0; key < rows.size(); ++key) {
      if (reads[key])
        count_visit(options, rows[key].rank, first->server, sent.key, held.key, loads);
    }
  });
  for (size_t i = 0; i < pack.documents.size(); ++i) {
    const Document& document = pack.documents[i];
    for (const Segment& segment : pack.segments_of(document)) {
      const Range rows{std::max(segment.start, document.first_query),
                       segment.start + segment.length};
      if (rows.begin >= rows.end) continue;
      loads[segment.rank].seconds_home += seconds(static_cast<int64_t>(i), rows, segment.rank);
    }
  }
  return loads;
}

// Seconds of a layer. In each pass, a rank first lags, and then computes visiting tasks, and home
// tasks beside transfers. The forward pass has 2/7 of the seconds and 0.37 of the bytes.
inline double layer_seconds(const std::vector<Load>& loads, const Links& links) {
  double hidden = 0;
  for (const Load& load : loads) {
    hidden += links.hidden_part * load.seconds / static_cast<double>(loads.size());
  }
  const auto pass = [&](double seconds_part, double bytes_part) {
    double most = 0;
    for (const Load& load : loads) {
      const auto between = static_cast<double>(std::max(load.node_bytes_in, load.node_bytes_out));
      const auto inside = static_cast<double>(
          std::max(load.bytes_in - load.node_bytes_in, load.bytes_out - load.node_bytes_out));
      const double transfers = bytes_part * std::max(inside / links.bytes_per_second,
                                                     between / links.node_bytes_per_second);
      const double home = seconds_part * (load.seconds - load.seconds_visiting);
      most = std::max(most, seconds_part * (load.seconds_lag + load.seconds_visiting) +
                                std::max(home, transfers - seconds_part * hidden));
    }
    return most;
  };
  return pass(2.0 / 7, 0.37) + pass(5.0 / 7, 0.63);
}

// Reported loads are those of the tasks, up to the order of summation.
inline std::string check_loads(const Pack& pack, const PlanOptions& options, const Plan& plan) {
  if (static_cast<int64_t>(plan.loads.size()) != pack.num_ranks) return "number of loads";
  const std::vector<Load> counted = count_loads(pack, options, plan.tasks);
  const auto close = [](double a, double b) { return std::abs(a - b) <= 1e-9 * std::max(a, b); };
  for (size_t rank = 0; rank < counted.size(); ++rank) {
    const Load &load = plan.loads[rank], &expected = counted[rank];
    const std::string of_rank = " of rank " + std::to_string(rank);
    if (!close(load.seconds, expected.seconds)) return "seconds" + of_rank;
    if (!close(load.seconds_visiting, expected.seconds_visiting)) {
      return "seconds_visiting" + of_rank;
    }
    if (!close(load.seconds_home, expected.seconds_home)) return "seconds_home" + of_rank;
    if (load.bytes_in != expected.bytes_in) return "bytes_in" + of_rank;
    if (load.bytes_out != expected.bytes_out) return "bytes_out" + of_rank;
    if (load.node_bytes_in != expected.node_bytes_in) return "node_bytes_in" + of_rank;
    if (load.node_bytes_out != expected.node_bytes_out) return "node_bytes_out" + of_rank;
    if (load.held_bytes != expected.held_bytes) return "held_bytes" + of_rank;
    if (load.seconds_lag != expected.seconds_lag) return "seconds_lag" + of_rank;
  }
  return "";
}

// What each visit of each server keeps, or would.
struct Keepable {
  int64_t server;
  int64_t bytes;
  bool is_kept;
};

// Servers keep no more than the cap, and nothing that they do not keep would fit beside what is
// larger or as large.
inline std::string check_kept(const Pack& pack, const PlanOptions& options, const Plan& plan) {
  PlanOptions inputs = options;
  inputs.held_bytes = options.kept_bytes;
  inputs.servers.clear();
  std::vector<Keepable> all;
  for_each_visit(plan.tasks, [&](auto first, auto last) {
    const std::vector<Load> loads = count_loads(pack, inputs, {first, last});
    const bool is_kept = std::any_of(first, last, [](const Task& task) { return task.is_kept; });
    all.push_back({first->server, loads[first->server].held_bytes, is_kept});
  });
  std::stable_sort(all.begin(), all.end(),
                   [](const Keepable& a, const Keepable& b) { return a.bytes > b.bytes; });
  std::vector<double> left(pack.num_ranks, options.kept_cap_bytes);
  for (const auto& [server, bytes, is_kept] : all) {
    const auto needs = static_cast<double>(bytes);
    if (is_kept && needs > left[server]) return "kept_cap_bytes of " + std::to_string(server);
    if (!is_kept && needs > 0 && needs <= left[server]) {
      return "room to keep on " + std::to_string(server);
    }
    if (is_kept) left[server] -= needs;
  }
  return "";
}

// Servers hold no more than their caps, and none computes that serves nothing.
inline std::string check_servers(const PlanOptions& options, const Plan& plan) {
  if (options.servers.empty()) return "";
  for (size_t rank = 0; rank < options.servers.size(); ++rank) {
    const Server& server = options.servers[rank];
    const std::string of_rank = " of rank " + std::to_string(rank);
    if (static_cast<double>(plan.loads[rank].held_bytes) > server.cap_bytes) return "cap" + of_rank;
    if (server.speed == 0 && plan.loads[rank].seconds > 0) return "speed" + of_rank;
  }
  return "";
}

}  // namespace distca::planner
