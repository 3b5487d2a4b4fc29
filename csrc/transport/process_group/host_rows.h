#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "../transport.h"

namespace distca::transport {

// Starts an exchange of rows between hosts. First every rank says what it exchanges: gloo matches
// messages by their order alone, and where their sizes differ it returns stale memory or ends the
// process. The work fails with CallMismatch, on every rank, unless all say the same; then nothing
// is sent. `received` are written when it is done.
c10::intrusive_ptr<c10d::Work> exchange_on_host(c10::intrusive_ptr<c10d::ProcessGroup> group,
                                                std::vector<RowBatch> batches,
                                                std::vector<at::Tensor> received,
                                                const Where& where);

}  // namespace distca::transport
