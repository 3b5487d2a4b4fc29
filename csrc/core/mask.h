#pragma once

#include <cstdint>

#include "rows.h"

// Decides which keys a query sees, for plans, costs and task lists. The Hopper kernels apply the
// same rule to elements, in 32 bits.
namespace distca {

// A query at position p sees keys [p - window_left, p + window_right] of its document; -1 means no
// limit. Causal: {-1, 0}. Full: {-1, -1}. Sliding window of W: {W, 0}.
struct Mask {
  int64_t window_left = -1;
  int64_t window_right = 0;
};

// Throws std::invalid_argument naming the field.
void validate(const Mask& mask);

constexpr bool is_full(const Mask& mask) {
  return mask.window_left < 0 && mask.window_right < 0;
}

constexpr bool is_causal(const Mask& mask) {
  return mask.window_left < 0 && mask.window_right == 0;
}

// Returns the subrange of `keys` that at least one of `queries` sees. It is contiguous, since each
// query sees the interval of the query before it, shifted by one. Empty without queries. Positions
// must not be negative.
constexpr Range keys_seen(const Mask& mask, Range queries, Range keys) {
  if (queries.begin >= queries.end) return {queries.begin, queries.begin};
  Range seen = keys;
  if (mask.window_left >= 0) seen.begin = std::max(seen.begin, queries.begin - mask.window_left);
  if (mask.window_right >= 0 && mask.window_right < keys.end - queries.end) {
    seen.end = queries.end + mask.window_right;
  }
  seen.end = std::max(seen.begin, seen.end);
  return seen;
}

// Returns the keys that `queries` see in a document of `length` tokens.
constexpr Range keys_of(const Mask& mask, Range queries, int64_t length) {
  return keys_seen(mask, queries, {0, length});
}

// Returns the subrange of `queries` that see `key`.
constexpr Range queries_seeing(const Mask& mask, int64_t key, Range queries) {
  return keys_seen({mask.window_right, mask.window_left}, {key, key + 1}, queries);
}

// How much of a tile of scores is visible: none of it, some, or all.
enum class Sight { kNone, kSome, kAll };

// Neither range may be empty.
constexpr Sight sight_of(const Mask& mask, Range queries, Range keys) {
  const Range seen = keys_seen(mask, queries, keys);
  if (seen.begin == seen.end) return Sight::kNone;
  const bool first_sees_last =
      mask.window_right < 0 || keys.end - 1 - queries.begin <= mask.window_right;
  const bool last_sees_first =
      mask.window_left < 0 || queries.end - 1 - keys.begin <= mask.window_left;
  return first_sees_last && last_sees_first ? Sight::kAll : Sight::kSome;
}

// Returns the number of visible (query, key) pairs in a document of `length` tokens, in closed
// form.
int64_t num_pairs(const Mask& mask, Range queries, int64_t length);

struct TileSize {
  int64_t queries;
  int64_t keys;
};

// Returns the number of tiles with a visible pair, in closed form. Query tiles start at
// queries.begin, key tiles at the first visible key.
int64_t num_tiles(const Mask& mask, Range queries, int64_t length, const TileSize& tile);

}  // namespace distca
