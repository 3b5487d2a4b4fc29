#include "schedule.h"

#include <algorithm>
#include <vector>

#include "cutter.h"

namespace distca::planner {
namespace {

// Links inside a node are the fast ones: its ranks take the first receiver, whatever the bytes.
constexpr Pairing kInsideNode{.num_candidates = 1, .bounds_bytes = false};

bool visits_home(const Problem& problem, const Item& item, int64_t home) {
  const Task task{item.document, item.rows.begin, item.rows.end, home};
  return num_rows(item.rows) > 0 && !is_home(problem.pack, problem.options.mask, task);
}

// Returns the servers that have memory left, those with the most first.
std::vector<int64_t> receivers_for(const Assignment& assignment, int64_t donor) {
  const PlanOptions& options = assignment.problem().options;
  const auto left = [&](int64_t rank) {
    return options.cap_bytes(rank) - static_cast<double>(assignment.load(rank).held_bytes);
  };
  std::vector<int64_t> ranks;
  for (int64_t rank = 0; rank < assignment.problem().pack.num_ranks; ++rank) {
    if (rank != donor && options.speed(rank) > 0 && left(rank) > 0) ranks.push_back(rank);
  }
  std::stable_sort(ranks.begin(), ranks.end(),
                   [&](int64_t a, int64_t b) { return left(a) > left(b); });
  return ranks;
}

// Moves rows that visit their own home, because their keys are elsewhere, to the servers with most
// memory left. Stops when the donor keeps to its cap, or when no server has memory left.
void relieve_memory(Assignment& assignment, int64_t donor) {
  const Problem& problem = assignment.problem();
  Cutter cutter(assignment, donor);
  std::vector<Item> waiting;  // for the next receiver, the largest first
  for (const Item& item : assignment.own(donor)) {
    if (visits_home(problem, item, donor)) waiting.push_back(item);
  }
  // Moves the first rows of the item and leaves the others in it. Returns whether any moved.
  const auto give = [&](Item& item, int64_t receiver) {
    const auto move = cutter.first_rows({receiver, item.seconds, item.seconds}, item);
    if (!move) return false;
    assignment.apply(*move);
    item.rows.begin = move->slice.end;
    item.seconds = problem.seconds(item.document, item.rows);
    return true;
  };
  for (const int64_t receiver : receivers_for(assignment, donor)) {
    bool has_place = true;
    auto item = waiting.begin(), rest = item;
    for (; has_place && item != waiting.end() && assignment.is_over_cap(donor); ++item) {
      while (assignment.is_over_cap(donor) && visits_home(problem, *item, donor)) {
        if (give(*item, receiver)) continue;
        *rest++ = *item;
        has_place = !assignment.is_budget_spent();
        break;
      }
    }
    if (!assignment.is_over_cap(donor)) return;
    if (rest != item) waiting.erase(rest, item);
  }
}

// Returns whether a node kept so much work that its ranks take more than `most` seconds on average.
bool is_hopeless(const Assignment& assignment, double most) {
  const Problem& problem = assignment.problem();
  const int64_t num_ranks = problem.pack.num_ranks, size = problem.options.links.ranks_per_node;
  for (int64_t first = 0; first < num_ranks; first += size) {
    double seconds = 0, speed = 0;
    for (int64_t rank = first; rank < std::min(num_ranks, first + size); ++rank) {
      const double lag = problem.options.lag_seconds(rank) * problem.options.speed(rank);
      seconds += lag + assignment.seconds(rank);
      speed += problem.options.speed(rank);
    }
    if (seconds > most * speed) return true;
  }
  return false;
}

}  // namespace

bool schedule(Assignment& assignment, const Pairing& pairing, double most) {
  const Links& links = assignment.problem().options.links;
  const int64_t num_ranks = assignment.problem().pack.num_ranks;
  for (int64_t rank = 0; rank < num_ranks; ++rank) {
    if (assignment.is_over_cap(rank)) relieve_memory(assignment, rank);
  }
  if (links.are_slow_between_nodes(num_ranks)) {
    balance_nodes(assignment, pairing);
    if (is_hopeless(assignment, most)) return false;
    for (int64_t first = 0; first < num_ranks; first += links.ranks_per_node) {
      const Range ranks{first, std::min(num_ranks, first + links.ranks_per_node)};
      balance_ranks(assignment, kInsideNode, ranks);
    }
  }
  recut(assignment, balance_ranks(assignment, pairing, {0, num_ranks}));
  return true;
}

}  // namespace distca::planner
