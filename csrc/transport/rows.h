#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace distca::transport {

// Whole-row copies by index. Tensors are [rows, ...] whose rows are contiguous in memory (any row
// stride); index tensors are int32 on the same device. `index` undefined or empty means row i is
// row i. Rows of src and dst have the same bytes.

// dst[i] = src[index[i]] for every row i of dst.
void gather_rows(const at::Tensor& src, const at::Tensor& index, const at::Tensor& dst);

// dst[index[i]] = src[i] for every row i of src; indices are distinct.
void scatter_rows(const at::Tensor& src, const at::Tensor& index, const at::Tensor& dst);

// Which received slots add up to which home row: row[i] gets slots slot[begin[i]..begin[i + 1]).
struct Reduction {
  at::Tensor row;    // int32 [num_rows], distinct
  at::Tensor begin;  // int32 [num_rows + 1]
  at::Tensor slot;   // int32 [begin.back()]
};

// dst[row[i]] += sum of src[slot] in slot order, accumulated in float (double for float64) and
// rounded once: deterministic, no atomics.
void reduce_rows(const at::Tensor& src, const Reduction& reduction, const at::Tensor& dst);

}  // namespace distca::transport
