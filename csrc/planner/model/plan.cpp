#include "plan.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>

#include "ranges.h"

namespace distca::planner {
namespace {

[[noreturn]] void reject(const std::string& what) {
  throw std::invalid_argument("plan: " + what);
}

// Words go to four chains in turn, which a processor works on side by side.
class Digest {
 public:
  void add(int64_t word) { mix(chains_[num_words_++ % 4], static_cast<uint64_t>(word)); }
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

std::string to_string(const Task& task) {
  return "task of document " + std::to_string(task.document) + ", queries [" +
         std::to_string(task.q_begin) + ", " + std::to_string(task.q_end) + "), server " +
         std::to_string(task.server);
}

void check_range(const Task& task, const Pack& pack) {
  const int64_t num_documents = static_cast<int64_t>(pack.documents.size());
  if (task.document < 0 || task.document >= num_documents) {
    reject(to_string(task) + ": the pack has " + std::to_string(num_documents) + " documents");
  }
  if (task.server < 0 || task.server >= pack.num_ranks) {
    reject(to_string(task) + ": the pack has " + std::to_string(pack.num_ranks) + " ranks");
  }
  const Document& document = pack.documents[task.document];
  if (task.q_begin < document.first_query || task.q_begin >= task.q_end ||
      task.q_end > document.length) {
    reject(to_string(task) + ": queries must be a part of [" +
           std::to_string(document.first_query) + ", " + std::to_string(document.length) + ")");
  }
}

// Tasks by document, then position.
std::vector<Task> by_document(const std::vector<Task>& tasks, size_t num_documents) {
  std::vector<int64_t> next(num_documents + 1, 0);
  for (const Task& task : tasks) ++next[task.document + 1];
  std::partial_sum(next.begin(), next.end(), next.begin());
  std::vector<Task> sorted(tasks.size());
  for (const Task& task : tasks) sorted[next[task.document]++] = task;
  const auto precedes = [](const Task& a, const Task& b) {
    return std::tie(a.document, a.q_begin) < std::tie(b.document, b.q_begin);
  };
  for (auto first = sorted.begin(); first != sorted.end();) {
    auto last = first + 1;
    while (last != sorted.end() && last->document == first->document) ++last;
    if (last - first > 1) std::sort(first, last, precedes);
    first = last;
  }
  return sorted;
}

// Every document's queries, by position, have to follow one another from its first to its length.
void check_cover(const std::vector<Task>& tasks, const Pack& pack) {
  const std::vector<Task> sorted = by_document(tasks, pack.documents.size());
  auto task = sorted.begin();
  for (size_t i = 0; i < pack.documents.size(); ++i) {
    int64_t covered = pack.documents[i].first_query;
    for (; task != sorted.end() && task->document == static_cast<int64_t>(i); ++task) {
      if (task->q_begin != covered) {
        reject(to_string(*task) + ": queries before it are computed up to " +
               std::to_string(covered) + "; every query is computed once");
      }
      covered = task->q_end;
    }
    if (covered != pack.documents[i].length) {
      reject("document " + std::to_string(i) + " has queries up to " +
             std::to_string(pack.documents[i].length) + ", computed up to " +
             std::to_string(covered));
    }
  }
}

// Of one document a server keeps the inputs of all its visiting tasks, or of none: they share keys.
void check_keeping(const Plan& plan, const Pack& pack) {
  for (auto task = plan.tasks.begin(); task != plan.tasks.end();) {
    const auto last = std::find_if(task, plan.tasks.end(), [task](const Task& other) {
      return other.server != task->server || other.document != task->document;
    });
    if (std::any_of(task, last, [](const Task& each) { return each.is_kept; })) {
      const auto wrong = std::find_if(task, last, [&](const Task& each) {
        return each.is_kept == is_home(pack, plan.mask, each);
      });
      if (wrong != last) {
        reject(to_string(*wrong) + ": a server keeps the inputs of all visiting tasks of a " +
               "document or of none, and of no home task");
      }
    }
    task = last;
  }
}

}  // namespace

void validate(const Plan& plan, const Pack& pack) {
  if (plan.num_ranks != pack.num_ranks) {
    reject("num_ranks is " + std::to_string(plan.num_ranks) + "; the pack has " +
           std::to_string(pack.num_ranks));
  }
  if (static_cast<int64_t>(plan.loads.size()) != plan.num_ranks) {
    reject("loads has " + std::to_string(plan.loads.size()) +
           " entries; expected one for each of " + std::to_string(plan.num_ranks) + " ranks");
  }
  validate(plan.mask);
  for (const Task& task : plan.tasks) check_range(task, pack);
  if (!std::is_sorted(plan.tasks.begin(), plan.tasks.end(), in_plan_order)) {
    reject("tasks are not in order of (server, document, q_begin)");
  }
  check_cover(plan.tasks, pack);
  check_keeping(plan, pack);
  const uint64_t digest = digest_of(pack, plan.mask, plan.tasks);
  if (plan.digest != digest) {
    reject("digest is " + std::to_string(plan.digest) + "; pack, mask and tasks give " +
           std::to_string(digest) + ", so one of them was changed");
  }
}

uint64_t digest_of(const Pack& pack, const Mask& mask, std::span<const Task> tasks) {
  Digest digest;
  digest.add(pack.num_ranks);
  for (int64_t rows : pack.num_rows) digest.add(rows);
  digest.add(static_cast<int64_t>(pack.documents.size()));
  for (const Document& document : pack.documents) {
    digest.add(document.id);
    digest.add(document.length);
    digest.add(document.num_segments);
    digest.add(document.first_query);
    for (const Segment& segment : pack.segments_of(document)) {
      for (int64_t value : {segment.start, segment.length, segment.rank, segment.row}) {
        digest.add(value);
      }
    }
  }
  digest.add(mask.window_left);
  digest.add(mask.window_right);
  digest.add(static_cast<int64_t>(tasks.size()));
  for (const Task& task : tasks) {
    for (int64_t value : {task.document, task.q_begin, task.q_end, task.server}) digest.add(value);
    if (task.is_kept) digest.add(1);
  }
  return digest.value();
}

}  // namespace distca::planner
