#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "planner/layout/layout.h"
#include "planner_properties.h"
#include "transport/process_group/slots.h"

// What the layouts of a plan have to be, told token by token where the planner knows ranges. Each
// check returns what is wrong, or nothing.
namespace distca::planner {

// A layout with what the transport over a process group derives from its movement.
struct Keeping {
  transport::Slots again;
  VisitingRuns kept;
};
struct SlotLayout : Layout, transport::Slots {
  std::optional<Keeping> keeping;  // set if this rank, or a server of its rows, keeps inputs
};

inline std::optional<Keeping> keeping_of(const Layout& layout) {
  const Movement& movement = layout.movement;
  if (!keeps_any(movement)) return {};
  return Keeping{
      transport::slots_of(movement, layout.rank, layout.num_ranks, transport::Moving::kNotKept),
      kept_runs(movement, layout.rank)};
}

struct Token {
  int64_t document;  // -1: the row does not move
  int64_t position;
};

// What one server's layout has to hold: tasks read in place, and visiting ones with their rows.
struct ServerRows {
  std::vector<Token> queries, keys;  // visiting rows
  std::vector<PlacedTask> home_tasks, visiting_tasks;
};

inline std::vector<ServerRows> server_rows(const Pack& pack, const Plan& plan, const Homes& homes) {
  std::vector<ServerRows> servers(plan.num_ranks);
  for_each_visit(plan.tasks, [&](auto first, auto last) {
    ServerRows& server = servers[first->server];
    const std::vector<HomeRow>& rows = homes[first->document];
    std::vector<int64_t> key_row(rows.size(), -1);  // -1: not read, 0: read, then its visiting row
    std::vector<std::pair<Task, Range>> visiting;
    for (auto task = first; task != last; ++task) {
      const Range keys = keys_seen(plan.mask, *task, pack.documents[task->document].length);
      if (in_place(rows, keys, task->server)) {
        server.home_tasks.push_back({rows[task->q_begin].q_row, task->q_end - task->q_begin,
                                     rows[keys.begin].row, keys.end - keys.begin,
                                     task->q_begin - keys.begin});
        continue;
      }
      visiting.emplace_back(*task, keys);
      std::fill(key_row.begin() + keys.begin, key_row.begin() + keys.end, 0);
    }
    for (size_t key = 0; key < rows.size(); ++key) {
      if (key_row[key] < 0) continue;
      key_row[key] = static_cast<int64_t>(server.keys.size());
      server.keys.push_back({first->document, static_cast<int64_t>(key)});
    }
    for (const auto& [task, keys] : visiting) {
      server.visiting_tasks.push_back({static_cast<int64_t>(server.queries.size()),
                                       task.q_end - task.q_begin, key_row[keys.begin],
                                       keys.end - keys.begin, task.q_begin - keys.begin});
      for (int64_t q = task.q_begin; q < task.q_end; ++q) {
        server.queries.push_back({task.document, q});
      }
    }
  });
  for (ServerRows& server : servers) {
    std::sort(server.home_tasks.begin(), server.home_tasks.end(),
              [](const PlacedTask& a, const PlacedTask& b) { return a.q_row < b.q_row; });
  }
  return servers;
}

// Early ones, then late ones: that is in order of rows.
inline std::vector<PlacedTask> home_tasks(const Layout& layout) {
  std::vector<PlacedTask> tasks = layout.early_tasks;
  tasks.insert(tasks.end(), layout.late_tasks.begin(), layout.late_tasks.end());
  return tasks;
}

// No late task shares a row with an early one, and a rank without traffic has none.
inline std::string check_late(const SlotLayout& layout) {
  if (layout.late_tasks.empty()) return "";
  if (layout.send_k_runs.empty() && layout.send_q_runs.empty() && layout.visiting_tasks.empty()) {
    return "late tasks without traffic";
  }
  int64_t q_end = 0, k_end = 0;
  for (const PlacedTask& task : layout.early_tasks) {
    q_end = std::max(q_end, task.q_row + task.num_q_rows);
    k_end = std::max(k_end, task.k_row + task.num_k_rows);
  }
  for (const PlacedTask& task : layout.late_tasks) {
    if (task.q_row < q_end || task.k_row < k_end) return "a late task shares rows with early ones";
  }
  return "";
}

// Row by row what runs hold; of runs that make no sense, the beginning.
inline std::vector<int64_t> rows_of(const std::vector<Run>& runs) {
  constexpr size_t kMostRows = 1 << 20;
  std::vector<int64_t> rows;
  for (const Run& run : runs) {
    for (int64_t i = 0; i < run.length && rows.size() < kMostRows; ++i) {
      rows.push_back(run.first + i);
    }
  }
  return rows;
}

// The tables that bring queries, or keys, to their servers and what becomes of them home.
struct RouteTables {
  std::vector<int64_t> transport::Slots::*send_rows;
  std::vector<int64_t> transport::Slots::*recv_rows;
  std::vector<Run> transport::Slots::*index;
  std::vector<Run> transport::Slots::*visiting_row;
  std::vector<Token> ServerRows::*visiting;
  int64_t HomeRow::*home_row;
};

inline const RouteTables kQueryRoute = {
    &transport::Slots::send_q_rows, &transport::Slots::recv_q_rows, &transport::Slots::send_q_runs,
    &transport::Slots::recv_q_runs, &ServerRows::queries,           &HomeRow::q_row};
inline const RouteTables kKeyRoute = {&transport::Slots::send_k_rows,
                                      &transport::Slots::recv_k_rows,
                                      &transport::Slots::send_k_runs,
                                      &transport::Slots::recv_k_runs,
                                      &ServerRows::keys,
                                      &HomeRow::row};

// First slot of each peer, and the number of all slots.
inline std::vector<int64_t> slot_begins(const std::vector<int64_t>& rows) {
  std::vector<int64_t> begins{0};
  for (const int64_t count : rows) begins.push_back(begins.back() + count);
  return begins;
}

// Counts transpose, and tables are as long as the counts say.
inline std::string check_counts(const std::vector<transport::Slots>& ranks,
                                const std::vector<ServerRows>& servers, const RouteTables& route) {
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    const transport::Slots& movement = ranks[rank];
    const std::vector<int64_t>& send = movement.*route.send_rows;
    const std::vector<int64_t>& recv = movement.*route.recv_rows;
    if (send.size() != ranks.size() || recv.size() != ranks.size()) return "number of peers";
    for (size_t peer = 0; peer < ranks.size(); ++peer) {
      if (send[peer] < 0 || send[peer] != (ranks[peer].*route.recv_rows)[rank]) {
        return "rows from " + std::to_string(rank) + " to " + std::to_string(peer);
      }
    }
    const auto num_moving = static_cast<size_t>(std::ranges::count_if(
        servers[rank].*route.visiting, [](const Token& token) { return token.document >= 0; }));
    const size_t num_slots = rows_of(movement.*route.visiting_row).size();
    const auto is_total = [](const std::vector<int64_t>& counts, size_t total) {
      return slot_begins(counts).back() == static_cast<int64_t>(total);
    };
    if (!is_total(recv, num_moving)) return "rows received";
    if (num_slots != 0 && num_slots != num_moving) return "number of slots";
    if (!is_total(send, rows_of(movement.*route.index).size())) return "rows sent";
  }
  return "";
}

// Every slot holds the home row that belongs at its place among the visiting rows.
inline std::string check_route(const std::vector<transport::Slots>& ranks,
                               const std::vector<ServerRows>& servers, const Homes& homes,
                               const RouteTables& route) {
  if (std::string wrong = check_counts(ranks, servers, route); !wrong.empty()) return wrong;
  std::vector<std::vector<int64_t>> sent_begins, sent_rows;
  for (const transport::Slots& movement : ranks) {
    sent_begins.push_back(slot_begins(movement.*route.send_rows));
    sent_rows.push_back(rows_of(movement.*route.index));
  }
  for (size_t server = 0; server < ranks.size(); ++server) {
    const std::vector<Token>& visiting = servers[server].*route.visiting;
    const std::vector<int64_t> rows = rows_of(ranks[server].*route.visiting_row);
    const std::vector<int64_t> begins = slot_begins(ranks[server].*route.recv_rows);
    std::vector<int64_t> last(ranks.size(), -1);  // visiting row, by home
    bool in_order = true;
    for (int64_t slot = 0; slot < begins.back(); ++slot) {
      const int64_t row = rows.empty() ? slot : rows[slot];
      if (row < 0 || row >= static_cast<int64_t>(visiting.size())) return "row of a slot";
      const auto& [document, position] = visiting[row];
      if (document < 0) return "a row that does not move";
      const HomeRow home = homes[document][position];
      if (slot < begins[home.rank] || slot >= begins[home.rank + 1]) return "slot of a row";
      if (std::exchange(last[home.rank], row) >= row) return "order of rows";
      const int64_t sent = sent_begins[home.rank][server] + slot - begins[home.rank];
      if (sent_rows[home.rank][sent] != home.*route.home_row) return "home row of a slot";
      in_order = in_order && row == slot;
    }
    if (!rows.empty() && in_order) return "rows that are an identity";
  }
  return "";
}

// Each query's result is written once: by a task that reads it in place, or by its way home.
inline std::string check_results(const SlotLayout& layout, const Pack& pack) {
  if (layout.num_home_rows != pack.num_rows[layout.rank]) return "num_home_rows";
  if (layout.num_context_rows != pack.num_context_rows[layout.rank]) return "num_context_rows";
  const int64_t num_rows = layout.num_home_rows - layout.num_context_rows;
  std::vector<int64_t> written = rows_of(layout.send_q_runs);
  for (const PlacedTask& task : home_tasks(layout)) {
    for (int64_t i = 0; i < task.num_q_rows; ++i) written.push_back(task.q_row + i);
  }
  std::sort(written.begin(), written.end());
  if (static_cast<int64_t>(written.size()) != num_rows) return "number of results";
  for (int64_t row = 0; row < num_rows; ++row) {
    if (written[row] != row) return "result of a row";
  }
  return "";
}

inline bool same_tasks(const std::vector<PlacedTask>& a, const std::vector<PlacedTask>& b) {
  const auto fields = [](const PlacedTask& task) {
    return std::tie(task.q_row, task.num_q_rows, task.k_row, task.num_k_rows, task.q_offset);
  };
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [&](const auto& x, const auto& y) { return fields(x) == fields(y); });
}

// Server and document of all tasks whose inputs are kept.
using Keepers = std::set<std::pair<int64_t, int64_t>>;

inline Keepers keepers_of(const Plan& plan) {
  Keepers keepers;
  for (const Task& task : plan.tasks) {
    if (task.is_kept) keepers.insert({task.server, task.document});
  }
  return keepers;
}

// The kept rows are those that the plan names. Marks them as not moving.
inline std::string mark_kept(const Keepers& keepers, int64_t server, const std::vector<Run>& kept,
                             std::vector<Token>& rows) {
  std::vector<int64_t> expected;
  for (size_t row = 0; row < rows.size(); ++row) {
    if (!keepers.contains({server, rows[row].document})) continue;
    expected.push_back(static_cast<int64_t>(row));
    rows[row].document = -1;
  }
  return rows_of(kept) == expected ? "" : "rows kept";
}

// What moves for the backward pass is what is not kept.
inline std::string check_keeping(const std::vector<SlotLayout>& layouts, const Plan& plan,
                                 std::vector<ServerRows> servers, const Homes& homes) {
  const Keepers keepers = keepers_of(plan);
  std::vector<transport::Slots> again;
  for (const SlotLayout& layout : layouts) {
    again.push_back(layout.keeping ? layout.keeping->again : transport::Slots(layout));
    if (!layout.keeping) continue;
    const VisitingRuns& kept = layout.keeping->kept;
    ServerRows& rows = servers[layout.rank];
    for (const std::string& wrong : {mark_kept(keepers, layout.rank, kept.queries, rows.queries),
                                     mark_kept(keepers, layout.rank, kept.keys, rows.keys)}) {
      if (!wrong.empty()) return wrong;
    }
  }
  for (const RouteTables* route : {&kQueryRoute, &kKeyRoute}) {
    if (std::string wrong = check_route(again, servers, homes, *route); !wrong.empty()) {
      return wrong + ", again";
    }
  }
  return "";
}

// All ranks' layouts together. The plan covers the pack.
inline std::string check_layouts(const Pack& pack, const Plan& plan,
                                 const std::vector<SlotLayout>& layouts) {
  if (static_cast<int64_t>(layouts.size()) != pack.num_ranks) return "number of layouts";
  const Homes homes = homes_of(pack);
  const std::vector<ServerRows> servers = server_rows(pack, plan, homes);
  for (int64_t rank = 0; rank < pack.num_ranks; ++rank) {
    const SlotLayout& layout = layouts[rank];
    if (layout.rank != rank || layout.num_ranks != pack.num_ranks) return "rank of a layout";
    if (!same_tasks(home_tasks(layout), servers[rank].home_tasks)) return "home tasks";
    if (!same_tasks(layout.visiting_tasks, servers[rank].visiting_tasks)) return "visiting tasks";
    if (std::string wrong = check_late(layout); !wrong.empty()) return wrong;
    if (std::string wrong = check_results(layout, pack); !wrong.empty()) return wrong;
  }
  const std::vector<transport::Slots> movements(layouts.begin(), layouts.end());
  for (const RouteTables* route : {&kQueryRoute, &kKeyRoute}) {
    const std::string wrong = check_route(movements, servers, homes, *route);
    if (!wrong.empty()) return wrong;
  }
  return check_keeping(layouts, plan, servers, homes);
}

inline SlotLayout slot_layout(const Pack& pack, const Plan& plan, int64_t rank) {
  const Layout layout = make_layout(pack, plan, rank);
  return {layout,
          transport::slots_of(layout.movement, rank, plan.num_ranks, transport::Moving::kAll),
          keeping_of(layout)};
}

inline std::vector<SlotLayout> make_layouts(const Pack& pack, const Plan& plan) {
  std::vector<SlotLayout> layouts;
  for (int64_t rank = 0; rank < pack.num_ranks; ++rank) {
    layouts.push_back(slot_layout(pack, plan, rank));
  }
  return layouts;
}

}  // namespace distca::planner
