#include "rows.h"

#include <ATen/OpMathType.h>
#include <ATen/ops/repeat_interleave.h>

#include <algorithm>

#include "transport.h"

// On the CPU, PyTorch's operators do this. They take the rows of an index in order.
namespace distca::transport {
namespace {

bool is_identity(const at::Tensor& index) {
  return !index.defined() || index.numel() == 0;
}

void write_rows(const at::Tensor& src, const at::Tensor& index, const at::Tensor& dst) {
  dst.index_copy_(0, index.to(at::kLong), src);
}

}  // namespace

void copy_rows(const std::vector<RowCopy>& copies) {
#ifdef DISTCA_WITH_CUDA
  if (!copies.empty() && copies[0].dst.is_cuda()) return copy_rows_cuda(copies);
#endif
  for (const auto& [src, dst, src_row, dst_row] : copies) {
    const int64_t num_rows = std::min(src.size(0), dst.size(0));
    const at::Tensor rows = !is_identity(src_row)   ? src.index_select(0, src_row)
                            : !is_identity(dst_row) ? src
                                                    : src.narrow(0, 0, num_rows);
    if (is_identity(dst_row)) {
      dst.narrow(0, 0, rows.size(0)).copy_(rows);
    } else {
      write_rows(rows, dst_row, dst);
    }
  }
}

void pack_rows(const std::vector<Packing>& packings, [[maybe_unused]] const Seal& seal) {
#ifdef DISTCA_WITH_CUDA
  if (packings[0].records.is_cuda()) return pack_rows_cuda(packings, seal);
#endif
  for (const Packing& packing : packings) copy_rows(packing.copies);
}

void unpack_rows(const std::vector<Packing>& packings, [[maybe_unused]] const Seal& seal) {
#ifdef DISTCA_WITH_CUDA
  if (packings[0].records.is_cuda()) return unpack_rows_cuda(packings, seal);
#endif
  for (const Packing& packing : packings) copy_rows(packing.copies);
}

void reduce_rows(const at::Tensor& src, const Reduction& reduction, const at::Tensor& dst,
                 [[maybe_unused]] const uint32_t* spoiled) {
  const auto& [row, begin, slot] = reduction;
  if (row.numel() == 0 || dst.numel() == 0) return;
#ifdef DISTCA_WITH_CUDA
  if (dst.is_cuda()) return reduce_rows_cuda(src, reduction, dst, spoiled);
#endif
  const auto real = at::toOpMathType(dst.scalar_type());
  at::Tensor sum = dst.index_select(0, row).to(real);
  sum.index_add_(0, at::repeat_interleave(begin.diff()), src.index_select(0, slot).to(real));
  write_rows(sum.to(dst.scalar_type()), row, dst);
}

void keep(const Routes& routes, const Inputs& visiting, const Inputs& kept) {
  if (!routes.keeping || !kept.q.defined()) return;
  const auto& [queries, keys, kept_q, kept_k] = *routes.keeping;
  std::vector<RowCopy> copies{{visiting.q, kept.q, kept_q}};
  if (visiting.k.defined()) {
    copies.push_back({visiting.k, kept.k, kept_k});
    copies.push_back({visiting.v, kept.v, kept_k});
  }
  copy_rows(copies);
}

void restore(const Routes& routes, const Inputs& kept, const Inputs& visiting) {
  if (!routes.keeping || !routes.keeping->kept_q.defined()) return;
  const auto& [queries, keys, kept_q, kept_k] = *routes.keeping;
  std::vector<RowCopy> copies{{kept.q, visiting.q, {}, kept_q}};
  if (visiting.k.defined()) {
    copies.push_back({kept.k, visiting.k, {}, kept_k});
    copies.push_back({kept.v, visiting.v, {}, kept_k});
  }
  copy_rows(copies);
}

}  // namespace distca::transport
