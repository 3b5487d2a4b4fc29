#pragma once

#include "forward_shape.cuh"
#include "turns.cuh"

// The warps of the forward kernel that compute nothing. One takes tickets, another brings queries,
// keys and values, and at 128 two more store results. One thread of each warp does the work.
namespace distca::attention::sm90 {

// Takes tickets, one job ahead of the threads that work on them.
template <typename Shape>
__device__ __forceinline__ void take_tickets(const ForwardArguments& arguments, uint32_t barriers) {
  using Barriers = ForwardBarriers<Shape>;
  const Turn turn(arguments.num_in_turn);
  for (uint32_t i = 0;; ++i) {
    ring_at(barriers, Barriers::kJobEmpty).wait_before(i);
    auto& job = in_block<Job<Shape::kWarpgroups>>(ForwardMemory<Shape>::kJobs)[Ring<2>::stage(i)];
    int32_t item;
    do {
      item = turn.is_over() ? arguments.num_items : atomicAdd(arguments.ticket, 1);
    } while (item < arguments.num_items && !write_job<Shape>(job, item, arguments));
    const bool is_over = item >= arguments.num_items;
    if (is_over) job.head = -1;
    ring_at(barriers, Barriers::kJobFull).arrive(i);
    if (is_over) return;
  }
}

// Stores the results of one warpgroup. Warp 2 serves the first warpgroup, and warp 3 the second.
// Results go where the warpgroup's queries of the next job were before it read them to registers.
template <typename Shape>
__device__ __forceinline__ void store_results(const ForwardArguments& arguments, uint32_t shared,
                                              uint32_t barriers) {
  using Barriers = ForwardBarriers<Shape>;
  using Queries = typename Shape::Queries;
  using Job = sm90::Job<Shape::kWarpgroups>;
  const uint32_t warpgroup = threadIdx.x / 32 - 2;
  const Job* jobs = in_block<Job>(ForwardMemory<Shape>::kJobs);
  const uint32_t place = shared + ForwardMemory<Shape>::kQuery + 64 * 128 * warpgroup;
  for (uint32_t n = 0;; ++n) {
    ring_at(barriers, Barriers::kJobFull).wait(n);
    const bool is_over = jobs[Ring<2>::stage(n)].head < 0;
    // Waits until the warpgroup holds the queries of job n and has staged the results of job n - 1.
    if (n > 0 || !is_over) named_sync(kStoreBarrier + warpgroup, kStoreThreads);
    if (threadIdx.x % 32 == 0) {
      if (n > 0) {
        const JobPart& part = jobs[Ring<2>::stage(n - 1)].parts[warpgroup];
        if (part.num_rows > 0) {
          store_tile<Queries>(&arguments.staged_out, {part.head, part.q_row, part.num_rows}, place);
          copies_commit();
        }
        ring_at(barriers, Barriers::kJobEmpty).arrive(n - 1);
        copies_wait_read();
      }
      if (!is_over) ring_at<Shape::kQueryStages>(barriers, Barriers::kQueryEmpty).arrive(n);
    }
    __syncwarp();
    if (is_over) return;
  }
}

// The thread that brings queries, keys and values.
template <typename Shape>
struct ForwardProducer {
  using Memory = ForwardMemory<Shape>;
  using Barriers = ForwardBarriers<Shape>;
  using Keys = typename Shape::Keys;
  using Values = typename Shape::Values;
  using Queries = typename Shape::Queries;
  using QueryRing = Ring<Shape::kQueryStages>;
  using BlockRing = Ring<Shape::kStages>;
  using BlockUse = StageUse<Shape::kStages>;
  using Job = sm90::Job<Shape::kWarpgroups>;

  const ForwardArguments& arguments;
  uint32_t shared;
  uint32_t barriers;
  uint32_t num_blocks = 0, num_queries = 0;
  BlockUse next_block;

  __device__ __forceinline__ void bring(const Job& job) {
    const BlockRange blocks = blocks_of<Shape::kKeyRows>(job.tile, arguments.window);
    const uint32_t stage = QueryRing::stage(num_queries);
    const QueryRing empty = ring_at<Shape::kQueryStages>(barriers, Barriers::kQueryEmpty);
    const uint32_t query_full =
        ring_at<Shape::kQueryStages>(barriers, Barriers::kQueryFull).barrier(num_queries);
    if constexpr (Shape::kQueryStages > 1) empty.wait_before(num_queries++);
    const int32_t start = job.front.start<Shape::kKeyRows>(job.tile, blocks);
    if constexpr (Shape::kQueryStages == 1) {
      bring_keys(keys_of(job), row_of(job, start), next_block);
      empty.wait_before(num_queries++);
    }
    in_block<int32_t>(Memory::kStarts)[stage] = start;
    constexpr uint32_t kPartBytes = Queries::kBytes / Shape::kWarpgroups;
    uint32_t num_parts = 0;
    for (const JobPart& part : job.parts) num_parts += part.num_rows > 0;
    barrier_arrive_expecting(query_full, num_parts * kPartBytes);
    uint32_t to = shared + Memory::kQuery + stage * Queries::kBytes;
    for (const JobPart& part : job.parts) {
      if (part.num_rows > 0) {
        load_tile<Queries>(to, &arguments.q, {part.head, part.q_row, part.num_rows}, query_full);
      }
      to += 64 * 128;
    }
    if constexpr (Shape::kQueryStages == 1) {
      bring_rest(job, blocks, start);
    } else {
      bring_blocks(job, start, blocks.first);
      if (start + 1 < blocks.last) bring_blocks(job, blocks.last - 1, start + 1);
    }
  }

  // Keys of a job: those of a head, up to row `end`.
  struct JobKeys {
    int32_t head;
    int32_t end;
  };
  __device__ __forceinline__ JobKeys keys_of(const Job& job) const {
    return {job.head / arguments.heads_per_key, job.tile.k_end};
  }
  // Returns the first row of a block of keys.
  static __device__ __forceinline__ int32_t row_of(const Job& job, int32_t block) {
    return job.tile.k_begin + block * Shape::kKeyRows;
  }

  // Where a block of keys or values goes.
  struct Place {
    uint32_t at;
    uint32_t full;  // the barrier of the place, which expects the block
  };
  // Returns the place of a block once it is empty.
  template <typename Tile>
  __device__ __forceinline__ Place place_of(uint32_t full, uint32_t empty, uint32_t first,
                                            BlockUse use) {
    BlockRing{barriers, empty}.wait_before(use);
    const uint32_t is_full = BlockRing{barriers, full}.barrier(use);
    barrier_arrive_expecting(is_full, Tile::kBytes);
    return {shared + first + use.stage() * Tile::kBytes, is_full};
  }
  __device__ __forceinline__ Place key_place(BlockUse use) {
    return place_of<Keys>(Barriers::kKeyFull, Barriers::kKeyEmpty, Memory::kKey, use);
  }
  __device__ __forceinline__ Place value_place(BlockUse use) {
    return place_of<Values>(Barriers::kValueFull, Barriers::kValueEmpty, Memory::kValue, use);
  }

  // Copies of whole blocks need fewer coordinates, which shortens an iteration: with two stages,
  // its time is not hidden.
  template <typename Tile>
  static __device__ __forceinline__ void load_block(const Place& place, const CUtensorMap* map,
                                                    const CUtensorMap* whole_map,
                                                    const JobKeys& keys, int32_t row) {
    if (row + Shape::kKeyRows <= keys.end) {
      load_whole_tile<Tile>(place.at, whole_map, keys.head, row, place.full);
    } else {
      load_tile<Tile>(place.at, map, {keys.head, row, max(0, keys.end - row)}, place.full);
    }
  }
  __device__ __forceinline__ void bring_keys(const JobKeys& keys, int32_t row, BlockUse use) {
    load_block<Keys>(key_place(use), &arguments.k, &arguments.whole_k, keys, row);
  }
  __device__ __forceinline__ void bring_values(const JobKeys& keys, int32_t row, BlockUse use) {
    load_block<Values>(value_place(use), &arguments.v, &arguments.whole_v, keys, row);
  }
  // Brings kKeyRows rows of keys and values.
  __device__ __forceinline__ void bring_whole_block(int32_t head, int32_t row, BlockUse use) {
    const Place keys = key_place(use);
    load_whole_tile<Keys>(keys.at, &arguments.whole_k, head, row, keys.full);
    const Place values = value_place(use);
    load_whole_tile<Values>(values.at, &arguments.whole_v, head, row, values.full);
  }

  // Brings keys and values from block `from` down to block `to`. Only block `from` may have fewer
  // than kKeyRows rows.
  __device__ __forceinline__ void bring_blocks(const Job& job, int32_t from, int32_t to) {
    const JobKeys keys = keys_of(job);
    const int32_t last_row = row_of(job, to);
    int32_t row = row_of(job, from);
    bring_keys(keys, row, next_block);
    bring_values(keys, row, next_block);
#pragma unroll 1
    while (true) {
      if (num_blocks++ % Front::kBlocksBetween == 0) job.front.say(row);
      next_block = next_block.next();
      row -= Shape::kKeyRows;
      if (row < last_row) break;
      bring_whole_block(keys.head, row, next_block);
    }
  }

  // Brings all but the first keys, which come before the queries. The keys of a block come before
  // the values of the previous block, in the order of use.
  __device__ __forceinline__ void bring_rest(const Job& job, const BlockRange& blocks,
                                             int32_t start) {
    const JobKeys keys = keys_of(job);
    const int32_t first_row = row_of(job, blocks.first), end_row = row_of(job, blocks.last);
    int32_t row = row_of(job, start);
#pragma unroll 1
    for (int32_t left = blocks.count(); left > 0; --left) {
      const int32_t next_row = (row == first_row ? end_row : row) - Shape::kKeyRows;
      const BlockUse following = next_block.next();
      if (left > 1) bring_keys(keys, next_row, following);
      bring_values(keys, row, next_block);
      if (num_blocks++ % Front::kBlocksBetween == 0) job.front.say(row);
      row = next_row;
      next_block = following;
    }
  }

  __device__ __forceinline__ void run() {
    for (uint32_t i = 0;; ++i) {
      ring_at(barriers, Barriers::kJobFull).wait(i);
      const Job& job = in_block<Job>(Memory::kJobs)[Ring<2>::stage(i)];
      const bool is_over = job.head < 0;
      if (!is_over) bring(job);
      ring_at(barriers, Barriers::kJobEmpty).arrive(i);
      if (is_over) return;
    }
  }
};

}  // namespace distca::attention::sm90
