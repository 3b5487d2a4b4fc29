#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <cstdint>
#include <vector>

namespace distca::transport {

// Whole-row copies by index. Tensors are [rows, ...] whose rows are contiguous in memory (any row
// stride); index tensors are int32 on the same device. `index` undefined or empty means row i is
// row i. Rows of src and dst have the same bytes.

// Identifies a call and the sender beside each row that travels where the device compares it: the
// host does not wait for the rows, so it cannot.
struct Seal {
  uint32_t tag = 0;             // of the call: see tag_of
  uint32_t rank = 0;            // of the sender
  uint32_t* host = nullptr;     // HostWords, told of a seal that differs; null: rows have no seals
  uint32_t* spoiled = nullptr;  // device word: not 0 once a seal has differed
};
constexpr int64_t kSealBytes = 16;

// The seals of records, one at the end of each, that are to be made or compared. A record is a row
// of bytes. If any seal differs, the functions below write NaN from then on: what was computed from
// these rows must not be used.
enum class Sealing { kNone, kMake, kCheck };
struct Seals {
  Sealing sealing = Sealing::kNone;
  char* data = nullptr;
  int64_t num_rows = 0;
  int64_t stride_bytes = 0;
  Seal seal;  // of this call
};

// `records`: uint8 [rows, row_bytes], contiguous.
Seals seals_of(const at::Tensor& records, const Seal& seal, Sealing sealing);

// Compares the seals of received rows.
void check_seals(const Seals& seals);

// The side of a copy that its index is on.
enum class Indexed { kSource, kDestination };
void copy_rows(const at::Tensor& src, const at::Tensor& index, const at::Tensor& dst,
               Indexed indexed, const Seals& seals);

// dst[i] = src[index[i]] for every row i of dst. Also makes `seals`.
inline void gather_rows(const at::Tensor& src, const at::Tensor& index, const at::Tensor& dst,
                        const Seals& seals = {}) {
  copy_rows(src, index, dst, Indexed::kSource, seals);
}

// dst[index[i]] = src[i] for every row i of src; indices are distinct. Also makes `seals`, or
// compares them: rows whose seal differs become NaN.
inline void scatter_rows(const at::Tensor& src, const at::Tensor& index, const at::Tensor& dst,
                         const Seals& seals = {}) {
  copy_rows(src, index, dst, Indexed::kDestination, seals);
}

// Which received slots add up to which home row: row[i] gets slots slot[begin[i]..begin[i + 1]).
struct Reduction {
  at::Tensor row;    // int32 [num_rows], distinct
  at::Tensor begin;  // int32 [num_rows + 1]
  at::Tensor slot;   // int32 [begin.back()]
};

// dst[row[i]] += sum of src[slot] in slot order, accumulated in float (double for float64) and
// rounded once: deterministic, no atomics. A sum becomes NaN if the seal of one of its rows
// differs.
void reduce_rows(const at::Tensor& src, const Reduction& reduction, const at::Tensor& dst,
                 const Seals& seals = {});

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

struct RowCopy {
  RowView src;
  RowView dst;
  const int32_t* index;  // null: row i is row i
  Indexed indexed;

  int64_t num_rows() const { return indexed == Indexed::kSource ? dst.num_rows : src.num_rows; }
};

struct RowReduction {
  RowView src;
  RowView dst;
  int64_t num_rows;
  const int32_t* row;
  const int32_t* begin;
  const int32_t* slot;
};

#ifdef DISTCA_WITH_CUDA
void check_seals_cuda(const Seals& seals);
void copy_rows_cuda(const RowCopy& copy, const Seals& seals);
void reduce_rows_cuda(const RowReduction& reduction, at::ScalarType dtype, const Seals& seals);

// Lets a communication kernel that was just launched on its own stream take its multiprocessors
// before kernels of the current stream take all of them; it would wait for those to finish.
void hold_current_stream();
#endif

}  // namespace distca::transport
