#include "balancer.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "loads.h"
#include "ranges.h"
#include "scheduler.h"

namespace distca::planner {
namespace {

constexpr double kLinkStep = 1.5;       // from one limit of link seconds to the next
constexpr int kMaxAttempts = 12;        // higher limits tried when the one asked for is not kept
constexpr double kCloseEnough = 1.002;  // ratio of limits between which to stop

double max_seconds(const std::vector<Load>& loads) {
  double seconds = 0;
  for (const Load& load : loads) seconds = std::max(seconds, load.seconds);
  return seconds;
}

double max_link_seconds(const std::vector<Load>& loads, double bytes_per_second) {
  int64_t bytes = 0;
  for (const Load& load : loads) bytes = std::max({bytes, load.bytes_in, load.bytes_out});
  return static_cast<double>(bytes) / bytes_per_second;
}

double mean_seconds(const std::vector<Load>& loads) {
  double seconds = 0;
  for (const Load& load : loads) seconds += load.seconds;
  return seconds / static_cast<double>(loads.size());
}

Candidate make_candidate(const Pack& pack, const PlanOptions& options, std::vector<Task> tasks) {
  std::vector<Load> loads = loads_of(pack, options, tasks);
  const double seconds = max_seconds(loads);
  const double link_seconds = max_link_seconds(loads, options.link_bytes_per_second);
  return {std::move(tasks), std::move(loads), seconds, std::max(seconds, link_seconds)};
}

// Joins adjacent query ranges of a document on one server, unless that turns a home task into a
// visiting one or costs more.
std::vector<Task> merge_adjacent(const Pack& pack, const PlanOptions& options,
                                 const std::vector<Task>& tasks) {
  const auto seconds = [&](const Task& task) {
    return options.cost.seconds(options.mask, queries(task), pack.documents[task.document].length);
  };
  std::vector<Task> merged;
  for (const Task& task : tasks) {
    if (!merged.empty()) {
      Task& last = merged.back();
      if (last.server == task.server && last.document == task.document &&
          last.q_end == task.q_begin) {
        const Task joined{task.document, last.q_begin, task.q_end, task.server};
        const bool keeps_home =
            is_home(pack, options.mask, joined) ||
            (!is_home(pack, options.mask, last) && !is_home(pack, options.mask, task));
        if (keeps_home && seconds(joined) <= (seconds(last) + seconds(task)) * (1 + 1e-9)) {
          last = joined;
          continue;
        }
      }
    }
    merged.push_back(task);
  }
  return merged;
}

bool finishes_earlier(const Candidate& a, const Candidate& b) {
  return std::tie(a.makespan, a.seconds) < std::tie(b.makespan, b.seconds);
}

struct Attempt {
  Candidate candidate;
  bool balanced;  // within the limits it was made for
};

class Balancer {
 public:
  Balancer(const Pack& pack, const PlanOptions& options, const std::vector<Task>& home)
      : pack_(pack),
        options_(options),
        home_(home),
        best_(make_candidate(pack, options, merge_adjacent(pack, options, home))),
        home_loads_(best_.loads) {}

  Candidate run();

 private:
  Attempt attempt(const Limits& limits, Preference preference) const;
  void keep_if_earlier(Candidate candidate);
  bool balance_compute(double seconds, double most_link);
  void raise_limits(double low);

  const Pack& pack_;
  const PlanOptions& options_;
  const std::vector<Task>& home_;
  Candidate best_;
  const std::vector<Load> home_loads_;
};

Attempt Balancer::attempt(const Limits& limits, Preference preference) const {
  const Schedule made = schedule(pack_, options_, home_, home_loads_, limits, preference);
  return {make_candidate(pack_, options_, merge_adjacent(pack_, options_, made.tasks)),
          made.balanced};
}

void Balancer::keep_if_earlier(Candidate candidate) {
  if (finishes_earlier(candidate, best_)) best_ = std::move(candidate);
}

// Looks for a plan within `seconds` of compute that uses links as little as that needs.
bool Balancer::balance_compute(double seconds, double most_link) {
  const auto balances = [&](const Limits& limits, Preference preference) {
    Attempt made = attempt(limits, preference);
    if (made.balanced) {
      best_ = std::move(made.candidate);
    } else {
      keep_if_earlier(std::move(made.candidate));
    }
    return made.balanced;
  };
  double link = std::min(mean_seconds(home_loads_), most_link);
  while (!balances({seconds, link}, Preference::kFewBytes)) {
    if (link >= most_link) return balances({seconds, link}, Preference::kFullServers);
    link = std::min(link * kLinkStep, most_link);
  }
  // The cuts may fit tiles better than home's did, and so leave a lower mean to keep to.
  const double own = mean_seconds(best_.loads) * (1 + options_.tolerance);
  if (best_.seconds > own) {
    Attempt made = attempt({own, link}, Preference::kFewBytes);
    if (made.balanced) best_ = std::move(made.candidate);
  }
  return true;
}

// Looks for a low limit to compute and links alike.
void Balancer::raise_limits(double low) {
  double high = best_.makespan;
  for (int i = 0; i < kMaxAttempts && high > low * kCloseEnough; ++i) {
    const double limit = (low + high) / 2;
    bool balanced = false;
    for (Preference preference : {Preference::kFewBytes, Preference::kFullServers}) {
      Attempt made = attempt({limit, limit}, preference);
      balanced = balanced || made.balanced;
      keep_if_earlier(std::move(made.candidate));
    }
    (balanced ? high : low) = limit;
    high = std::min(high, best_.makespan);
  }
}

Candidate Balancer::run() {
  const double mean = mean_seconds(home_loads_);
  const double seconds = mean * (1 + options_.tolerance);
  if (best_.seconds <= seconds) return best_;
  const double most_link = std::min(best_.makespan, options_.max_link_ratio * mean);
  if (!balance_compute(seconds, most_link)) raise_limits(seconds);
  return std::move(best_);
}

}  // namespace

Candidate balance(const Pack& pack, const PlanOptions& options, const std::vector<Task>& home) {
  return Balancer(pack, options, home).run();
}

}  // namespace distca::planner
