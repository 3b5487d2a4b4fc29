#include "rows.h"

#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <ATen/Parallel.h>

#include <cstring>
#include <vector>

#include "row_view.h"

namespace distca::transport {
namespace {

constexpr int64_t kCopyGrainRows = 64;

RowCopy row_copy(const at::Tensor& src, const at::Tensor& index, const at::Tensor& dst) {
  const RowCopy copy{row_view(src), row_view(dst), index_or_null(index)};
  TORCH_INTERNAL_ASSERT(copy.src.row_bytes == copy.dst.row_bytes, "rows of ", copy.src.row_bytes,
                        " bytes copied to rows of ", copy.dst.row_bytes);
  return copy;
}

template <typename scalar_t>
void reduce_rows_cpu(const RowReduction& reduction) {
  using acc_t = at::opmath_type<scalar_t>;
  const int64_t num_columns = reduction.dst.row_bytes / sizeof(scalar_t);
  at::parallel_for(0, reduction.num_rows, kCopyGrainRows, [&](int64_t first, int64_t last) {
    std::vector<acc_t> sum(num_columns);
    for (int64_t i = first; i < last; ++i) {
      auto* dst = reinterpret_cast<scalar_t*>(reduction.dst.data +
                                              reduction.row[i] * reduction.dst.stride_bytes);
      for (int64_t c = 0; c < num_columns; ++c) sum[c] = static_cast<acc_t>(dst[c]);
      for (int32_t j = reduction.begin[i]; j < reduction.begin[i + 1]; ++j) {
        const auto* src = reinterpret_cast<const scalar_t*>(
            reduction.src.data + reduction.slot[j] * reduction.src.stride_bytes);
        for (int64_t c = 0; c < num_columns; ++c) sum[c] += static_cast<acc_t>(src[c]);
      }
      for (int64_t c = 0; c < num_columns; ++c) dst[c] = static_cast<scalar_t>(sum[c]);
    }
  });
}

void gather_rows_cpu(const RowCopy& copy) {
  at::parallel_for(0, copy.dst.num_rows, kCopyGrainRows, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      const int64_t row = copy.index ? copy.index[i] : i;
      std::memcpy(copy.dst.data + i * copy.dst.stride_bytes,
                  copy.src.data + row * copy.src.stride_bytes, copy.dst.row_bytes);
    }
  });
}

void scatter_rows_cpu(const RowCopy& copy) {
  at::parallel_for(0, copy.src.num_rows, kCopyGrainRows, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      const int64_t row = copy.index ? copy.index[i] : i;
      std::memcpy(copy.dst.data + row * copy.dst.stride_bytes,
                  copy.src.data + i * copy.src.stride_bytes, copy.src.row_bytes);
    }
  });
}

}  // namespace

void check_seals([[maybe_unused]] const SealedRows& found) {
#ifdef DISTCA_WITH_CUDA
  const SealView seals = seal_view(found);
  if (seals.num_rows > 0) check_seals_cuda(seals);
#endif
}

void gather_rows(const at::Tensor& src, const at::Tensor& index, const at::Tensor& dst,
                 [[maybe_unused]] const SealedRows& made) {
  if (dst.numel() == 0) return;
  const RowCopy copy = row_copy(src, index, dst);
#ifdef DISTCA_WITH_CUDA
  if (dst.is_cuda()) return gather_rows_cuda(copy, seal_view(made));
#endif
  gather_rows_cpu(copy);
}

void scatter_rows(const at::Tensor& src, const at::Tensor& index, const at::Tensor& dst,
                  [[maybe_unused]] const SealedRows& found) {
  if (src.numel() == 0) return;
  const RowCopy copy = row_copy(src, index, dst);
#ifdef DISTCA_WITH_CUDA
  if (dst.is_cuda()) return scatter_rows_cuda(copy, seal_view(found));
#endif
  scatter_rows_cpu(copy);
}

void scatter_and_seal_rows(const at::Tensor& src, const at::Tensor& index, const at::Tensor& dst,
                           [[maybe_unused]] const SealedRows& made) {
#ifdef DISTCA_WITH_CUDA
  if (dst.is_cuda() && src.numel() > 0) {
    return scatter_and_seal_rows_cuda(row_copy(src, index, dst), seal_view(made));
  }
#endif
  scatter_rows(src, index, dst);
}

void reduce_rows(const at::Tensor& src, const Reduction& reduction, const at::Tensor& dst,
                 [[maybe_unused]] const SealedRows& found) {
  if (reduction.row.numel() == 0 || dst.numel() == 0) return;
  const RowReduction plain{row_view(src),
                           row_view(dst),
                           reduction.row.numel(),
                           reduction.row.const_data_ptr<int32_t>(),
                           reduction.begin.const_data_ptr<int32_t>(),
                           reduction.slot.const_data_ptr<int32_t>()};
#ifdef DISTCA_WITH_CUDA
  if (dst.is_cuda()) return reduce_rows_cuda(plain, dst.scalar_type(), seal_view(found));
#endif
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kBFloat16, at::kHalf, dst.scalar_type(), "reduce_rows",
                                  [&] { reduce_rows_cpu<scalar_t>(plain); });
}

}  // namespace distca::transport
