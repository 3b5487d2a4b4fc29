#include <cuda_runtime.h>

#include "backward_rows.cuh"
#include "kernels.h"
#include "launch.cuh"
#include "order.cuh"
#include "ptx.cuh"

// One block per (key block, kv head). Its keys, values, dK and dV stay; all query tiles that see
// the keys pass by, of every task and of every query head of the kv head, so that dK and dV are
// written once. Two warpgroups own 64 keys each. Scores are computed transposed, S^T = K Q^T, so
// that P^T and dS^T feed dV += P^T dO and dK += dS^T Q from registers; dS also goes to shared
// memory, where both warpgroups take it for dQ^T = K^T dS^T one tile later, so that neither waits
// for the other. dQ is added up in global memory: in float32, or deterministic in fixed point (see
// RowStats).
namespace distca::attention::sm90 {
namespace {

struct BackwardArguments {
  CUtensorMap q, k, v, grad_out, dk, dv;
  const QueryTile* tiles;
  const KeyBlock* blocks;
  int32_t heads_q;
  int32_t heads_kv;
  const float* row_stats;
  void* dq_sums;
  Window window;
  float softmax_scale;
};

template <typename T, int kHeadDim_, bool kDeterministic_>
struct BackwardShape {
  using Element = T;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr bool kDeterministic = kDeterministic_;
  static constexpr int kPanels = kHeadDim / 64;
  static constexpr int kRows = backward_tile_rows(kHeadDim);
  static constexpr int kWarpgroups = 2;
  static constexpr int kThreads = 128 * (kWarpgroups + 1);
  static constexpr int kStages = 2;
  // Whether row statistics are loaded and dV's product starts as early as they can: better, but
  // takes more registers.
  static constexpr bool kEarlySums = kHeadDim == 128;
  static constexpr uint32_t kQueryPanel = kRows * 128;
  static constexpr uint32_t kKeyPanel = kKeyBlockRows * 128;
  static constexpr uint32_t kQueryBytes = kPanels * kQueryPanel;
  static constexpr uint32_t kKeyBytes = kPanels * kKeyPanel;
  static constexpr uint32_t kGradScoreBytes = kRows * kKeyBlockRows * 2;
};

// What consumers need of a staged tile.
struct alignas(16) StagedTile {
  int32_t position;
  int32_t k_begin;
  int32_t k_end;
  int32_t index;  // tile * heads_q + head
};

template <typename Shape>
struct BackwardMemory {
  static constexpr uint32_t kKey = 0;
  static constexpr uint32_t kValue = kKey + Shape::kKeyBytes;
  static constexpr uint32_t kQuery = kValue + Shape::kKeyBytes;
  static constexpr uint32_t kGradOut = kQuery + Shape::kStages * Shape::kQueryBytes;
  static constexpr uint32_t kGradScore = kGradOut + Shape::kStages * Shape::kQueryBytes;
  static constexpr uint32_t kStats = kGradScore + 2 * Shape::kGradScoreBytes;
  static constexpr uint32_t kVectorBytes = 4 * stats_pitch(Shape::kRows);
  // One over the quanta of dQ live until dQ is added, one tile later than the rest of a stage.
  static constexpr uint32_t kQuanta = kStats + Shape::kStages * 2 * kVectorBytes;
  static constexpr uint32_t kTiles =
      kQuanta + (Shape::kDeterministic ? 2 * Shape::kStages * kVectorBytes : 0);
  static constexpr uint32_t kBarriers = kTiles + Shape::kStages * sizeof(StagedTile);
  static constexpr uint32_t kBytes = kBarriers + 128;
};

enum Barrier : uint32_t {
  kKeyFull,
  kValueFull,
  kQueryFull,
  kQueryEmpty = kQueryFull + 2,
  kGradOutFull = kQueryEmpty + 2,
  kGradOutEmpty = kGradOutFull + 2,
  kGradScoreFull = kGradOutEmpty + 2,
  kGradScoreEmpty = kGradScoreFull + 2,
  kNumBarriers = kGradScoreEmpty + 2
};

__device__ __forceinline__ uint32_t barrier_at(uint32_t barriers, uint32_t which) {
  return barriers + 8 * which;
}

struct Item {
  KeyBlock block;
  int32_t key_head;
};

// Run by run, so that the queries in use stay in cache; in a run as many heads at once as give
// every multiprocessor several items, the longest first.
__device__ __forceinline__ Item item_of(int32_t index, const BackwardArguments& arguments) {
  const KeyBlock* any = arguments.blocks + index / arguments.heads_kv;
  const int32_t first = any->first_of_run, count = any->num_of_run;
  const HeadGroup group =
      head_group(index - first * arguments.heads_kv, count, arguments.heads_kv, 1);
  return {arguments.blocks[first + group.in_group / group.num_heads],
          group.first_head + group.in_group % group.num_heads};
}

template <typename Shape>
__device__ __forceinline__ void produce(const BackwardArguments& arguments, const Item& item,
                                        uint32_t shared, StagedTile* staged) {
  using Memory = BackwardMemory<Shape>;
  const uint32_t barriers = shared + Memory::kBarriers;
  const auto copy_keys = [&](const CUtensorMap* map, uint32_t full, uint32_t to) {
    barrier_arrive_expecting(barrier_at(barriers, full), Shape::kKeyBytes);
    for (int panel = 0; panel < Shape::kPanels; ++panel) {
      copy_to_shared(shared + to + panel * Shape::kKeyPanel, map,
                     {64 * panel, item.key_head, item.block.k_row, item.block.num_rows},
                     barrier_at(barriers, full));
    }
  };
  copy_keys(&arguments.k, kKeyFull, Memory::kKey);
  copy_keys(&arguments.v, kValueFull, Memory::kValue);
  const int32_t heads_per_key = arguments.heads_q / arguments.heads_kv;
  uint32_t i = 0;
#pragma unroll 1
  for (int32_t head = item.key_head * heads_per_key; head < (item.key_head + 1) * heads_per_key;
       ++head) {
#pragma unroll 1
    for (int32_t t = item.block.first_tile; t < item.block.last_tile; ++t, ++i) {
      const QueryTile tile = arguments.tiles[t];
      const uint32_t stage = i & 1, phase = (i >> 1) & 1;
      const int32_t index = t * arguments.heads_q + head;
      const float* stats =
          arguments.row_stats + static_cast<int64_t>(index) * 3 * stats_pitch(Shape::kRows);
      const auto copy = [&](const CUtensorMap* map, uint32_t full, uint32_t to) {
        for (int panel = 0; panel < Shape::kPanels; ++panel) {
          copy_to_shared(shared + to + stage * Shape::kQueryBytes + panel * Shape::kQueryPanel, map,
                         {64 * panel, head, tile.q_row, tile.num_rows},
                         barrier_at(barriers, full + stage));
        }
      };
      const uint32_t query_full = barrier_at(barriers, kQueryFull + stage);
      constexpr uint32_t kVector = Memory::kVectorBytes;
      barrier_wait(barrier_at(barriers, kQueryEmpty + stage), phase ^ 1);
      staged[stage] = {tile.position, tile.k_begin, tile.k_end, index};
      barrier_arrive_expecting(query_full,
                               Shape::kQueryBytes + (Shape::kDeterministic ? 3 : 2) * kVector);
      copy(&arguments.q, kQueryFull, Memory::kQuery);
      copy_bytes_to_shared(shared + Memory::kStats + stage * 2 * kVector, stats, 2 * kVector,
                           query_full);
      if constexpr (Shape::kDeterministic) {
        copy_bytes_to_shared(shared + Memory::kQuanta + (i & 3) * kVector,
                             stats + 2 * stats_pitch(Shape::kRows), kVector, query_full);
      }
      barrier_wait(barrier_at(barriers, kGradOutEmpty + stage), phase ^ 1);
      barrier_arrive_expecting(barrier_at(barriers, kGradOutFull + stage), Shape::kQueryBytes);
      copy(&arguments.grad_out, kGradOutFull, Memory::kGradOut);
    }
  }
}

// The part of a consumer warpgroup.
template <typename Shape>
struct BackwardConsumer {
  using T = typename Shape::Element;
  using Memory = BackwardMemory<Shape>;
  static constexpr int kScores = Shape::kRows / 2;  // registers of 64 keys by kRows queries

  const BackwardArguments& arguments;
  uint32_t shared;
  uint32_t barriers;
  const uint8_t* memory;
  int warpgroup, warp, lane;
  float scale_log2;

  float dk[Shape::kHeadDim / 2];
  float dv[Shape::kHeadDim / 2];

  __device__ __forceinline__ void release(uint32_t barrier) {
    __syncwarp();
    if (lane == 0) barrier_arrive(barrier_at(barriers, barrier));
  }

  // Values of this thread's query columns 8 j + 2 (lane % 4) and the next, j from 2 i to 2 i + 1,
  // of a vector of row statistics in shared memory.
  __device__ __forceinline__ float4 stats(uint32_t vector, int i) const {
    return *reinterpret_cast<const float4*>(memory + vector +
                                            4 * ((lane % 4) * stats_group(Shape::kRows) + 4 * i));
  }

  // scores (+)= rows of this warpgroup's 64 keys (or values) times all query rows, transposed.
  __device__ __forceinline__ void begin_scores(float (&scores)[kScores], uint32_t keys,
                                               uint32_t queries, bool accumulate) {
    const Operand left = operand_at(shared + keys + warpgroup * 64 * 128, 0);
    const Operand right = operand_at(shared + queries, 0);
    products_begin();
#pragma unroll
    for (int k = 0; k < Shape::kHeadDim / 16; ++k) {
      const uint32_t inside = (k % 4) * 32;
      product<T, false, false>(scores, descriptor(left, (k / 4) * Shape::kKeyPanel + inside),
                               descriptor(right, (k / 4) * Shape::kQueryPanel + inside),
                               accumulate || k > 0);
    }
    products_commit();
  }

  // sums += left (64 keys by kRows queries, registers) times rows of queries.
  __device__ __forceinline__ void begin_sums(float (&sums)[Shape::kHeadDim / 2],
                                             uint32_t (&left)[kScores / 2], uint32_t queries) {
    const Operand right = operand_at(shared + queries, Shape::kQueryPanel);
    pin(sums);
    pin(left);
    products_begin();
#pragma unroll
    for (int k = 0; k < Shape::kRows / 16; ++k) {
      product<T, true>(sums, left + 4 * k, descriptor(right, k * 16 * 128), 1);
    }
    products_commit();
  }

  // Of dQ^T, kHeadDim by kRows, this warpgroup computes 64 by 64.
  __device__ __forceinline__ void begin_dq(float (&dq)[32], uint32_t buffer) {
    const uint32_t key_panel = Shape::kPanels == 2 ? warpgroup : 0;
    const uint32_t query_panel = Shape::kPanels == 2 ? 0 : warpgroup;
    const Operand left = operand_at(shared + Memory::kKey + key_panel * Shape::kKeyPanel, 0);
    const Operand right = operand_at(shared + Memory::kGradScore + buffer * Shape::kGradScoreBytes +
                                         query_panel * Shape::kKeyPanel,
                                     0);
    pin(dq);
    products_begin();
#pragma unroll
    for (int k = 0; k < kKeyBlockRows / 16; ++k) {
      product<T, true, true>(dq, descriptor(left, k * 16 * 128), descriptor(right, k * 16 * 128),
                             k > 0);
    }
    products_commit();
  }

  __device__ __forceinline__ void mask(float (&scores)[kScores], const StagedTile& tile,
                                       int32_t first_key) {
    const Window& window = arguments.window;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int32_t key = first_key + 64 * warpgroup + 16 * warp + lane / 4 + 8 * r;
      const bool outside = key < tile.k_begin || key >= tile.k_end;
      // Queries at [begin, end) of the tile see the key.
      const int32_t begin = window.right >= 0 ? key - window.right - tile.position : 0;
      const int32_t end = outside            ? 0
                          : window.left >= 0 ? key + window.left + 1 - tile.position
                                             : Shape::kRows;
#pragma unroll
      for (int j = 0; j < kScores / 4; ++j) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const int32_t query = 8 * j + 2 * (lane % 4) + c;
          if (query < begin || query >= end) scores[4 * j + 2 * r + c] = -INFINITY;
        }
      }
    }
  }

  __device__ __forceinline__ bool needs_mask(const StagedTile& tile, int32_t first_key) const {
    const Window& window = arguments.window;
    return first_key < tile.k_begin || first_key + kKeyBlockRows > tile.k_end ||
           (window.right >= 0 && first_key + kKeyBlockRows - 1 > tile.position + window.right) ||
           (window.left >= 0 && first_key < tile.position + Shape::kRows - 1 - window.left);
  }

  // Per-query values, two of column group 2 i and two of 2 i + 1, as accumulators hold them.
  static __device__ __forceinline__ void spread(const float4& values, float* accumulators) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      accumulators[2 * r] = values.x;
      accumulators[2 * r + 1] = values.y;
      accumulators[4 + 2 * r] = values.z;
      accumulators[4 + 2 * r + 1] = values.w;
    }
  }

  __device__ __forceinline__ void pack_all(const float (&values)[kScores],
                                           uint32_t (&packed)[kScores / 2]) {
#pragma unroll
    for (int i = 0; i < kScores / 2; ++i) packed[i] = pack<T>(values[2 * i], values[2 * i + 1]);
  }

  __device__ __forceinline__ void store_grad_scores(const uint32_t (&grads)[kScores / 2],
                                                    uint32_t buffer) {
    const uint32_t to = shared + Memory::kGradScore + buffer * Shape::kGradScoreBytes;
    const uint32_t row = 64 * warpgroup + 16 * warp + (lane & 15);
#pragma unroll
    for (int i = 0; i < Shape::kRows / 16; ++i) {
      store_matrices(to + (i / 4) * Shape::kKeyPanel + swizzled(row, 2 * (i % 4) + (lane >> 4)),
                     grads[4 * i], grads[4 * i + 1], grads[4 * i + 2], grads[4 * i + 3]);
    }
    fence_shared_writes();
  }

  // Adds dQ of tile i of this block's passage, whose place in the sums is `index`.
  __device__ __forceinline__ void add_dq(const float (&dq)[32], uint32_t i, int32_t index) {
    constexpr int kWords = Shape::kRows * Shape::kHeadDim;
    const int64_t base = static_cast<int64_t>(index) * kWords + warpgroup * 4096;
    const int thread = 32 * warp + lane;
    if constexpr (Shape::kDeterministic) {
      const uint32_t quanta = Memory::kQuanta + (i & 3) * Memory::kVectorBytes;
      const int first_column = Shape::kPanels == 2 ? 0 : 4 * warpgroup;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        float inverse[8];
        spread(stats(quanta, first_column + j), inverse);
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          add_to_global(static_cast<int32_t*>(arguments.dq_sums) + base + 128 * (8 * j + e) + thread,
                        __float2int_rn(dq[8 * j + e] * inverse[e]));
        }
      }
    } else {
#pragma unroll
      for (int e = 0; e < 32; e += 4) {
        add_to_global(static_cast<float*>(arguments.dq_sums) + base + 128 * e + 4 * thread, dq[e],
                      dq[e + 1], dq[e + 2], dq[e + 3]);
      }
    }
  }

  __device__ __forceinline__ void write(float (&sums)[Shape::kHeadDim / 2], float scale,
                                        const CUtensorMap* map, uint32_t staging,
                                        const Item& item) {
    const uint32_t to = shared + staging + warpgroup * 64 * 128;
    const uint32_t row = 16 * warp + (lane & 15);
#pragma unroll
    for (int i = 0; i < Shape::kHeadDim / 16; ++i) {
      store_matrices(to + (i / 4) * Shape::kKeyPanel + swizzled(row, 2 * (i % 4) + (lane >> 4)),
                     pack<T>(sums[8 * i] * scale, sums[8 * i + 1] * scale),
                     pack<T>(sums[8 * i + 2] * scale, sums[8 * i + 3] * scale),
                     pack<T>(sums[8 * i + 4] * scale, sums[8 * i + 5] * scale),
                     pack<T>(sums[8 * i + 6] * scale, sums[8 * i + 7] * scale));
    }
    fence_shared_writes();
    named_sync(1 + warpgroup, 128);
    const int32_t num_rows = min(64, item.block.num_rows - 64 * warpgroup);
    if (warp != 0 || lane != 0 || num_rows <= 0) return;
    for (int panel = 0; panel < Shape::kPanels; ++panel) {
      copy_to_global(map, {64 * panel, item.key_head, item.block.k_row + 64 * warpgroup, num_rows},
                     to + panel * Shape::kKeyPanel);
    }
    copies_commit();
  }

  __device__ __forceinline__ void run(const Item& item, const StagedTile* staged) {
#pragma unroll
    for (int i = 0; i < Shape::kHeadDim / 2; ++i) dk[i] = dv[i] = 0.f;
    barrier_wait(barrier_at(barriers, kKeyFull), 0);
    barrier_wait(barrier_at(barriers, kValueFull), 0);
    const uint32_t num_tiles =
        (item.block.last_tile - item.block.first_tile) * (arguments.heads_q / arguments.heads_kv);
    int32_t previous_index = 0;
#pragma unroll 1
    for (uint32_t i = 0; i < num_tiles; ++i) {
      const uint32_t stage = i & 1, phase = (i >> 1) & 1;
      float scores[kScores], grads[kScores];
      uint32_t probabilities[kScores / 2], packed_grads[kScores / 2];
      float dq[32];
      barrier_wait(barrier_at(barriers, kQueryFull + stage), phase);
      const StagedTile tile = staged[stage];
      const uint32_t queries = Memory::kQuery + stage * Shape::kQueryBytes;
      const uint32_t grad_out = Memory::kGradOut + stage * Shape::kQueryBytes;
      const uint32_t log_sums = Memory::kStats + stage * 2 * Memory::kVectorBytes;
      const uint32_t minus_delta = log_sums + Memory::kVectorBytes;
      // dP - delta, by starting from -delta.
#pragma unroll
      for (int j = 0; j < kScores / 8; ++j) spread(stats(minus_delta, j), grads + 8 * j);
      pin(scores);
      pin(grads);
      begin_scores(scores, Memory::kKey, queries, false);
      barrier_wait(barrier_at(barriers, kGradOutFull + stage), phase);
      begin_scores(grads, Memory::kValue, grad_out, true);

      float4 early_log_sums[kScores / 8];
      if constexpr (Shape::kEarlySums) {
#pragma unroll
        for (int j = 0; j < kScores / 8; ++j) early_log_sums[j] = stats(log_sums, j);
      }
      products_wait<1>();
      pin(scores);
      if (needs_mask(tile, item.block.k_row)) mask(scores, tile, item.block.k_row);
#pragma unroll
      for (int j = 0; j < kScores / 8; ++j) {
        float log_sum[8];
        spread(Shape::kEarlySums ? early_log_sums[j] : stats(log_sums, j), log_sum);
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          float& score = scores[8 * j + e];
          score = exp2_fast(fmaf(score, scale_log2, -log_sum[e]));
        }
      }
      if constexpr (Shape::kEarlySums) pack_all(scores, probabilities);
      products_wait<0>();
      pin(grads);
      if constexpr (Shape::kEarlySums) begin_sums(dv, probabilities, grad_out);
#pragma unroll
      for (int e = 0; e < kScores; ++e) grads[e] *= scores[e];
      pack_all(grads, packed_grads);
      if constexpr (!Shape::kEarlySums) pack_all(scores, probabilities);
      barrier_wait(barrier_at(barriers, kGradScoreEmpty + stage), phase ^ 1);
      store_grad_scores(packed_grads, stage);
      release(kGradScoreFull + stage);
      // Of the tile before; there is none at first, and the result of that product is not used.
      barrier_wait(barrier_at(barriers, kGradScoreFull + (stage ^ 1)), ((i - 1) >> 1) & 1);
      begin_dq(dq, stage ^ 1);
      if constexpr (!Shape::kEarlySums) begin_sums(dv, probabilities, grad_out);
      begin_sums(dk, packed_grads, queries);
      products_wait<Shape::kEarlySums ? 1 : 2>();
      pin(dq);
      if (i > 0) {
        release(kGradScoreEmpty + (stage ^ 1));
        add_dq(dq, i - 1, previous_index);
      }
      products_wait<0>();
      pin(dk);
      pin(dv);
      previous_index = tile.index;
      release(kQueryEmpty + stage);
      release(kGradOutEmpty + stage);
    }
    if (num_tiles > 0) {
      const uint32_t stage = (num_tiles - 1) & 1;
      float dq[32];
      barrier_wait(barrier_at(barriers, kGradScoreFull + stage), ((num_tiles - 1) >> 1) & 1);
      begin_dq(dq, stage);
      products_wait<0>();
      pin(dq);
      add_dq(dq, num_tiles - 1, previous_index);
    }
    write(dv, 1.f, &arguments.dv, Memory::kValue, item);
    // Both warpgroups have read all keys for dQ.
    named_sync(3, 256);
    write(dk, arguments.softmax_scale, &arguments.dk, Memory::kKey, item);
    if (warp == 0 && lane == 0) copies_wait_read();
  }
};

template <typename Shape>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    backward_kernel(const __grid_constant__ BackwardArguments arguments) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using Memory = BackwardMemory<Shape>;
  extern __shared__ uint8_t raw[];
  uint8_t* aligned = raw + ((1024 - (shared_address(raw) & 1023)) & 1023);
  const uint32_t shared = shared_address(aligned);
  const uint32_t barriers = shared + Memory::kBarriers;
  auto* staged = reinterpret_cast<StagedTile*>(aligned + Memory::kTiles);
  if (threadIdx.x == 0) {
    constexpr uint32_t kWarps = 4 * Shape::kWarpgroups;
    for (uint32_t i = 0; i < kNumBarriers; ++i) {
      const bool by_warps = (i >= kQueryEmpty && i < kQueryEmpty + 2) || i >= kGradOutEmpty;
      barrier_init(barrier_at(barriers, i), by_warps ? kWarps : 1);
    }
    barrier_init_fence();
  }
  __syncthreads();
  const Item item = item_of(blockIdx.x, arguments);
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  if (warpgroup == 0) {
    give_registers<24>();
    if (threadIdx.x == 0) produce<Shape>(arguments, item, shared, staged);
  } else {
    take_registers<240>();
    constexpr float kLog2E = 1.4426950408889634f;
    BackwardConsumer<Shape> consumer{arguments,
                                     shared,
                                     barriers,
                                     aligned,
                                     warpgroup - 1,
                                     static_cast<int>(threadIdx.x % 128) / 32,
                                     static_cast<int>(threadIdx.x % 32),
                                     arguments.softmax_scale * kLog2E};
    consumer.run(item, staged);
  }
#endif
}

template <typename Shape>
void launch(const BackwardCall& call, cudaStream_t stream) {
  constexpr uint32_t kSharedBytes = BackwardMemory<Shape>::kBytes + 1024;
  BackwardArguments arguments{.q = make_ragged_map(call.q, Shape::kRows),
                              .k = make_ragged_map(call.k, kKeyBlockRows),
                              .v = make_ragged_map(call.v, kKeyBlockRows),
                              .grad_out = make_ragged_map(call.grad_out, Shape::kRows),
                              .dk = make_ragged_map(call.dk, 64),
                              .dv = make_ragged_map(call.dv, 64),
                              .tiles = call.tiles.tiles,
                              .blocks = call.tiles.blocks,
                              .heads_q = static_cast<int32_t>(call.q.heads),
                              .heads_kv = static_cast<int32_t>(call.k.heads),
                              .row_stats = call.row_stats,
                              .dq_sums = call.dq_sums,
                              .window = call.window,
                              .softmax_scale = call.softmax_scale};
  const int num_items = call.tiles.num_blocks * arguments.heads_kv;
  if (num_items == 0) return;
  launch_kernel(backward_kernel<Shape>, {num_items, Shape::kThreads, kSharedBytes}, stream,
                arguments);
}

template <typename T, int kHeadDim>
void launch_by_mode(const BackwardCall& call, cudaStream_t stream) {
  if (call.deterministic) {
    launch<BackwardShape<T, kHeadDim, true>>(call, stream);
  } else {
    launch<BackwardShape<T, kHeadDim, false>>(call, stream);
  }
}

template <typename T>
void launch_by_head_dim(const BackwardCall& call, cudaStream_t stream) {
  if (call.q.head_dim <= 64) {
    launch_by_mode<T, 64>(call, stream);
  } else {
    launch_by_mode<T, 128>(call, stream);
  }
}

}  // namespace

BackwardSizes backward_sizes(const DeviceTiles& tiles, int64_t heads_q, int64_t heads_kv,
                             int64_t head_dim) {
  const int64_t rows = tiles.num_tiles * heads_q * backward_tile_rows(head_dim);
  return {
      .dq_sums = rows * (head_dim <= 64 ? 64 : 128) * 4,
      .row_stats = tiles.num_tiles * heads_q * 3 * 4 * stats_pitch(backward_tile_rows(head_dim)),
      .bounds = tiles.num_runs * heads_kv * 2 * 4};
}

void backward(const BackwardCall& call, cudaStream_t stream) {
  prepare_rows(call, stream);
  if (call.q.element == Element::kBfloat16) {
    launch_by_head_dim<__nv_bfloat16>(call, stream);
  } else {
    launch_by_head_dim<__half>(call, stream);
  }
  finish_dq(call, stream);
}

}  // namespace distca::attention::sm90
