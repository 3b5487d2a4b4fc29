#pragma once

#include <memory>
#include <vector>

#include "../registry.h"
#include "records.h"
#include "stream_waits.h"

namespace distca::transport {

// Starts exchanges of rows over a process group, and waits for them. Every rank must start
// exchanges in the same order, and finish them in that order.
class Exchanges {
 public:
  explicit Exchanges(const Opening& opening)
      : opening_(opening), calls_(opening.group, opening.patience) {}

  // Returns the seal of this call's rows if a stream, not the host, waits for them (see Seal).
  Seal seal(const Where& where, const c10::Device& device);

  // Starts an exchange. On the CPU it only starts to compare calls, and rows follow in finish().
  Gathering start(const std::vector<RowBatch>& batches, const Where& where);

#ifdef DISTCA_WITH_CUDA
  // Starts an exchange in which this rank only receives, on a device. It does not wait for the
  // current stream. So allocate `batches` before the call's first exchange starts: that exchange
  // waits for earlier uses of their memory.
  Gathering start_to_receive(const std::vector<RowBatch>& batches, const Where& where);
#endif

  // Lets an exchange that is ready begin before the next kernels of the device's current stream.
  void let_begin(const c10::Device& device);

  // On the CPU the host waits for rows. On a device the current stream waits if this rank receives
  // rows. Otherwise it waits for this rank's rows to leave, unless `may_run_ahead`.
  void finish(const Gathering& started, const std::vector<RowBatch>& batches, bool may_run_ahead);

  // See Transport.
  std::vector<ExchangeTime> take_times();

 private:
  Pending start_rows(const std::vector<RowBatch>& batches, const Where& where,
                     const std::string& activity);

  Opening opening_;
  ControlPlane calls_;
#ifdef DISTCA_WITH_CUDA
  StreamWaits& streams_of(const c10::Device& device);
  void finish_on_device(const Gathering& started, const std::vector<RowBatch>& batches,
                        bool may_run_ahead);

  std::unique_ptr<StreamWaits> streams_;
#endif
};

}  // namespace distca::transport
