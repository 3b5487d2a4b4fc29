#include "rows.h"

#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <ATen/Parallel.h>

#include <cstring>
#include <utility>
#include <vector>

#include "transport.h"

namespace distca::transport {
namespace {

constexpr int64_t kCopyGrainRows = 64;

void copy_rows_cpu(const RowCopy& copy) {
  at::parallel_for(0, copy.num_rows(), kCopyGrainRows, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      const int64_t row = copy.index ? copy.index[i] : i;
      const auto [from, to] =
          copy.indexed == Indexed::kSource ? std::pair(row, i) : std::pair(i, row);
      std::memcpy(copy.dst.data + to * copy.dst.stride_bytes,
                  copy.src.data + from * copy.src.stride_bytes, copy.src.row_bytes);
    }
  });
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

}  // namespace

Seals seals_of(const at::Tensor& records, const Seal& seal, Sealing sealing) {
  if (seal.host == nullptr) return {};
  const RowView view = row_view(records);
  return {sealing, view.data + view.row_bytes - kSealBytes, view.num_rows, view.row_bytes, seal};
}

void check_seals([[maybe_unused]] const Seals& seals) {
#ifdef DISTCA_WITH_CUDA
  if (seals.num_rows > 0) check_seals_cuda(seals);
#endif
}

void copy_rows(const at::Tensor& src, const at::Tensor& index, const at::Tensor& dst,
               Indexed indexed, [[maybe_unused]] const Seals& seals) {
  if ((indexed == Indexed::kSource ? dst : src).numel() == 0) return;
  const bool has_index = index.defined() && index.numel() > 0;
  const RowCopy copy{row_view(src), row_view(dst),
                     has_index ? index.const_data_ptr<int32_t>() : nullptr, indexed};
  TORCH_INTERNAL_ASSERT(copy.src.row_bytes == copy.dst.row_bytes, "rows of ", copy.src.row_bytes,
                        " bytes copied to rows of ", copy.dst.row_bytes);
#ifdef DISTCA_WITH_CUDA
  if (dst.is_cuda()) return copy_rows_cuda(copy, seals);
#endif
  copy_rows_cpu(copy);
}

void reduce_rows(const at::Tensor& src, const Reduction& reduction, const at::Tensor& dst,
                 [[maybe_unused]] const Seals& seals) {
  if (reduction.row.numel() == 0 || dst.numel() == 0) return;
  const RowReduction plain{row_view(src),
                           row_view(dst),
                           reduction.row.numel(),
                           reduction.row.const_data_ptr<int32_t>(),
                           reduction.begin.const_data_ptr<int32_t>(),
                           reduction.slot.const_data_ptr<int32_t>()};
#ifdef DISTCA_WITH_CUDA
  if (dst.is_cuda()) return reduce_rows_cuda(plain, dst.scalar_type(), seals);
#endif
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kBFloat16, at::kHalf, dst.scalar_type(), "reduce_rows",
                                  [&] { reduce_rows_cpu<scalar_t>(plain); });
}

void keep(const Routes& routes, const Inputs& visiting, const Inputs& kept) {
  if (!routes.keeping || !kept.q.defined()) return;
  gather_rows(visiting.q, routes.keeping->kept_q, kept.q);
  gather_rows(visiting.k, routes.keeping->kept_k, kept.k);
  gather_rows(visiting.v, routes.keeping->kept_k, kept.v);
}

void restore(const Routes& routes, const Inputs& kept, const Inputs& visiting) {
  if (!routes.keeping) return;
  scatter_rows(kept.q, routes.keeping->kept_q, visiting.q);
  scatter_rows(kept.k, routes.keeping->kept_k, visiting.k);
  scatter_rows(kept.v, routes.keeping->kept_k, visiting.v);
}

}  // namespace distca::transport
