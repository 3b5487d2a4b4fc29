#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "failures.h"

namespace distca::transport {

// Rows in flight between all ranks of a group. Started by every rank in the same order.
class Exchange {
 public:
  virtual ~Exchange() = default;

  // Received rows, by peer. On CUDA the current stream waits, not the host. Throws naming the ranks
  // at fault and `where` if a peer is gone.
  virtual at::Tensor wait() = 0;
};

// Row counts per peer, [num_ranks] each; ranks' tables must transpose.
struct RowCounts {
  std::vector<int64_t> send;
  std::vector<int64_t> recv;
};

class Transport {
 public:
  virtual ~Transport() = default;

  // `rows` uint8 [sum(counts.send), row_bytes], contiguous, ordered by peer.
  virtual std::unique_ptr<Exchange> start(const at::Tensor& rows, const RowCounts& counts,
                                          const Where& where) = 0;
};

}  // namespace distca::transport
