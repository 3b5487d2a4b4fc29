#include <algorithm>
#include <utility>

#include "../model/ranges.h"
#include "core/check.h"
#include "layout.h"

namespace distca::planner {
namespace {

constexpr int64_t kTileRows = 128;  // of the kernels: cuts elsewhere cost a tile

// Deals tasks, which come in plan order, out to rounds.
class Rounds {
 public:
  Rounds(const Pack& pack, const Mask& mask, const RowBytes& held, double cap_bytes)
      : pack_(pack), mask_(mask), held_(held), cap_bytes_(cap_bytes) {}

  void add(Task task) {
    if (task.server != server_) begin_server(task.server);
    if (is_home(pack_, mask_, task)) return tasks[0].push_back(task);
    if (bytes_ > 0 && bytes_ + bytes_added(queries(task), task.document) > cap_bytes_) open_next();
    while (bytes_ + bytes_added(queries(task), task.document) > cap_bytes_) {
      const int64_t cut = task.q_begin + num_that_fit(task);
      put({task.document, task.q_begin, cut, task.server, task.is_kept});
      task.q_begin = cut;
      open_next();
    }
    put(task);
  }

  std::vector<std::vector<Task>> tasks{1};  // by round, of all servers

 private:
  // Keys that the round's earlier tasks of the document read are there already. Those begin and
  // end in the order of the queries.
  double bytes_added(Range rows, int64_t document) const {
    const Range keys = keys_of(mask_, rows, pack_.documents[document].length);
    const int64_t first = document == document_ ? std::max(keys.begin, keys_end_) : keys.begin;
    return static_cast<double>(num_rows(rows) * held_.query +
                               std::max<int64_t>(keys.end - first, 0) * held_.key);
  }

  // Of the first queries of a task that a round of its own cannot hold.
  int64_t num_that_fit(const Task& task) const {
    const auto bytes_of_first = [&](int64_t count) {
      return bytes_added({task.q_begin, task.q_begin + count}, task.document);
    };
    int64_t fit = 0, too_many = task.q_end - task.q_begin;
    while (too_many - fit > 1) {
      const int64_t middle = fit + (too_many - fit) / 2;
      (bytes_of_first(middle) <= cap_bytes_ ? fit : too_many) = middle;
    }
    require(fit > 0, "server ", task.server, " needs ", static_cast<int64_t>(bytes_of_first(1)),
            " bytes for one query of document ", task.document, " with its keys; a round may hold ",
            static_cast<int64_t>(cap_bytes_));
    return fit > kTileRows ? fit / kTileRows * kTileRows : fit;
  }

  // A part of a task may be at home although the whole is not.
  void put(const Task& task) {
    if (is_home(pack_, mask_, task)) return tasks[0].push_back(task);
    bytes_ += bytes_added(queries(task), task.document);
    const Range keys = keys_of(mask_, queries(task), pack_.documents[task.document].length);
    keys_end_ = task.document == document_ ? std::max(keys_end_, keys.end) : keys.end;
    document_ = task.document;
    tasks[round_].push_back(task);
  }

  void begin_server(int64_t server) {
    server_ = server;
    round_ = 0;
    bytes_ = 0;
    document_ = -1;
  }

  void open_next() {
    bytes_ = 0;
    document_ = -1;
    if (++round_ == tasks.size()) tasks.emplace_back();
  }

  const Pack& pack_;
  const Mask mask_;
  const RowBytes held_;
  const double cap_bytes_;
  int64_t server_ = -1;
  size_t round_ = 0;
  double bytes_ = 0;       // held in the round
  int64_t document_ = -1;  // the last one of the round
  int64_t keys_end_ = 0;   // of it, read so far
};

}  // namespace

std::vector<Plan> rounds_of(const Pack& pack, const Plan& plan, const RowBytes& held,
                            double cap_bytes) {
  Rounds rounds(pack, plan.mask, held, cap_bytes);
  for (const Task& task : plan.tasks) rounds.add(task);
  std::vector<Plan> plans;
  for (std::vector<Task>& tasks : rounds.tasks) {
    plans.push_back({plan.num_ranks, plan.mask, std::move(tasks), {}, plan.digest});
  }
  return plans;
}

}  // namespace distca::planner
