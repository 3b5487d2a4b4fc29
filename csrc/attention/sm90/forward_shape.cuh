#pragma once

#include "forward_items.cuh"
#include "kernels.h"
#include "ring.cuh"
#include "tile_io.cuh"

// What the warps of the forward kernel agree on: sizes, barriers and places in shared memory.
namespace distca::attention::sm90 {

template <typename T, int kHeadDim_, int kValueDim_, int kKeyRows_, int kStages_, int kWarpgroups_,
          int kRegisters_, int kProducerRegisters_>
struct ForwardShape {
  using Element = T;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kValueDim = kValueDim_;
  static constexpr int kKeyRows = kKeyRows_;
  static constexpr int kStages = kStages_;  // of keys, and of values
  static constexpr int kWarpgroups = kWarpgroups_;
  static constexpr int kRegisters = kRegisters_;
  static constexpr int kProducerRegisters = kProducerRegisters_;
  static constexpr bool kIsCapped = false;
  static constexpr int kRows = 64 * kWarpgroups;
  static constexpr int kThreads = 128 * (kWarpgroups + 1);
  // Registers of a thread when the kernel is launched: a block has 64K, and threads get multiples
  // of 8. Warpgroups exchange them within this total, and one that asks for more than are left
  // waits forever.
  static constexpr int kLaunchRegisters = 65536 / kThreads / 8 * 8;
  static_assert(kWarpgroups * kRegisters + kProducerRegisters <=
                (kWarpgroups + 1) * kLaunchRegisters);
  // Whether a warpgroup skips the first blocks of a tile if its rows see none of their keys. Most
  // causal tiles of more than 128 rows have such blocks. In tiles of 128 rows and blocks of 128
  // keys they are rare, and the code to skip them costs 3 %.
  static constexpr bool kSkipsBlocks = kRows > kKeyBlockRows;
  // Columns of a tile's queries that warpgroups keep in registers. Products then read less from
  // shared memory, which saves power. At other widths there are not enough registers.
  static constexpr int kHeldColumns = kHeadDim >= 128 && kValueDim == 128 ? 128 : 0;
  // Whether these are all columns. If so, results take the place of queries in shared memory, and
  // the copy engine stores them. Each warpgroup has a warp that starts its copies. At other widths,
  // the threads that compute store results. At 128 this would cost 2 %, because products never
  // pause there.
  static constexpr bool kHoldsQueries = kHeldColumns == kHeadDim;
  // Stages of queries. Only at 64 is there room for two.
  static constexpr int kQueryStages = kHoldsQueries || kHeadDim > 128 ? 1 : 2;
  // Whether warpgroups take turns to issue products, so that one's softmax overlaps another's
  // products. Otherwise all of them may run their softmax at the same time. Measured without turns:
  // 4 % slower at 64, up to 4 % slower at (192, 128), 1 % faster at 128, and up to 1 % faster at
  // 192.
  static constexpr bool kTakesTurns = kHeadDim == 64 || kHeadDim > kValueDim;
  using Queries = SharedTile<kRows, kHeadDim>;
  using Keys = SharedTile<kKeyRows, kHeadDim>;
  using Values = SharedTile<kKeyRows, kValueDim>;
};

// The first hardware barrier of each kind. Every warpgroup has one of each.
constexpr uint32_t kTurnBarrier = 1;
constexpr uint32_t kStoreBarrier = kTurnBarrier + 4;
// Threads of a warpgroup and of the warp that stores its results.
constexpr uint32_t kStoreThreads = 128 + 32;

// Indices of barriers in shared memory, one for each stage.
template <typename Shape>
struct ForwardBarriers {
  static constexpr uint32_t kQueryFull = 0;
  static constexpr uint32_t kQueryEmpty = kQueryFull + 2;
  static constexpr uint32_t kKeyFull = kQueryEmpty + 2;
  static constexpr uint32_t kKeyEmpty = kKeyFull + Shape::kStages;
  static constexpr uint32_t kValueFull = kKeyEmpty + Shape::kStages;
  static constexpr uint32_t kValueEmpty = kValueFull + Shape::kStages;
  static constexpr uint32_t kJobFull = kValueEmpty + Shape::kStages;
  static constexpr uint32_t kJobEmpty = kJobFull + 2;
  static constexpr uint32_t kCount = kJobEmpty + 2;
};

// Offsets in shared memory: stages of queries, keys and values, and two jobs.
template <typename Shape>
struct ForwardMemory {
  static constexpr uint32_t kQuery = 0;
  static constexpr uint32_t kKey = kQuery + Shape::kQueryStages * Shape::Queries::kBytes;
  static constexpr uint32_t kValue = kKey + Shape::kStages * Shape::Keys::kBytes;
  static constexpr uint32_t kJobs = kValue + Shape::kStages * Shape::Values::kBytes;
  static constexpr uint32_t kStarts = kJobs + 2 * sizeof(Job<Shape::kWarpgroups>);
  static constexpr uint32_t kBarriers = kStarts + 2 * sizeof(int32_t);
  static constexpr uint32_t kBytes = kBarriers + kBarrierBytes * ForwardBarriers<Shape>::kCount;
  static_assert(kJobs % alignof(Job<Shape::kWarpgroups>) == 0 && kBarriers % kBarrierBytes == 0);
  static_assert(kBytes <= kMaxSharedBytes);
};

}  // namespace distca::attention::sm90
