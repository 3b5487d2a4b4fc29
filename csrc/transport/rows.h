#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <cstdint>
#include <vector>

namespace distca::transport {

// Identifies a call and the sender beside each row that travels where the device compares it: the
// host does not wait for the rows, so it cannot.
struct Seal {
  uint32_t tag = 0;             // of the call: see tag_of
  uint32_t rank = 0;            // of the sender
  uint32_t* host = nullptr;     // HostWords, told of a seal that differs; null: rows have no seals
  uint32_t* spoiled = nullptr;  // device word: not 0 once a seal has differed
};
constexpr int64_t kSealBytes = 16;

// Copies of whole rows: row dst_row[i] of `dst` becomes row src_row[i] of `src`. Tensors are
// [rows, ...] whose rows are contiguous in memory (any row stride) and have the same bytes. Indices
// are int32 on the same device, those of dst_row distinct; if undefined or empty, row i is row i,
// up to the fewest rows of the two.
struct RowCopy {
  at::Tensor src;
  at::Tensor dst;
  at::Tensor src_row = {};
  at::Tensor dst_row = {};
};

// Makes all copies in one launch, like the functions below.
void copy_rows(const std::vector<RowCopy>& copies);

// Records, and the copies into or out of parts of their rows.
struct Packing {
  at::Tensor records;  // uint8 [rows, row_bytes], contiguous
  std::vector<RowCopy> copies;
};

// Copies rows to all records, and begins each with the seal, if the call has seals.
void pack_rows(const std::vector<Packing>& packings, const Seal& seal);

// Compares the seals of all records, and copies rows from them. Rows of another call become NaN,
// and so does every row that is packed or unpacked after it: results that were computed from them
// must not be used.
void unpack_rows(const std::vector<Packing>& packings, const Seal& seal);

// Which received slots add up to which home row: row[i] gets slots slot[begin[i]..begin[i + 1]).
struct Reduction {
  at::Tensor row;    // int32 [num_rows], distinct
  at::Tensor begin;  // int32 [num_rows + 1]
  at::Tensor slot;   // int32 [begin.back()]
};

// dst[row[i]] += sum of src[slot] in slot order, accumulated in float (double for float64) and
// rounded once: deterministic, no atomics. NaN if `spoiled` (see Seal) is set.
void reduce_rows(const at::Tensor& src, const Reduction& reduction, const at::Tensor& dst,
                 const uint32_t* spoiled = nullptr);

// Returns the tensor's sizes for another number of rows.
inline std::vector<int64_t> sizes_with(const at::Tensor& tensor, int64_t num_rows) {
  std::vector<int64_t> sizes = tensor.sizes().vec();
  sizes[0] = num_rows;
  return sizes;
}

// Rows as plain memory, as loops and kernels see them.
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

#ifdef DISTCA_WITH_CUDA
void copy_rows_cuda(const std::vector<RowCopy>& copies);
void pack_rows_cuda(const std::vector<Packing>& packings, const Seal& seal);
void unpack_rows_cuda(const std::vector<Packing>& packings, const Seal& seal);
void reduce_rows_cuda(const at::Tensor& src, const Reduction& reduction, const at::Tensor& dst,
                      const uint32_t* spoiled);

// Lets a communication kernel that was just launched on its own stream take its multiprocessors
// before kernels of the current stream take all of them; it would wait for those to finish.
void hold_current_stream();
#endif

}  // namespace distca::transport
