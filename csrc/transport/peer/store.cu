#include <algorithm>

#include "launch.cuh"
#include "words.cuh"

namespace distca::transport::peer {
namespace {

constexpr int kThreads = 512;
constexpr int kFew = 54;  // blocks, and flags, of a launch that sends few parameters
constexpr int kMany = 560;
constexpr int64_t kBytesPerCta = int64_t{16} << 10;
constexpr int kMaxCtas = 128;  // nothing else runs: the stream's next kernel waits

// Rows in words of one size; a block without gaps on either side is one row.
struct StoreBlock {
  const char* src;
  char* dst;
  int64_t src_stride;
  int64_t dst_stride;
  uint32_t row_words;   // 0 for one row
  uint32_t word_bytes;  // 16 or 4
};

struct StoreTargets {
  Board board;
  uint16_t first_block[kMaxPeers + 1];  // by target
  uint16_t first_flag[kMaxPeers + 1];
  uint32_t last_use;
  uint32_t epoch;
  uint32_t* counters;
};

// All of it goes to the device with every launch, whatever it holds: so there are two sizes.
template <int kCapacity>
struct StoreArguments {
  StoreTargets targets;
  int64_t words_until[kCapacity];  // words of the target in its blocks up to this one
  StoreBlock blocks[kCapacity];
  uint32_t* flags[kCapacity];
};
static_assert(sizeof(StoreArguments<kFew>) <= 4096 && sizeof(StoreArguments<kMany>) <= 32764);

// Words [begin, end) of a block. Short code for blocks without gaps: its way to the multiprocessor
// is part of a small store's time.
template <typename WordT, bool kHasGaps>
__device__ __forceinline__ void store_words(const StoreBlock& block, int64_t begin, int64_t end) {
  constexpr int kUnrolled = 4;
  for (int64_t first = begin + threadIdx.x; first < end; first += kUnrolled * kThreads) {
    WordT words[kUnrolled];
    int64_t rows[kUnrolled];
#pragma unroll
    for (int j = 0; j < kUnrolled; ++j) {
      const int64_t i = first + j * kThreads;
      rows[j] = kHasGaps ? i / block.row_words : 0;
      const auto* src = reinterpret_cast<const WordT*>(block.src + rows[j] * block.src_stride);
      if (i < end) words[j] = src[i - rows[j] * block.row_words];
    }
#pragma unroll
    for (int j = 0; j < kUnrolled; ++j) {
      const int64_t i = first + j * kThreads;
      auto* dst = reinterpret_cast<WordT*>(block.dst + rows[j] * block.dst_stride);
      if (i < end) dst[i - rows[j] * block.row_words] = words[j];
    }
  }
}

template <typename WordT>
__device__ __forceinline__ void store_words(const StoreBlock& block, int64_t begin, int64_t end) {
  if (block.row_words == 0) {
    store_words<WordT, false>(block, begin, end);
  } else {
    store_words<WordT, true>(block, begin, end);
  }
}

// gridDim.x blocks share a target's words evenly, whichever of its row blocks they are of.
template <int kCapacity>
__device__ __forceinline__ void store_share(const StoreArguments<kCapacity>& a, int target) {
  const int first_block = a.targets.first_block[target];
  const int last_block = a.targets.first_block[target + 1];
  if (first_block == last_block) return;
  const int64_t share = (a.words_until[last_block - 1] + gridDim.x - 1) / gridDim.x;
  const int64_t first = share * blockIdx.x, last = first + share;
  int64_t before = 0;
  for (int i = first_block; i < last_block && before < last; ++i) {
    const int64_t until = a.words_until[i];
    const int64_t begin = max(first, before) - before, end = min(last, until) - before;
    before = until;
    if (begin >= end) continue;
    if (a.blocks[i].word_bytes == 16) {
      store_words<uint4>(a.blocks[i], begin, end);
    } else {
      store_words<uint32_t>(a.blocks[i], begin, end);
    }
  }
}

// blockIdx.y is the target.
template <int kCapacity>
__global__ void __launch_bounds__(kThreads)
    store_kernel(const __grid_constant__ StoreArguments<kCapacity> a) {
  admit_dependent();
  const auto& [board, first_block, first_flag, last_use, epoch, counters] = a.targets;
  const int target = static_cast<int>(blockIdx.y);
  if (blockIdx.x == 0 && target == 0) say_started(board, epoch);
  await_buffers(board, last_use);
  store_share(a, target);
  if (first_flag[target] == first_flag[target + 1]) return;
  if (!is_last(counters + target, gridDim.x)) return;
  for (int i = first_flag[target] + static_cast<int>(threadIdx.x); i < first_flag[target + 1];
       i += kThreads) {
    store_release(a.flags[i], epoch);
  }
}

StoreBlock store_block_of(const RowBlock& rows) {
  const auto bits = reinterpret_cast<uintptr_t>(rows.src) | reinterpret_cast<uintptr_t>(rows.dst) |
                    static_cast<uintptr_t>(rows.src_stride | rows.dst_stride | rows.row_bytes);
  const uint32_t word_bytes = bits % 16 == 0 ? 16 : 4;
  const auto row_words = static_cast<uint32_t>(rows.has_gaps() ? rows.row_bytes / word_bytes : 0);
  return {rows.src, rows.dst, rows.src_stride, rows.dst_stride, row_words, word_bytes};
}

// Launches that hold kMany blocks at most. Flags go with the last block of their rank.
class StoreLaunch {
 public:
  StoreLaunch(const Board& board, uint32_t last_use, uint32_t epoch, uint32_t* counters,
              cudaStream_t stream)
      : targets_{board, {}, {}, last_use, epoch, counters}, stream_(stream) {}

  void open(int64_t rank) {
    end_target();
    ++num_targets_;
    rank_ = rank;
    bytes_of_target_ = words_of_target_ = 0;
  }

  void add(const RowBlock& rows) {
    if (blocks_.size() == kMany) reopen();
    blocks_.push_back(store_block_of(rows));
    words_of_target_ += rows.num_bytes() / blocks_.back().word_bytes;
    words_until_.push_back(words_of_target_);
    bytes_of_target_ += rows.num_bytes();
    most_bytes_ = std::max(most_bytes_, bytes_of_target_);
  }

  // For all that was added for the rank.
  void raise(const std::vector<int64_t>& flags) {
    for (const int64_t flag : flags) {
      if (flags_.size() == kMany) reopen();
      flags_.push_back(targets_.board.words[rank_] + flag);
    }
  }

  void launch() {
    if (num_targets_ == 0) return;
    end_target();
    if (std::max(blocks_.size(), flags_.size()) <= kFew) {
      launch_with<kFew>();
    } else {
      launch_with<kMany>();
    }
    blocks_.clear();
    words_until_.clear();
    flags_.clear();
    num_targets_ = 0;
    most_bytes_ = 0;
  }

 private:
  // What is added from now on is of the next target.
  void end_target() {
    targets_.first_block[num_targets_] = static_cast<uint16_t>(blocks_.size());
    targets_.first_flag[num_targets_] = static_cast<uint16_t>(flags_.size());
  }

  // Goes on with the same rank.
  void reopen() {
    launch();
    open(rank_);
  }

  template <int kCapacity>
  void launch_with() const {
    StoreArguments<kCapacity> arguments = {targets_, {}, {}, {}};
    std::copy(words_until_.begin(), words_until_.end(), arguments.words_until);
    std::copy(blocks_.begin(), blocks_.end(), arguments.blocks);
    std::copy(flags_.begin(), flags_.end(), arguments.flags);
    const int64_t ctas = (most_bytes_ + kBytesPerCta - 1) / kBytesPerCta;
    const int64_t most_ctas = std::max(1, kMaxCtas / num_targets_);
    const dim3 grid(static_cast<unsigned>(std::clamp<int64_t>(ctas, 1, most_ctas)),
                    static_cast<unsigned>(num_targets_));
    store_kernel<<<grid, kThreads, 0, stream_>>>(arguments);
    check(cudaGetLastError(), "store kernel launch");
  }

  StoreTargets targets_;
  std::vector<int64_t> words_until_;
  std::vector<StoreBlock> blocks_;
  std::vector<uint32_t*> flags_;
  cudaStream_t stream_;
  int64_t rank_ = -1;  // of the last target
  int num_targets_ = 0;
  int64_t words_of_target_ = 0;
  int64_t bytes_of_target_ = 0;
  int64_t most_bytes_ = 0;
};

}  // namespace

void store(const Board& board, const std::vector<Parcel>& parcels, uint32_t last_use,
           uint32_t epoch, uint32_t* counters, cudaStream_t stream) {
  StoreLaunch launch(board, last_use, epoch, counters, stream);
  for (auto parcel = parcels.begin(); parcel != parcels.end();) {
    std::vector<int64_t> flags;
    const int64_t rank = parcel->rank;
    launch.open(rank);
    for (; parcel != parcels.end() && parcel->rank == rank; ++parcel) {
      for (const RowBlock& rows : parcel->blocks) launch.add(rows);
      flags.push_back(parcel->flag);
    }
    launch.raise(flags);
  }
  launch.launch();
}

}  // namespace distca::transport::peer
