#include "process_group.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <numeric>

#include "head_start.h"
#include "works_watch.h"

namespace distca::transport {
namespace {

class ProcessGroupExchange : public Exchange {
 public:
  ProcessGroupExchange(std::vector<RowBatch> batches, std::shared_ptr<Patience> patience,
                       WorksWatch* watch, const Where& where)
      : batches_(std::move(batches)), patience_(std::move(patience)), watch_(watch), where_(where) {
    for (const RowBatch& batch : batches_) {
      const auto& recv = batch.counts.recv;
      const int64_t num_rows = std::accumulate(recv.begin(), recv.end(), int64_t{0});
      received_.push_back(at::empty({num_rows, batch.rows.size(1)}, batch.rows.options()));
    }
  }

  void start(c10d::ProcessGroup& group) {
    patience_->guard(where_, [&] {
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
    if (watch_ != nullptr) {
      patience_->wait_on_stream(works_, where_);
      watch_->add(where_);
    } else {
      patience_->wait_on_host(works_, where_, describe(where_));
    }
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
  WorksWatch* watch_;  // null where the host waits
  Where where_;
  Patience::Works works_;
};

// Of the streams of one device.
struct StreamWatchdog {
  WorksWatch watch;
  Watchdog watchdog;

  StreamWatchdog(c10::intrusive_ptr<c10d::ProcessGroup> group, c10::Device device,
                 std::shared_ptr<FailureBoard> failures, double timeout_s)
      : watch(std::move(group), device), watchdog(watch, std::move(failures), timeout_s) {}
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
    if (device.is_cuda() && !streams_) {
      streams_ = std::make_unique<StreamWatchdog>(group_, device, failures_, timeout_s_);
    }
    if (streams_) streams_->watchdog.check();
    auto exchange = std::make_unique<ProcessGroupExchange>(
        batches, patience_, device.is_cuda() ? &streams_->watch : nullptr, where);
    exchange->start(*group_);
    give_head_start(device);
    return exchange;
  }

 private:
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
