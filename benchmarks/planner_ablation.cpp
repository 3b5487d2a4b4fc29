// Measures the gain of each of the planner's heuristics: how much predicted step time, bytes moved
// and planning time grow without it.
//
//     planner_ablation [--ranks 8,64] lengths.json ...
//
// Documents are drawn from each list, in shuffled order, and packed to 32768 and 131072 tokens a
// rank, for causal attention of 32 query and 8 key heads of 128 in bfloat16. All ranks share one
// node, or nodes of eight have slower links between them; some cases have a sliding window.

#include <algorithm>
#include <cstdio>
#include <ctime>
#include <fstream>
#include <iterator>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "planner/balance/balancer.h"
#include "planner/model/loads.h"

namespace distca::planner {
namespace {

struct Change {
  const char* name;
  void (*make)(Heuristics& heuristics);
};

// Each row switches one heuristic off, or changes its value. The first change is too small to
// matter, so it shows the noise of the search.
constexpr Change kChanges[] = {
    {"noise: `limit_slack` 2.2e-4", [](Heuristics& h) { h.limit_slack = 2.2e-4; }},
    {"`limit_slack`", [](Heuristics& h) { h.limit_slack = 0; }},
    {"`max_limits`, `close_enough`", [](Heuristics& h) { h.max_limits = 1; }},
    {"`min_relief`", [](Heuristics& h) { h.min_relief = 1e-9; }},
    {"`tries_unbounded`", [](Heuristics& h) { h.tries_unbounded = false; }},
    {"`many_ranks`, `many_items`", [](Heuristics& h) { h.many_ranks = 0; }},
    {"`plans_for_links`", [](Heuristics& h) { h.plans_for_links = false; }},
    {"`node_slack`", [](Heuristics& h) { h.node_slack = 0; }},
    {"`max_receivers` 2", [](Heuristics& h) { h.max_receivers = 2; }},
    {"`fits_last_slice`", [](Heuristics& h) { h.fits_last_slice = false; }},
    {"`many_documents`", [](Heuristics& h) { h.many_documents = 1 << 30; }},
    {"`max_bytes_ratio`", [](Heuristics& h) { h.max_bytes_ratio = 1e9; }},
    {"`splits_high`", [](Heuristics& h) { h.splits_high = false; }},
    {"`num_split_points` 1", [](Heuristics& h) { h.num_split_points = 1; }},
    {"`missing_part`", [](Heuristics& h) { h.missing_part = 0; }},
    {"`keys_part`", [](Heuristics& h) { h.keys_part = 1e9; }},
    {"`num_near`", [](Heuristics& h) { h.num_near = 0; }},
    {"`max_recut_slices`", [](Heuristics& h) { h.max_recut_slices = 0; }},
};

std::vector<int64_t> read_lengths(const std::string& path) {
  std::ifstream file(path);
  std::vector<int64_t> lengths;
  int64_t length = 0;
  for (char separator = 0; file >> separator && separator != ']' && file >> length;) {
    if (length > 0) lengths.push_back(length);
  }
  if (lengths.empty()) std::fprintf(stderr, "%s: not a JSON list of lengths\n", path.c_str());
  return lengths;
}

// Packs documents, over and over, to `tokens` on each rank. A document that does not fit is cut;
// its rest starts the next rank as a document of its own.
Pack draw_pack(std::vector<int64_t> lengths, int64_t num_ranks, int64_t tokens, uint64_t seed) {
  std::mt19937_64 random(seed);
  for (size_t i = lengths.size(); i > 1; --i) std::swap(lengths[i - 1], lengths[random() % i]);
  std::vector<Piece> pieces;
  int64_t rest = 0;
  size_t next = 0;
  for (int64_t rank = 0; rank < num_ranks; ++rank) {
    for (int64_t left = tokens; left > 0; left -= pieces.back().length) {
      if (rest == 0) rest = lengths[next++ % lengths.size()];
      pieces.push_back({rank, static_cast<int64_t>(pieces.size()), 0, std::min(rest, left)});
      rest -= pieces.back().length;
    }
  }
  return make_pack(pieces, num_ranks);
}

struct Case {
  PlanOptions options;
  std::vector<Pack> packs;
};

PlanOptions options_of(bool has_nodes, bool has_window) {
  PlanOptions options;
  options.cost.seconds_per_tile = 3.5 * 4 * 128 * 128 * 32 * 128 / 300e12;
  options.row_bytes = {41344, 12288};
  if (has_nodes) options.links = {8, 200e9, 50e9};
  if (has_window) options.mask = {4096, 0};
  return options;
}

std::vector<Case> cases_of(const std::vector<int64_t>& lengths, const std::vector<int64_t>& ranks) {
  std::vector<Case> cases;
  for (const int64_t num_ranks : ranks) {
    for (const int64_t tokens : {32768, 131072}) {
      std::vector<Pack> packs;
      const int64_t num_seeds = std::clamp<int64_t>(1024 / num_ranks, 2, 16);
      for (int64_t seed = 0; seed < num_seeds; ++seed) {
        packs.push_back(draw_pack(lengths, num_ranks, tokens, seed));
      }
      const bool has_window_too = tokens == 32768 && num_ranks <= 512;
      for (const bool has_nodes : {false, true}) {
        for (const bool has_window : {false, true}) {
          if (has_window && !has_window_too) continue;
          cases.push_back({options_of(has_nodes, has_window), packs});
        }
      }
    }
  }
  return cases;
}

struct Figures {
  double step = 0;  // seconds
  double bytes = 0;
  double planning = 0;  // seconds of processor time
};

Figures measure(const Case& each, const Heuristics& heuristics) {
  Figures sum;
  for (const Pack& pack : each.packs) {
    const std::clock_t start = std::clock();
    const Problem problem(pack, each.options, heuristics);
    Budget budget = budget_for(problem);
    const std::vector<Task> tasks = balance(problem, budget);
    sum.planning += static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC;
    const std::vector<Load> loads = loads_of(pack, each.options, tasks);
    sum.step += makespan(loads, each.options.links, 0);
    sum.bytes += total_bytes(loads);
  }
  return sum;
}

// The growth of all cases' figures without one heuristic.
class Row {
 public:
  void add(const Figures& without, const Figures& with) {
    step_.add(without.step, with.step);
    bytes_.add(without.bytes, with.bytes);
    without_planning_ += without.planning;
    planning_ += with.planning;
  }
  void print(const char* name) const {
    std::printf("| %s | %.1f | %.1f | %.1f | %.1f | %.0f |\n", name, step_.most, step_.mean(),
                bytes_.most, bytes_.mean(), 100 * (without_planning_ / planning_ - 1));
  }

 private:
  struct Percents {
    void add(double without, double with) {
      const double percent = with > 0 ? 100 * (without / with - 1) : 0;
      most = std::max(most, percent);
      sum += percent;
      ++count;
    }
    double mean() const { return sum / count; }

    double most = -100, sum = 0;
    int count = 0;
  };

  Percents step_, bytes_;
  double without_planning_ = 0, planning_ = 0;
};

int run(const std::vector<std::string>& arguments) {
  std::vector<int64_t> ranks = {8, 64, 512, 4096};
  std::vector<Case> cases;
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i] == "--ranks" && i + 1 < arguments.size()) {
      ranks.clear();
      std::istringstream list(arguments[++i]);
      for (std::string count; std::getline(list, count, ',');) ranks.push_back(std::stoll(count));
      continue;
    }
    const std::vector<int64_t> lengths = read_lengths(arguments[i]);
    if (lengths.empty()) return 1;
    for (Case& each : cases_of(lengths, ranks)) cases.push_back(std::move(each));
  }
  if (cases.empty()) {
    std::fprintf(stderr, "usage: planner_ablation [--ranks 8,64] lengths.json ...\n");
    return 1;
  }
  std::vector<Row> rows(std::size(kChanges));
  for (const Case& each : cases) {
    measure(each, {});  // warms up
    const Figures with = measure(each, {});
    for (size_t i = 0; i < rows.size(); ++i) {
      Heuristics heuristics;
      kChanges[i].make(heuristics);
      rows[i].add(measure(each, heuristics), with);
    }
  }
  std::printf("| without | step, worst %% | mean %% | bytes, worst %% | mean %% | planning %% |\n");
  std::printf("| --- | --- | --- | --- | --- | --- |\n");
  for (size_t i = 0; i < rows.size(); ++i) rows[i].print(kChanges[i].name);
  return 0;
}

}  // namespace
}  // namespace distca::planner

int main(int argc, char** argv) {
  return distca::planner::run({argv + 1, argv + argc});
}
