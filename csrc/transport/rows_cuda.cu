#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAException.h>

#include "host_words.h"
#include "rows.h"

namespace distca::transport {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMaxBlocks = 4096;  // rows are strided over blocks beyond this

constexpr unsigned kHoldNs = 20000;  // a launch that is ready begins within about 5 us

__global__ void hold_kernel() {
  __nanosleep(kHoldNs);
}

// Reports a seal to the host, the first ones only: any of them will do. Without atomics, which not
// every host's memory takes from a device.
__device__ __forceinline__ void report(const Seal& own, const uint4& found) {
  *own.spoiled = 1;
  volatile uint32_t* words = own.host;
  if (words[static_cast<int>(HostWord::kMismatch)] != 0) return;
  words[static_cast<int>(HostWord::kTheirTag)] = found.x;
  words[static_cast<int>(HostWord::kTheirRank)] = found.y;
  words[static_cast<int>(HostWord::kOwnTag)] = own.tag;
  __threadfence_system();
  words[static_cast<int>(HostWord::kMismatch)] = 1;
}

// Returns whether a row's seal is of another call, and reports it.
__device__ __forceinline__ bool is_broken(const Seals& seals, int64_t row) {
  const uint4 found = *reinterpret_cast<const uint4*>(seals.data + row * seals.stride_bytes);
  if (found.x == seals.seal.tag) return false;
  report(seals.seal, found);
  return true;
}

__device__ __forceinline__ void make_seal(const Seals& seals, int64_t row) {
  *reinterpret_cast<uint4*>(seals.data + row * seals.stride_bytes) =
      make_uint4(seals.seal.tag, seals.seal.rank, 0, 0);
}

template <typename Word>
__device__ __forceinline__ Word nan_word() {
  Word word;
  memset(&word, 0xff, sizeof(Word));
  return word;
}

__global__ void check_seals_kernel(Seals seals) {
  const int64_t row = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (row < seals.num_rows) is_broken(seals, row);
}

// One block copies whole rows; the index is on the source (gather) or the destination (scatter).
template <typename Word, bool kIndexSource, Sealing kSealing>
__global__ void copy_rows_kernel(RowCopy copy, int64_t num_rows, int64_t words_per_row,
                                 Seals seals) {
  constexpr bool kAreInputs = kIndexSource;  // this rank's own, so never spoiled
  const bool is_spoiled = kSealing != Sealing::kNone && !kAreInputs && *seals.seal.spoiled != 0;
  for (int64_t i = blockIdx.x * blockDim.x + threadIdx.x;
       kSealing == Sealing::kMake && i < seals.num_rows; i += gridDim.x * blockDim.x) {
    make_seal(seals, i);
  }
  for (int64_t i = blockIdx.x; i < num_rows; i += gridDim.x) {
    const int64_t indexed = copy.index ? copy.index[i] : i;
    const bool is_nan = is_spoiled || (kSealing == Sealing::kCheck && is_broken(seals, i));
    const auto* src = reinterpret_cast<const Word*>(copy.src.data + (kIndexSource ? indexed : i) *
                                                                        copy.src.stride_bytes);
    auto* dst = reinterpret_cast<Word*>(copy.dst.data +
                                        (kIndexSource ? i : indexed) * copy.dst.stride_bytes);
    for (int64_t w = threadIdx.x; w < words_per_row; w += blockDim.x) {
      dst[w] = is_nan ? nan_word<Word>() : src[w];
    }
  }
}

template <typename scalar_t>
__global__ void reduce_rows_kernel(RowReduction reduction, int64_t num_columns, Seals seals) {
  using acc_t = at::opmath_type<scalar_t>;
  const bool is_spoiled = seals.data != nullptr && *seals.seal.spoiled != 0;
  for (int64_t i = blockIdx.x; i < reduction.num_rows; i += gridDim.x) {
    auto* dst = reinterpret_cast<scalar_t*>(reduction.dst.data +
                                            reduction.row[i] * reduction.dst.stride_bytes);
    const int32_t first = reduction.begin[i];
    const int32_t last = reduction.begin[i + 1];
    bool is_nan = is_spoiled;
    for (int32_t j = first; seals.data != nullptr && j < last; ++j) {
      is_nan |= is_broken(seals, reduction.slot[j]);
    }
    for (int64_t c = threadIdx.x; c < num_columns; c += blockDim.x) {
      acc_t sum = is_nan ? static_cast<acc_t>(NAN) : static_cast<acc_t>(dst[c]);
      for (int32_t j = first; j < last; ++j) {
        const auto* src = reinterpret_cast<const scalar_t*>(
            reduction.src.data + reduction.slot[j] * reduction.src.stride_bytes);
        sum += static_cast<acc_t>(src[c]);
      }
      dst[c] = static_cast<scalar_t>(sum);
    }
  }
}

bool is_aligned(const RowCopy& copy, int64_t bytes) {
  const auto misaligned = reinterpret_cast<uintptr_t>(copy.src.data) |
                          reinterpret_cast<uintptr_t>(copy.dst.data) | copy.src.stride_bytes |
                          copy.dst.stride_bytes | copy.src.row_bytes;
  return misaligned % bytes == 0;
}

int num_blocks(int64_t num_rows) {
  return static_cast<int>(std::min(num_rows, kMaxBlocks));
}

template <typename Word, bool kIndexSource, Sealing kSealing>
void launch_copy(const RowCopy& copy, const Seals& seals) {
  const int64_t num_rows = copy.num_rows();
  const int64_t words = copy.src.row_bytes / static_cast<int64_t>(sizeof(Word));
  const int threads = words >= kThreads ? kThreads : static_cast<int>((words + 31) / 32 * 32);
  copy_rows_kernel<Word, kIndexSource, kSealing>
      <<<num_blocks(num_rows), threads, 0, at::cuda::getCurrentCUDAStream()>>>(copy, num_rows,
                                                                               words, seals);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

template <bool kIndexSource, Sealing kSealing>
void copy_rows(const RowCopy& copy, const Seals& seals) {
  if (is_aligned(copy, 16)) return launch_copy<uint4, kIndexSource, kSealing>(copy, seals);
  if (is_aligned(copy, 4)) return launch_copy<uint32_t, kIndexSource, kSealing>(copy, seals);
  launch_copy<uint8_t, kIndexSource, kSealing>(copy, seals);
}

}  // namespace

void check_seals_cuda(const Seals& seals) {
  const auto blocks = static_cast<unsigned>((seals.num_rows + kThreads - 1) / kThreads);
  check_seals_kernel<<<blocks, kThreads, 0, at::cuda::getCurrentCUDAStream()>>>(seals);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

void copy_rows_cuda(const RowCopy& copy, const Seals& seals) {
  const bool gathers = copy.indexed == Indexed::kSource;
  switch (seals.sealing) {
    case Sealing::kNone:
      return gathers ? copy_rows<true, Sealing::kNone>(copy, seals)
                     : copy_rows<false, Sealing::kNone>(copy, seals);
    case Sealing::kMake:
      return gathers ? copy_rows<true, Sealing::kMake>(copy, seals)
                     : copy_rows<false, Sealing::kMake>(copy, seals);
    case Sealing::kCheck:
      return copy_rows<false, Sealing::kCheck>(copy, seals);
  }
}

void reduce_rows_cuda(const RowReduction& reduction, at::ScalarType dtype, const Seals& seals) {
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kBFloat16, at::kHalf, dtype, "reduce_rows", [&] {
    const int64_t num_columns = reduction.dst.row_bytes / static_cast<int64_t>(sizeof(scalar_t));
    reduce_rows_kernel<scalar_t>
        <<<num_blocks(reduction.num_rows), kThreads, 0, at::cuda::getCurrentCUDAStream()>>>(
            reduction, num_columns, seals);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  });
}

void hold_current_stream() {
  hold_kernel<<<1, 1, 0, at::cuda::getCurrentCUDAStream()>>>();
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace distca::transport
