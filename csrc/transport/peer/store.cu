#include <ATen/cuda/CUDAContextLight.h>

#include <algorithm>

#include "device.cuh"

namespace distca::transport::peer {
namespace {

constexpr int kThreads = 512;
constexpr int kFew = 60;  // blocks of a launch that sends few parameters
constexpr int kMany = 600;
constexpr int64_t kBytesPerCta = int64_t{8} << 10;

// Nothing else of this rank runs, because the stream's next kernel waits. But blocks that wait for
// buffers must leave multiprocessors to the kernels that free them.
constexpr int max_ctas(int num_multiprocessors) {
  constexpr int kMost = 128, kLeft = 4;
  return std::clamp(num_multiprocessors - kLeft, 1, kMost);
}
static_assert(max_ctas(132) == 128 && max_ctas(114) == 110 && max_ctas(78) == 74);

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
  uint8_t ranks[kMaxPeers];             // by target
  uint64_t are_whole;                   // bits of targets whose last block is here
  CallWord word;
  uint32_t last_use;
  Call call;
  uint32_t* counters;
};

// All of it goes to the device with every launch, whatever it holds: so there are two sizes.
template <int kCapacity>
struct StoreArguments {
  StoreTargets targets;
  int64_t words_until[kCapacity];  // words of the target in its blocks up to this one
  StoreBlock blocks[kCapacity];
};
static_assert(sizeof(StoreArguments<kFew>) <= 4096 && sizeof(StoreArguments<kMany>) <= 32764);

// Those of all ranks, for all threads of a block.
class Buffers {
 public:
  __device__ Buffers(const Board& board, uint32_t last_use) : board_(board), last_use_(last_use) {}

  // Whether nobody needs what is there, once that is known.
  __device__ __forceinline__ bool are_free() {
    if (!is_known_) are_free_ = await_buffers(board_, last_use_);
    is_known_ = true;
    return are_free_;
  }

 private:
  const Board& board_;
  uint32_t last_use_;
  bool is_known_ = false;
  bool are_free_ = false;
};

// Words [begin, end) of a block, the first of them loaded before the buffers are free. Short code
// for blocks without gaps: its way to the multiprocessor is part of a small store's time.
template <typename WordT, bool kHasGaps>
__device__ __forceinline__ void store_words(const StoreBlock& block, int64_t begin, int64_t end,
                                            Buffers& buffers) {
  constexpr int kUnrolled = 4;
  for (; begin < end; begin += kUnrolled * kThreads) {
    WordT words[kUnrolled];
    int64_t rows[kUnrolled];
#pragma unroll
    for (int j = 0; j < kUnrolled; ++j) {
      const int64_t i = begin + j * kThreads + threadIdx.x;
      rows[j] = kHasGaps ? i / block.row_words : 0;
      const auto* src = reinterpret_cast<const WordT*>(block.src + rows[j] * block.src_stride);
      if (i < end) words[j] = src[i - rows[j] * block.row_words];
    }
    if (!buffers.are_free()) return;
#pragma unroll
    for (int j = 0; j < kUnrolled; ++j) {
      const int64_t i = begin + j * kThreads + threadIdx.x;
      auto* dst = reinterpret_cast<WordT*>(block.dst + rows[j] * block.dst_stride);
      if (i < end) dst[i - rows[j] * block.row_words] = words[j];
    }
  }
}

template <typename WordT>
__device__ __forceinline__ void store_words(const StoreBlock& block, int64_t begin, int64_t end,
                                            Buffers& buffers) {
  if (block.row_words == 0) {
    store_words<WordT, false>(block, begin, end, buffers);
  } else {
    store_words<WordT, true>(block, begin, end, buffers);
  }
}

// gridDim.x blocks share a target's words evenly, whichever of its row blocks they are of.
template <int kCapacity>
__device__ __forceinline__ void store_share(const StoreArguments<kCapacity>& a, int target,
                                            Buffers& buffers) {
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
      store_words<uint4>(a.blocks[i], begin, end, buffers);
    } else {
      store_words<uint32_t>(a.blocks[i], begin, end, buffers);
    }
  }
}

// blockIdx.y is the target.
template <int kCapacity>
__global__ void __launch_bounds__(kThreads)
    store_kernel(const __grid_constant__ StoreArguments<kCapacity> a) {
  admit_dependent();
  const StoreTargets& targets = a.targets;
  const Board& board = targets.board;
  const int target = static_cast<int>(blockIdx.y);
  if (blockIdx.x == 0 && target == 0) say_started(board, targets.call.epoch);
  Buffers buffers(board, targets.last_use);
  store_share(a, target, buffers);
  if (!buffers.are_free() || (targets.are_whole >> target & 1) == 0) return;
  if (!is_last(targets.counters + target, gridDim.x) || threadIdx.x != 0) return;
  store_release(
      call_word(board.words[targets.ranks[target]], targets.word, targets.call.epoch, board.rank),
      call_word_of(targets.call));
}

StoreBlock store_block_of(const RowBlock& rows) {
  const auto bits = reinterpret_cast<uintptr_t>(rows.src) | reinterpret_cast<uintptr_t>(rows.dst) |
                    static_cast<uintptr_t>(rows.src_stride | rows.dst_stride | rows.row_bytes);
  const uint32_t word_bytes = bits % 16 == 0 ? 16 : 4;
  const auto row_words = static_cast<uint32_t>(rows.has_gaps() ? rows.row_bytes / word_bytes : 0);
  return {rows.src, rows.dst, rows.src_stride, rows.dst_stride, row_words, word_bytes};
}

// Launches that hold kMany blocks at most.
class StoreLaunch {
 public:
  StoreLaunch(const Board& board, CallWord word, uint32_t last_use, const Call& call,
              uint32_t* counters, cudaStream_t stream)
      : targets_{board, {}, {}, 0, word, last_use, call, counters}, stream_(stream) {}

  void add(const Parcel& parcel) {
    open(parcel.rank);
    for (const RowBlock& rows : parcel.blocks) {
      if (blocks_.size() == kMany) {
        launch();
        open(parcel.rank);
      }
      add(rows);
    }
    targets_.are_whole |= uint64_t{1} << (num_targets_ - 1);
  }

  void launch() {
    if (num_targets_ == 0) return;
    targets_.first_block[num_targets_] = static_cast<uint16_t>(blocks_.size());
    blocks_.size() <= kFew ? launch_with<kFew>() : launch_with<kMany>();
    blocks_.clear();
    words_until_.clear();
    targets_.are_whole = 0;
    num_targets_ = 0;
    most_bytes_ = 0;
  }

 private:
  void open(int64_t rank) {
    targets_.first_block[num_targets_] = static_cast<uint16_t>(blocks_.size());
    targets_.ranks[num_targets_] = static_cast<uint8_t>(rank);
    ++num_targets_;
    bytes_of_target_ = words_of_target_ = 0;
  }

  void add(const RowBlock& rows) {
    blocks_.push_back(store_block_of(rows));
    words_of_target_ += rows.num_bytes() / blocks_.back().word_bytes;
    words_until_.push_back(words_of_target_);
    bytes_of_target_ += rows.num_bytes();
    most_bytes_ = std::max(most_bytes_, bytes_of_target_);
  }

  template <int kCapacity>
  void launch_with() const {
    StoreArguments<kCapacity> arguments = {targets_, {}, {}};
    std::copy(words_until_.begin(), words_until_.end(), arguments.words_until);
    std::copy(blocks_.begin(), blocks_.end(), arguments.blocks);
    const int num_multiprocessors = at::cuda::getCurrentDeviceProperties()->multiProcessorCount;
    const int64_t ctas = (most_bytes_ + kBytesPerCta - 1) / kBytesPerCta;
    const int64_t most_ctas = std::max(1, max_ctas(num_multiprocessors) / num_targets_);
    const dim3 grid(static_cast<unsigned>(std::clamp<int64_t>(ctas, 1, most_ctas)),
                    static_cast<unsigned>(num_targets_));
    store_kernel<<<grid, kThreads, 0, stream_>>>(arguments);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  }

  StoreTargets targets_;
  std::vector<int64_t> words_until_;
  std::vector<StoreBlock> blocks_;
  cudaStream_t stream_;
  int num_targets_ = 0;
  int64_t words_of_target_ = 0;
  int64_t bytes_of_target_ = 0;
  int64_t most_bytes_ = 0;
};

}  // namespace

void store(const Board& board, const std::vector<Parcel>& parcels, CallWord word, uint32_t last_use,
           const Call& call, uint32_t* counters, cudaStream_t stream) {
  StoreLaunch launch(board, word, last_use, call, counters, stream);
  for (const Parcel& parcel : parcels) launch.add(parcel);
  launch.launch();
}

}  // namespace distca::transport::peer
