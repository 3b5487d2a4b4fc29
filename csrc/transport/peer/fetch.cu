#include <ATen/cuda/CUDAContextLight.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <type_traits>

#include "device.cuh"

namespace distca::transport::peer {
namespace {

constexpr int kThreads = 512;
constexpr int kUnrolled = 4;
constexpr int kFewGathers = 64;  // of a launch that sends few parameters
constexpr int kFewSources = 96;
constexpr int kManyGathers = 512;
constexpr int kManySources = 1024;
constexpr int64_t kChunkBytes = int64_t{32} << 10;

// Leaves multiprocessors to other communication.
constexpr int max_ctas(int num_multiprocessors) {
  return std::max(1, num_multiprocessors * 8 / 11);
}
static_assert(max_ctas(132) == 96);

struct FetchTarget {
  char* dst;
  int64_t num_bytes;
  uint32_t row_bytes;  // 0: rows are consecutive
  uint32_t dst_stride;
  uint16_t first_source;
  uint16_t num_sources;
  bool adds;
};

struct FetchCall {
  Board board;
  uint32_t* counter;
  uint32_t epoch;
  int num_gathers;
  bool is_last;  // of the launches of a call
};

// All of it goes to the device with every launch, whatever it holds: so there are two sizes.
template <int kGathers, int kSources>
struct FetchArguments {
  FetchCall call;
  uint32_t first_chunk[kGathers + 1];
  FetchTarget gathers[kGathers];
  const char* sources[kSources];
};
using FewFetches = FetchArguments<kFewGathers, kFewSources>;
using ManyFetches = FetchArguments<kManyGathers, kManySources>;
static_assert(sizeof(FewFetches) <= 4096 && sizeof(ManyFetches) <= 32764);
static_assert(kMaxPeers <= kManySources, "a launch holds all sources of a gather");

// Pair is __half2 or __nv_bfloat162.
template <typename Pair>
__device__ __forceinline__ void add_to(float (&sum)[8], const uint4& words) {
  const auto* pairs = reinterpret_cast<const Pair*>(&words);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    sum[2 * i] += __low2float(pairs[i]);
    sum[2 * i + 1] += __high2float(pairs[i]);
  }
}

template <typename Pair>
__device__ __forceinline__ uint4 rounded(const float (&sum)[8]) {
  uint4 words;
  auto* pairs = reinterpret_cast<Pair*>(&words);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (std::is_same_v<Pair, __half2>) {
      pairs[i] = __floats2half2_rn(sum[2 * i], sum[2 * i + 1]);
    } else {
      pairs[i] = __floats2bfloat162_rn(sum[2 * i], sum[2 * i + 1]);
    }
  }
  return words;
}

// A thread's share of a step of kUnrolled x kThreads words. Loads are together, before the stores,
// so that many are on their way at a time.
template <typename WordT>
__device__ __forceinline__ void load_step(WordT (&words)[kUnrolled], const WordT* from,
                                          int64_t first, int64_t num_words) {
#pragma unroll
  for (int j = 0; j < kUnrolled; ++j) {
    if (first + j * kThreads < num_words) words[j] = from[first + j * kThreads];
  }
}

// Returns the destination of word `index` of a gather.
template <typename WordT>
__device__ __forceinline__ WordT* place_of(const FetchTarget& gather, int64_t index) {
  if (gather.row_bytes == 0) return reinterpret_cast<WordT*>(gather.dst) + index;
  const uint32_t row_words = gather.row_bytes / sizeof(WordT);
  const auto word = static_cast<uint32_t>(index);  // fits: see FetchLaunch::add
  char* row = gather.dst + int64_t{word / row_words} * gather.dst_stride;
  return reinterpret_cast<WordT*>(row) + word % row_words;
}

// Copies bytes [begin, begin + num_bytes) of a gather.
template <typename WordT>
__device__ __forceinline__ void copy_chunk(const FetchTarget& gather, const char* src,
                                           int64_t begin, int64_t num_bytes) {
  const int64_t num_words = num_bytes / static_cast<int64_t>(sizeof(WordT));
  const int64_t words_before = begin / static_cast<int64_t>(sizeof(WordT));
  const auto* from = reinterpret_cast<const WordT*>(src + begin);
  for (int64_t first = threadIdx.x; first < num_words; first += kUnrolled * kThreads) {
    WordT words[kUnrolled];
    load_step(words, from, first, num_words);
#pragma unroll
    for (int j = 0; j < kUnrolled; ++j) {
      const int64_t index = first + j * kThreads;
      if (index < num_words) *place_of<WordT>(gather, words_before + index) = words[j];
    }
  }
}

// dst and sources from byte `begin` of a gather on.
template <typename Pair>
__device__ __forceinline__ void add_chunk(char* dst, const char* const* sources, int num_sources,
                                          int64_t begin, int64_t num_bytes) {
  auto* to = reinterpret_cast<uint4*>(dst + begin);
  const int64_t num_words = num_bytes / 16;
  for (int64_t first = threadIdx.x; first < num_words; first += kUnrolled * kThreads) {
    float sums[kUnrolled][8] = {};
    for (int s = -1; s < num_sources; ++s) {
      const uint4* from = s < 0 ? to : reinterpret_cast<const uint4*>(sources[s] + begin);
      uint4 words[kUnrolled];
      load_step(words, from, first, num_words);
#pragma unroll
      for (int j = 0; j < kUnrolled; ++j) {
        if (first + j * kThreads < num_words) add_to<Pair>(sums[j], words[j]);
      }
    }
#pragma unroll
    for (int j = 0; j < kUnrolled; ++j) {
      if (first + j * kThreads < num_words) to[first + j * kThreads] = rounded<Pair>(sums[j]);
    }
  }
}

__device__ __forceinline__ void fill_nan(const FetchTarget& gather, int64_t begin,
                                         int64_t num_bytes) {
  for (int64_t i = threadIdx.x; i < num_bytes / 4; i += kThreads) {
    *place_of<uint32_t>(gather, begin / 4 + i) = 0xffffffffu;
  }
}

template <typename Pair>
__device__ __forceinline__ void take_chunk(const FetchTarget& gather, const char* const* sources,
                                           int64_t begin) {
  const int64_t num_bytes = min(kChunkBytes, gather.num_bytes - begin);
  const auto misaligned = reinterpret_cast<uintptr_t>(gather.dst) |
                          reinterpret_cast<uintptr_t>(sources[0]) |
                          static_cast<uintptr_t>(num_bytes) | gather.row_bytes | gather.dst_stride;
  if (gather.adds) {
    add_chunk<Pair>(gather.dst, sources, gather.num_sources, begin, num_bytes);
  } else if (misaligned % 16 == 0) {
    copy_chunk<uint4>(gather, sources[0], begin, num_bytes);
  } else {
    copy_chunk<uint32_t>(gather, sources[0], begin, num_bytes);
  }
}

template <typename Pair, typename Arguments>
__global__ void __launch_bounds__(kThreads) fetch_kernel(const __grid_constant__ Arguments a) {
  await_predecessor();
  const uint32_t num_chunks = a.first_chunk[a.call.num_gathers];
  const bool is_worthless = is_cut_short(a.call.board, a.call.epoch);
  int i = 0;
  for (uint32_t chunk = blockIdx.x; chunk < num_chunks; chunk += gridDim.x) {
    while (a.first_chunk[i + 1] <= chunk) ++i;
    const FetchTarget& gather = a.gathers[i];
    const char* const* sources = a.sources + gather.first_source;
    const int64_t begin = (chunk - a.first_chunk[i]) * kChunkBytes;
    if (is_worthless) {
      fill_nan(gather, begin, min(kChunkBytes, gather.num_bytes - begin));
    } else {
      take_chunk<Pair>(gather, sources, begin);
    }
  }
  if (!a.call.is_last || !is_last(a.call.counter, gridDim.x)) return;
  tell_finished(a.call.board, a.call.epoch);
}

// Launches that hold kManyGathers gathers at most.
class FetchLaunch {
 public:
  FetchLaunch(const Board& board, Addend addend, uint32_t epoch, uint32_t* counter,
              cudaStream_t stream)
      : call_{board, counter, epoch, 0, false}, addend_(addend), stream_(stream) {}

  void add(const Gather& gather) {
    TORCH_INTERNAL_ASSERT(!gather.adds || !gather.has_gaps(),
                          "rows that are added to must be consecutive");
    constexpr int64_t kMaxBytesWithGaps = int64_t{4} << 32;  // 2^32 words: see place_of
    TORCH_INTERNAL_ASSERT(!gather.has_gaps() || gather.num_bytes() < kMaxBytesWithGaps,
                          "a gather into rows with gaps has ", gather.num_bytes(),
                          " bytes; expected fewer than ", kMaxBytesWithGaps);
    const size_t num_sources = gather.sources.size();
    if (gathers_.size() == kManyGathers || sources_.size() + num_sources > kManySources)
      launch(false);
    const int64_t num_bytes = gather.num_bytes();
    const auto of_gaps = [&gather](int64_t bytes) {
      return static_cast<uint32_t>(gather.has_gaps() ? bytes : 0);
    };
    gathers_.push_back({gather.dst, num_bytes, of_gaps(gather.row_bytes),
                        of_gaps(gather.dst_stride), static_cast<uint16_t>(sources_.size()),
                        static_cast<uint16_t>(num_sources), gather.adds});
    for (const Gather::Source& source : gather.sources) sources_.push_back(source.data);
    const int64_t num_chunks = (num_bytes + kChunkBytes - 1) / kChunkBytes;
    first_chunk_.push_back(first_chunk_.back() + static_cast<uint32_t>(num_chunks));
  }

  void launch(bool is_last) {
    call_.is_last = is_last;
    call_.num_gathers = static_cast<int>(gathers_.size());
    const bool are_few = gathers_.size() <= kFewGathers && sources_.size() <= kFewSources;
    are_few ? launch_with<FewFetches>() : launch_with<ManyFetches>();
    gathers_.clear();
    sources_.clear();
    first_chunk_ = {0};
  }

 private:
  template <typename Arguments>
  void launch_with() const {
    Arguments arguments = {call_, {}, {}, {}};
    std::copy(first_chunk_.begin(), first_chunk_.end(), arguments.first_chunk);
    std::copy(gathers_.begin(), gathers_.end(), arguments.gathers);
    std::copy(sources_.begin(), sources_.end(), arguments.sources);
    const auto kernel = addend_ == Addend::kFloat16 ? fetch_kernel<__half2, Arguments>
                                                    : fetch_kernel<__nv_bfloat162, Arguments>;
    const int most_ctas = max_ctas(at::cuda::getCurrentDeviceProperties()->multiProcessorCount);
    const int num_ctas = std::clamp(static_cast<int>(first_chunk_.back()), 1, most_ctas);
    launch_dependent(kernel, num_ctas, kThreads, stream_, arguments);
  }

  FetchCall call_;
  std::vector<uint32_t> first_chunk_ = {0};  // by gather, and one more
  std::vector<FetchTarget> gathers_;
  std::vector<const char*> sources_;
  Addend addend_;
  cudaStream_t stream_;
};

}  // namespace

void fetch(const Board& board, const std::vector<Gather>& gathers, Addend addend, const Call& call,
           uint32_t* counter, cudaStream_t stream) {
  if (gathers.empty()) return finish(board, call.epoch, stream);
  RankSet others = 0;
  for (const Gather& gather : gathers) {
    for (const Gather::Source& source : gather.sources) others |= RankSet{1} << source.rank;
  }
  others &= ~(RankSet{1} << board.rank);  // what is its own is an earlier kernel's
  // Not by the many blocks of the kernel that takes results: where they look at words, copies from
  // this device get a twentieth of their speed.
  await_results(board, others, call, stream);
  FetchLaunch launch(board, addend, call.epoch, counter, stream);
  for (const Gather& gather : gathers) launch.add(gather);
  launch.launch(true);
}

}  // namespace distca::transport::peer
