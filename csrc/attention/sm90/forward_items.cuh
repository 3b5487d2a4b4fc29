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

// Blocks of keys that a tile sees: [first, last), in blocks from the tile's k_begin. Not empty: a
// tile that sees no key has one block, all of it hidden.
struct BlockRange {
  int32_t first;
  int32_t last;

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
    const bool is_inside = block >= blocks.first && block < blocks.last;
    return said >> 32 == group && is_inside ? block : blocks.last - 1;
  }
};

// A tile and head to compute; head is -1 after the last. A tile that is at most half full would
// leave warpgroups idle. If an even number of heads share keys, the job packs heads: it computes
// the tile for `head` and for the next head or the next three.
struct Job {
  QueryTile tile;
  int32_t head;
  bool packs_heads;
  Front front;
};

// The heads of a job that packs heads, and the number of warpgroups that compute each of them.
struct Packing {
  int32_t num_heads;
  int32_t warpgroups;
};

template <int kWarpgroups>
__device__ __forceinline__ Packing packing_of(const QueryTile& tile,
                                              const ForwardArguments& arguments) {
  static_assert(kWarpgroups == 2 || kWarpgroups == 4);
  if (kWarpgroups == 2) return {2, 1};
  if (tile.num_rows > 64) return {2, 2};
  return {arguments.heads_per_key % 4 == 0 ? 4 : 2, 1};
}

// What one warpgroup computes of a job: up to 64 rows of a head, perhaps none.
struct JobPart {
  QueryTile tile;
  int32_t head;
};

template <int kWarpgroups>
__device__ __forceinline__ JobPart part_of(const Job& job, int32_t warpgroup,
                                           const ForwardArguments& arguments) {
  const Packing packing = packing_of<kWarpgroups>(job.tile, arguments);
  JobPart part{job.tile, job.packs_heads ? job.head + warpgroup / packing.warpgroups : job.head};
  const int32_t first_row = 64 * (job.packs_heads ? warpgroup % packing.warpgroups : warpgroup);
  part.tile.q_row += first_row;
  part.tile.position += first_row;
  part.tile.num_rows = min(64, job.tile.num_rows - first_row);
  if (job.packs_heads && warpgroup >= packing.num_heads * packing.warpgroups) {
    part.tile.num_rows = 0;
  }
  return part;
}

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

// Returns the job of an item. Items are ordered run by run, and in a run by groups of kv heads, so
// that the keys in use stay in cache. Within a group, tiles are ordered from the last position to
// the first, which is longest first, and query heads change fastest.
template <typename Shape>
__device__ __forceinline__ Job job_of(int32_t item, const ForwardArguments& arguments) {
  const QueryTile* any = arguments.tiles + item / arguments.heads_q;
  const int32_t first = any->first_of_run, count = any->num_of_run;
  const HeadGroup group = head_group(item - first * arguments.heads_q, count, arguments.heads_q,
                                     arguments.heads_per_key);
  const int32_t tile = first + count - 1 - group.in_group / group.num_heads;
  Job job{.tile = arguments.tiles[tile],
          .head = group.first_head + group.in_group % group.num_heads};
  job.packs_heads = job.tile.num_rows <= Shape::kRows / 2 && arguments.heads_per_key % 2 == 0;
  const BlockRange blocks = blocks_of<Shape::kKeyRows>(job.tile, arguments.window);
  if (arguments.fronts && blocks.count() >= Front::kMinKeys / Shape::kKeyRows) {
    const int32_t number = group.first_head / group.num_heads + job.tile.run;
    job.front = {arguments.fronts + number % kNumFronts,
                 static_cast<uint32_t>(item - group.in_group) + 1};
  }
  return job;
}

}  // namespace distca::attention::sm90
