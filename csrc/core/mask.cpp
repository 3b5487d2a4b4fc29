#include "mask.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "check.h"

namespace distca {
namespace {

// Like ceil_div, but fast if the divisor is a power of two, as tile sizes are.
int64_t num_tiles_up_to(int64_t position, int64_t tile) {
  const uint64_t side = static_cast<uint64_t>(tile);
  if ((side & (side - 1)) != 0) return ceil_div(position, tile);
  return (position + tile - 1) >> std::countr_zero(side);
}

// Sum of 0 + 1 + ... + (count - 1).
int64_t triangle(int64_t count) {
  return count * (count - 1) / 2;
}

// Sum over i in [0, count) of floor((first + i * step) / divisor); nothing is negative. The part
// below the divisor counts lattice points under a line, whose axes swap as in Euclid's algorithm.
int64_t floor_sum(int64_t count, int64_t first, int64_t step, int64_t divisor) {
  int64_t sum = 0;
  while (count > 0) {
    sum += triangle(count) * (step / divisor) + count * (first / divisor);
    step %= divisor;
    first %= divisor;
    const int64_t last = first + count * step;
    count = last / divisor;
    first = last % divisor;
    std::swap(step, divisor);
  }
  return sum;
}

// num_tiles for any mask. A function of its own keeps the causal case fast.
[[gnu::noinline]] int64_t num_masked_tiles(const Mask& mask, Range q, int64_t length,
                                           const TileSize& tile) {
  const int64_t num_q_tiles = num_tiles_up_to(q.end - q.begin, tile.queries);
  const Range keys = keys_of(mask, q, length);
  const int64_t widest = ceil_div(length - keys.begin, tile.keys);

  // Key tiles up to the last key of each query tile; the last query tile may be cut short.
  int64_t tiles = ceil_div(keys.end - keys.begin, tile.keys);
  int64_t num_rising = 0;
  if (mask.window_right >= 0) {
    const int64_t room = std::max<int64_t>(0, length - mask.window_right - q.begin);
    num_rising = std::min(num_q_tiles - 1, room / tile.queries);
  }
  if (num_rising > 0) {
    const int64_t first_end = q.begin + tile.queries + mask.window_right;
    const int64_t first = first_end - keys.begin + tile.keys - 1;
    tiles += floor_sum(num_rising, first, tile.queries, tile.keys);
  }
  tiles += (num_q_tiles - 1 - num_rising) * widest;

  // Key tiles wholly before the first key of each query tile.
  if (mask.window_left >= 0) {
    const int64_t hidden = std::max<int64_t>(0, mask.window_left - q.begin);
    const int64_t skipped =
        hidden / tile.queries + (hidden % tile.queries != 0);  // query tiles that see key 0
    if (skipped < num_q_tiles) {
      const int64_t first = q.begin + skipped * tile.queries - mask.window_left - keys.begin;
      tiles -= floor_sum(num_q_tiles - skipped, first, tile.queries, tile.keys);
    }
  }
  return tiles;
}

}  // namespace

void validate(const Mask& mask) {
  const auto check = [](const char* field, int64_t width) {
    require(width >= -1, field, " is ", width,
            "; expected -1 (no limit) or the number of keys seen on that side");
  };
  check("mask.window_left", mask.window_left);
  check("mask.window_right", mask.window_right);
}

int64_t num_pairs(const Mask& mask, Range q, int64_t length) {
  if (q.begin >= q.end) return 0;
  int64_t pairs = (q.end - q.begin) * length;
  if (mask.window_right >= 0) {  // keys after p + window_right are hidden from query p
    const int64_t split = std::clamp(length - mask.window_right, q.begin, q.end);
    const int64_t shortest = length - mask.window_right - split;  // hidden from query split - 1
    pairs -= (split - q.begin) * shortest + triangle(split - q.begin);
  }
  if (mask.window_left >= 0) {  // and so are keys before p - window_left
    const int64_t split = std::clamp(mask.window_left, q.begin, q.end);
    pairs -= (q.end - split) * (split - mask.window_left) + triangle(q.end - split);
  }
  return pairs;
}

int64_t num_tiles(const Mask& mask, Range q, int64_t length, const TileSize& tile) {
  if (!is_causal(mask) || tile.queries != tile.keys) return num_masked_tiles(mask, q, length, tile);
  // Each query tile sees one more key tile than the one before it; the last may be cut short.
  const int64_t num_q_tiles = num_tiles_up_to(q.end - q.begin, tile.queries);
  return (num_q_tiles - 1) * num_tiles_up_to(q.begin, tile.keys) + triangle(num_q_tiles) +
         num_tiles_up_to(q.end, tile.keys);
}

}  // namespace distca
