#pragma once

#include "columns.cuh"
#include "forward_shape.cuh"
#include "softcap.cuh"
#include "softmax.cuh"

namespace distca::attention::sm90 {

// A warpgroup of the forward kernel: 64 query rows of each job.
template <typename Shape>
struct ForwardConsumer {
  using T = typename Shape::Element;
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
  int warpgroup, warp, lane;
  float scale_log2;
  uint32_t num_queries = 0;
  BlockUse next_keys, next_values;
  // Operands in stage 0.
  Operand first_keys{uniform(operand_at(shared + Memory::kKey, 0).low)};
  Operand first_values{uniform(operand_at(shared + Memory::kValue, Values::kPanelBytes).low)};

  uint32_t queries[Shape::kHeldColumns > 0 ? Shape::kHeldColumns / 4 : 1];
  float out[Shape::kValueDim / 2];
  float scores[Shape::kKeyRows / 2];
  uint32_t probabilities[Shape::kKeyRows / 4];
  RowSoftmax<Shape::kKeyRows> softmax;

  // Returns the operand in a use's stage, given that in stage 0.
  template <typename Tile>
  static __device__ __forceinline__ Operand in_stage(Operand first, BlockUse use) {
    return {first.low + use.stage() * (Tile::kBytes >> 4)};
  }

  // Returns where the job's queries are in shared memory.
  __device__ __forceinline__ uint32_t staged_queries() const {
    return shared + Memory::kQuery + QueryRing::stage(num_queries) * Queries::kBytes;
  }

  // scores = Q K^T of the next block of keys; asynchronous.
  __device__ __forceinline__ void begin_scores() {
    [[maybe_unused]] const Operand query = operand_at(staged_queries() + warpgroup * 64 * 128, 0);
    const Operand key = in_stage<Keys>(first_keys, next_keys);
    constexpr int kHeldSteps = Shape::kHeldColumns / 16;
    pin(scores);
    if constexpr (kHeldSteps > 0) pin(queries);
    products_begin();
#pragma unroll
    for (int k = 0; k < Shape::kHeadDim / 16; ++k) {
      const uint32_t inside = (k % 4) * 32;
      const uint64_t keys = descriptor(key, (k / 4) * Keys::kPanelBytes + inside);
      if constexpr (kHeldSteps > 0) {
        if (k < kHeldSteps) {
          product<T, false>(scores, queries + 4 * k, keys, k > 0);
          continue;
        }
      }
      product<T, false, false>(scores, descriptor(query, (k / 4) * Queries::kPanelBytes + inside),
                               keys, k > 0);
    }
    products_commit();
  }
  // Gives the keys back. `zero` is added to the address of their barrier.
  __device__ __forceinline__ void give_keys_back(uint32_t zero = 0) {
    arrive_as_warp(BlockRing{barriers, Barriers::kKeyEmpty}.barrier(next_keys) + zero);
    next_keys = next_keys.next();
  }
  // Gives the keys back, but only once probabilities exist: ptxas cannot know that `known` is 0. It
  // moves a wait for products up to the preceding access to shared memory, but the softmax should
  // run before that wait, so that it overlaps the product with values.
  __device__ __forceinline__ void end_scores() {
    const uint32_t zero = static_cast<uint32_t>(arguments.num_items) >> 31;
    const uint32_t known =
        (__float_as_uint(softmax.sum[0]) | __float_as_uint(softmax.sum[1])) & zero;
    give_keys_back(known);
  }

  // out = P V of the next block of values, added to `out` if `accumulate`; asynchronous.
  __device__ __forceinline__ void begin_out(bool accumulate) {
    BlockRing{barriers, Barriers::kValueFull}.wait(next_values);
    const Operand value = in_stage<Values>(first_values, next_values);
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
    BlockRing{barriers, Barriers::kValueEmpty}.arrive_as_warp(next_values);
    next_values = next_values.next();
  }

  __device__ __forceinline__ void give_queries_back() {
    ring_at<Shape::kQueryStages>(barriers, Barriers::kQueryEmpty).arrive_as_warp(num_queries);
  }
  // Loads kHeldColumns of the job's queries into registers.
  __device__ __forceinline__ void hold_queries() {
    const uint32_t from = staged_queries();
    const uint32_t row = 64 * warpgroup + 16 * warp + lane % 16;
#pragma unroll
    for (int k = 0; k < Shape::kHeldColumns / 16; ++k) {
      load_matrices(from + (k / 4) * Queries::kPanelBytes + swizzled(row, 2 * (k % 4) + lane / 16),
                    queries + 4 * k);
    }
  }
  // Waits for the queries of a job. Returns its first block of keys.
  __device__ __forceinline__ int32_t await_queries() const {
    ring_at<Shape::kQueryStages>(barriers, Barriers::kQueryFull).wait(num_queries);
    return in_block<int32_t>(Memory::kStarts)[QueryRing::stage(num_queries)];
  }

  // Hides keys of a block that the thread's rows may not see.
  __device__ __forceinline__ void mask(const JobPart& part, int32_t block) {
    const auto& [left, right] = arguments.window;
    const int32_t num_keys = part.num_keys;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int32_t row = part.position + 16 * warp + lane / 4 + 8 * r;
      const int32_t column = block * Shape::kKeyRows + 2 * (lane % 4);
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

  // Job n, what this warpgroup computes of it, and its blocks of keys. They are read from shared
  // memory wherever they are needed, because no registers are left to keep them.
  __device__ __forceinline__ const Job& job_in_slot(uint32_t n) const {
    return in_block<Job>(Memory::kJobs)[Ring<2>::stage(n)];
  }
  __device__ __forceinline__ const JobPart& part_in_slot(uint32_t n) const {
    return job_in_slot(n).parts[warpgroup];
  }
  __device__ __forceinline__ BlockRange blocks_in_slot(uint32_t n) const {
    return blocks_of<Shape::kKeyRows>(job_in_slot(n).tile, arguments.window);
  }

  __device__ __forceinline__ void await_turn() {
    if constexpr (Shape::kTakesTurns) named_sync(kTurnBarrier + warpgroup, 256);
  }
  __device__ __forceinline__ void end_turn() {
    static_assert(kTurnBarrier + Shape::kWarpgroups <= kStoreBarrier);
    if constexpr (Shape::kTakesTurns) {
      named_arrive(kTurnBarrier + (warpgroup + 1) % Shape::kWarpgroups, 256);
    }
  }

  // Gives a block of keys and values back unused. It takes a turn, because all warpgroups must take
  // equally many in a job.
  __device__ __forceinline__ void skip_block() {
    await_turn();
    end_turn();
    BlockRing{barriers, Barriers::kKeyFull}.wait(next_keys);
    give_keys_back();
    BlockRing{barriers, Barriers::kValueFull}.wait(next_values);
    give_values_back();
  }

  // Returns how many blocks from `start` down come before the first one that rows of `part` see. At
  // least one block is left, even if `part` has no rows.
  __device__ __forceinline__ int32_t num_skipped(const JobPart& part, const BlockRange& blocks,
                                                 int32_t start) const {
    if (part.num_rows <= 0) return blocks.count() - 1;
    return max(0, start - max(part.blocks.last - 1, blocks.first));
  }

  // Computes `count` blocks from `block` on. The first scores are already under way, and the last
  // product is still under way on return.
  __device__ __forceinline__ void attend(const JobPart& part, const BlockRange& blocks,
                                         int32_t block, int32_t count) {
    const JobPart first = part;  // read while the scores are computed
    products_wait<0>();
    pin(scores);
    if (!Shape::kHoldsQueries && count == 1) give_queries_back();
    if constexpr (Shape::kIsCapped) cap_scores(scores, arguments.cap);
    if (!first.clear_blocks.has(block)) mask(first, block);
    softmax.start(scores, scale_log2);
    end_scores();
    pack_probabilities();
    for (int32_t i = 1; i < count; ++i) {
      block = (block == blocks.first ? blocks.last : block) - 1;
      BlockRing{barriers, Barriers::kKeyFull}.wait(next_keys);
      await_turn();
      begin_scores();
      const bool is_clear = part.clear_blocks.has(block);  // read while the scores are computed
      begin_out(i > 1);
      end_turn();
      products_wait<1>();
      pin(scores);
      if (!Shape::kHoldsQueries && i + 1 == count) give_queries_back();
      if constexpr (Shape::kIsCapped) cap_scores(scores, arguments.cap);
      if (!is_clear) mask(part, block);
      const bool moves = softmax.step(scores, scale_log2);
      end_scores();
      products_wait<0>();
      pin(out);
      give_values_back();
      if (moves) rescale_out();
      pack_probabilities();
    }
    begin_out(count > 1);
    ++num_queries;  // not before, so that the address of queries does not change in the loop
  }

  // The reciprocal is approximate at 128, which makes the kernel 0.4 % faster. At 64 this would
  // make it 2 % slower, because ptxas then happens to assign registers that slow down the softmax.
  static __device__ __forceinline__ float reciprocal(float x) {
    if constexpr (Shape::kHoldsQueries) return reciprocal_fast(x);
    return 1.f / x;
  }

  __device__ __forceinline__ void write(const JobPart& part) {
    float inverse[2], sums[2];
    softmax.total(sums);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float sum = sums[r];
      inverse[r] = sum == 0.f ? 0.f : reciprocal(sum);
      const int32_t row = 16 * warp + lane / 4 + 8 * r;
      if (lane % 4 == 0 && row < part.num_rows) {
        const float lse = sum == 0.f ? -INFINITY : softmax.shift[r] * kLn2 + __logf(sum);
        arguments.lse[static_cast<int64_t>(part.q_row + row) * arguments.heads_q + part.head] = lse;
      }
    }
    if constexpr (Shape::kHoldsQueries) {
      stage_rows<T, Queries>(staged_queries(), 64 * warpgroup, out, inverse);
      named_arrive(kStoreBarrier + warpgroup, kStoreThreads);
    } else {
      store_rows<T>(arguments.out, {part.head, part.q_row, part.num_rows}, out, inverse);
    }
  }

  __device__ __forceinline__ void run() {
    if (warpgroup == Shape::kWarpgroups - 1) end_turn();
    for (uint32_t n = 0;; ++n) {
      // The last product of job n - 1 is under way.
      ring_at(barriers, Barriers::kJobFull).wait(n);
      const bool is_over = job_in_slot(n).head < 0;
      int32_t block = 0, num_unseen = 0;
      if (!is_over) {
        block = await_queries();
        if constexpr (Shape::kHeldColumns > 0) hold_queries();
        if constexpr (Shape::kSkipsBlocks) {
          num_unseen = num_skipped(part_in_slot(n), blocks_in_slot(n), block);
          block -= num_unseen;
          if (num_unseen > 0) {
            products_wait<0>();
            if (n > 0) give_values_back();
            for (int32_t i = 0; i < num_unseen; ++i) skip_block();
          }
        }
        BlockRing{barriers, Barriers::kKeyFull}.wait(next_keys);
      } else if (Shape::kHoldsQueries && n > 0) {
        // Waits until the copy engine has read the results of job n - 2.
        ring_at<Shape::kQueryStages>(barriers, Barriers::kQueryEmpty).wait(num_queries - 1);
      }
      begin_scores();  // of no use after the last job
      products_wait<1>();
      if (n > 0) {
        pin(out);
        if (num_unseen == 0) give_values_back();
        write(part_in_slot(n - 1));
        // Frees the slot only now, so that a block holds at most one ticket that other blocks could
        // work on.
        ring_at(barriers, Barriers::kJobEmpty).arrive_as_warp(n - 1);
      } else if (Shape::kHoldsQueries && !is_over) {
        named_arrive(kStoreBarrier + warpgroup, kStoreThreads);  // queries are in registers
      }
      if (is_over) break;
      const BlockRange blocks = blocks_in_slot(n);
      attend(part_in_slot(n), blocks, block, blocks.count() - num_unseen);
    }
    products_wait<0>();
  }
};

}  // namespace distca::attention::sm90
