#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace distca::transport {

// Whole-row copies by index. Tensors are [rows, ...] whose rows are contiguous in memory (any row
// stride); index tensors are int32 on the same device. `index` undefined or empty means row i is
// row i. Rows of src and dst have the same bytes.

// What the rows of a call's results carry beside them from a server to their home, where a device
// compares it: a host that does not wait cannot.
struct Seal {
  uint32_t tag = 0;            // of the call: see tag_of
  uint32_t rank = 0;           // of the server
  uint32_t* broken = nullptr;  // host words that say which other seal was found; null: no seal
};
constexpr int64_t kSealBytes = 16;
enum class BrokenSeal { kIsFound, kTag, kRank, kExpected };  // words of Seal::broken

// Seals of rows: uint8 [rows, kSealBytes], any row stride; undefined where there are none. And
// seals of the ranks whose rows the results were computed from, contiguous, undefined likewise.
struct SealedRows {
  at::Tensor seals;
  Seal seal;
  at::Tensor senders;
};

// dst[i] = src[index[i]] for every row i of dst. Writes `made.seals`, whatever rows they are of.
void gather_rows(const at::Tensor& src, const at::Tensor& index, const at::Tensor& dst,
                 const SealedRows& made = {});

// dst[index[i]] = src[i] for every row i of src; indices are distinct. Rows of src that have
// another seal than `found` says become NaN.
void scatter_rows(const at::Tensor& src, const at::Tensor& index, const at::Tensor& dst,
                  const SealedRows& found = {});

// The same, and seals the rows of dst.
void scatter_and_seal_rows(const at::Tensor& src, const at::Tensor& index, const at::Tensor& dst,
                           const SealedRows& made);

// Which received slots add up to which home row: row[i] gets slots slot[begin[i]..begin[i + 1]).
struct Reduction {
  at::Tensor row;    // int32 [num_rows], distinct
  at::Tensor begin;  // int32 [num_rows + 1]
  at::Tensor slot;   // int32 [begin.back()]
};

// dst[row[i]] += sum of src[slot] in slot order, accumulated in float (double for float64) and
// rounded once: deterministic, no atomics. A row to which one with another seal than `found` says
// belongs becomes NaN.
void reduce_rows(const at::Tensor& src, const Reduction& reduction, const at::Tensor& dst,
                 const SealedRows& found = {});

}  // namespace distca::transport
