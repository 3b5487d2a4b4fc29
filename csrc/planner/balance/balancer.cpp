#include "balancer.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

#include "../model/loads.h"
#include "../model/ranges.h"
#include "scheduler.h"

namespace distca::planner {
namespace {

constexpr int kMaxAttempts = 8;         // limits tried when the least is not kept
constexpr int kMaxBisections = 6;       // of the last step
constexpr double kFirstStep = 0.0025;   // from one limit to the next; three times as much each time
constexpr double kCloseEnough = 1.005;  // ratio of limits between which to stop
constexpr double kRounding = 2e-4;      // of a limit, left for surpluses that are not worth a task
constexpr double kLeastRelief = 1e-4;   // of the mean compute
constexpr int64_t kManyRanks = 512;     // from which one style has to do
constexpr int64_t kManyShares = 1 << 17;  // likewise

// What a plan may take: about as long as a step's attention is planned at most, however its
// documents lie, and in proportion to them.
constexpr int64_t kSteps = 24'000'000;
constexpr int64_t kStepsPerShare = 160;

// Fair shares of bytes take more of them out of a server, whose link may be too slow for that.
constexpr Style kUnfair{8, true, false, 0, 0.8};

// Where links between nodes take longer than servers.
constexpr Style kTight[] = {
    {8, true, false, 4, 1}, {8, true, false, 2, 0.9}, {8, true, false, 1, 0.8}};

// Tried in this order; the first alone where ranks are many.
constexpr Style kStyles[] = {
    {8, true, true},   {16, true, true}, {8, false, true},   {4, true, true},
    {8, true, false},  {1, true, true},  {16, false, true},  {4, false, false},
    {16, true, false}, {1, false, true}, {4, false, true},   {4, true, false},
    {1, false, false}, {1, true, false}, {16, false, false}, {8, false, false}};

// Joins adjacent query ranges of a document on one server, unless that turns a home task into a
// visiting one or costs more.
std::vector<Task> merge_adjacent(const Pack& pack, const PlanOptions& options,
                                 std::vector<Task> tasks) {
  const auto seconds = [&](const Task& task) {
    return options.cost.seconds(options.mask, queries(task), pack.documents[task.document].length);
  };
  const auto joins = [&](const Task& a, const Task& b) {
    if (a.server != b.server || a.document != b.document || a.q_end != b.q_begin) return false;
    const Task joined{a.document, a.q_begin, b.q_end, a.server};
    const bool keeps_home = is_home(pack, options.mask, joined) ||
                            (!is_home(pack, options.mask, a) && !is_home(pack, options.mask, b));
    return keeps_home && seconds(joined) <= (seconds(a) + seconds(b)) * (1 + 1e-9);
  };
  size_t num_merged = 0;
  for (const Task& task : tasks) {
    if (num_merged > 0 && joins(tasks[num_merged - 1], task)) {
      tasks[num_merged - 1].q_end = task.q_end;
    } else {
      tasks[num_merged++] = task;
    }
  }
  tasks.resize(num_merged);
  return tasks;
}

Budget budget_for(const Home& home) {
  return Budget(kSteps + kStepsPerShare * static_cast<int64_t>(home.shares.size()));
}

class Balancer {
 public:
  Balancer(const Pack& pack, const PlanOptions& options, const Home& home);

  std::vector<Task> run();

 private:
  bool try_limit(double limit);
  void save_bytes(double limit);
  bool attempt(double limit, const Style& style);
  void try_without_limit();
  [[noreturn]] void reject() const;

  const Pack& pack_;
  const PlanOptions& options_;
  const Home& home_;
  double total_ = 0;  // seconds at speed 1
  double speed_ = 0;  // of all servers
  Prices prices_;
  Budget budget_;
  std::optional<Assignment> best_;
  double makespan_;        // of the best
  double bytes_;           // of the best
  bool is_tight_ = false;  // whether links between nodes kept servers from the first limit
  bool is_valid_ = false;  // whether the best keeps to memory caps and servers
};

Balancer::Balancer(const Pack& pack, const PlanOptions& options, const Home& home)
    : pack_(pack), options_(options), home_(home), budget_(budget_for(home)) {
  double pairs = 0;
  for (const Document& document : pack.documents) {
    const Range all{document.first_query, document.length};
    pairs += static_cast<double>(num_pairs(options.mask, all, document.length));
  }
  for (int64_t rank = 0; rank < pack.num_ranks; ++rank) {
    total_ += home.seconds[rank];
    speed_ += options.speed(rank);
  }
  // A slice of n query rows and m keys has at most n * m pairs, and is least for its pairs where
  // both take as many bytes.
  const double bytes =
      static_cast<double>(options.row_bytes.query) * static_cast<double>(options.row_bytes.key);
  prices_ = {total_ > 0 ? 2 * std::sqrt(bytes * pairs / total_) : 0,
             kLeastRelief * total_ / speed_};
  best_.emplace(pack, options, home, total_ / speed_, budget_);
  makespan_ = best_->makespan();
  bytes_ = best_->total_bytes();
  is_valid_ = best_->is_valid();
}

// Returns whether the style gives a plan within the limit, and keeps the plan if it is the best so
// far. Once the budget is spent, tries only if there is no valid plan yet.
bool Balancer::attempt(double limit, const Style& style) {
  if (budget_.is_spent() && is_valid_) return false;
  Assignment made(pack_, options_, home_, limit * (1 - kRounding), budget_);
  schedule(made, pack_, options_, prices_, style);
  if (!made.is_valid()) return false;
  const double makespan = made.makespan();
  const double bytes = made.total_bytes();
  const bool kept = makespan <= limit;
  const bool better = kept && makespan_ <= limit ? bytes < bytes_ : makespan < makespan_;
  if (better || !is_valid_) {
    makespan_ = makespan;
    bytes_ = bytes;
    is_valid_ = true;
    best_.emplace(std::move(made));
  }
  return kept;
}

bool Balancer::try_limit(double limit) {
  if (!is_tight_ && (attempt(limit, kStyles[0]) || attempt(limit, kUnfair))) return true;
  if (!options_.links.are_slow_between_nodes(pack_.num_ranks)) return false;
  is_tight_ = true;
  return std::any_of(std::begin(kTight), std::end(kTight),
                     [&](const Style& style) { return attempt(limit, style); });
}

// Tries the other styles too, if ranks and documents are few.
void Balancer::save_bytes(double limit) {
  const int64_t most = static_cast<int64_t>(std::size(kStyles));
  const int64_t num_shares = static_cast<int64_t>(home_.shares.size());
  const int64_t num_styles = std::min(
      {kManyRanks / pack_.num_ranks, kManyShares / std::max<int64_t>(1, num_shares), most});
  for (int64_t i = 1; i < num_styles; ++i) attempt(limit, kStyles[i]);
}

// Tries without limits for servers and links, so that only memory restricts the plan.
void Balancer::try_without_limit() {
  budget_ = budget_for(home_);
  double slowest = std::numeric_limits<double>::infinity();
  for (int64_t rank = 0; rank < pack_.num_ranks; ++rank) {
    if (options_.speed(rank) > 0) slowest = std::min(slowest, options_.speed(rank));
  }
  const double bytes = best_->total_bytes() + 1e18;
  const Links& links = options_.links;
  attempt(
      total_ / slowest * 2 + bytes / std::min(links.bytes_per_second, links.node_bytes_per_second),
      kStyles[0]);
  if (!is_valid_) reject();
}

// Names a rank whose rows have no place, and the server that has most left.
void Balancer::reject() const {
  int64_t roomiest = -1;
  double most = -std::numeric_limits<double>::infinity();
  for (int64_t rank = 0; rank < pack_.num_ranks; ++rank) {
    if (options_.speed(rank) == 0 || !(options_.cap_bytes(rank) > most)) continue;
    roomiest = rank;
    most = options_.cap_bytes(rank);
  }
  int64_t rank = 0;
  const auto needs = [&] {
    return options_.speed(rank) == 0
               ? home_.seconds[rank] > 0
               : static_cast<double>(home_.traffic[rank].held_bytes) > options_.cap_bytes(rank);
  };
  while (rank + 1 < pack_.num_ranks && !needs()) ++rank;
  const std::string rows = options_.speed(rank) == 0
                               ? "rows of rank " + std::to_string(rank) + ", which serves nothing,"
                               : "rows that visit server " + std::to_string(rank);
  int64_t bytes = home_.traffic[rank].held_bytes;
  if (options_.speed(rank) == 0) {
    for (const Share& share : home_.shares_of(rank)) {
      const Range keys = keys_of(options_.mask, share.rows, pack_.documents[share.document].length);
      bytes += num_rows(share.rows) * options_.held_bytes.query +
               num_rows(keys) * options_.held_bytes.key;
    }
  }
  throw std::invalid_argument("options: servers: no plan keeps to the memory caps: " + rows +
                              " take " + std::to_string(bytes) + " bytes in all, and server " +
                              std::to_string(roomiest) + ", which has the largest cap, may hold " +
                              std::to_string(static_cast<int64_t>(most)) +
                              "; raise the caps or let more ranks serve");
}

// The least limit that is kept is looked for by growing steps, then between the last two.
std::vector<Task> Balancer::run() {
  double limit = total_ / speed_ * (1 + options_.tolerance);
  if (is_valid_ && best_->slowest_seconds() <= limit) {  // whatever the links: keys have to travel
    return merge_adjacent(pack_, options_, best_->tasks());
  }
  double failed = 0, kept = 0;
  double step = kFirstStep;
  for (int i = 0; i < kMaxAttempts && (!is_valid_ || makespan_ > limit); ++i) {
    if (try_limit(limit)) {
      kept = limit;
      break;
    }
    failed = limit;
    limit = std::min(limit * (1 + step), is_valid_ ? makespan_ : limit * 2);
    step *= 3;
  }
  for (int i = 0; i < kMaxBisections && failed > 0; ++i) {
    if (!is_valid_ || makespan_ <= failed * kCloseEnough) break;
    limit = (failed + makespan_) / 2;
    (try_limit(limit) ? kept : failed) = limit;
  }
  if (kept > 0) save_bytes(kept);
  if (!is_valid_) try_without_limit();
  return merge_adjacent(pack_, options_, best_->tasks());
}

}  // namespace

std::vector<Task> balance(const Pack& pack, const PlanOptions& options, const Home& home) {
  return Balancer(pack, options, home).run();
}

}  // namespace distca::planner
