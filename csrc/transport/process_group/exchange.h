#pragma once

#include <ATen/core/Tensor.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "../registry.h"
#ifdef DISTCA_WITH_CUDA
#include "../watchdog.h"
#endif

namespace distca::transport {

// Rows of one size that all ranks of a group exchange, ordered by peer.
struct RowBatch {
  at::Tensor sent;      // uint8 [sum(counts.send), row_bytes], contiguous
  at::Tensor received;  // uint8 [sum(counts.recv), row_bytes], complete when the works are
  RowCounts counts;
};

// Starts an exchange between hosts. First all ranks compare their calls, because gloo matches
// messages by their order alone: if sizes differ, it returns stale memory or aborts. If calls
// differ, the work fails with CallMismatch on every rank, and no row is sent.
Works exchange_on_host(c10d::ProcessGroup& group, std::vector<RowBatch> batches,
                       const Where& where);

// Starts an exchange between devices, which a stream has to wait for.
Works exchange_on_device(c10d::ProcessGroup& group, const std::vector<RowBatch>& batches);

#ifdef DISTCA_WITH_CUDA
// Watches the streams of a device that wait for exchanges of a process group. Aborting the group's
// communicator releases them. Until then the watchdog does not use the CUDA driver: see HostWords.
class StreamWaits {
 public:
  StreamWaits(const Opening& opening, c10::Device device);
  StreamWaits(const StreamWaits&) = delete;
  ~StreamWaits();

  // Throws as Watchdog::check.
  void check() { watchdog_.check(); }

  // Notes that the device's current stream has just been told to wait for an exchange.
  void add(const Pending& pending);

  // Returns the seal for a call's rows.
  Seal seal(const Where& where);

 private:
  HostWords words_;
  at::Tensor spoiled_;  // see Seal
  uint32_t rank_;
  uint32_t num_waits_ = 0;
  // Marks waits that have ended; on the caller's stream that write would delay compute. It is not
  // from PyTorch's pool, because user work on a pooled stream would wait for other ranks.
  c10::Device device_;
  cudaStream_t marks_ = nullptr;
  Watchdog watchdog_;
};
#endif

}  // namespace distca::transport
