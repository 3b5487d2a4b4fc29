#pragma once

#include "backward_pair.cuh"
#include "backward_rows.cuh"
#include "core/rows.h"
#include "kernels.h"
#include "order.cuh"
#include "ring.cuh"
#include "softcap.cuh"
#include "tile_io.cuh"

// What the warps of the backward kernel agree on: sizes, places in shared memory, barriers, and
// what they tell each other.
namespace distca::attention::sm90 {

struct BackwardArguments {
  CUtensorMap q, k, v, grad_out, staged_dk, staged_dv;
  RowTensor dk, dv;
  const QueryTile* tiles;
  const KeyBlock* blocks;
  int32_t* ticket;
  int32_t num_items;
  int32_t num_in_turn;  // see Blocks
  int32_t heads_q;
  int32_t heads_kv;
  int32_t heads_per_key;
  const uint8_t* row_stats;
  void* dq_sums;
  Window window;
  float softmax_scale;
  Softcap cap;
};

template <typename T, int kHeadDim_, int kValueDim_, bool kDeterministic_>
struct BackwardShape {
  using Element = T;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kValueDim = kValueDim_;
  // Above 128, dK and dV of 64 keys exceed one warpgroup's registers (see backward_wide.cuh), and
  // blocks work in pairs (see backward_pair.cuh).
  static constexpr bool kIsWide = kHeadDim > 128;
  static constexpr bool kDeterministic = kDeterministic_;
  static constexpr bool kIsCapped = false;
  // Whether the softmax overlaps the product of dP instead of following it: see wait_for_room. At
  // 64 this gains up to 3 %; at 128 it costs as much in deterministic mode on short documents.
  static constexpr bool kSoftmaxFirst = kHeadDim_ == 64;
  static constexpr int kRows = backward_tile_rows(kHeadDim);
  // Keys of an item. The two blocks of a pair take the halves of a key block as items.
  static constexpr int kKeyRows = kIsWide ? kKeyPartRows : kKeyBlockRows;
  // See head_group. Above 128, additions to dQ take a larger share of the time, and fewer of them
  // miss L2 if fewer heads are in work. At 256, groups of 1024 would make the kernel 3 to 4 %
  // slower on documents of 8K and 32K tokens, and groups of 256 would make it 4 to 6 % slower on
  // lists of shorter documents.
  static constexpr int32_t kItemsOfGroup = kIsWide ? 128 : sm90::kItemsOfGroup;
  static constexpr int kBlocks = kIsWide ? 2 : 1;  // of a cluster
  // Stages of queries, and of dO. Wide shapes have one more buffer than stages: see TileBuffers.
  static constexpr int kStages = kIsWide && kValueDim == 128 ? 3 : 2;
  static constexpr int kGradOutStages = kHeadDim == 256 ? 1 : kStages;  // there is no room for two
  static constexpr int kThreads = 3 * 128;
  // Registers of a thread. The kernel is launched with 168 for each thread of its three warpgroups.
  // If kFeedRegisters + 2 * kKeyRegisters exceeded 504, a warpgroup would wait for them forever.
  static constexpr int kFeedRegisters = 24;
  static constexpr int kKeyRegisters = 240;
  using Queries = SharedTile<kRows, kHeadDim>;
  using GradOuts = SharedTile<kRows, kValueDim>;
  using Keys = SharedTile<kKeyRows, kHeadDim>;
  using Values = SharedTile<kKeyRows, kValueDim>;
  using GradScores = SharedTile<kKeyRows, kRows>;
  using PartnerKeys = SharedTile<kKeyRows, 128>;  // two pieces: see Pair
  static_assert(!kIsWide ||
                (Keys::kBytes == Queries::kBytes && Values::kBytes == GradOuts::kBytes));
};

// Keys of a key block, kKeyRows at most, and a kv head; num_rows is -1 after the last item.
struct alignas(16) BackwardItem {
  int32_t k_row;
  int32_t num_rows;
  int32_t partner_row;  // the first key of the partner's item, if blocks work in pairs
  int32_t num_partner_rows;
  int32_t key_head;
  int32_t num_tiles;  // of all query heads together
  int32_t first_tile;
  int32_t last_tile;
};

__device__ __forceinline__ RowRange rows_of(const BackwardItem& item) {
  return {item.key_head, item.k_row, item.num_rows};
}

// What key warpgroups need to know of a staged query tile.
struct alignas(16) StagedTile {
  int32_t position;
  int32_t k_begin;
  int32_t k_end;
  int32_t index;  // of its dQ among the sums
};

constexpr int kItemSlots = 2;
constexpr int kStatStages = 2;

// A statistic of a query row. To select it from RowStats, a product multiplies them by eight equal
// rows, which are 1 at the statistic's pieces and 0 elsewhere: see TileSteps::multiply_stats.
enum class RowStat : uint32_t { kMinusLogSum, kMinusDelta };
constexpr uint32_t kEightStatsBytes = 8 * sizeof(RowStats);

// Rings of barriers. The first four have kStages barriers each. The others have two, one for each
// slot or buffer. If a ring has only one stage, slot or buffer, its other barriers are not used.
enum BackwardBarrier : uint32_t {
  kQueryFull,
  kGradOutFull,
  kQueryEmpty,
  kGradOutEmpty,
  kItemFull,
  kItemAsked,
  kItemEmpty,
  kGradScoreFull,
  kGradScoreEmpty,
  kNumCommon,
  // Up to head_dim 128.
  kKeyFull = kNumCommon,
  kValueFull,
  kItemStaged,
  kNumOfNarrow,
  // Above head_dim 128.
  kProbabilityFull = kNumCommon,
  kProbabilityEmpty,
  kPartnerFull,  // dS
  kPartnerKeyFull,
  kPartnerKeyEmpty,
  kTicketFull,
  kTicketRead,
  kNumOfWide
};
constexpr uint32_t kNumStageRings = 4;
static_assert(kItemFull == kNumStageRings);

// Returns the index of the first barrier of ring `which`. For the index after the last ring, this
// is the number of all barriers.
template <typename Shape>
constexpr __host__ __device__ uint32_t first_barrier(uint32_t which) {
  return which < kNumStageRings ? which * Shape::kStages
                                : kNumStageRings * Shape::kStages + 2 * (which - kNumStageRings);
}

// Offsets in shared memory. Ones and statistics come first: products read them with strides of 0,
// which compute-sanitizer takes for reads of up to 4096 bytes in sequence. Those must end inside
// the block's memory. Up to head_dim 128, there are two slots of keys and values, so that the next
// item's arrive while this one's are in use. Above 128, keys and values share buffers with queries
// and dO: see TileBuffers. There are two or three stages of queries and of dO (at 256, one of dO),
// two stages of statistics, and two buffers of dS. Deterministic mode also has stages of quanta.
// Wide shapes also have P, passed from one warpgroup to the other, the ticket that the leader
// sends, columns of the partner's keys, and two buffers for the partner's dS.
template <typename Shape>
struct BackwardMemory {
  static constexpr uint32_t kOnes = 0;
  static constexpr uint32_t kStats = kOnes + 2 * kEightStatsBytes;
  static constexpr uint32_t kStatsBytes = quanta_offset(Shape::kRows);
  static constexpr uint32_t kQuanta = kStats + kStatStages * kStatsBytes;
  // Inverse quanta of a tile are needed until its dQ is added, one tile later. They come with dO,
  // and wide shapes may give the next tile's dO back before that.
  static constexpr uint32_t kQuantaStages = Shape::kGradOutStages + (Shape::kIsWide ? 2 : 1);
  static constexpr uint32_t kQuantaBytes = Shape::kRows * kQuantumBytes;
  static constexpr uint32_t kTiles =
      kQuanta + (Shape::kDeterministic ? kQuantaStages * kQuantaBytes : 0);
  static constexpr uint32_t kItems = kTiles + Shape::kStages * sizeof(StagedTile);
  static constexpr uint32_t kBarriers = kItems + kItemSlots * sizeof(BackwardItem);
  static constexpr uint32_t kNumRings = Shape::kIsWide ? kNumOfWide : kNumOfNarrow;
  static constexpr uint32_t kTicket = kBarriers + kBarrierBytes * first_barrier<Shape>(kNumRings);
  static constexpr uint32_t kEndOfSmall = kTicket + (Shape::kIsWide ? sizeof(int32_t) : 0);
  static constexpr uint32_t kSlot = round_up(kEndOfSmall, kPanelAlignment);
  static constexpr uint32_t kSlotBytes = Shape::Keys::kBytes + Shape::Values::kBytes;
  static constexpr uint32_t kQuery = kSlot + (Shape::kIsWide ? 0 : kItemSlots * kSlotBytes);
  static constexpr uint32_t kExtraBuffers = Shape::kIsWide ? 1 : 0;
  static constexpr uint32_t kGradOut =
      kQuery + (Shape::kStages + kExtraBuffers) * Shape::Queries::kBytes;
  static constexpr uint32_t kGradScore =
      kGradOut + (Shape::kGradOutStages + kExtraBuffers) * Shape::GradOuts::kBytes;
  static constexpr uint32_t kProbability = kGradScore + 2 * Shape::GradScores::kBytes;
  static constexpr uint32_t kPartnerKey =
      kProbability + (Shape::kIsWide ? Shape::kKeyRows * Shape::kRows * sizeof(float) : 0);
  static constexpr uint32_t kPartnerScore =
      kPartnerKey + (Shape::kIsWide ? Shape::PartnerKeys::kBytes : 0);
  static constexpr uint32_t kBytes =
      kPartnerScore + (Shape::kIsWide ? 2 * Shape::GradScores::kBytes : 0);
  static_assert(kStats % 16 == 0 && kTiles % alignof(StagedTile) == 0);
  static_assert(kItems % alignof(BackwardItem) == 0 && kBarriers % kBarrierBytes == 0);
  static_assert(kBytes <= kMaxSharedBytes);

  // Offset of a buffer of queries or dO, by its index.
  static __device__ uint32_t query(uint32_t buffer) {
    return kQuery + buffer * Shape::Queries::kBytes;
  }
  static __device__ uint32_t grad_out(uint32_t buffer) {
    return kGradOut + buffer * Shape::GradOuts::kBytes;
  }
  // Offsets for item n or tile i, both counted over all items of the block. key() and value() are
  // for head_dim up to 128 only.
  static __device__ uint32_t key(uint32_t n) {
    return kSlot + Ring<kItemSlots>::stage(n) * kSlotBytes;
  }
  static __device__ uint32_t value(uint32_t n) { return key(n) + Shape::Keys::kBytes; }
  static __device__ uint32_t grad_score(uint32_t i) {
    return kGradScore + Ring<2>::stage(i) * Shape::GradScores::kBytes;
  }
  static __device__ uint32_t partner_score(uint32_t i) {
    return kPartnerScore + Ring<2>::stage(i) * Shape::GradScores::kBytes;
  }
  static __device__ uint32_t stats(uint32_t i) {
    return kStats + Ring<kStatStages>::stage(i) * kStatsBytes;
  }
  static __device__ uint32_t ones(RowStat stat) {
    return kOnes + static_cast<uint32_t>(stat) * kEightStatsBytes;
  }
  static __device__ uint32_t quanta(uint32_t i) {
    return kQuanta + i % kQuantaStages * kQuantaBytes;
  }
};

// Buffers of a wide shape. Keys and queries, which are equally large, share one more buffer than
// they have stages, and so do values and dO. An item's keys arrive in the next stage in turn, and
// its tiles in the stages after that. The keys stay in use while the tiles pass by, so they keep
// the buffer in which they arrived, and their stage gets the buffer of the previous item's keys
// instead. That buffer may be filled again once all warps are done with the previous keys. The same
// holds for values and dO. With a single stage of dO, values and dO swap their two buffers with
// every item.
template <typename Shape>
class TileBuffers {
 public:
  using Memory = BackwardMemory<Shape>;
  using Use = StageUse<Shape::kStages>;

  // Exchanges the buffer of the stage at `use`, which the next keys fill, for the current keys'.
  __device__ __forceinline__ void take_keys(Use use) {
    const uint32_t swapped = of_stage(use) ^ of_keys();
    places_ ^= swapped << kBits * use.stage() ^ swapped << kKeysAt ^ 1 << kParityAt;
  }

  // Keeps the compiler from holding offsets in registers across the tiles of an item.
  __device__ __forceinline__ void forget_offsets() { places_ = in_register(places_); }

  // Returns how many items with tiles came before this one, modulo 2; 1 before the first.
  __device__ __forceinline__ uint32_t parity() const { return places_ >> kParityAt; }

  // Offsets in shared memory.
  __device__ __forceinline__ uint32_t keys() const { return Memory::query(of_keys()); }
  __device__ __forceinline__ uint32_t queries(Use use) const {
    return Memory::query(of_stage(use));
  }
  __device__ __forceinline__ uint32_t values() const {
    return Memory::grad_out(kIsSingle ? parity() : of_keys());
  }
  __device__ __forceinline__ uint32_t grad_outs(Use use) const {
    return Memory::grad_out(kIsSingle ? 1 - parity() : of_stage(use));
  }

  // Returns the use of a stage of dO for the keys or tile whose stage of queries is at `use`.
  static __device__ __forceinline__ auto grad_out_use(Use use) {
    if constexpr (kIsSingle) {
      return use.count;
    } else {
      return use;
    }
  }

 private:
  static constexpr bool kIsSingle = Shape::kGradOutStages == 1;
  static constexpr int kBits = 4;  // of a buffer's index
  static constexpr int kKeysAt = kBits * Shape::kStages;
  static constexpr int kParityAt = kKeysAt + kBits;
  static_assert(kIsSingle || Shape::kGradOutStages == Shape::kStages);

  __device__ __forceinline__ uint32_t of_stage(Use use) const {
    return places_ >> kBits * use.stage() & ((1 << kBits) - 1);
  }
  __device__ __forceinline__ uint32_t of_keys() const {
    return places_ >> kKeysAt & ((1 << kBits) - 1);
  }

  // Each stage's buffer, that of the keys, and the parity, in one register.
  uint32_t places_ = 1 << kParityAt | Shape::kStages << kKeysAt |
                     (Shape::kStages > 2 ? 2 << 2 * kBits : 0) | 1 << kBits;
};

// Returns the ring of barriers `which`, in a block whose shared memory begins at `shared`.
template <typename Shape, int kStages>
__device__ __forceinline__ Ring<kStages> ring_of(uint32_t shared, BackwardBarrier which) {
  using Memory = BackwardMemory<Shape>;
  return ring_at<kStages>(shared + Memory::kBarriers, first_barrier<Shape>(which));
}

// What every thread of the kernel has.
template <typename Shape>
struct BackwardThread {
  const BackwardArguments& arguments;
  uint32_t shared;

  __device__ __forceinline__ Ring<2> ring(BackwardBarrier which) const {
    return ring_of<Shape, 2>(shared, which);
  }
  __device__ __forceinline__ Ring<1> single_ring(BackwardBarrier which) const {
    return ring_of<Shape, 1>(shared, which);
  }
  __device__ __forceinline__ Ring<Shape::kStages> stage_ring(BackwardBarrier which) const {
    return ring_of<Shape, Shape::kStages>(shared, which);
  }
  __device__ __forceinline__ Ring<Shape::kGradOutStages> grad_out_ring(
      BackwardBarrier which) const {
    return ring_of<Shape, Shape::kGradOutStages>(shared, which);
  }

  __device__ __forceinline__ StagedTile& staged_tile(uint32_t stage) const {
    return in_block<StagedTile>(BackwardMemory<Shape>::kTiles)[stage];
  }
  __device__ __forceinline__ BackwardItem& item_slot(uint32_t n) const {
    return in_block<BackwardItem>(BackwardMemory<Shape>::kItems)[Ring<kItemSlots>::stage(n)];
  }

  // Waits for the n-th item and returns it. Its num_rows is -1 after the last.
  __device__ __forceinline__ const BackwardItem& item(uint32_t n) const {
    ring(kItemFull).wait(n);
    return item_slot(n);
  }
};

// Returns how many threads or warps arrive at a barrier of ring `which`. At kQueryFull, these are
// for queries and for their statistics. In a pair, three threads of the feed arrive at kItemAsked:
// those that run bring_tiles, send_grad_scores and bring_partner_keys. At kGradScoreEmpty, the key
// warps of both blocks arrive, because all of them read dS of both.
template <typename Shape>
__device__ __forceinline__ uint32_t num_arrivals(uint32_t which) {
  if (which == kQueryFull) return 2;
  if (which == kQueryEmpty || which == kGradOutEmpty) return 8;
  if constexpr (Shape::kIsWide) {
    if (which == kItemAsked) return 3;
    if (which == kGradScoreEmpty) return 16;
    if (which == kItemEmpty || which == kPartnerKeyEmpty) return 8;
    if (which == kGradScoreFull || which == kProbabilityFull || which == kProbabilityEmpty) {
      return 4;
    }
  } else {
    if (which == kGradScoreFull || which == kGradScoreEmpty || which == kItemStaged) return 8;
  }
  return 1;
}

template <typename Shape>
__device__ __forceinline__ void init_barriers(uint32_t shared) {
  using Memory = BackwardMemory<Shape>;
  for (uint32_t which = 0; which < Memory::kNumRings; ++which) {
    const uint32_t end = first_barrier<Shape>(which + 1);
    for (uint32_t i = first_barrier<Shape>(which); i < end; ++i) {
      barrier_init(shared + Memory::kBarriers + kBarrierBytes * i, num_arrivals<Shape>(which));
    }
  }
  barrier_init_fence();
}

// Writes the rows that select each RowStat. The block must synchronise before it uses them.
template <typename Shape>
__device__ __forceinline__ void write_ones() {
  constexpr uint32_t kColumns = sizeof(RowStats) / sizeof(__nv_bfloat16);
  if (threadIdx.x < 2 * 8 * kColumns) {
    const uint32_t stat = threadIdx.x / (8 * kColumns), column = threadIdx.x % kColumns;
    in_block<__nv_bfloat16>(BackwardMemory<Shape>::kOnes)[threadIdx.x] =
        __float2bfloat16(column / RowStats::kPieces == stat ? 1.f : 0.f);
    fence_shared_writes();
  }
}

}  // namespace distca::attention::sm90
