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

__device__ __forceinline__ uint4* seal_of(const RowView& records, int64_t row) {
  return reinterpret_cast<uint4*>(records.data + row * records.stride_bytes + records.row_bytes -
                                  kSealBytes);
}

__global__ void make_seals_kernel(RowView records, Seal seal) {
  const int64_t row = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (row < records.num_rows) *seal_of(records, row) = make_uint4(seal.tag, seal.rank, 0, 0);
}

__global__ void check_seals_kernel(RowView records, Seal seal) {
  const int64_t row = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (row >= records.num_rows) return;
  const uint4 found = *seal_of(records, row);
  if (found.x != seal.tag) report(seal, found);
}

// A copy of rows, as kernels see it.
struct RowCopy {
  RowView src;
  RowView dst;
  const int32_t* index;  // null: row i is row i
  int64_t num_rows;
  const uint32_t* spoiled;
};

struct RowReduction {
  RowView src;
  RowView dst;
  int64_t num_rows;
  const int32_t* row;
  const int32_t* begin;
  const int32_t* slot;
  const uint32_t* spoiled;
};

template <typename Word>
__device__ __forceinline__ Word nan_word() {
  Word word;
  memset(&word, 0xff, sizeof(Word));
  return word;
}

// One block copies whole rows; the index is on the source (gather) or the destination (scatter).
template <typename Word, bool kIndexSource>
__global__ void copy_rows_kernel(RowCopy copy, int64_t words_per_row) {
  const bool is_nan = copy.spoiled != nullptr && *copy.spoiled != 0;
  for (int64_t i = blockIdx.x; i < copy.num_rows; i += gridDim.x) {
    const int64_t indexed = copy.index ? copy.index[i] : i;
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
__global__ void reduce_rows_kernel(RowReduction reduction, int64_t num_columns) {
  using acc_t = at::opmath_type<scalar_t>;
  const bool is_nan = reduction.spoiled != nullptr && *reduction.spoiled != 0;
  for (int64_t i = blockIdx.x; i < reduction.num_rows; i += gridDim.x) {
    auto* dst = reinterpret_cast<scalar_t*>(reduction.dst.data +
                                            reduction.row[i] * reduction.dst.stride_bytes);
    const int32_t first = reduction.begin[i];
    const int32_t last = reduction.begin[i + 1];
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

template <typename Word, bool kIndexSource>
void launch_copy(const RowCopy& copy) {
  const int64_t words = copy.src.row_bytes / static_cast<int64_t>(sizeof(Word));
  const int threads = words >= kThreads ? kThreads : static_cast<int>((words + 31) / 32 * 32);
  copy_rows_kernel<Word, kIndexSource>
      <<<num_blocks(copy.num_rows), threads, 0, at::cuda::getCurrentCUDAStream()>>>(copy, words);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

template <bool kIndexSource>
void copy_rows(const at::Tensor& src, const at::Tensor& index, const at::Tensor& dst,
               const uint32_t* spoiled) {
  const bool has_index = index.defined() && index.numel() > 0;
  const RowCopy copy{row_view(src), row_view(dst),
                     has_index ? index.const_data_ptr<int32_t>() : nullptr,
                     (kIndexSource ? dst : src).size(0), spoiled};
  TORCH_INTERNAL_ASSERT(copy.src.row_bytes == copy.dst.row_bytes, "rows of ", copy.src.row_bytes,
                        " bytes copied to rows of ", copy.dst.row_bytes);
  if (is_aligned(copy, 16)) return launch_copy<uint4, kIndexSource>(copy);
  if (is_aligned(copy, 4)) return launch_copy<uint32_t, kIndexSource>(copy);
  launch_copy<uint8_t, kIndexSource>(copy);
}

void launch_seals(void (*kernel)(RowView, Seal), const RowView& records, const Seal& seal) {
  const auto blocks = static_cast<unsigned>((records.num_rows + kThreads - 1) / kThreads);
  kernel<<<blocks, kThreads, 0, at::cuda::getCurrentCUDAStream()>>>(records, seal);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace

void make_seals_cuda(const RowView& records, const Seal& seal) {
  launch_seals(make_seals_kernel, records, seal);
}

void check_seals_cuda(const RowView& records, const Seal& seal) {
  launch_seals(check_seals_kernel, records, seal);
}

void gather_rows_cuda(const at::Tensor& src, const at::Tensor& index, const at::Tensor& dst,
                      const uint32_t* spoiled) {
  copy_rows<true>(src, index, dst, spoiled);
}

void scatter_rows_cuda(const at::Tensor& src, const at::Tensor& index, const at::Tensor& dst,
                       const uint32_t* spoiled) {
  copy_rows<false>(src, index, dst, spoiled);
}

void reduce_rows_cuda(const at::Tensor& src, const Reduction& reduction, const at::Tensor& dst,
                      const uint32_t* spoiled) {
  const RowReduction plain{row_view(src),
                           row_view(dst),
                           reduction.row.numel(),
                           reduction.row.const_data_ptr<int32_t>(),
                           reduction.begin.const_data_ptr<int32_t>(),
                           reduction.slot.const_data_ptr<int32_t>(),
                           spoiled};
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kBFloat16, at::kHalf, dst.scalar_type(), "reduce_rows", [&] {
    const int64_t num_columns = plain.dst.row_bytes / static_cast<int64_t>(sizeof(scalar_t));
    reduce_rows_kernel<scalar_t>
        <<<num_blocks(plain.num_rows), kThreads, 0, at::cuda::getCurrentCUDAStream()>>>(
            plain, num_columns);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  });
}

void hold_current_stream() {
  hold_kernel<<<1, 1, 0, at::cuda::getCurrentCUDAStream()>>>();
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace distca::transport
