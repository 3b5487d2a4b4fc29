#pragma once

#include <algorithm>

#include "columns.cuh"
#include "forward_items.cuh"
#include "kernels.h"
#include "launch.cuh"
#include "ring.cuh"
#include "softcap.cuh"
#include "softmax.cuh"
#include "tile_io.cuh"
#include "turns.cuh"

// Persistent blocks take tickets, a (tile, head) each, longest first. One thread turns tickets into
// jobs, and another copies queries, keys and values to shared memory. Warpgroups of 64 query rows
// each compute softmax(Q K^T) V, one block of keys after another. The softmax of a block of keys
// overlaps the product of the block before it. Warpgroups take turns, so it also overlaps another's
// products. The first scores of a job are computed while the previous job's results are written.
namespace distca::attention::sm90 {

template <typename T, int kHeadDim_, int kValueDim_, int kKeyRows_, int kWarpgroups_,
          int kRegisters_, int kProducerRegisters_, bool kHasPolynomials_>
struct ForwardShape {
  using Element = T;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kValueDim = kValueDim_;
  static constexpr int kKeyRows = kKeyRows_;
  static constexpr int kWarpgroups = kWarpgroups_;
  static constexpr int kRegisters = kRegisters_;
  static constexpr int kProducerRegisters = kProducerRegisters_;
  static constexpr bool kHasPolynomials = kHasPolynomials_;
  static constexpr bool kIsCapped = false;
  static constexpr int kRows = 64 * kWarpgroups;
  static constexpr int kThreads = 128 * (kWarpgroups + 1);
  // Wide heads leave room for one tile of queries. Results take its place.
  static constexpr int kQueryStages = kHeadDim <= 128 ? 2 : 1;
  // In tiles with more rows than a block has keys, most causal tiles have blocks that only some
  // warpgroups see. In others such blocks are rare, and the code to skip them costs 3 %.
  static constexpr bool kSkipsBlocks = kRows > kKeyBlockRows;
  using Queries = SharedTile<kRows, kHeadDim>;
  using Results = SharedTile<kRows, kValueDim>;
  using Keys = SharedTile<kKeyRows, kHeadDim>;
  using Values = SharedTile<kKeyRows, kValueDim>;
};

enum Barrier : uint32_t {
  kQueryFull,
  kQueryEmpty = kQueryFull + 2,
  kKeyFull = kQueryEmpty + 2,
  kKeyEmpty = kKeyFull + 2,
  kValueFull = kKeyEmpty + 2,
  kValueEmpty = kValueFull + 2,
  kJobFull = kValueEmpty + 2,
  kJobEmpty = kJobFull + 2,
  kNumBarriers = kJobEmpty + 2
};

// Offsets in shared memory: two stages of keys, values and jobs.
template <typename Shape>
struct ForwardMemory {
  static constexpr bool kOutIsQuery = Shape::kQueryStages == 1;
  static constexpr uint32_t kQuery = 0;
  static constexpr uint32_t kQueryEnd = kQuery + Shape::kQueryStages * Shape::Queries::kBytes;
  static constexpr uint32_t kOut = kOutIsQuery ? kQuery : kQueryEnd;
  static constexpr uint32_t kKey = kOutIsQuery ? kQueryEnd : kOut + Shape::Results::kBytes;
  static constexpr uint32_t kValue = kKey + 2 * Shape::Keys::kBytes;
  static constexpr uint32_t kJobs = kValue + 2 * Shape::Values::kBytes;
  static constexpr uint32_t kStarts = kJobs + 2 * sizeof(Job);
  static constexpr uint32_t kBarriers = kStarts + 2 * sizeof(int32_t);
  static constexpr uint32_t kBytes = kBarriers + kBarrierBytes * kNumBarriers;
  static_assert(!kOutIsQuery || Shape::Results::kBytes <= Shape::Queries::kBytes);
  static_assert(kJobs % alignof(Job) == 0 && kBarriers % kBarrierBytes == 0);
  static_assert(kBytes <= kMaxSharedBytes);
};

// Takes tickets, one job ahead of the threads that work on them.
template <typename Shape>
__device__ __forceinline__ void take_tickets(const ForwardArguments& arguments, uint32_t barriers) {
  const Turn turn(arguments.num_in_turn);
  for (uint32_t i = 0;; ++i) {
    ring_at(barriers, kJobEmpty).wait_before(i);
    Job job;
    do {
      const int32_t item = turn.is_over() ? arguments.num_items : atomicAdd(arguments.ticket, 1);
      job = item < arguments.num_items ? job_of<Shape::kKeyRows>(item, arguments) : Job{.head = -1};
    } while (job.pairs_heads && job.head % 2 != 0);
    in_block<Job>(ForwardMemory<Shape>::kJobs)[Ring<2>::stage(i)] = job;
    ring_at(barriers, kJobFull).arrive(i);
    if (job.head < 0) return;
  }
}

// The part of the producer thread.
template <typename Shape>
struct ForwardProducer {
  using Memory = ForwardMemory<Shape>;
  using Keys = typename Shape::Keys;
  using Values = typename Shape::Values;
  using Queries = typename Shape::Queries;
  using QueryRing = Ring<Shape::kQueryStages>;

  const ForwardArguments& arguments;
  uint32_t shared;
  uint32_t barriers;
  uint32_t num_blocks = 0, num_queries = 0;

  __device__ __forceinline__ void bring(const Job& job) {
    const BlockRange blocks = blocks_of<Shape::kKeyRows>(job.tile, arguments.window);
    const uint32_t stage = QueryRing::stage(num_queries);
    const QueryRing empty = ring_at<Shape::kQueryStages>(barriers, kQueryEmpty);
    const uint32_t query_full =
        ring_at<Shape::kQueryStages>(barriers, kQueryFull).barrier(num_queries);
    if constexpr (!Memory::kOutIsQuery) empty.wait_before(num_queries++);
    const int32_t start = job.front.start<Shape::kKeyRows>(job.tile, blocks);
    if constexpr (Memory::kOutIsQuery) {
      bring_keys(rows_of(job, start), num_blocks);
      empty.wait_before(num_queries++);
    }
    in_block<int32_t>(Memory::kStarts)[stage] = start;
    constexpr uint32_t kPartBytes = Queries::kBytes / Shape::kWarpgroups;
    uint32_t num_parts = 0;
    for (int32_t i = 0; i < Shape::kWarpgroups; ++i) num_parts += part_of(job, i).tile.num_rows > 0;
    barrier_arrive_expecting(query_full, num_parts * kPartBytes);
    for (int32_t i = 0; i < static_cast<int32_t>(num_parts); ++i) {
      const JobPart part = part_of(job, i);
      load_tile<Queries>(shared + Memory::kQuery + stage * Queries::kBytes + i * 64 * 128,
                         &arguments.q, {part.head, part.tile.q_row, part.tile.num_rows},
                         query_full);
    }
    if constexpr (Memory::kOutIsQuery) {
      bring_rest(job, blocks, start);
    } else {
      bring_blocks(job, start, blocks.first);
      if (start + 1 < blocks.last) bring_blocks(job, blocks.last - 1, start + 1);
    }
  }

  // Rows of a block of keys.
  __device__ __forceinline__ RowRange rows_of(const Job& job, int32_t block) const {
    RowRange rows{job.head / arguments.heads_per_key, job.tile.k_begin + block * Shape::kKeyRows,
                  0};
    rows.num_rows = max(0, min(Shape::kKeyRows, job.tile.k_end - rows.row));
    return rows;
  }

  __device__ __forceinline__ void bring_keys(const RowRange& rows, uint32_t i) {
    bring_block<Keys>(&arguments.k, kKeyFull, kKeyEmpty, Memory::kKey, rows, i);
  }
  __device__ __forceinline__ void bring_values(const RowRange& rows, uint32_t i) {
    bring_block<Values>(&arguments.v, kValueFull, kValueEmpty, Memory::kValue, rows, i);
  }
  template <typename Tile>
  __device__ __forceinline__ void bring_block(const CUtensorMap* map, Barrier full, Barrier empty,
                                              uint32_t at, const RowRange& rows, uint32_t i) {
    ring_at(barriers, empty).wait_before(i);
    const uint32_t is_full = ring_at(barriers, full).barrier(i);
    barrier_arrive_expecting(is_full, Tile::kBytes);
    load_tile<Tile>(shared + at + Ring<2>::stage(i) * Tile::kBytes, map, rows, is_full);
  }

  // From block `from` down to block `to`. What this loop takes per block is not hidden: two stages
  // are few.
  __device__ __forceinline__ void bring_blocks(const Job& job, int32_t from, int32_t to) {
    RowRange rows = rows_of(job, from);
    const int32_t first_row = job.tile.k_begin + to * Shape::kKeyRows;
#pragma unroll 1
    for (; rows.row >= first_row; ++num_blocks) {
      bring_keys(rows, num_blocks);
      bring_values(rows, num_blocks);
      if (num_blocks % Front::kBlocksBetween == 0) job.front.say(rows.row);
      rows.row -= Shape::kKeyRows;
      rows.num_rows = Shape::kKeyRows;
    }
  }

  // All but the first keys, which came before the queries. Keys come before the values of the block
  // before, in the order of use.
  __device__ __forceinline__ void bring_rest(const Job& job, const BlockRange& blocks,
                                             int32_t block) {
#pragma unroll 1
    for (int32_t left = blocks.count(); left > 0; --left, ++num_blocks) {
      const int32_t next = (block == blocks.first ? blocks.last : block) - 1;
      if (left > 1) bring_keys(rows_of(job, next), num_blocks + 1);
      bring_values(rows_of(job, block), num_blocks);
      if (num_blocks % Front::kBlocksBetween == 0) {
        job.front.say(job.tile.k_begin + block * Shape::kKeyRows);
      }
      block = next;
    }
  }

  __device__ __forceinline__ void run() {
    for (uint32_t i = 0;; ++i) {
      ring_at(barriers, kJobFull).wait(i);
      const Job job = in_block<Job>(Memory::kJobs)[Ring<2>::stage(i)];
      ring_at(barriers, kJobEmpty).arrive(i);
      if (job.head < 0) return;
      bring(job);
    }
  }
};

// The part of a consumer warpgroup.
template <typename Shape>
struct ForwardConsumer {
  using T = typename Shape::Element;
  using Memory = ForwardMemory<Shape>;
  using Keys = typename Shape::Keys;
  using Values = typename Shape::Values;
  using Queries = typename Shape::Queries;
  using Results = typename Shape::Results;
  using QueryRing = Ring<Shape::kQueryStages>;

  const ForwardArguments& arguments;
  uint32_t shared;
  uint32_t barriers;
  int warpgroup, warp, lane;
  float scale_log2;
  uint32_t num_keys_seen = 0, num_values_seen = 0, num_queries = 0, num_jobs = 0;

  float out[Shape::kValueDim / 2];
  float scores[Shape::kKeyRows / 2];
  uint32_t probabilities[Shape::kKeyRows / 4];
  RowSoftmax<Shape::kKeyRows, Shape::kHasPolynomials> softmax;

  // scores = Q K^T of the next block of keys; asynchronous.
  __device__ __forceinline__ void begin_scores() {
    const Operand query =
        operand_at(shared + Memory::kQuery + QueryRing::stage(num_queries) * Queries::kBytes +
                       warpgroup * 64 * 128,
                   0);
    const Operand key =
        operand_at(shared + Memory::kKey + Ring<2>::stage(num_keys_seen) * Keys::kBytes, 0);
    pin(scores);
    products_begin();
#pragma unroll
    for (int k = 0; k < Shape::kHeadDim / 16; ++k) {
      const uint32_t inside = (k % 4) * 32;
      product<T, false, false>(scores, descriptor(query, (k / 4) * Queries::kPanelBytes + inside),
                               descriptor(key, (k / 4) * Keys::kPanelBytes + inside), k > 0);
    }
    products_commit();
  }
  // Gives the keys back, but only once probabilities exist: `known` is 0, which ptxas cannot know.
  // It moves a wait for products up to the preceding access to shared memory, but the softmax
  // should run before that wait, so that it overlaps the product with values.
  __device__ __forceinline__ void end_scores() {
    const uint32_t zero = static_cast<uint32_t>(arguments.num_items) >> 31;
    const uint32_t known =
        (__float_as_uint(softmax.sum[0]) | __float_as_uint(softmax.sum[1])) & zero;
    arrive_as_warp(ring_at(barriers, kKeyEmpty).barrier(num_keys_seen) + known);
    ++num_keys_seen;
  }

  // out = P V of the next block of values, added to `out` if `accumulate`; asynchronous.
  __device__ __forceinline__ void begin_out(bool accumulate) {
    ring_at(barriers, kValueFull).wait(num_values_seen);
    const Operand value =
        operand_at(shared + Memory::kValue + Ring<2>::stage(num_values_seen) * Values::kBytes,
                   Values::kPanelBytes);
    pin(out);
    pin(probabilities);
    products_begin();
#pragma unroll
    for (int k = 0; k < Shape::kKeyRows / 16; ++k) {
      product<T, true>(out, probabilities + 4 * k, descriptor(value, k * 16 * 128),
                       k > 0 || accumulate);
    }
    products_commit();
  }
  __device__ __forceinline__ void give_values_back() {
    ring_at(barriers, kValueEmpty).arrive_as_warp(num_values_seen);
    ++num_values_seen;
  }

  __device__ __forceinline__ void give_queries_back() {
    ring_at<Shape::kQueryStages>(barriers, kQueryEmpty).arrive_as_warp(num_queries++);
  }
  // Waits for the queries of a job. Returns its first block of keys.
  __device__ __forceinline__ int32_t await_queries() const {
    ring_at<Shape::kQueryStages>(barriers, kQueryFull).wait(num_queries);
    return in_block<int32_t>(Memory::kStarts)[QueryRing::stage(num_queries)];
  }

  // Hides keys that the thread's rows may not see.
  __device__ __forceinline__ void mask(const QueryTile& tile, int32_t block) {
    const auto& [left, right] = arguments.window;
    const int32_t first_row = tile.position - tile.k_begin;
    const int32_t num_keys = tile.k_end - tile.k_begin;
    const int32_t first_key = block * Shape::kKeyRows;
    const int32_t end = right >= 0 ? min(num_keys, first_row + right + 1) : num_keys;
    const bool hides_left = left >= 0 && first_key < first_row + 63 - left;
    if (first_key + Shape::kKeyRows <= end && !hides_left) return;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int32_t row = first_row + 16 * warp + lane / 4 + 8 * r;
      const int32_t column = first_key + 2 * (lane % 4);
      const int32_t row_end = right >= 0 ? min(num_keys, row + right + 1) : num_keys;
      const int32_t row_begin = left >= 0 ? row - left : 0;
      hide(scores, r,
           columns_below<Shape::kKeyRows>(row_end - column) &
               ~columns_below<Shape::kKeyRows>(row_begin - column));
    }
  }

  __device__ __forceinline__ void pack_probabilities() {
#pragma unroll
    for (int i = 0; i < Shape::kKeyRows / 4; ++i) {
      probabilities[i] = pack<T>(scores[2 * i], scores[2 * i + 1]);
    }
  }

  __device__ __forceinline__ void rescale_out() {
#pragma unroll
    for (int i = 0; i < Shape::kValueDim / 2; ++i) out[i] *= softmax.correction[(i >> 1) & 1];
  }

  // Frees the slot of the previous job, so that a block holds at most one ticket that other blocks
  // could work on.
  __device__ __forceinline__ Job next_job() {
    ring_at(barriers, kJobFull).wait(num_jobs);
    if (num_jobs > 0) ring_at(barriers, kJobEmpty).arrive_as_warp(num_jobs - 1);
    return in_block<Job>(Memory::kJobs)[Ring<2>::stage(num_jobs++)];
  }

  // Warpgroups take turns to issue products, so that one's softmax overlaps another's products.
  // Otherwise all of them may run their softmax at the same time.
  __device__ __forceinline__ void await_turn() {
    named_sync(1 + warpgroup, 256);
  }
  __device__ __forceinline__ void end_turn() {
    named_arrive(1 + (warpgroup + 1) % Shape::kWarpgroups, 256);
  }

  // Gives a block of keys and values back unused. All warpgroups take equally many turns in a job.
  __device__ __forceinline__ void skip_block() {
    await_turn();
    end_turn();
    ring_at(barriers, kKeyFull).wait(num_keys_seen);
    ring_at(barriers, kKeyEmpty).arrive_as_warp(num_keys_seen++);
    ring_at(barriers, kValueFull).wait(num_values_seen);
    ring_at(barriers, kValueEmpty).arrive_as_warp(num_values_seen++);
  }

  // Returns how many blocks come before the first that the rows of `part` see. At least one block
  // is left, even without rows.
  __device__ __forceinline__ int32_t num_skipped(const JobPart& part, const BlockRange& blocks,
                                                 int32_t start) const {
    if (part.tile.num_rows <= 0) return blocks.count() - 1;
    return max(0, start - max(blocks_of<Shape::kKeyRows>(part.tile, arguments.window).last - 1,
                              blocks.first));
  }

  // From the first scores, which are under way already, to the last product, which comes after.
  __device__ __forceinline__ void attend(const QueryTile& tile, const BlockRange& blocks,
                                         int32_t block, int32_t count) {
    products_wait<0>();
    pin(scores);
    if constexpr (Shape::kIsCapped) cap_scores(scores, arguments.cap);
    mask(tile, block);
    softmax.start(scores, scale_log2);
    end_scores();
    pack_probabilities();
    for (int32_t i = 1; i < count; ++i) {
      block = (block == blocks.first ? blocks.last : block) - 1;
      ring_at(barriers, kKeyFull).wait(num_keys_seen);
      await_turn();
      begin_scores();
      begin_out(i > 1);
      end_turn();
      products_wait<1>();
      pin(scores);
      if constexpr (Shape::kIsCapped) cap_scores(scores, arguments.cap);
      mask(tile, block);
      const bool moves = softmax.step(scores, scale_log2);
      end_scores();
      products_wait<0>();
      pin(out);
      give_values_back();
      if (moves) rescale_out();
      pack_probabilities();
    }
    if constexpr (!Memory::kOutIsQuery) give_queries_back();
    begin_out(count > 1);
  }

  __device__ __forceinline__ void write(const JobPart& part) {
    const auto& [tile, head] = part;
    float inverse[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float sum = softmax.sum[r];
      sum += __shfl_xor_sync(0xffffffffu, sum, 1);
      sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      inverse[r] = sum == 0.f ? 0.f : 1.f / sum;
      const int32_t row = 16 * warp + lane / 4 + 8 * r;
      if (lane % 4 == 0 && row < tile.num_rows) {
        const float lse = sum == 0.f ? -INFINITY : softmax.shift[r] * kLn2 + __logf(sum);
        arguments.lse[static_cast<int64_t>(tile.q_row + row) * arguments.heads_q + head] = lse;
      }
    }
    const bool leads = warp == 0 && lane == 0;
    if (leads) copies_wait_read();
    named_sync(4 + warpgroup, 128);
    const uint32_t staged = shared + Memory::kOut, first_row = 64 * warpgroup;
    stage_rows<T, Results>(staged, first_row, out, inverse);
    named_sync(4 + warpgroup, 128);
    if (!leads || tile.num_rows <= 0) return;
    store_tile<Results>(&arguments.out, {head, tile.q_row, tile.num_rows},
                        staged + first_row * 128);
    copies_commit();
  }

  __device__ __forceinline__ void run() {
    if (warpgroup == Shape::kWarpgroups - 1) end_turn();
    JobPart part{.head = -1};  // whose last product is under way
    while (true) {
      const Job job = next_job();
      const BlockRange blocks = blocks_of<Shape::kKeyRows>(job.tile, arguments.window);
      const JobPart next = part_of(job, warpgroup);
      int32_t block = 0, num_unseen = 0;
      if (job.head >= 0) {
        block = await_queries();
        if constexpr (Shape::kSkipsBlocks) {
          num_unseen = num_skipped(next, blocks, block);
          block -= num_unseen;
          if (num_unseen > 0) {
            products_wait<0>();
            if (part.head >= 0) give_values_back();
            for (int32_t i = 0; i < num_unseen; ++i) skip_block();
          }
        }
        ring_at(barriers, kKeyFull).wait(num_keys_seen);
      }
      begin_scores();  // of no use after the last job
      products_wait<1>();
      if (part.head >= 0) {
        pin(out);
        if (num_unseen == 0) give_values_back();
        write(part);
      }
      if (job.head < 0) break;
      part = next;
      attend(part.tile, blocks, block, blocks.count() - num_unseen);
    }
    products_wait<0>();
    if (warp == 0 && lane == 0) copies_wait_read();
  }

  // The same where results take the place of queries, and so end a job before the next can begin.
  __device__ __forceinline__ void run_in_place() {
    if (warpgroup == Shape::kWarpgroups - 1) end_turn();
    for (Job job = next_job(); job.head >= 0; job = next_job()) {
      const BlockRange blocks = blocks_of<Shape::kKeyRows>(job.tile, arguments.window);
      const JobPart part = part_of(job, warpgroup);
      const int32_t block = await_queries();
      ring_at(barriers, kKeyFull).wait(num_keys_seen);
      begin_scores();
      attend(part.tile, blocks, block, blocks.count());
      products_wait<0>();
      pin(out);
      give_values_back();
      write(part);
      if (warp == 0 && lane == 0) copies_wait_read();
      give_queries_back();
    }
  }
};

template <typename Shape>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    forward_kernel(const __grid_constant__ ForwardArguments arguments) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using Memory = ForwardMemory<Shape>;
  const uint32_t shared = shared_address(in_block(0));
  const uint32_t barriers = shared + Memory::kBarriers;
  if ((shared & 1023) != 0) __trap();
  if (threadIdx.x == 0) {
    constexpr uint32_t kWarps = 4 * Shape::kWarpgroups;
    for (uint32_t i = 0; i < kNumBarriers; ++i) {
      const bool is_empty = (i >= kQueryEmpty && i < kKeyFull) ||
                            (i >= kKeyEmpty && i < kValueFull) ||
                            (i >= kValueEmpty && i < kJobFull);
      const uint32_t num_arrivals = i >= kJobEmpty ? kWarps + 1 : is_empty ? kWarps : 1;
      barrier_init(ring_at(barriers, i).barrier(0), num_arrivals);
    }
    barrier_init_fence();
  }
  __syncthreads();
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  if (warpgroup == 0) {
    give_registers<Shape::kProducerRegisters>();
    ForwardProducer<Shape> producer{arguments, shared, barriers};
    if (threadIdx.x == 0) producer.run();
    if (threadIdx.x == 32) take_tickets<Shape>(arguments, barriers);
  } else {
    take_registers<Shape::kRegisters>();
    ForwardConsumer<Shape> consumer{arguments,
                                    shared,
                                    barriers,
                                    warpgroup - 1,
                                    static_cast<int>(threadIdx.x % 128) / 32,
                                    static_cast<int>(threadIdx.x % 32),
                                    score_log2<Shape>(arguments)};
    if constexpr (Memory::kOutIsQuery) {
      consumer.run_in_place();
    } else {
      consumer.run();
    }
  }
#endif
}

template <typename Shape>
void launch(const ForwardCall& call, cudaStream_t stream) {
  static_assert(Shape::kRows == forward_tile_rows(Shape::kHeadDim));
  constexpr uint32_t kSharedBytes = ForwardMemory<Shape>::kBytes;
  const auto heads_q = static_cast<int32_t>(call.q.heads);
  const int32_t num_items = call.tiles.num_tiles * heads_q;
  const Blocks blocks = blocks_for(num_items, call.flops, call.shares_device);
  const ForwardArguments arguments{
      .q = make_ragged_map(call.q, 64),
      .k = make_ragged_map(call.k, Shape::kKeyRows),
      .v = make_ragged_map(call.v, Shape::kKeyRows),
      .out = make_ragged_map(call.out, 64),
      .tiles = call.tiles.tiles,
      .ticket = call.ticket,
      .fronts = call.fronts,
      .lse = call.lse,
      .num_items = num_items,
      .num_in_turn = blocks.num_in_turn,
      .heads_q = heads_q,
      .heads_per_key = static_cast<int32_t>(call.q.heads / call.k.heads),
      .window = call.window,
      .softmax_scale = call.softmax_scale,
      .cap = softcap_of(call)};
  launch_kernel(forward_kernel<Shape>, {blocks.count, Shape::kThreads, kSharedBytes}, stream,
                arguments);
}

template <typename T, int kHeadDim, int kValueDim>
struct ShapeOf;
template <typename T>
struct ShapeOf<T, 64, 64> : ForwardShape<T, 64, 64, 128, 3, 160, 32, true> {};
template <typename T>
struct ShapeOf<T, 128, 128> : ForwardShape<T, 128, 128, 128, 2, 232, 40, false> {};
template <typename T>
struct ShapeOf<T, 192, 128> : ForwardShape<T, 192, 128, 128, 2, 232, 40, false> {};
template <typename T>
struct ShapeOf<T, 192, 192> : ForwardShape<T, 192, 192, 112, 2, 232, 40, false> {};
template <typename T>
struct ShapeOf<T, 256, 256> : ForwardShape<T, 256, 256, 80, 2, 232, 40, false> {};

void forward_capped(const ForwardCall& call, cudaStream_t stream);

}  // namespace distca::attention::sm90
