#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "exchange.h"

namespace distca::transport {

// Starts an exchange of rows between hosts. First all ranks compare their calls, because gloo
// matches messages by their order alone: if sizes differ, it returns stale memory or aborts. If
// calls differ, the work fails with CallMismatch on every rank, and no row is sent. `received` is
// complete when the work is.
c10::intrusive_ptr<c10d::Work> exchange_on_host(c10d::ProcessGroup& group,
                                                std::vector<RowBatch> batches,
                                                std::vector<at::Tensor> received,
                                                const Where& where);

}  // namespace distca::transport
