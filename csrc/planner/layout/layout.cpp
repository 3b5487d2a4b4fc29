#include "layout.h"

#include <algorithm>
#include <iterator>
#include <numeric>
#include <utility>

#include "visits.h"

namespace distca::planner {
namespace {

// Appends the home rows of `range`, those of keys or of queries, to `sent`; returns how many there
// are.
int64_t append_home_rows(const HomeRuns& home, int64_t document, int64_t HomeRun::*row, Range range,
                         std::vector<Run>& sent) {
  int64_t num_sent = 0;
  home.for_each_part(document, row, range, [&](int64_t first, Range part) {
    sent.push_back({first, num_rows(part)});
    num_sent += num_rows(part);
  });
  return num_sent;
}

// Which visits' rows move.
enum class Moving { kAll, kNotKept };

bool moves(const Visit& visit, Moving moving) {
  return moving == Moving::kAll || !visit.is_kept;
}

// What a rank sends, to all servers.
class Sender {
 public:
  Sender(const Pack& pack, const Plan& plan, const HomeRuns& home);

  void fill(Moving moving, Movement& movement) const;
  bool spares_any() const { return spares_any_; }

 private:
  struct ServerVisits {
    int64_t server;
    std::vector<Visit> visits;  // of documents that the rank holds a part of
  };

  const HomeRuns& home_;
  std::vector<ServerVisits> servers_;
  bool spares_any_ = false;  // whether any server keeps what it sends
};

Sender::Sender(const Pack& pack, const Plan& plan, const HomeRuns& home) : home_(home) {
  const auto is_ours = [&](const Task& task) { return !home_.of(task.document).empty(); };
  std::vector<Task> ours;
  std::copy_if(plan.tasks.begin(), plan.tasks.end(), std::back_inserter(ours), is_ours);
  for (auto task = ours.begin(); task != ours.end();) {
    const auto last = std::find_if(
        task, ours.end(), [task](const Task& other) { return other.server != task->server; });
    servers_.push_back({task->server, visits_of(pack, plan.mask, {task, last})});
    for (const Visit& visit : servers_.back().visits) spares_any_ = spares_any_ || visit.is_kept;
    task = last;
  }
}

void Sender::fill(Moving moving, Movement& movement) const {
  for (const auto& [peer, visits] : servers_) {
    for (const Visit& visit : visits) {
      if (!moves(visit, moving)) continue;
      for (Range rows : visit.queries) {
        movement.send_q_rows[peer] +=
            append_home_rows(home_, visit.document, &HomeRun::q_row, rows, movement.send_q_runs);
      }
      for (Range keys : visit.keys.ranges()) {
        movement.send_k_rows[peer] +=
            append_home_rows(home_, visit.document, &HomeRun::row, keys, movement.send_k_runs);
      }
    }
  }
}

// Consecutive visiting rows with one home.
struct Arrival {
  int64_t home;
  int64_t num_rows;
};

void append_arrivals(std::span<const Segment> segments, Range range,
                     std::vector<Arrival>& arrivals) {
  for_each_segment(segments, range, [&](const Segment& segment, Range part) {
    arrivals.push_back({segment.rank, num_rows(part)});
  });
}

// Counts rows by peer and gives every visiting row its received slot: by peer, then in order.
void fill_receives(const std::vector<Arrival>& arrivals, std::vector<int64_t>& recv_rows,
                   std::vector<Run>& slots) {
  bool in_order = true;
  for (size_t i = 0; i < arrivals.size(); ++i) {
    recv_rows[arrivals[i].home] += arrivals[i].num_rows;
    in_order = in_order && (i == 0 || arrivals[i - 1].home <= arrivals[i].home);
  }
  if (in_order) return;
  std::vector<int64_t> next(recv_rows.size());
  std::exclusive_scan(recv_rows.begin(), recv_rows.end(), next.begin(), int64_t{0});
  for (const Arrival& arrival : arrivals) {
    slots.push_back({next[arrival.home], arrival.num_rows});
    next[arrival.home] += arrival.num_rows;
  }
}

void fill_receives(const Pack& pack, const std::vector<Visit>& visits, Moving moving,
                   Movement& movement) {
  std::vector<Arrival> q_arrivals, k_arrivals;
  for (const Visit& visit : visits) {
    if (!moves(visit, moving)) continue;
    const std::span<const Segment> segments = pack.segments_of(pack.documents[visit.document]);
    for (Range rows : visit.queries) append_arrivals(segments, rows, q_arrivals);
    for (Range keys : visit.keys.ranges()) append_arrivals(segments, keys, k_arrivals);
  }
  fill_receives(q_arrivals, movement.recv_q_rows, movement.q_slot_runs);
  fill_receives(k_arrivals, movement.recv_k_rows, movement.k_slot_runs);
}

Movement movement_of(const Pack& pack, const Sender& sender, const std::vector<Visit>& visits,
                     Moving moving) {
  Movement movement;
  for (std::vector<int64_t>* rows : {&movement.send_q_rows, &movement.recv_q_rows,
                                     &movement.send_k_rows, &movement.recv_k_rows}) {
    rows->assign(pack.num_ranks, 0);
  }
  sender.fill(moving, movement);
  fill_receives(pack, visits, moving, movement);
  return movement;
}

// Nothing where neither this rank nor a server of its rows keeps any.
std::optional<Keeping> keeping_of(const Pack& pack, const Sender& sender,
                                  const std::vector<Visit>& visits) {
  const auto is_kept = [](const Visit& visit) { return visit.is_kept; };
  if (!sender.spares_any() && std::none_of(visits.begin(), visits.end(), is_kept)) return {};
  Keeping keeping{movement_of(pack, sender, visits, Moving::kNotKept), {}, {}};
  int64_t q_row = 0, k_row = 0;
  for (const Visit& visit : visits) {
    auto& [q_runs, k_runs] = visit.is_kept ? keeping.kept : keeping.moved;
    for (Range rows : visit.queries) {
      q_runs.push_back({std::exchange(q_row, q_row + num_rows(rows)), num_rows(rows)});
    }
    for (Range keys : visit.keys.ranges()) {
      k_runs.push_back({std::exchange(k_row, k_row + num_rows(keys)), num_rows(keys)});
    }
  }
  return keeping;
}

// A home task, and the (query, key) pairs that it scores.
struct HomeTask {
  PlacedTask task;
  int64_t num_pairs;
};

// How many of the tasks, which are in order, come before the cut that halves their pairs best and
// separates their keys.
int64_t middle_of(const std::vector<HomeTask>& tasks) {
  int64_t num_pairs = 0, num_before = 0, num_early = static_cast<int64_t>(tasks.size());
  for (const HomeTask& home : tasks) num_pairs += home.num_pairs;
  int64_t smallest = num_pairs;  // difference of the two sides
  for (size_t i = 0; i + 1 < tasks.size(); ++i) {
    num_before += tasks[i].num_pairs;
    const PlacedTask& task = tasks[i].task;
    const int64_t difference = std::abs(num_pairs - 2 * num_before);
    if (task.k_row + task.num_k_rows > tasks[i + 1].task.k_row || difference >= smallest) continue;
    smallest = difference;
    num_early = static_cast<int64_t>(i) + 1;
  }
  return num_early;
}

// `are_cut`: whether something comes between early and late ones.
void fill_home_tasks(const Pack& pack, const Plan& plan, bool are_cut, Layout& layout) {
  std::vector<HomeTask> tasks;
  for (const Task& task : tasks_of(plan, layout.rank)) {
    if (!is_home(pack, plan.mask, task)) continue;
    const Document& document = pack.documents[task.document];
    const std::span<const Segment> segments = pack.segments_of(document);
    const Segment& segment = segments[segment_at(segments, task.q_begin)];
    const Range keys = keys_of(plan.mask, queries(task), document.length);
    tasks.push_back(
        {{segment.q_row + task.q_begin - segment.start, num_rows(queries(task)),
          segment.row + keys.begin - segment.start, num_rows(keys), task.q_begin - keys.begin},
         num_pairs(plan.mask, queries(task), document.length)});
  }
  std::sort(tasks.begin(), tasks.end(),
            [](const HomeTask& a, const HomeTask& b) { return a.task.q_row < b.task.q_row; });
  int64_t num_left = are_cut ? middle_of(tasks) : static_cast<int64_t>(tasks.size());
  for (const HomeTask& home : tasks) {
    (num_left-- > 0 ? layout.early_tasks : layout.late_tasks).push_back(home.task);
  }
}

void fill_visiting_tasks(const Pack& pack, const Plan& plan, const std::vector<Visit>& visits,
                         Layout& layout) {
  int64_t q_row = 0;
  int64_t k_row = 0;  // of the first key of a range
  for (const Visit& visit : visits) {
    const int64_t length = pack.documents[visit.document].length;
    auto range = visit.keys.ranges().begin();
    for (Range rows : visit.queries) {  // in ascending order of their first key
      const Range keys = keys_of(plan.mask, rows, length);
      for (; range->end <= keys.begin; ++range) k_row += num_rows(*range);
      layout.visiting_tasks.push_back({q_row, num_rows(rows), k_row + keys.begin - range->begin,
                                       num_rows(keys), rows.begin - keys.begin});
      q_row += num_rows(rows);
    }
    for (; range != visit.keys.ranges().end(); ++range) k_row += num_rows(*range);
  }
}

}  // namespace

Layout make_layout(const Pack& pack, const Plan& plan, int64_t rank, Results results) {
  return make_layout(pack, plan, HomeRuns(pack, rank), results);
}

Layout make_layout(const Pack& pack, const Plan& plan, const HomeRuns& home, Results results) {
  const int64_t rank = home.rank();
  const Sender sender(pack, plan, home);
  const std::vector<Visit> visits = visits_of(pack, plan.mask, tasks_of(plan, rank));
  Layout layout;
  static_cast<Movement&>(layout) = movement_of(pack, sender, visits, Moving::kAll);
  layout.rank = rank;
  layout.num_ranks = plan.num_ranks;
  layout.num_home_rows = pack.num_rows[rank];
  layout.num_context_rows = pack.num_context_rows[rank];
  layout.keeping = keeping_of(pack, sender, visits);
  const bool sends = !layout.send_q_runs.empty() || !layout.send_k_runs.empty();
  fill_home_tasks(pack, plan, !visits.empty() || (sends && results == Results::kTaken), layout);
  fill_visiting_tasks(pack, plan, visits, layout);
  return layout;
}

}  // namespace distca::planner
