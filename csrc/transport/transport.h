#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "failures.h"
#include "rows.h"

namespace distca::transport {

// Row counts per peer, [num_ranks] each; ranks' tables must transpose.
struct RowCounts {
  std::vector<int64_t> send;
  std::vector<int64_t> recv;
};

// Rows of one size: uint8 [sum(counts.send), row_bytes], contiguous, ordered by peer.
struct RowBatch {
  at::Tensor rows;
  RowCounts counts;
};

// Batches in flight between all ranks of a group. Started by every rank in the same order.
class Exchange {
 public:
  virtual ~Exchange() = default;

  // Received rows of each batch, ordered by peer. On CUDA the current stream waits, not the host.
  // Throws naming the ranks at fault and where the rank is in the step if a peer is gone.
  virtual std::vector<at::Tensor> wait() = 0;
};

class Transport {
 public:
  virtual ~Transport() = default;

  // Work that the caller puts on the current stream afterwards runs beside the exchange.
  virtual std::unique_ptr<Exchange> start(const std::vector<RowBatch>& batches,
                                          const Where& where) = 0;

  // Returns the seal of this call's results, if a stream waits for them and not the host: see Seal.
  virtual Seal seal(const Where& where, const c10::Device& device) = 0;
};

}  // namespace distca::transport
