#include <algorithm>

#include "forward_items.cuh"
#include "kernels.h"
#include "launch.cuh"
#include "ring.cuh"
#include "tile_io.cuh"

// One block per multiprocessor takes tickets, a (tile, head) each, longest first. One thread turns
// tickets into jobs, another copies queries, keys and values to shared memory. Warpgroups of 64
// query rows each compute softmax(Q K^T) V block by block of keys, the softmax of one block under
// the product of the block before it, and in turns, so that one warpgroup's softmax also lies under
// another's products. The first scores of a job are computed while the job before it is written.
namespace distca::attention::sm90 {
namespace {

template <typename T, int kHeadDim_, int kWarpgroups_, int kRegisters_, int kProducerRegisters_>
struct ForwardShape {
  using Element = T;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kWarpgroups = kWarpgroups_;
  static constexpr int kRegisters = kRegisters_;
  static constexpr int kProducerRegisters = kProducerRegisters_;
  static constexpr int kRows = 64 * kWarpgroups;
  static constexpr int kThreads = 128 * (kWarpgroups + 1);
  using Queries = SharedTile<kRows, kHeadDim>;
  using Keys = SharedTile<kKeyBlockRows, kHeadDim>;
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

// Offsets in shared memory: two stages of all but the results.
template <typename Shape>
struct ForwardMemory {
  static constexpr uint32_t kQuery = 0;
  static constexpr uint32_t kOut = kQuery + 2 * Shape::Queries::kBytes;
  static constexpr uint32_t kKey = kOut + Shape::Queries::kBytes;
  static constexpr uint32_t kValue = kKey + 2 * Shape::Keys::kBytes;
  static constexpr uint32_t kJobs = kValue + 2 * Shape::Keys::kBytes;
  static constexpr uint32_t kStarts = kJobs + 2 * sizeof(Job);
  static constexpr uint32_t kBarriers = kStarts + 2 * sizeof(int32_t);
  static constexpr uint32_t kBytes = kBarriers + kBarrierBytes * kNumBarriers;
  static_assert(kJobs % alignof(Job) == 0 && kBarriers % kBarrierBytes == 0);
  static_assert(kBytes <= kMaxSharedBytes);
};

// Takes tickets, a job ahead of those who work on them.
template <typename Shape>
__device__ __forceinline__ void take_tickets(const ForwardArguments& arguments, uint32_t barriers) {
  for (uint32_t i = 0;; ++i) {
    ring_at(barriers, kJobEmpty).wait_before(i);
    const int32_t item = atomicAdd(arguments.ticket, 1);
    Job job{.head = -1};
    if (item < arguments.num_items) job = job_of(item, arguments);
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
  using Queries = typename Shape::Queries;

  const ForwardArguments& arguments;
  uint32_t shared;
  uint32_t barriers;
  uint32_t num_blocks = 0, num_queries = 0;

  __device__ __forceinline__ void bring(const Job& job) {
    const BlockRange blocks = blocks_of(job.tile, arguments.window);
    const uint32_t stage = Ring<2>::stage(num_queries);
    const uint32_t query_full = ring_at(barriers, kQueryFull).barrier(num_queries);
    ring_at(barriers, kQueryEmpty).wait_before(num_queries++);
    const int32_t start = job.front.start(job.tile, blocks);
    in_block<int32_t>(Memory::kStarts)[stage] = start;
    barrier_arrive_expecting(query_full, Queries::kBytes);
    load_tile<Queries>(shared + Memory::kQuery + stage * Queries::kBytes, &arguments.q,
                       {job.head, job.tile.q_row, job.tile.num_rows}, query_full);
    bring_blocks(job, start, blocks.first);
    if (start + 1 < blocks.last) bring_blocks(job, blocks.last - 1, start + 1);
  }

  // From block `from` down to block `to`. What this loop takes per block is not hidden: two stages
  // are few.
  __device__ __forceinline__ void bring_blocks(const Job& job, int32_t from, int32_t to) {
    RowRange rows{job.head / arguments.heads_per_key, job.tile.k_begin + from * kKeyBlockRows, 0};
    rows.num_rows = max(0, min(kKeyBlockRows, job.tile.k_end - rows.row));
    const int32_t first_row = job.tile.k_begin + to * kKeyBlockRows;
#pragma unroll 1
    for (; rows.row >= first_row; ++num_blocks) {
      const auto copy = [&](const CUtensorMap* map, Barrier full, Barrier empty, uint32_t at) {
        ring_at(barriers, empty).wait_before(num_blocks);
        const uint32_t is_full = ring_at(barriers, full).barrier(num_blocks);
        barrier_arrive_expecting(is_full, Keys::kBytes);
        load_tile<Keys>(shared + at + Ring<2>::stage(num_blocks) * Keys::kBytes, map, rows,
                        is_full);
      };
      copy(&arguments.k, kKeyFull, kKeyEmpty, Memory::kKey);
      copy(&arguments.v, kValueFull, kValueEmpty, Memory::kValue);
      if (num_blocks % Front::kBlocksBetween == 0) job.front.say(rows.row);
      rows.row -= kKeyBlockRows;
      rows.num_rows = kKeyBlockRows;
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

// Running softmax of the two query rows whose scores a thread holds: rows lane / 4 and lane / 4 + 8
// of its warp's 16.
struct RowSoftmax {
  float shift[2];  // the score, in powers of 2, whose probability is 1
  float sum[2];    // of this thread's columns

  __device__ __forceinline__ void reset() {
    shift[0] = shift[1] = -INFINITY;
    sum[0] = sum[1] = 0.f;
  }

  // Turns scores into probabilities relative to the shift. It follows the largest score, but only
  // when that is further away than a probability of 2^kSlack: nearly all blocks then leave earlier
  // sums as they are. Returns by correction what these must be multiplied with, and whether that is
  // not 1 in some row of the warp.
  __device__ __forceinline__ bool step(float (&scores)[64], float scale_log2,
                                       float (&correction)[2]) {
    constexpr float kSlack = 8.f;
    bool moves = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float maximum = fmaxf(scores[2 * r], scores[2 * r + 1]);
#pragma unroll
      for (int j = 1; j < 16; ++j) {
        maximum = fmaxf(maximum, fmaxf(scores[4 * j + 2 * r], scores[4 * j + 2 * r + 1]));
      }
      maximum = fmaxf(maximum, __shfl_xor_sync(0xffffffffu, maximum, 1));
      maximum = fmaxf(maximum, __shfl_xor_sync(0xffffffffu, maximum, 2)) * scale_log2;
      correction[r] = 1.f;
      if (maximum > shift[r] + kSlack) {
        correction[r] = exp2_fast(shift[r] - maximum);
        shift[r] = maximum;
        moves = true;
      }
      // A row that has seen no key yet keeps all its probabilities at 0.
      const float subtracted = shift[r] == -INFINITY ? 0.f : shift[r];
      float partial = 0.f;
#pragma unroll
      for (int j = 0; j < 16; ++j) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          float& score = scores[4 * j + 2 * r + c];
          score = exp2_fast(fmaf(score, scale_log2, -subtracted));
          partial += score;
        }
      }
      sum[r] = sum[r] * correction[r] + partial;
    }
    return __any_sync(0xffffffffu, moves);
  }
};

// Hides keys that the thread's rows may not see. `first_row` is the position of its first row from
// the tile's k_begin, `first_key` of its first column.
__device__ __forceinline__ void mask_scores(float (&scores)[64], int32_t first_row,
                                            int32_t first_key, int32_t num_keys,
                                            const Window& window) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int32_t position = first_row + 8 * r;
    const int32_t end =
        (window.right >= 0 ? min(num_keys, position + window.right + 1) : num_keys) - first_key;
    const int32_t begin = (window.left >= 0 ? position - window.left : 0) - first_key;
#pragma unroll
    for (int j = 0; j < 16; ++j) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int32_t column = 8 * j + c;
        if (column >= end || column < begin) scores[4 * j + 2 * r + c] = -INFINITY;
      }
    }
  }
}

// The part of a consumer warpgroup.
template <typename Shape>
struct ForwardConsumer {
  using T = typename Shape::Element;
  using Memory = ForwardMemory<Shape>;
  using Keys = typename Shape::Keys;
  using Queries = typename Shape::Queries;

  const ForwardArguments& arguments;
  uint32_t shared;
  uint32_t barriers;
  int warpgroup, warp, lane;
  float scale_log2;
  uint32_t num_keys_seen = 0, num_values_seen = 0, num_queries = 0, num_jobs = 0;

  float out[Shape::kHeadDim / 2];
  float scores[kKeyBlockRows / 2];
  uint32_t probabilities[kKeyBlockRows / 4];
  float correction[2];
  RowSoftmax softmax;

  // scores = Q K^T of the next block of keys; asynchronous.
  __device__ __forceinline__ void begin_scores() {
    const Operand query =
        operand_at(shared + Memory::kQuery + Ring<2>::stage(num_queries) * Queries::kBytes +
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
  // Gives the keys back, but only once there are probabilities: `known` is 0, which ptxas cannot
  // see. It moves a wait for products up to the access to shared memory before it, and the softmax
  // is to run before that wait, under the product with values.
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
        operand_at(shared + Memory::kValue + Ring<2>::stage(num_values_seen) * Keys::kBytes,
                   Keys::kPanelBytes);
    pin(out);
    pin(probabilities);
    products_begin();
#pragma unroll
    for (int k = 0; k < kKeyBlockRows / 16; ++k) {
      product<T, true>(out, probabilities + 4 * k, descriptor(value, k * 16 * 128),
                       k > 0 || accumulate);
    }
    products_commit();
  }
  __device__ __forceinline__ void end_out() {
    pin(out);
    ring_at(barriers, kValueEmpty).arrive_as_warp(num_values_seen);
    ++num_values_seen;
  }

  // Returns whether earlier sums must be corrected.
  __device__ __forceinline__ bool soften(const QueryTile& tile, int32_t block) {
    const int32_t first_row = tile.position - tile.k_begin + 64 * warpgroup;
    const int32_t num_keys = tile.k_end - tile.k_begin;
    const int32_t first_key = block * kKeyBlockRows;
    const int32_t end = arguments.window.right >= 0
                            ? min(num_keys, first_row + arguments.window.right + 1)
                            : num_keys;
    const bool cut_left =
        arguments.window.left >= 0 && first_key < first_row + 63 - arguments.window.left;
    if (first_key + kKeyBlockRows > end || cut_left) {
      mask_scores(scores, first_row + 16 * warp + lane / 4, first_key + 2 * (lane % 4), num_keys,
                  arguments.window);
    }
    return softmax.step(scores, scale_log2, correction);
  }

  __device__ __forceinline__ void pack_probabilities() {
#pragma unroll
    for (int i = 0; i < kKeyBlockRows / 4; ++i) {
      probabilities[i] = pack<T>(scores[2 * i], scores[2 * i + 1]);
    }
  }

  __device__ __forceinline__ void rescale_out() {
#pragma unroll
    for (int i = 0; i < Shape::kHeadDim / 2; ++i) out[i] *= correction[(i >> 1) & 1];
  }

  // Frees the slot of the job before, so that a block holds one ticket at most that others could
  // work on.
  __device__ __forceinline__ Job next_job() {
    ring_at(barriers, kJobFull).wait(num_jobs);
    if (num_jobs > 0) ring_at(barriers, kJobEmpty).arrive_as_warp(num_jobs - 1);
    return in_block<Job>(Memory::kJobs)[Ring<2>::stage(num_jobs++)];
  }

  // From the first scores, which are under way before it, to the last product, which is after it.
  __device__ __forceinline__ void attend(const Job& job) {
    const BlockRange blocks = blocks_of(job.tile, arguments.window);
    int32_t block = in_block<int32_t>(Memory::kStarts)[Ring<2>::stage(num_queries)];
    products_wait<0>();
    pin(scores);
    softmax.reset();
    soften(job.tile, block);
    end_scores();
    pack_probabilities();
    const uint32_t turn = 1 + warpgroup, next_turn = 1 + (warpgroup + 1) % Shape::kWarpgroups;
    const int32_t count = blocks.count();
    for (int32_t i = 1; i < count; ++i) {
      block = (block == blocks.first ? blocks.last : block) - 1;
      named_sync(turn, 256);
      ring_at(barriers, kKeyFull).wait(num_keys_seen);
      begin_scores();
      begin_out(i > 1);
      named_arrive(next_turn, 256);
      products_wait<1>();
      pin(scores);
      const bool moves = soften(job.tile, block);
      end_scores();
      products_wait<0>();
      end_out();
      if (moves) rescale_out();
      pack_probabilities();
    }
    ring_at(barriers, kQueryEmpty).arrive_as_warp(num_queries++);
    begin_out(count > 1);
  }

  __device__ __forceinline__ void write(const Job& job) {
    const int32_t row_in_tile = 64 * warpgroup + 16 * warp + lane / 4;
    float inverse[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float sum = softmax.sum[r];
      sum += __shfl_xor_sync(0xffffffffu, sum, 1);
      sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      inverse[r] = sum == 0.f ? 0.f : 1.f / sum;
      const int32_t row = row_in_tile + 8 * r;
      if (lane % 4 == 0 && row < job.tile.num_rows) {
        const float lse = sum == 0.f ? -INFINITY : softmax.shift[r] * kLn2 + __logf(sum);
        arguments.lse[static_cast<int64_t>(job.tile.q_row + row) * arguments.heads_q + job.head] =
            lse;
      }
    }
    const bool leads = warp == 0 && lane == 0;
    if (leads) copies_wait_read();
    named_sync(4 + warpgroup, 128);
    const uint32_t tile = shared + Memory::kOut, first_row = 64 * warpgroup;
    stage_rows<T, Queries>(tile, first_row, out, inverse);
    named_sync(4 + warpgroup, 128);
    const int32_t num_rows = min(64, job.tile.num_rows - 64 * warpgroup);
    if (!leads || num_rows <= 0) return;
    store_tile<Queries>(&arguments.out, {job.head, job.tile.q_row + 64 * warpgroup, num_rows},
                        tile + first_row * 128);
    copies_commit();
  }

  __device__ __forceinline__ void run() {
    if (warpgroup == Shape::kWarpgroups - 1) named_arrive(1, 256);
    Job job{.head = -1};
    while (true) {
      const Job next = next_job();
      if (next.head >= 0) {
        ring_at(barriers, kQueryFull).wait(num_queries);
        ring_at(barriers, kKeyFull).wait(num_keys_seen);
      }
      begin_scores();  // of no use after the last job
      products_wait<1>();
      if (job.head >= 0) {
        end_out();
        write(job);
      }
      if (next.head < 0) break;
      job = next;
      attend(job);
    }
    products_wait<0>();
    if (warp == 0 && lane == 0) copies_wait_read();
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
                                    arguments.softmax_scale * kLog2E};
    consumer.run();
  }
#endif
}

template <typename Shape>
void launch(const ForwardCall& call, cudaStream_t stream) {
  static_assert(Shape::kRows == forward_tile_rows(Shape::kHeadDim));
  constexpr uint32_t kSharedBytes = ForwardMemory<Shape>::kBytes;
  const auto heads_q = static_cast<int32_t>(call.q.heads);
  const ForwardArguments arguments{
      .q = make_ragged_map(call.q, Shape::kRows),
      .k = make_ragged_map(call.k, kKeyBlockRows),
      .v = make_ragged_map(call.v, kKeyBlockRows),
      .out = make_ragged_map(call.out, 64),
      .tiles = call.tiles.tiles,
      .ticket = call.ticket,
      .fronts = call.fronts,
      .lse = call.lse,
      .num_items = call.tiles.num_tiles * heads_q,
      .heads_q = heads_q,
      .heads_per_key = static_cast<int32_t>(call.q.heads / call.k.heads),
      .window = call.window,
      .softmax_scale = call.softmax_scale};
  const int num_blocks = std::min(arguments.num_items, num_multiprocessors());
  launch_kernel(forward_kernel<Shape>, {num_blocks, Shape::kThreads, kSharedBytes}, stream,
                arguments);
}

template <typename T, int kHeadDim>
using ShapeOf = std::conditional_t<kHeadDim == 64, ForwardShape<T, 64, 3, 160, 32>,
                                   ForwardShape<T, 128, 2, 232, 40>>;

}  // namespace

void forward(const ForwardCall& call, cudaStream_t stream) {
  if (call.tiles.num_tiles == 0) return;
  by_element_and_head_dim(
      call.q, [&]<typename T, int kHeadDim>() { launch<ShapeOf<T, kHeadDim>>(call, stream); });
}

}  // namespace distca::attention::sm90
