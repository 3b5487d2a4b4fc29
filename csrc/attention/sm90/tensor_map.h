#pragma once

#include <cuda.h>

#include <cstdint>

namespace distca::attention::sm90 {

enum class Element { kBfloat16, kFloat16 };

// Rows [rows, heads, head_dim] in global memory, head_dim contiguous; strides in bytes, multiples
// of 16 as the address.
struct RowTensor {
  void* data;
  Element element;
  int64_t heads;
  int64_t head_dim;
  int64_t row_stride;
  int64_t head_stride;
};

// A map for copies of box_rows rows by 64 columns of one head, whose box may end at any row: rows
// past the end given with the copy read as zero and are not written (RaggedBox in ptx.cuh). One map
// therefore serves boxes anywhere in the tensor and no copy touches a neighbour's rows.
//
// It has two more dimensions than the tensor. With row stride s, coordinates (2^30 - n + r, row +
// n, 2^30) in dimensions of stride (s, s, 2^35 - s) give the address (row + r) s modulo 2^64, and
// r >= n falls outside the first of them, whose size is 2^30.
//
// Throws std::runtime_error when the driver refuses.
CUtensorMap make_ragged_map(const RowTensor& tensor, int32_t box_rows);

// A map with the tensor's own three dimensions. All rows of a box must be rows of the tensor, whose
// end the map does not know. Throws like make_ragged_map.
CUtensorMap make_plain_map(const RowTensor& tensor, int32_t box_rows);

}  // namespace distca::attention::sm90
