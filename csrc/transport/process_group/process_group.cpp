#include "process_group.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <numeric>

#include "head_start.h"

namespace distca::transport {
namespace {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;

class ProcessGroupExchange : public Exchange {
 public:
  ProcessGroupExchange(std::vector<RowBatch> batches, std::shared_ptr<FailureBoard> failures,
                       const Where& where)
      : batches_(std::move(batches)), failures_(std::move(failures)), where_(where) {
    for (const RowBatch& batch : batches_) {
      const auto& recv = batch.counts.recv;
      const int64_t num_rows = std::accumulate(recv.begin(), recv.end(), int64_t{0});
      received_.push_back(at::empty({num_rows, batch.rows.size(1)}, batch.rows.options()));
    }
  }

  void start(c10d::ProcessGroup& group) {
    guarded([&] {
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
    guarded([&] {
      for (const WorkPtr& work : works_) work->wait();
    });
    return received_;
  }

 private:
  WorkPtr launch(c10d::ProcessGroup& group, size_t idx) {
    std::vector<int64_t> send = batches_[idx].counts.send;
    std::vector<int64_t> recv = batches_[idx].counts.recv;
    return group.alltoall_base(received_[idx], batches_[idx].rows, recv, send);
  }

  template <typename F>
  void guarded(F&& communicate) {
    try {
      communicate();
    } catch (const std::exception& error) {
      const std::string cause = failures_->diagnose(message_of(error));
      TORCH_CHECK_WITH(DistBackendError, false, "distca: ", describe(where_), ": ", cause);
    }
  }

  std::vector<RowBatch> batches_;
  std::vector<at::Tensor> received_;
  std::shared_ptr<FailureBoard> failures_;
  Where where_;
  std::vector<WorkPtr> works_;
};

class ProcessGroupTransport : public Transport {
 public:
  ProcessGroupTransport(c10::intrusive_ptr<c10d::ProcessGroup> group,
                        std::shared_ptr<FailureBoard> failures)
      : group_(std::move(group)), failures_(std::move(failures)) {}

  std::unique_ptr<Exchange> start(const std::vector<RowBatch>& batches,
                                  const Where& where) override {
    auto exchange = std::make_unique<ProcessGroupExchange>(batches, failures_, where);
    exchange->start(*group_);
    give_head_start(batches[0].rows.device());
    return exchange;
  }

 private:
  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  std::shared_ptr<FailureBoard> failures_;
};

}  // namespace

std::unique_ptr<Transport> make_process_group_transport(
    c10::intrusive_ptr<c10d::ProcessGroup> group, std::shared_ptr<FailureBoard> failures) {
  return std::make_unique<ProcessGroupTransport>(std::move(group), std::move(failures));
}

}  // namespace distca::transport
