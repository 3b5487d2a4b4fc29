#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "../routes.h"
#include "patience.h"
#include "works_watch.h"

namespace distca::transport {

// Rows of one size: uint8 [sum(counts.send), row_bytes], contiguous, ordered by peer.
struct RowBatch {
  at::Tensor rows;
  RowCounts counts;
};

// Batches in flight between all ranks of a group. Every rank must start exchanges in the same
// order.
class Exchange {
 public:
  virtual ~Exchange() = default;

  // Returns the received rows of each batch, ordered by peer. On CUDA the current stream waits, not
  // the host.
  virtual std::vector<at::Tensor> wait() = 0;
};

// On the CPU the host waits for rows; on a device a stream does.
std::unique_ptr<Exchange> exchange_on_cpu(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                                          const std::vector<RowBatch>& batches,
                                          const std::shared_ptr<Patience>& patience,
                                          const Where& where);
std::unique_ptr<Exchange> exchange_on_stream(c10d::ProcessGroup& group,
                                             const std::vector<RowBatch>& batches,
                                             const std::shared_ptr<Patience>& patience,
                                             WorksWatch& watch, const Where& where);

}  // namespace distca::transport
