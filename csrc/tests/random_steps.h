#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <map>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "planner/model/options.h"
#include "planner/model/pack.h"
#include "planner/model/plan.h"

namespace distca::planner {

using Random = std::mt19937;

// std::uniform_int_distribution differs between standard libraries; this does not.
inline int64_t draw(Random& random, int64_t first, int64_t last) {
  return first + static_cast<int64_t>(random() % static_cast<uint64_t>(last - first + 1));
}

// Lengths 0, 1 and odd ones among them.
inline std::vector<int64_t> draw_lengths(Random& random, int64_t count, int64_t longest) {
  std::vector<int64_t> lengths;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t kind = draw(random, 0, 7);
    lengths.push_back(kind < 2 ? kind : draw(random, 1, longest));
  }
  return lengths;
}

// Every document whole, on a random rank; some ranks may stay empty.
inline std::vector<Piece> whole_documents(Random& random, const std::vector<int64_t>& lengths,
                                          int64_t num_ranks) {
  std::vector<Piece> pieces;
  for (size_t i = 0; i < lengths.size(); ++i) {
    pieces.push_back({draw(random, 0, num_ranks - 1), static_cast<int64_t>(i), 0, lengths[i]});
  }
  return pieces;
}

// One global pack cut into equal token runs, so that documents cross ranks.
inline std::vector<Piece> crossing_documents(const std::vector<int64_t>& lengths,
                                             int64_t num_ranks) {
  const int64_t total = std::accumulate(lengths.begin(), lengths.end(), int64_t{0});
  const int64_t budget = std::max<int64_t>(1, (total + num_ranks - 1) / num_ranks);
  std::vector<Piece> pieces;
  int64_t token = 0;
  for (size_t i = 0; i < lengths.size(); ++i) {
    for (int64_t start = 0; start < lengths[i];) {
      const int64_t room = budget - token % budget;
      const int64_t length = std::min(room, lengths[i] - start);
      pieces.push_back({token / budget, static_cast<int64_t>(i), start, length});
      start += length;
      token += length;
    }
  }
  return pieces;
}

// Documents cut anywhere, pieces on random ranks in random order, with ids that are not dense.
inline std::vector<Piece> shuffled_pieces(Random& random, const std::vector<int64_t>& lengths,
                                          int64_t num_ranks) {
  std::vector<Piece> pieces;
  for (size_t i = 0; i < lengths.size(); ++i) {
    const int64_t id = 1000 - 7 * static_cast<int64_t>(i);
    for (int64_t start = 0; start < lengths[i];) {
      const int64_t length = draw(random, 0, lengths[i] - start);
      pieces.push_back({draw(random, 0, num_ranks - 1), id, start, length});
      start += length;
    }
  }
  for (size_t i = pieces.size(); i > 1; --i) std::swap(pieces[i - 1], pieces[random() % i]);
  return pieces;
}

// Gives some documents context at their beginning, in one or more pieces.
inline void draw_context(Random& random, std::vector<Piece>& pieces) {
  std::map<int64_t, int64_t> lengths, first_queries;
  for (const Piece& piece : pieces) lengths[piece.document] += piece.length;
  for (const auto& [document, length] : lengths) {
    const bool has_context = length >= 2 && draw(random, 0, 1) == 1;
    first_queries[document] = has_context ? draw(random, 1, length - 1) : 0;
  }
  for (Piece& piece : pieces) {
    piece.num_context =
        std::clamp<int64_t>(first_queries[piece.document] - piece.start, 0, piece.length);
  }
}

// A step of one of the three kinds, now and then with context.
inline std::vector<Piece> draw_pieces(Random& random, int64_t num_ranks, int64_t longest) {
  std::vector<int64_t> lengths = draw_lengths(random, draw(random, 0, 9), longest);
  if (draw(random, 0, 4) == 0) lengths = {draw(random, 1, 3 * longest)};
  std::vector<Piece> pieces;
  switch (draw(random, 0, 2)) {
    case 0:
      pieces = whole_documents(random, lengths, num_ranks);
      break;
    case 1:
      pieces = crossing_documents(lengths, num_ranks);
      break;
    default:
      pieces = shuffled_pieces(random, lengths, num_ranks);
  }
  if (draw(random, 0, 2) == 0) draw_context(random, pieces);
  return pieces;
}

inline Mask draw_mask(Random& random) {
  switch (draw(random, 0, 3)) {
    case 0:
      return {-1, 0};
    case 1:
      return {-1, -1};
    case 2:
      return {draw(random, 0, 20), 0};
    default:
      return {draw(random, -1, 20), draw(random, -1, 20)};
  }
}

// Options under which small steps move a lot of work.
inline PlanOptions draw_options(Random& random) {
  PlanOptions options;
  options.mask = draw_mask(random);
  options.cost.tile_q = draw(random, 1, 8);
  options.cost.tile_k = draw(random, 1, 8);
  options.row_bytes = {draw(random, 0, 500), draw(random, 0, 200)};
  options.links.bytes_per_second = draw(random, 0, 2) == 0 ? 1e8 : 1e12;
  options.tolerance = 0.01 * static_cast<double>(draw(random, 0, 5));
  if (draw(random, 0, 2) == 0) {
    options.kept_bytes = {draw(random, 0, options.row_bytes.query),
                          draw(random, 0, options.row_bytes.key)};
    options.kept_cap_bytes = static_cast<double>(draw(random, 0, 1 << draw(random, 0, 20)));
  }
  return options;
}

// Draws servers of several speeds, some of which serve nothing, caps, lags, nodes and what moving
// costs. Each of these occurs in some steps only.
inline void draw_cluster(Random& random, int64_t num_ranks, PlanOptions& options) {
  options.held_bytes = {draw(random, 0, 300), draw(random, 0, 200)};
  if (draw(random, 0, 1) == 0) {
    constexpr double kSpeeds[] = {0, 0.5, 1, 1, 2};
    const bool capped = draw(random, 0, 1) == 0, lagging = draw(random, 0, 1) == 0;
    const double tile = options.cost.seconds_per_tile;
    for (int64_t rank = 0; rank < num_ranks; ++rank) {
      options.servers.push_back({kSpeeds[draw(random, 0, 4)]});
      if (capped) {
        options.servers.back().cap_bytes = static_cast<double>(draw(random, 0, 20000));
      }
      if (lagging)
        options.servers.back().lag_seconds = tile * static_cast<double>(draw(random, 0, 200));
    }
    options.servers[draw(random, 0, num_ranks - 1)].speed = 1;
  }
  if (draw(random, 0, 1) == 0) {
    options.links.ranks_per_node = draw(random, 1, num_ranks);
    options.links.node_bytes_per_second =
        options.links.bytes_per_second / static_cast<double>(draw(random, 1, 10));
  }
  if (draw(random, 0, 2) == 0) options.links.moving_part = 0.05;
}

// Lognormal lengths with a Pareto tail, packed into equal token budgets; a document longer than
// what a rank has left is cut into independent ones.
inline std::vector<Piece> heavy_tailed_step(Random& random, int64_t num_ranks, int64_t budget) {
  const auto uniform = [&random] { return (static_cast<double>(random()) + 0.5) / 4294967296.0; };
  std::vector<Piece> pieces;
  int64_t left = 0;
  for (int64_t rank = 0; rank < num_ranks; ++rank) {
    for (int64_t row = 0; row < budget;) {
      if (left == 0) {
        const double normal =
            std::sqrt(-2 * std::log(uniform())) * std::cos(6.283185307179586 * uniform());
        const bool in_tail = uniform() < 0.05;
        const double length =
            in_tail ? 8192 * std::pow(uniform(), -1 / 1.1) : std::exp(7.0 + 1.0 * normal);
        left = 1 + static_cast<int64_t>(std::min(length, 2.0 * static_cast<double>(budget)));
      }
      const int64_t length = std::min(left, budget - row);
      pieces.push_back({rank, static_cast<int64_t>(pieces.size()), 0, length});
      row += length;
      left -= length;
    }
  }
  return pieces;
}

// Document i whole on rank_of(i).
template <typename RankOf>
std::vector<Piece> placed_whole(const std::vector<int64_t>& lengths, RankOf rank_of) {
  std::vector<Piece> pieces;
  for (size_t i = 0; i < lengths.size(); ++i) {
    const auto id = static_cast<int64_t>(i);
    pieces.push_back({rank_of(id), id, 0, lengths[i]});
  }
  return pieces;
}

// A document dealt out over ranks in runs of `run` tokens, one rank after the other. `backward`
// lists the last run first, so that rows descend as positions ascend.
inline std::vector<Piece> dealt_document(int64_t length, int64_t run, int64_t num_ranks,
                                         bool backward) {
  std::vector<Piece> pieces;
  for (int64_t start = 0; start < length; start += run) {
    pieces.push_back({start / run % num_ranks, 0, start, std::min(run, length - start)});
  }
  if (backward) std::reverse(pieces.begin(), pieces.end());
  return pieces;
}

struct NamedStep {
  std::string name;
  std::vector<Piece> pieces;
};

// Steps at the edges of what a planner expects. `side` is the tile that lengths keep close to.
inline std::vector<NamedStep> adversarial_steps(Random& random, int64_t num_ranks, int64_t side) {
  const int64_t middle = num_ranks / 2;
  const auto last = [num_ranks](int64_t) { return num_ranks - 1; };
  const auto on_middle = [middle](int64_t) { return middle; };
  const auto in_turn = [num_ranks](int64_t i) { return i % num_ranks; };
  const auto on_even = [num_ranks](int64_t i) { return i % num_ranks / 2 * 2; };
  const int64_t huge = (8 + num_ranks) * side + draw(random, -1, 1);
  const std::vector<int64_t> ones(3 * num_ranks + 1, 1);
  const std::vector<int64_t> equal(2 * num_ranks, 2 * side + 5);
  const std::vector<int64_t> mixed = draw_lengths(random, 3 * num_ranks, 2 * side);
  std::vector<int64_t> near_tiles, doubling, huge_among_ones = ones;
  for (int64_t i = 0; i < 2 * num_ranks; ++i) {
    near_tiles.push_back(draw(random, 1, 2) * side + draw(random, -1, 1));
  }
  for (int64_t length = 1; length <= huge; length *= 2) doubling.push_back(length);
  huge_among_ones[draw(random, 0, 2)] = huge;

  return {
      {"no tokens", {}},
      {"one token", placed_whole({1}, last)},
      {"one huge document on one rank", placed_whole({huge}, last)},
      {"one huge document over all ranks", crossing_documents({huge}, num_ranks)},
      {"one rank holds everything", placed_whole(mixed, on_middle)},
      {"every other rank empty", placed_whole(mixed, on_even)},
      {"random lengths cut in equal tokens", crossing_documents(mixed, num_ranks)},
      {"all of length 1", placed_whole(ones, in_turn)},
      {"all of length 1 on one rank", placed_whole(ones, on_middle)},
      {"lengths near tiles", placed_whole(near_tiles, in_turn)},
      {"lengths near tiles cut in equal tokens", crossing_documents(near_tiles, num_ranks)},
      {"equal loads", placed_whole(equal, in_turn)},
      {"one huge document among ones", placed_whole(huge_among_ones, in_turn)},
      {"doubling lengths", placed_whole(doubling, in_turn)},
      {"a document dealt out by tokens", dealt_document(5 * num_ranks + 1, 1, num_ranks, false)},
      {"a document dealt out backward", dealt_document(huge, side - 1, num_ranks, true)}};
}

// Causal, sliding, full and two-sided, with windows at both sides of a tile's.
inline std::vector<Mask> adversarial_masks(int64_t side) {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  return {{-1, 0},      {-1, -1},      {0, 0},  {side - 1, 0}, {side, 0},     {side + 1, 0},
          {side, side}, {1, 2 * side}, {0, -1}, {-1, 3},       {kMost, kMost}};
}

inline bool sees(const Mask& mask, int64_t query, int64_t key) {
  return (mask.window_left < 0 || key >= query - mask.window_left) &&
         (mask.window_right < 0 || key <= query + mask.window_right);
}

inline double imbalance(const Plan& plan) {
  double most = 0, total = 0;
  for (const Load& load : plan.loads) {
    most = std::max(most, load.seconds);
    total += load.seconds;
  }
  return total == 0 ? 1.0 : most * static_cast<double>(plan.num_ranks) / total;
}

// Expects `statement` to throw std::invalid_argument whose message has `part` in it.
#define EXPECT_REJECTED(statement, part)                                                \
  try {                                                                                 \
    statement;                                                                          \
    ADD_FAILURE() << #statement << " was accepted";                                     \
  } catch (const std::invalid_argument& error) {                                        \
    EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what(); \
  }

}  // namespace distca::planner
