#include "exchange.h"

#include <ATen/core/ivalue.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#ifdef DISTCA_WITH_CUDA
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#endif

#include <algorithm>
#include <map>
#include <string>
#include <utility>

namespace distca::transport {
namespace {

using Future = c10::ivalue::Future;

// Describes how `places`, [num_ranks, kWhereWords], differ; empty if all are equal.
std::string difference_of(const at::Tensor& places) {
  std::map<WhereWords, std::vector<int64_t>> ranks_by_place;
  const auto* next = places.const_data_ptr<int64_t>();
  for (int64_t rank = 0; rank < places.size(0); ++rank, next += kWhereWords) {
    WhereWords words;
    std::copy_n(next, kWhereWords, words.begin());
    ranks_by_place[words].push_back(rank);
  }
  if (ranks_by_place.size() == 1) return "";
  RanksByPlace described;
  for (const auto& [words, ranks] : ranks_by_place) {
    described.push_back({describe(where_of(words)), ranks});
  }
  return describe_places(std::move(described), "is in", "are in") +
         ", and rows of one call would have served another" + kSameCalls;
}

c10::intrusive_ptr<c10d::Work> start(auto& group, const RowBatch& batch) {
  std::vector<int64_t> send = batch.counts.send, recv = batch.counts.recv;
  at::Tensor sent = batch.sent, received = batch.received;
  return group.alltoall_base(received, sent, recv, send);
}

// Runs both parts of an exchange as one work. Keeps tensors alive as long as gloo works on them.
class HostRows : public c10d::Work {
 public:
  HostRows(c10d::Backend& backend, std::vector<RowBatch> batches)
      : backend_(backend), batches_(std::move(batches)), num_left_(batches_.size()) {}

  void compare(const Where& where) {
    const WhereWords words = words_of(where);
    own_ = at::empty({1, kWhereWords}, at::kLong);
    std::copy(words.begin(), words.end(), own_.mutable_data_ptr<int64_t>());
    places_ = at::empty({backend_.getSize(), kWhereWords}, at::kLong);
    then(backend_._allgather_base(places_, own_), [](HostRows& self) { self.send(); });
  }

 private:
  // Runs on a thread of gloo, once all ranks have announced their calls.
  void send() {
    const std::string difference = difference_of(places_);
    if (!difference.empty()) throw CallMismatch(difference);
    for (const RowBatch& batch : batches_) {
      then(start(backend_, batch), [](HostRows& self) {
        if (--self.num_left_ == 0) self.finish();
      });
    }
  }

  // Runs `next` when `work` has ended well; the first exception ends this work.
  template <typename F>
  void then(const c10::intrusive_ptr<c10d::Work>& work, F next) {
    auto self = c10::intrusive_ptr<HostRows>::reclaim_copy(this);
    work->getFuture()->addCallback([self, next](Future& ended) {
      try {
        if (ended.hasError()) std::rethrow_exception(ended.exception_ptr());
        next(*self);
      } catch (const std::exception&) {
        if (!self->has_failed_.exchange(true)) self->finish(std::current_exception());
      }
    });
  }

  // Not owned: gloo's destructor joins the threads that run this work's parts, so that none of them
  // may hold the last reference.
  c10d::Backend& backend_;
  std::vector<RowBatch> batches_;
  at::Tensor own_, places_;
  std::atomic<size_t> num_left_;
  std::atomic<bool> has_failed_ = false;
};

}  // namespace

Works exchange_on_host(c10d::ProcessGroup& group, std::vector<RowBatch> batches,
                       const Where& where) {
  auto rows = c10::make_intrusive<HostRows>(*group.getBackend(at::kCPU), std::move(batches));
  rows->compare(where);
  return {rows};
}

Works exchange_on_device(c10d::ProcessGroup& group, const std::vector<RowBatch>& batches) {
  const c10::DeviceType device = batches[0].sent.device().type();
  const bool coalesces = group.getBackend(device)->supportsCoalescing();
  Works works;
  // One launch for all batches: a second one would queue behind the attention kernels.
  if (coalesces) group.startCoalescing(device);
  for (const RowBatch& batch : batches) works.push_back(start(group, batch));
  if (coalesces) works = {group.endCoalescing(device)};
  return works;
}

#ifdef DISTCA_WITH_CUDA
StreamWaits::StreamWaits(const Opening& opening, c10::Device device)
    : spoiled_(at::zeros({1}, at::TensorOptions(device).dtype(at::kInt))),
      rank_(static_cast<uint32_t>(opening.failures->rank())),
      device_(device),
      watchdog_(
          words_, [group = opening.group, device] { group->getBackend(device.type())->abort(); },
          opening.failures, opening.timeout_s) {
  const c10::cuda::CUDAGuard guard(device);
  C10_CUDA_CHECK(cudaStreamCreateWithFlags(&marks_, cudaStreamNonBlocking));
  c10::cuda::getCurrentCUDAStream().synchronize();  // other streams read `spoiled_`, too
}

StreamWaits::~StreamWaits() {
  C10_CUDA_CHECK_WARN(cudaStreamDestroy(marks_));
}

void StreamWaits::add(const Pending& pending) {
  const uint32_t number = ++num_waits_;
  watchdog_.note(number, pending.wait, pending.wait.where.phase);
  words_.write(HostWord::kStarted, number);
  const c10::cuda::CUDAStreamGuard guard(c10::cuda::getStreamFromExternal(marks_, device_.index()));
  for (const auto& work : pending.works) work->wait();
  write_on_stream(words_.on_device() + static_cast<int>(HostWord::kFinished), number, marks_);
}

Seal StreamWaits::seal(const Where& where) {
  return {tag_of(where), rank_, words_.on_device(), static_cast<uint32_t*>(spoiled_.data_ptr())};
}
#endif

}  // namespace distca::transport
