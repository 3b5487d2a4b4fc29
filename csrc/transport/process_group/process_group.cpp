#include "process_group.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <numeric>

#include "head_start.h"
#include "host_rows.h"
#include "works_watch.h"

namespace distca::transport {
namespace {

std::vector<at::Tensor> room_for(const std::vector<RowBatch>& batches) {
  std::vector<at::Tensor> received;
  for (const RowBatch& batch : batches) {
    const auto& recv = batch.counts.recv;
    const int64_t num_rows = std::accumulate(recv.begin(), recv.end(), int64_t{0});
    received.push_back(at::empty({num_rows, batch.rows.size(1)}, batch.rows.options()));
  }
  return received;
}

// An exchange for which the host waits.
class HostExchange : public Exchange {
 public:
  HostExchange(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
               const std::vector<RowBatch>& batches, std::shared_ptr<Patience> patience,
               const Where& where)
      : received_(room_for(batches)),
        patience_(std::move(patience)),
        wait_(patience_->enter(where, describe(where))) {
    patience_->guard(where, [&] { work_ = exchange_on_host(*group, batches, received_, where); });
  }

  std::vector<at::Tensor> wait() override {
    patience_->wait_on_host({work_}, wait_);
    return received_;
  }

 private:
  std::vector<at::Tensor> received_;
  std::shared_ptr<Patience> patience_;
  Wait wait_;
  c10::intrusive_ptr<c10d::Work> work_;
};

// An exchange for which a stream of a device waits.
class StreamExchange : public Exchange {
 public:
  StreamExchange(std::vector<RowBatch> batches, std::shared_ptr<Patience> patience,
                 WorksWatch& watch, const Where& where)
      : batches_(std::move(batches)),
        received_(room_for(batches_)),
        patience_(std::move(patience)),
        watch_(watch),
        wait_(patience_->enter(where, "")) {}

  void start(c10d::ProcessGroup& group) {
    patience_->guard(wait_.where, [&] {
      const c10::DeviceType device = batches_[0].rows.device().type();
      if (!group.getBackend(device)->supportsCoalescing()) {
        for (size_t idx = 0; idx < batches_.size(); ++idx) works_.push_back(launch(group, idx));
        return;
      }
      // One launch for all batches: a second one would queue behind the attention kernels.
      group.startCoalescing(device);
      for (size_t idx = 0; idx < batches_.size(); ++idx) launch(group, idx);
      works_.push_back(group.endCoalescing(device));
    });
  }

  std::vector<at::Tensor> wait() override {
    patience_->wait_on_stream(works_, wait_.where);
    patience_->guard(wait_.where, [&] { watch_.add(works_, wait_); });
    return received_;
  }

 private:
  c10::intrusive_ptr<c10d::Work> launch(c10d::ProcessGroup& group, size_t idx) {
    std::vector<int64_t> send = batches_[idx].counts.send;
    std::vector<int64_t> recv = batches_[idx].counts.recv;
    return group.alltoall_base(received_[idx], batches_[idx].rows, recv, send);
  }

  std::vector<RowBatch> batches_;
  std::vector<at::Tensor> received_;
  std::shared_ptr<Patience> patience_;
  WorksWatch& watch_;
  Wait wait_;
  Patience::Works works_;
};

// Of the streams of one device.
struct StreamWatchdog {
  WorksWatch watch;
  Watchdog watchdog;

  StreamWatchdog(c10::intrusive_ptr<c10d::ProcessGroup> group, c10::Device device,
                 std::shared_ptr<FailureBoard> failures, double timeout_s)
      : watch(std::move(group), device, failures->group(), failures->rank()),
        watchdog(watch, std::move(failures), timeout_s) {}
};

class ProcessGroupTransport : public Transport {
 public:
  ProcessGroupTransport(c10::intrusive_ptr<c10d::ProcessGroup> group,
                        std::shared_ptr<Patience> patience, std::shared_ptr<FailureBoard> failures,
                        double timeout_s)
      : group_(std::move(group)),
        patience_(std::move(patience)),
        failures_(std::move(failures)),
        timeout_s_(timeout_s) {}

  std::unique_ptr<Exchange> start(const std::vector<RowBatch>& batches,
                                  const Where& where) override {
    const c10::Device device = batches[0].rows.device();
    if (device.is_cpu()) {
      return std::make_unique<HostExchange>(group_, batches, patience_, where);
    }
    StreamWatchdog& streams = streams_of(device);
    streams.watchdog.check();
    auto exchange = std::make_unique<StreamExchange>(batches, patience_, streams.watch, where);
    exchange->start(*group_);
    give_head_start(device);
    return exchange;
  }

  Seal seal(const Where& where, const c10::Device& device) override {
    if (device.is_cpu()) return {};
    return streams_of(device).watch.seal(where);
  }

 private:
  StreamWatchdog& streams_of(const c10::Device& device) {
    if (!streams_) {
      streams_ = std::make_unique<StreamWatchdog>(group_, device, failures_, timeout_s_);
    }
    return *streams_;
  }

  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  std::shared_ptr<Patience> patience_;
  std::shared_ptr<FailureBoard> failures_;
  double timeout_s_;
  std::unique_ptr<StreamWatchdog> streams_;
};

}  // namespace

std::unique_ptr<Transport> make_process_group_transport(
    c10::intrusive_ptr<c10d::ProcessGroup> group, std::shared_ptr<Patience> patience,
    std::shared_ptr<FailureBoard> failures, double timeout_s) {
  return std::make_unique<ProcessGroupTransport>(std::move(group), std::move(patience),
                                                 std::move(failures), timeout_s);
}

}  // namespace distca::transport
