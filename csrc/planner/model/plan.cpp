#include "plan.h"

#include <algorithm>
#include <ostream>
#include <tuple>
#include <utility>

#include "core/check.h"
#include "ranges.h"

namespace distca::planner {

static std::ostream& operator<<(std::ostream& out, const Task& task) {
  return out << "task of document " << task.document << ", queries [" << task.q_begin << ", "
             << task.q_end << "), server " << task.server;
}

namespace {

// Words go to four chains in turn, which a processor works on side by side.
class Digest {
 public:
  template <typename... Words>
  void add(Words... words) {
    (mix(chains_[num_words_++ % 4], static_cast<uint64_t>(words)), ...);
  }
  uint64_t value() const {
    uint64_t hash = num_words_;
    for (const uint64_t chain : chains_) mix(hash, chain);
    return hash;
  }

 private:
  static void mix(uint64_t& hash, uint64_t word) {
    hash = (hash ^ word) * 0x9e3779b97f4a7c15u;
    hash ^= hash >> 32;
  }

  uint64_t chains_[4] = {0xcbf29ce484222325u, 1, 2, 3};
  uint64_t num_words_ = 0;
};

void check_range(const Task& task, const Pack& pack) {
  const auto num_documents = static_cast<int64_t>(pack.documents.size());
  require(0 <= task.document && task.document < num_documents, "plan: ", task, ": the pack has ",
          num_documents, " documents");
  require(0 <= task.server && task.server < pack.num_ranks, "plan: ", task, ": the pack has ",
          pack.num_ranks, " ranks");
  const Document& document = pack.documents[task.document];
  require(document.first_query <= task.q_begin && task.q_begin < task.q_end &&
              task.q_end <= document.length,
          "plan: ", task, ": queries must be a part of [", document.first_query, ", ",
          document.length, ")");
}

// Every document's queries, by position, have to follow one another from its first to its length.
void check_cover(std::vector<Task> tasks, const Pack& pack) {
  std::sort(tasks.begin(), tasks.end(), [](const Task& a, const Task& b) {
    return std::tie(a.document, a.q_begin) < std::tie(b.document, b.q_begin);
  });
  auto task = tasks.begin();
  for (size_t i = 0; i < pack.documents.size(); ++i) {
    int64_t covered = pack.documents[i].first_query;
    for (; task != tasks.end() && task->document == static_cast<int64_t>(i); ++task) {
      require(task->q_begin == covered, "plan: ", *task, ": queries before it are computed up to ",
              covered, "; every query is computed once");
      covered = task->q_end;
    }
    require(covered == pack.documents[i].length, "plan: document ", i, " has queries up to ",
            pack.documents[i].length, ", computed up to ", covered);
  }
}

// Of one document a server keeps the inputs of all its visiting tasks, or of none: they share keys.
void check_keeping(const Plan& plan, const Pack& pack) {
  for_each_visit(plan.tasks, [&](std::span<const Task> tasks) {
    const auto is_kept = [](const Task& task) { return task.is_kept; };
    if (std::none_of(tasks.begin(), tasks.end(), is_kept)) return;
    for (const Task& task : tasks) {
      require(task.is_kept != is_home(pack, plan.mask, task), "plan: ", task,
              ": a server keeps the inputs of all visiting tasks of a document or of none, and of "
              "no home task");
    }
  });
}

}  // namespace

Plan plan_of_tasks(const Pack& pack, const Mask& mask, std::vector<Task> tasks) {
  validate(mask);
  for (Task& task : tasks) {
    check_range(task, pack);
    task.is_kept = task.is_kept && !is_home(pack, mask, task);
  }
  Plan plan{pack.num_ranks, mask, std::move(tasks), std::vector<Load>(pack.num_ranks)};
  plan.digest = digest_of(pack, mask, plan.tasks);
  validate(plan, pack);
  return plan;
}

void validate(const Plan& plan, const Pack& pack) {
  require(plan.num_ranks == pack.num_ranks, "plan: num_ranks is ", plan.num_ranks,
          "; the pack has ", pack.num_ranks);
  require(static_cast<int64_t>(plan.loads.size()) == plan.num_ranks, "plan: loads has ",
          plan.loads.size(), " entries; expected one for each of ", plan.num_ranks, " ranks");
  validate(plan.mask);
  for (const Task& task : plan.tasks) check_range(task, pack);
  require(std::is_sorted(plan.tasks.begin(), plan.tasks.end(), in_plan_order),
          "plan: tasks are not in order of (server, document, q_begin)");
  check_cover(plan.tasks, pack);
  check_keeping(plan, pack);
  const uint64_t digest = digest_of(pack, plan.mask, plan.tasks);
  require(plan.digest == digest, "plan: digest is ", plan.digest, "; pack, mask and tasks give ",
          digest, ", so one of them was changed");
}

uint64_t digest_of(const Pack& pack, const Mask& mask, std::span<const Task> tasks) {
  Digest digest;
  digest.add(pack.num_ranks);
  for (const int64_t rows : pack.num_rows) digest.add(rows);
  digest.add(pack.documents.size());
  for (const Document& document : pack.documents) {
    digest.add(document.id, document.length, document.num_segments, document.first_query);
    for (const Segment& segment : pack.segments_of(document)) {
      digest.add(segment.start, segment.length, segment.rank, segment.row);
    }
  }
  digest.add(mask.window_left, mask.window_right, tasks.size());
  for (const Task& task : tasks) {
    digest.add(task.document, task.q_begin, task.q_end, task.server);
    if (task.is_kept) digest.add(1);
  }
  return digest.value();
}

}  // namespace distca::planner
