#include "rows.h"

#include <ATen/OpMathType.h>
#include <ATen/ops/repeat_interleave.h>

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

void make_seals([[maybe_unused]] const at::Tensor& records, [[maybe_unused]] const Seal& seal) {
#ifdef DISTCA_WITH_CUDA
  if (seal.host != nullptr && records.numel() > 0) make_seals_cuda(row_view(records), seal);
#endif
}

void check_seals([[maybe_unused]] const at::Tensor& records, [[maybe_unused]] const Seal& seal) {
#ifdef DISTCA_WITH_CUDA
  if (seal.host != nullptr && records.numel() > 0) check_seals_cuda(row_view(records), seal);
#endif
}

void gather_rows(const at::Tensor& src, const at::Tensor& index, const at::Tensor& dst,
                 [[maybe_unused]] const uint32_t* spoiled) {
  if (dst.numel() == 0) return;
#ifdef DISTCA_WITH_CUDA
  if (dst.is_cuda()) return gather_rows_cuda(src, index, dst, spoiled);
#endif
  dst.copy_(is_identity(index) ? src.narrow(0, 0, dst.size(0)) : src.index_select(0, index));
}

void scatter_rows(const at::Tensor& src, const at::Tensor& index, const at::Tensor& dst,
                  [[maybe_unused]] const uint32_t* spoiled) {
  if (src.numel() == 0) return;
#ifdef DISTCA_WITH_CUDA
  if (dst.is_cuda()) return scatter_rows_cuda(src, index, dst, spoiled);
#endif
  if (!is_identity(index)) return write_rows(src, index, dst);
  dst.narrow(0, 0, src.size(0)).copy_(src);
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
  gather_rows(visiting.q, routes.keeping->kept_q, kept.q);
  gather_rows(visiting.k, routes.keeping->kept_k, kept.k);
  gather_rows(visiting.v, routes.keeping->kept_k, kept.v);
}

void restore(const Routes& routes, const Inputs& kept, const Inputs& visiting) {
  if (!routes.keeping || !routes.keeping->kept_q.defined()) return;
  scatter_rows(kept.q, routes.keeping->kept_q, visiting.q);
  scatter_rows(kept.k, routes.keeping->kept_k, visiting.k);
  scatter_rows(kept.v, routes.keeping->kept_k, visiting.v);
}

}  // namespace distca::transport
