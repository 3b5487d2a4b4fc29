#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "../transport.h"

namespace distca::transport {

using Tensors = std::vector<at::Tensor>;

// Tensors whose rows travel one route together. A record holds the bytes of one row of each, side
// by side, at multiples of 16 bytes so that every part is a valid strided tensor at the other end
// and rows copy as 16-byte words. It may begin with a seal. Data from a peer then begins with one,
// even if the peer sends records of another size.
struct Load {
  Tensors tensors;
  const Route& route;
};

// Rows of one size that all ranks of a group exchange, ordered by peer.
struct RowBatch {
  at::Tensor sent;      // uint8 [sum(counts.send), row_bytes], contiguous
  at::Tensor received;  // uint8 [sum(counts.recv), row_bytes], complete when the works are
  RowCounts counts;
};

// Returns what a load and its received rows take on the way, not yet filled.
RowBatch new_batch(const Load& load, const RowCounts& counts, const Seal& seal);

// Returns the rows of each of the load's tensors in `records`, whose memory they share.
Tensors parts_of(const at::Tensor& records, const Load& load, const Seal& seal);

// Returns tensors like these, with `num_rows` rows each, whose values are undefined.
Tensors rows_like(const Tensors& tensors, int64_t num_rows);

}  // namespace distca::transport
