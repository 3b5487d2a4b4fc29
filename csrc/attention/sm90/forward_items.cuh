#pragma once

#include "kernels.h"
#include "order.cuh"
#include "ptx.cuh"
#include "softcap.cuh"

// The items of a forward launch, a (tile, head) each: in which order they come, and where in its
// keys each begins.
//
// An item may begin at any block of its keys and wrap around. One with many keys begins where
// others of its heads are, so that all read the same keys at the same time. Otherwise
// multiprocessors, some of which are faster, drift apart by more keys than L2 holds. The additional
// traffic costs no cycles, but it costs power and thereby clock: see docs/hopper-kernels.md.
namespace distca::attention::sm90 {

struct ForwardArguments {
  CUtensorMap q, k, v, staged_out;  // ragged
  CUtensorMap whole_k, whole_v;
  RowTensor out;
  const QueryTile* tiles;
  int32_t* ticket;
  uint64_t* fronts;
  float* lse;
  int32_t num_items;
  int32_t num_in_turn;  // see Blocks
  int32_t heads_q;
  int32_t heads_per_key;
  Window window;
  float softmax_scale;
  Softcap cap;
};

// Blocks of keys [first, last), counted from a tile's k_begin.
struct alignas(8) BlockRange {
  int32_t first;
  int32_t last;

  __device__ __forceinline__ bool has(int32_t block) const {
    return (block >= first) & (block < last);
  }
  __device__ __forceinline__ int32_t count() const { return last - first; }
};

// The key row at which items of a group of heads are, as one of them stored it last.
struct Front {
  static constexpr int32_t kMinKeys = 1 << 16;  // of items that follow; L2 holds so many of a head
  static constexpr uint32_t kBlocksBetween = 16;

  uint64_t* word;  // the group, and a key row; null for an item that does not follow
  uint32_t group;  // above 0

  __device__ __forceinline__ void say(int32_t k_row) const {
    if (word) store_relaxed(word, uint64_t{group} << 32 | static_cast<uint32_t>(k_row));
  }
  // The block of keys that comes first, before those below it and then the rest from the last on.
  template <int kKeyRows>
  __device__ __forceinline__ int32_t start(const QueryTile& tile, const BlockRange& blocks) const {
    if (!word) return blocks.last - 1;
    const uint64_t said = load_relaxed(word);
    const int32_t block = (static_cast<int32_t>(said) - tile.k_begin) / kKeyRows;
    return said >> 32 == group && blocks.has(block) ? block : blocks.last - 1;
  }
};

// What one warpgroup computes of a job: up to 64 rows of a tile for one head. Keys, positions and
// blocks are counted from the first key of the job's tile.
struct JobPart {
  int32_t head;
  int32_t q_row;
  int32_t num_rows;  // 0 or less: none
  int32_t position;
  int32_t num_keys;
  BlockRange blocks;
  BlockRange clear_blocks;  // that every row sees in full
};

// What a thread block computes at a time: a tile for one or more heads, or several tiles with the
// same first key.
template <int kWarpgroups>
struct Job {
  QueryTile tile;  // spans the positions and keys of all parts; has no q_row and no run
  int32_t head;    // of the first part; -1 after the last job
  Front front;
  JobPart parts[kWarpgroups];
};

// What a job computes: tiles from `first_tile` on for one head, or one tile for heads from `head`
// on. Each tile and head has `warpgroups` warpgroups.
struct Packing {
  int32_t first_tile;
  int32_t num_tiles;
  int32_t head;
  int32_t num_heads;
  int32_t warpgroups;
};

// Returns the blocks that a tile sees. Not empty: if it sees no key, it has one block, all hidden.
template <int kKeyRows>
__device__ __forceinline__ BlockRange blocks_of(const QueryTile& tile, const Window& window) {
  const int32_t first_position = tile.position - tile.k_begin;
  const int32_t last_position = first_position + tile.num_rows - 1;
  int32_t end = tile.k_end - tile.k_begin;
  if (window.right >= 0) end = min(end, last_position + window.right + 1);
  const int32_t begin = window.left >= 0 ? max(0, first_position - window.left) : 0;
  if (end <= begin) return {0, 1};
  return {begin / kKeyRows, (end + kKeyRows - 1) / kKeyRows};
}

// Returns what the job of an item (a tile and a head) computes. Its num_heads is 0 if the job of
// another item computes the item. A tile that is at most half full would leave warpgroups idle. If
// an even number of heads share keys, the job computes such a tile for two or four heads. Otherwise
// it computes a group of adjacent tiles of the run with the same first key: up to four of at most
// 64 rows, or else two of at most 128. Groups are counted from the run's first tile. The job of the
// last tile computes the group, because its item comes first. Shapes whose warpgroups do not skip
// blocks do not group tiles: a tile's bits would depend on its neighbours, which differ from launch
// to launch.
template <typename Shape>
__device__ __forceinline__ Packing packing_of(int32_t tile, int32_t head,
                                              const ForwardArguments& arguments) {
  constexpr int32_t kWarpgroups = Shape::kWarpgroups;
  static_assert(kWarpgroups == 2 || kWarpgroups == 4);
  const QueryTile* tiles = arguments.tiles;
  const QueryTile& own = tiles[tile];
  const Packing alone{tile, 1, head, 1, kWarpgroups};
  if (own.num_rows > 32 * kWarpgroups) return alone;
  if (arguments.heads_per_key % 2 == 0) {
    const bool fill_one = kWarpgroups == 2 || own.num_rows <= 64;
    const bool are_four = kWarpgroups == 4 && fill_one && arguments.heads_per_key % 4 == 0;
    const int32_t num_heads = are_four ? 4 : 2;
    return {tile, 1, head, head % num_heads == 0 ? num_heads : 0, fill_one ? 1 : 2};
  }
  if constexpr (Shape::kSkipsBlocks) {
#pragma unroll 1
    for (int32_t warpgroups = 1; warpgroups < kWarpgroups; warpgroups *= 2) {
      const int32_t most = kWarpgroups / warpgroups;
      const int32_t first = tile - ((tile - own.first_of_run) & (most - 1));
      const int32_t end = min(first + most, own.first_of_run + own.num_of_run);
      bool fit = true;
#pragma unroll 1
      for (int32_t i = first; i < end; ++i) {
        fit &= tiles[i].num_rows <= 64 * warpgroups && tiles[i].k_begin == own.k_begin;
      }
      if (fit) return {first, end - first, head, tile + 1 == end ? 1 : 0, warpgroups};
    }
  }
  return alone;
}

// Returns the blocks that 64 rows from `position` on all see in full. May be empty.
template <int kKeyRows>
__device__ __forceinline__ BlockRange clear_blocks_of(int32_t position, int32_t num_keys,
                                                      const Window& window) {
  const int32_t end = window.right >= 0 ? min(num_keys, position + window.right + 1) : num_keys;
  const int32_t begin = window.left >= 0 ? max(0, position + 63 - window.left) : 0;
  return {(begin + kKeyRows - 1) / kKeyRows, max(0, end) / kKeyRows};
}

// Writes the parts, the tile and the head of a job to shared memory.
template <typename Shape>
__device__ __forceinline__ void write_parts(Job<Shape::kWarpgroups>& job, const Packing& packing,
                                            const ForwardArguments& arguments) {
  const QueryTile& first = arguments.tiles[packing.first_tile];
  int32_t end = 0, k_end = 0, unit = 0, first_row = 0;
#pragma unroll 1
  for (JobPart& part : job.parts) {
    const bool is_used = unit < packing.num_tiles * packing.num_heads;
    QueryTile tile = arguments.tiles[packing.first_tile + min(unit, packing.num_tiles - 1)];
    end = max(end, tile.position + tile.num_rows);
    k_end = max(k_end, tile.k_end);
    tile.num_rows = is_used ? min(64, tile.num_rows - first_row) : 0;
    tile.position += first_row;
    part.head = packing.head + (packing.num_heads > 1 ? unit : 0);
    part.q_row = tile.q_row + first_row;
    part.num_rows = tile.num_rows;
    part.position = tile.position - tile.k_begin;
    part.num_keys = tile.k_end - tile.k_begin;
    part.blocks = blocks_of<Shape::kKeyRows>(tile, arguments.window);
    part.clear_blocks =
        clear_blocks_of<Shape::kKeyRows>(part.position, part.num_keys, arguments.window);
    first_row += 64;
    if (first_row == 64 * packing.warpgroups) {
      ++unit;
      first_row = 0;
    }
  }
  job.tile = {.num_rows = end - first.position,
              .position = first.position,
              .k_begin = first.k_begin,
              .k_end = k_end};
  job.head = packing.head;
}

// Writes the job of an item. Returns false, and writes nothing, if another item's job computes the
// item.
//
// Items are ordered run by run, and in a run by groups of kv heads, so that the keys in use stay in
// cache. Within a group, tiles are ordered from the last position to the first, which is longest
// first, and query heads change fastest.
template <typename Shape>
__device__ __forceinline__ bool write_job(Job<Shape::kWarpgroups>& job, int32_t item,
                                          const ForwardArguments& arguments) {
  const QueryTile* any = arguments.tiles + item / arguments.heads_q;
  const int32_t first = any->first_of_run, count = any->num_of_run;
  const HeadGroup group = head_group(item - first * arguments.heads_q, count, arguments.heads_q,
                                     arguments.heads_per_key);
  const Packing packing =
      packing_of<Shape>(first + count - 1 - group.in_group / group.num_heads,
                        group.first_head + group.in_group % group.num_heads, arguments);
  if (packing.num_heads == 0) return false;
  const int32_t number = group.first_head / group.num_heads + any->run;
  job.front = {arguments.fronts + number % kNumFronts,
               static_cast<uint32_t>(item - group.in_group) + 1};
  write_parts<Shape>(job, packing, arguments);
  const BlockRange blocks = blocks_of<Shape::kKeyRows>(job.tile, arguments.window);
  const bool follows = arguments.fronts && blocks.count() >= Front::kMinKeys / Shape::kKeyRows;
  if (!follows) job.front.word = nullptr;
  return true;
}

}  // namespace distca::attention::sm90
