#include "exchange.h"

#include <ATen/ops/empty.h>

#include <numeric>

#include "host_rows.h"

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

// An exchange that the host waits for.
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

// An exchange that a device's stream waits for.
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

}  // namespace

std::unique_ptr<Exchange> exchange_on_cpu(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                                          const std::vector<RowBatch>& batches,
                                          const std::shared_ptr<Patience>& patience,
                                          const Where& where) {
  return std::make_unique<HostExchange>(group, batches, patience, where);
}

std::unique_ptr<Exchange> exchange_on_stream(c10d::ProcessGroup& group,
                                             const std::vector<RowBatch>& batches,
                                             const std::shared_ptr<Patience>& patience,
                                             WorksWatch& watch, const Where& where) {
  auto exchange = std::make_unique<StreamExchange>(batches, patience, watch, where);
  exchange->start(group);
  return exchange;
}

}  // namespace distca::transport
