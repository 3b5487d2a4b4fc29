#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "kernels.h"

namespace distca::transport::peer {
namespace {

constexpr int kThreads = 512;
constexpr int kMaxStoreBlocks = 480;  // of rows, in one launch
constexpr int kMaxStoreFlags = 512;
constexpr int kMaxGathers = 256;
constexpr int kMaxSources = 512;
constexpr int kMaxRanges = 512;  // of words to wait for
constexpr int64_t kMaxParameterBytes = 32764;
constexpr int64_t kBytesPerStoreCta = int64_t{16} << 10;
constexpr int kMaxStoreCtas = 128;  // nothing else runs: the stream's next kernel waits
constexpr int kFetchCtas = 96;      // leaves multiprocessors to other communication
constexpr int64_t kChunkBytes = int64_t{32} << 10;

void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  throw std::runtime_error(std::string(what) + " failed: " + cudaGetErrorString(error));
}

__device__ __forceinline__ uint32_t load_acquire(const uint32_t* word) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}

__device__ __forceinline__ void store_release(uint32_t* word, uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}

// How far ahead of the epoch the word is when it stands for it.
__device__ __forceinline__ uint32_t spin(const uint32_t* word, uint32_t epoch) {
  uint32_t ahead = load_acquire(word) - epoch;
  while (static_cast<int32_t>(ahead) < 0) {
    __nanosleep(200);
    ahead = load_acquire(word) - epoch;
  }
  return ahead;
}

__device__ __forceinline__ bool is_poisoned(uint32_t ahead) {
  return static_cast<int32_t>(ahead) >= static_cast<int32_t>(kPoison / 2);
}

// Results of a call that was cut short are worth nothing: the others go on waiting, until they
// learn why.
__device__ __forceinline__ void raise_everywhere(const Board& board, Word word, uint32_t epoch) {
  __threadfence_system();
  const int rank = static_cast<int>(threadIdx.x);
  const uint32_t* started = board.words[board.rank] + word_index(Word::kStarted, board.rank);
  if (rank >= board.num_ranks || is_poisoned(load_acquire(started) - epoch)) return;
  store_release(board.words[rank] + word_index(word, board.rank), epoch);
}

// By all threads of a block.
__device__ __forceinline__ void await_buffers(const Board& board, uint32_t last_use) {
  const uint32_t* finished = board.words[board.rank] + word_index(Word::kFinished, 0);
  if (threadIdx.x < board.num_ranks) spin(finished + threadIdx.x, last_use);
  __syncthreads();
}

__device__ __forceinline__ void say_started(const Board& board, uint32_t epoch) {
  uint32_t* started = board.words[board.rank] + word_index(Word::kStarted, board.rank);
  if (threadIdx.x != 0 || is_poisoned(load_acquire(started) - epoch)) return;
  store_release(started, epoch);
}

__global__ void start_kernel(Board board, uint32_t last_use, uint32_t epoch) {
  say_started(board, epoch);
  await_buffers(board, last_use);
}

// Whether this is the last of `num_blocks` blocks to get here, for all of its threads. What all of
// them wrote is then visible to the last.
__device__ __forceinline__ bool is_last(uint32_t* counter, uint32_t num_blocks) {
  __shared__ bool last;
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence_system();
    last = atomicAdd(counter, 1) == num_blocks - 1;
    if (last) *counter = 0;
    __threadfence_system();
  }
  __syncthreads();
  return last;
}

__global__ void publish_kernel(Board board, uint32_t epoch) {
  raise_everywhere(board, Word::kResults, epoch);
}

struct AwaitArguments {
  const uint32_t* words;
  uint32_t epoch;
  int num_ranges;
  struct {
    uint32_t first, last;
  } ranges[kMaxRanges];
};

__global__ void await_kernel(const __grid_constant__ AwaitArguments a) {
  for (int i = 0; i < a.num_ranges; ++i) {
    for (uint32_t word = a.ranges[i].first + threadIdx.x; word < a.ranges[i].last;
         word += blockDim.x) {
      spin(a.words + word, a.epoch);
    }
  }
}

// Rows in words of one size; a block without gaps on either side is one row.
struct StoreBlock {
  const char* src;
  char* dst;
  int64_t src_stride;
  int64_t dst_stride;
  int64_t num_words;
  uint32_t row_words;
  uint32_t word_bytes;  // 16 or 4
};

struct StoreArguments {
  StoreBlock blocks[kMaxStoreBlocks];
  uint16_t first_block[kMaxPeers + 1];  // by target
  int64_t num_words[kMaxPeers];
  uint16_t first_flag[kMaxPeers + 1];
  uint32_t* flags[kMaxStoreFlags];
  Board board;
  uint32_t last_use;
  uint32_t epoch;
  uint32_t* counters;
};
static_assert(sizeof(StoreArguments) <= kMaxParameterBytes);

// Words [begin, end) of a block.
template <typename WordT>
__device__ __forceinline__ void store_words(const StoreBlock& block, int64_t begin, int64_t end) {
  constexpr int kUnrolled = 4;
  const auto at = [&](auto* first, int64_t stride, int64_t i) {
    const int64_t row = block.num_words == block.row_words ? 0 : i / block.row_words;
    using Word = std::conditional_t<std::is_const_v<std::remove_pointer_t<decltype(first)>>,
                                    const WordT, WordT>;
    return reinterpret_cast<Word*>(first + row * stride) + (i - row * block.row_words);
  };
  int64_t i = begin + threadIdx.x;
  for (; i + (kUnrolled - 1) * kThreads < end; i += kUnrolled * kThreads) {
    WordT words[kUnrolled];
#pragma unroll
    for (int j = 0; j < kUnrolled; ++j)
      words[j] = *at(block.src, block.src_stride, i + j * kThreads);
#pragma unroll
    for (int j = 0; j < kUnrolled; ++j)
      *at(block.dst, block.dst_stride, i + j * kThreads) = words[j];
  }
  for (; i < end; i += kThreads)
    *at(block.dst, block.dst_stride, i) = *at(block.src, block.src_stride, i);
}

// blockIdx.y is the target; gridDim.x blocks share its words evenly, whichever block they are of.
__global__ void __launch_bounds__(kThreads) store_kernel(const __grid_constant__ StoreArguments a) {
  const int target = static_cast<int>(blockIdx.y);
  if (blockIdx.x == 0 && target == 0) say_started(a.board, a.epoch);
  await_buffers(a.board, a.last_use);
  const int64_t share = (a.num_words[target] + gridDim.x - 1) / gridDim.x;
  const int64_t first = share * blockIdx.x, last = first + share;
  int64_t before = 0;
  for (int i = a.first_block[target]; i < a.first_block[target + 1] && before < last; ++i) {
    const StoreBlock& block = a.blocks[i];
    const int64_t begin = max(first - before, int64_t{0});
    const int64_t end = min(last - before, block.num_words);
    before += block.num_words;
    if (begin >= end) continue;
    if (block.word_bytes == 16) {
      store_words<uint4>(block, begin, end);
    } else {
      store_words<uint32_t>(block, begin, end);
    }
  }
  const int first_flag = a.first_flag[target], last_flag = a.first_flag[target + 1];
  if (first_flag == last_flag || !is_last(a.counters + target, gridDim.x)) return;
  for (int i = first_flag + static_cast<int>(threadIdx.x); i < last_flag; i += kThreads) {
    store_release(a.flags[i], a.epoch);
  }
}

struct FetchSource {
  const char* data;
  int32_t rank;
};

struct FetchArguments {
  char* dst[kMaxGathers];
  int64_t num_bytes[kMaxGathers];
  uint32_t first_chunk[kMaxGathers + 1];
  uint16_t first_source[kMaxGathers + 1];
  Taking taking[kMaxGathers];
  FetchSource sources[kMaxSources];
  Board board;
  uint32_t* counter;
  uint32_t epoch;
  int num_gathers;
  bool is_last;  // of the launches of a call
};
static_assert(sizeof(FetchArguments) <= kMaxParameterBytes);

template <typename T>
__device__ __forceinline__ void add_to(float (&sum)[8], const uint4& words) {
  using Pair = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
  const auto* pairs = reinterpret_cast<const Pair*>(&words);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float2 values;
    if constexpr (std::is_same_v<T, __half>) {
      values = __half22float2(pairs[i]);
    } else {
      values = __bfloat1622float2(pairs[i]);
    }
    sum[2 * i] += values.x;
    sum[2 * i + 1] += values.y;
  }
}

template <typename T>
__device__ __forceinline__ uint4 rounded(const float (&sum)[8]) {
  using Pair = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
  uint4 words;
  auto* pairs = reinterpret_cast<Pair*>(&words);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (std::is_same_v<T, __half>) {
      pairs[i] = __floats2half2_rn(sum[2 * i], sum[2 * i + 1]);
    } else {
      pairs[i] = __floats2bfloat162_rn(sum[2 * i], sum[2 * i + 1]);
    }
  }
  return words;
}

// dst and sources from byte `begin` of a gather on.
template <typename WordT>
__device__ __forceinline__ void copy_chunk(char* dst, const char* src, int64_t num_bytes) {
  const int64_t num_words = num_bytes / static_cast<int64_t>(sizeof(WordT));
  const auto* from = reinterpret_cast<const WordT*>(src);
  auto* to = reinterpret_cast<WordT*>(dst);
#pragma unroll 4
  for (int64_t i = threadIdx.x; i < num_words; i += kThreads) to[i] = from[i];
}

template <typename T>
__device__ __forceinline__ void add_chunk(char* dst, const FetchSource* sources, int num_sources,
                                          int64_t begin, int64_t num_bytes) {
  auto* to = reinterpret_cast<uint4*>(dst + begin);
  const int64_t num_words = num_bytes / 16;
  for (int64_t i = threadIdx.x; i < num_words; i += kThreads) {
    float sum[8] = {};
    add_to<T>(sum, to[i]);
    for (int s = 0; s < num_sources; ++s) {
      add_to<T>(sum, reinterpret_cast<const uint4*>(sources[s].data + begin)[i]);
    }
    to[i] = rounded<T>(sum);
  }
}

__device__ __forceinline__ void fill_nan(char* dst, int64_t num_bytes) {
  auto* to = reinterpret_cast<uint32_t*>(dst);
  for (int64_t i = threadIdx.x; i < num_bytes / 4; i += kThreads) to[i] = 0xffffffffu;
}

__device__ __forceinline__ bool is_aligned(const void* a, const void* b, int64_t num_bytes) {
  return ((reinterpret_cast<uintptr_t>(a) | reinterpret_cast<uintptr_t>(b) |
           static_cast<uintptr_t>(num_bytes)) &
          15) == 0;
}

template <typename T>
__global__ void __launch_bounds__(kThreads) fetch_kernel(const __grid_constant__ FetchArguments a) {
  __shared__ bool poisoned;
  const uint32_t* results = a.board.words[a.board.rank] + word_index(Word::kResults, 0);
  const uint32_t num_chunks = a.first_chunk[a.num_gathers];
  int gather = 0;
  for (uint32_t chunk = blockIdx.x; chunk < num_chunks; chunk += gridDim.x) {
    while (a.first_chunk[gather + 1] <= chunk) ++gather;
    const int first_source = a.first_source[gather];
    const int num_sources = a.first_source[gather + 1] - first_source;
    __syncthreads();  // `poisoned` of the chunk before has been read
    if (threadIdx.x == 0) {
      uint32_t ahead = 0;
      for (int s = 0; s < num_sources; ++s) {
        ahead = max(ahead, spin(results + a.sources[first_source + s].rank, a.epoch));
      }
      poisoned = is_poisoned(ahead);
    }
    __syncthreads();
    const int64_t begin = (chunk - a.first_chunk[gather]) * kChunkBytes;
    const int64_t num_bytes = min(kChunkBytes, a.num_bytes[gather] - begin);
    char* dst = a.dst[gather];
    const FetchSource* sources = a.sources + first_source;
    if (poisoned) {
      fill_nan(dst + begin, num_bytes);
    } else if (a.taking[gather] == Taking::kNothing) {
      continue;
    } else if (a.taking[gather] == Taking::kAdd) {
      add_chunk<T>(dst, sources, num_sources, begin, num_bytes);
    } else if (is_aligned(dst, sources[0].data, num_bytes)) {
      copy_chunk<uint4>(dst + begin, sources[0].data + begin, num_bytes);
    } else {
      copy_chunk<uint32_t>(dst + begin, sources[0].data + begin, num_bytes);
    }
  }
  if (!a.is_last || !is_last(a.counter, gridDim.x)) return;
  raise_everywhere(a.board, Word::kFinished, a.epoch);
}

StoreBlock store_block_of(const RowBlock& rows) {
  const auto bits = reinterpret_cast<uintptr_t>(rows.src) | reinterpret_cast<uintptr_t>(rows.dst) |
                    static_cast<uintptr_t>(rows.src_stride | rows.dst_stride | rows.row_bytes);
  const uint32_t word_bytes = bits % 16 == 0 ? 16 : 4;
  const int64_t num_words = rows.num_bytes() / word_bytes;
  const bool has_gaps =
      rows.num_rows > 1 && (rows.src_stride != rows.row_bytes || rows.dst_stride != rows.row_bytes);
  return {
      rows.src,        rows.dst,
      rows.src_stride, rows.dst_stride,
      num_words,       static_cast<uint32_t>(has_gaps ? rows.row_bytes / word_bytes : num_words),
      word_bytes};
}

// Launches that hold kMaxStoreBlocks blocks at most. Flags go with the last block of their rank.
class StoreLaunch {
 public:
  StoreLaunch(const Board& board, uint32_t last_use, uint32_t epoch, uint32_t* counters,
              cudaStream_t stream)
      : stream_(stream) {
    arguments_.board = board;
    arguments_.last_use = last_use;
    arguments_.epoch = epoch;
    arguments_.counters = counters;
  }

  void open(int64_t rank) {
    arguments_.first_block[num_targets_] = static_cast<uint16_t>(num_blocks_);
    arguments_.first_flag[num_targets_] = static_cast<uint16_t>(num_flags_);
    arguments_.num_words[num_targets_] = 0;
    bytes_of_target_ = 0;
    ++num_targets_;
    rank_ = rank;
  }

  void add(const RowBlock& rows) {
    if (num_blocks_ == kMaxStoreBlocks) reopen();
    arguments_.blocks[num_blocks_++] = store_block_of(rows);
    arguments_.num_words[num_targets_ - 1] += arguments_.blocks[num_blocks_ - 1].num_words;
    bytes_of_target_ += rows.num_bytes();
    most_bytes_ = std::max(most_bytes_, bytes_of_target_);
  }

  // For all that was added for the rank.
  void raise(const std::vector<int64_t>& flags) {
    for (const int64_t flag : flags) {
      if (num_flags_ == kMaxStoreFlags) reopen();
      arguments_.flags[num_flags_++] = arguments_.board.words[rank_] + flag;
    }
  }

  void launch() {
    if (num_targets_ == 0) return;
    arguments_.first_block[num_targets_] = static_cast<uint16_t>(num_blocks_);
    arguments_.first_flag[num_targets_] = static_cast<uint16_t>(num_flags_);
    const int64_t ctas = (most_bytes_ + kBytesPerStoreCta - 1) / kBytesPerStoreCta;
    const int64_t most_ctas = std::max(1, kMaxStoreCtas / num_targets_);
    const dim3 grid(static_cast<unsigned>(std::clamp<int64_t>(ctas, 1, most_ctas)),
                    static_cast<unsigned>(num_targets_));
    store_kernel<<<grid, kThreads, 0, stream_>>>(arguments_);
    check(cudaGetLastError(), "store kernel launch");
    num_blocks_ = num_targets_ = num_flags_ = 0;
    most_bytes_ = 0;
  }

 private:
  // Goes on with the same rank.
  void reopen() {
    const int64_t rank = rank_;
    launch();
    open(rank);
  }

  StoreArguments arguments_ = {};
  cudaStream_t stream_;
  int64_t rank_ = -1;  // of the last target
  int num_blocks_ = 0;
  int num_targets_ = 0;
  int num_flags_ = 0;
  int64_t bytes_of_target_ = 0;
  int64_t most_bytes_ = 0;
};

class FetchLaunch {
 public:
  FetchLaunch(const Board& board, Addend addend, uint32_t epoch, uint32_t* counter,
              cudaStream_t stream)
      : addend_(addend), stream_(stream) {
    arguments_.board = board;
    arguments_.epoch = epoch;
    arguments_.counter = counter;
  }

  void add(const Gather& gather) {
    const auto num_sources = static_cast<int>(gather.sources.size());
    if (arguments_.num_gathers == kMaxGathers || num_sources_ + num_sources > kMaxSources) launch();
    const int i = arguments_.num_gathers++;
    arguments_.dst[i] = gather.dst;
    arguments_.num_bytes[i] = gather.num_bytes;
    arguments_.taking[i] = gather.taking;
    for (const auto& [data, rank] : gather.sources) {
      arguments_.sources[num_sources_++] = {data, static_cast<int32_t>(rank)};
    }
    arguments_.first_source[i + 1] = static_cast<uint16_t>(num_sources_);
    const int64_t num_chunks = (gather.num_bytes + kChunkBytes - 1) / kChunkBytes;
    arguments_.first_chunk[i + 1] = arguments_.first_chunk[i] + static_cast<uint32_t>(num_chunks);
  }

  void launch_last() {
    arguments_.is_last = true;
    launch();
  }

 private:
  void launch() {
    const auto num_chunks = static_cast<int>(arguments_.first_chunk[arguments_.num_gathers]);
    const int num_blocks = std::clamp(num_chunks, 1, kFetchCtas);
    if (addend_ == Addend::kFloat16) {
      fetch_kernel<__half><<<num_blocks, kThreads, 0, stream_>>>(arguments_);
    } else {
      fetch_kernel<__nv_bfloat16><<<num_blocks, kThreads, 0, stream_>>>(arguments_);
    }
    check(cudaGetLastError(), "fetch kernel launch");
    arguments_.num_gathers = 0;
    num_sources_ = 0;
  }

  FetchArguments arguments_ = {};
  Addend addend_;
  cudaStream_t stream_;
  int num_sources_ = 0;
};

}  // namespace

void start(const Board& board, uint32_t last_use, uint32_t epoch, cudaStream_t stream) {
  start_kernel<<<1, kMaxPeers, 0, stream>>>(board, last_use, epoch);
  check(cudaGetLastError(), "start kernel launch");
}

void await_words(const Board& board, const std::vector<FlagRange>& ranges, uint32_t epoch,
                 cudaStream_t stream) {
  for (auto next = ranges.begin(); next != ranges.end();) {
    AwaitArguments arguments = {board.words[board.rank], epoch, 0, {}};
    for (; next != ranges.end() && arguments.num_ranges < kMaxRanges; ++next) {
      arguments.ranges[arguments.num_ranges++] = {static_cast<uint32_t>(next->first),
                                                  static_cast<uint32_t>(next->last)};
    }
    await_kernel<<<1, kMaxPeers, 0, stream>>>(arguments);
    check(cudaGetLastError(), "await kernel launch");
  }
}

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

void publish(const Board& board, uint32_t epoch, cudaStream_t stream) {
  publish_kernel<<<1, kMaxPeers, 0, stream>>>(board, epoch);
  check(cudaGetLastError(), "publish kernel launch");
}

void fetch(const Board& board, const std::vector<Gather>& gathers, Addend addend, uint32_t epoch,
           uint32_t* counter, cudaStream_t stream) {
  FetchLaunch launch(board, addend, epoch, counter, stream);
  for (const Gather& gather : gathers) launch.add(gather);
  launch.launch_last();
}

}  // namespace distca::transport::peer
