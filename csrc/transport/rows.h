#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace distca::transport {

// Whole-row copies by index. Tensors are [rows, ...] whose rows are contiguous in memory (any row
// stride); index tensors are int32 on the same device. `index` undefined or empty means row i is
// row i. Rows of src and dst have the same bytes.

// Identifies a call and the sender beside each row that travels where the device compares it: the
// host does not wait for the rows, so it cannot.
struct Seal {
  uint32_t tag = 0;             // of the call: see tag_of
  uint32_t rank = 0;            // of the sender
  uint32_t* broken = nullptr;   // host words for a seal that differs; null: rows have no seals
  uint32_t* spoiled = nullptr;  // device word: not 0 once a seal has differed
};
constexpr int64_t kSealBytes = 16;
enum class BrokenSeal { kIsFound, kTag, kRank, kExpected };  // words of Seal::broken

struct SealedRows {
  at::Tensor records;  // uint8 [rows, row_bytes], contiguous; each ends with its seal, see Record
  Seal seal;           // of this call
};

// Compares the seals of received rows with the one of this call. If any differs, the functions
// below write NaN from then on: what was computed from these rows must not be used.
void check_seals(const SealedRows& found);

// dst[i] = src[index[i]] for every row i of dst. Also seals `made.records`.
void gather_rows(const at::Tensor& src, const at::Tensor& index, const at::Tensor& dst,
                 const SealedRows& made = {});

// dst[index[i]] = src[i] for every row i of src; indices are distinct. Rows whose seal differs from
// the one that `found` expects become NaN.
void scatter_rows(const at::Tensor& src, const at::Tensor& index, const at::Tensor& dst,
                  const SealedRows& found = {});

// Does the same as scatter_rows, and seals `made.records`.
void scatter_and_seal_rows(const at::Tensor& src, const at::Tensor& index, const at::Tensor& dst,
                           const SealedRows& made);

// Which received slots add up to which home row: row[i] gets slots slot[begin[i]..begin[i + 1]).
struct Reduction {
  at::Tensor row;    // int32 [num_rows], distinct
  at::Tensor begin;  // int32 [num_rows + 1]
  at::Tensor slot;   // int32 [begin.back()]
};

// dst[row[i]] += sum of src[slot] in slot order, accumulated in float (double for float64) and
// rounded once: deterministic, no atomics. A sum becomes NaN if one of its rows has another seal
// than `found` expects.
void reduce_rows(const at::Tensor& src, const Reduction& reduction, const at::Tensor& dst,
                 const SealedRows& found = {});

}  // namespace distca::transport
