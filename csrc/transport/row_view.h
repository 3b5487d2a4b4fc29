#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <cstdint>

#include "rows.h"

namespace distca::transport {

// A tensor's rows as plain memory, what the copy loops and kernels see.
struct RowView {
  char* data;
  int64_t num_rows;
  int64_t stride_bytes;
  int64_t row_bytes;
};

inline RowView row_view(const at::Tensor& tensor) {
  int64_t expected = 1;
  for (int64_t dim = tensor.dim() - 1; dim > 0; --dim) {
    TORCH_INTERNAL_ASSERT(tensor.size(dim) == 1 || tensor.stride(dim) == expected,
                          "rows are not contiguous: sizes ", tensor.sizes(), ", strides ",
                          tensor.strides());
    expected *= tensor.size(dim);
  }
  const int64_t element = tensor.element_size();
  const int64_t stride = tensor.size(0) > 1 ? tensor.stride(0) : expected;
  return {static_cast<char*>(tensor.data_ptr()), tensor.size(0), stride * element,
          expected * element};
}

// SealedRows as plain memory; `data` is null if rows have no seals.
struct SealView {
  char* data = nullptr;
  int64_t num_rows = 0;
  int64_t stride_bytes = 0;
  Seal seal;
};

inline SealView seal_view(const SealedRows& rows) {
  if (rows.seal.broken == nullptr) return {};
  const RowView view = row_view(rows.records);
  return {view.data + view.row_bytes - kSealBytes, view.num_rows, view.row_bytes, rows.seal};
}

// Source and destination rows of a copy, and the index on one side of it (nullptr: none).
struct RowCopy {
  RowView src;
  RowView dst;
  const int32_t* index;
};

// Reduction of rows.h as plain memory.
struct RowReduction {
  RowView src;
  RowView dst;
  int64_t num_rows;
  const int32_t* row;
  const int32_t* begin;
  const int32_t* slot;
};

inline const int32_t* index_or_null(const at::Tensor& index) {
  return index.defined() && index.numel() > 0 ? index.const_data_ptr<int32_t>() : nullptr;
}

#ifdef DISTCA_WITH_CUDA
void check_seals_cuda(const SealView& found);
void gather_rows_cuda(const RowCopy& copy, const SealView& made);
void scatter_rows_cuda(const RowCopy& copy, const SealView& found);
void scatter_and_seal_rows_cuda(const RowCopy& copy, const SealView& made);
void reduce_rows_cuda(const RowReduction& reduction, at::ScalarType dtype, const SealView& found);
#endif

}  // namespace distca::transport
