#include "process_group.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <numeric>

namespace distca::transport {
namespace {

class ProcessGroupExchange : public Exchange {
 public:
  ProcessGroupExchange(at::Tensor sent, at::Tensor received, std::shared_ptr<FailureBoard> failures,
                       const Where& where)
      : sent_(std::move(sent)),
        received_(std::move(received)),
        failures_(std::move(failures)),
        where_(where) {}

  void start(c10d::ProcessGroup& group, const RowCounts& counts) {
    std::vector<int64_t> send = counts.send;
    std::vector<int64_t> recv = counts.recv;
    guarded([&] { work_ = group.alltoall_base(received_, sent_, recv, send); });
  }

  at::Tensor wait() override {
    guarded([&] { work_->wait(); });
    return received_;
  }

 private:
  template <typename F>
  void guarded(F&& communicate) {
    try {
      communicate();
    } catch (const std::exception& error) {
      const std::string cause = failures_->diagnose(message_of(error));
      TORCH_CHECK_WITH(DistBackendError, false, "distca: ", describe(where_), ": ", cause);
    }
  }

  at::Tensor sent_;
  at::Tensor received_;
  std::shared_ptr<FailureBoard> failures_;
  Where where_;
  c10::intrusive_ptr<c10d::Work> work_;
};

class ProcessGroupTransport : public Transport {
 public:
  ProcessGroupTransport(c10::intrusive_ptr<c10d::ProcessGroup> group,
                        std::shared_ptr<FailureBoard> failures)
      : group_(std::move(group)), failures_(std::move(failures)) {}

  std::unique_ptr<Exchange> start(const at::Tensor& rows, const RowCounts& counts,
                                  const Where& where) override {
    const int64_t num_received =
        std::accumulate(counts.recv.begin(), counts.recv.end(), int64_t{0});
    at::Tensor received = at::empty({num_received, rows.size(1)}, rows.options());
    auto exchange =
        std::make_unique<ProcessGroupExchange>(rows, std::move(received), failures_, where);
    exchange->start(*group_, counts);
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
