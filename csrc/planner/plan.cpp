#include "plan.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

#include "balancer.h"
#include "ranges.h"
#include "scheduler.h"

namespace distca::planner {
namespace {

[[noreturn]] void reject(const std::string& what) {
  throw std::invalid_argument("plan: " + what);
}

[[noreturn]] void reject(const std::string& field, const std::string& value,
                         const std::string& expected) {
  throw std::invalid_argument("options: " + field + " is " + value + "; expected " + expected);
}

void check(const PlanOptions& options) {
  validate(options.mask);
  validate(options.cost);
  const RowBytes& bytes = options.row_bytes;
  if (bytes.query < 0) reject("row_bytes.query", std::to_string(bytes.query), "0 or more");
  if (bytes.key < 0) reject("row_bytes.key", std::to_string(bytes.key), "0 or more");
  if (!(options.link_bytes_per_second > 0)) {
    reject("link_bytes_per_second", std::to_string(options.link_bytes_per_second),
           "a positive number");
  }
  if (!(options.max_link_ratio > 0)) {
    reject("max_link_ratio", std::to_string(options.max_link_ratio), "a positive number");
  }
  if (!(options.tolerance >= 0) || !std::isfinite(options.tolerance)) {
    reject("tolerance", std::to_string(options.tolerance), "0 or a positive number");
  }
}

class Digest {
 public:
  void add(int64_t value) {
    hash_ = (hash_ ^ static_cast<uint64_t>(value)) * 0x9e3779b97f4a7c15u;
    hash_ ^= hash_ >> 32;
  }
  uint64_t value() const { return hash_; }

 private:
  uint64_t hash_ = 0xcbf29ce484222325u;
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
  const int64_t length = pack.documents[task.document].length;
  if (task.q_begin < 0 || task.q_begin >= task.q_end || task.q_end > length) {
    reject(to_string(task) + ": queries must be a part of [0, " + std::to_string(length) + ")");
  }
}

// Every document's queries, by position, have to follow one another from 0 to its length.
void check_cover(std::vector<Task> tasks, const Pack& pack) {
  std::sort(tasks.begin(), tasks.end(), [](const Task& a, const Task& b) {
    return std::tie(a.document, a.q_begin) < std::tie(b.document, b.q_begin);
  });
  auto task = tasks.begin();
  for (size_t i = 0; i < pack.documents.size(); ++i) {
    int64_t covered = 0;
    for (; task != tasks.end() && task->document == static_cast<int64_t>(i); ++task) {
      if (task->q_begin != covered) {
        reject(to_string(*task) + ": queries before it are computed up to " +
               std::to_string(covered) + "; every query is computed once");
      }
      covered = task->q_end;
    }
    if (covered != pack.documents[i].length) {
      reject("document " + std::to_string(i) + " has " + std::to_string(pack.documents[i].length) +
             " queries, computed up to " + std::to_string(covered));
    }
  }
}

}  // namespace

Plan make_plan(const Pack& pack, const PlanOptions& options) {
  check(options);
  const std::vector<Task> home = home_cut(pack);
  Candidate chosen = balance(pack, options, home);
  Plan plan{pack.num_ranks, options.mask, std::move(chosen.tasks), std::move(chosen.loads), 0};
  for (const Task& task : home) {
    plan.loads[task.server].seconds_home +=
        options.cost.seconds(options.mask, queries(task), pack.documents[task.document].length);
  }
  plan.digest = digest_of(pack, plan.mask, plan.tasks);
  return plan;
}

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
    digest.add(static_cast<int64_t>(document.segments.size()));
    for (const Segment& segment : document.segments) {
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
  }
  return digest.value();
}

}  // namespace distca::planner
