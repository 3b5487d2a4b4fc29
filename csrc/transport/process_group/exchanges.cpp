#include "exchanges.h"

#ifdef DISTCA_WITH_CUDA
#include <c10/cuda/CUDAGuard.h>
#endif

#include <algorithm>
#include <cstring>
#include <map>
#include <string>
#include <utility>

namespace distca::transport {
namespace {

// Returns the bytes that this rank sends or receives, whichever are more.
[[maybe_unused]] int64_t most_bytes(const std::vector<RowBatch>& batches) {
  int64_t sent = 0, received = 0;
  for (const RowBatch& batch : batches) {
    sent += batch.sent.numel();
    received += batch.received.numel();
  }
  return std::max(sent, received);
}

// Starts an exchange of rows. On a device, a stream must wait for it.
Works exchange(c10d::ProcessGroup& group, const std::vector<RowBatch>& batches) {
  const c10::DeviceType device = batches[0].sent.device().type();
  const bool coalesces = group.getBackend(device)->supportsCoalescing();
  Works works;
  // One launch for all batches: a second one would queue behind the attention kernels.
  if (coalesces) group.startCoalescing(device);
  for (const auto& [sent, received, counts] : batches) {
    at::Tensor input = sent, output = received;
    std::vector<int64_t> send = counts.send, recv = counts.recv;
    works.push_back(group.alltoall_base(output, input, recv, send));
  }
  if (coalesces) works = {group.endCoalescing(device)};
  return works;
}

// Describes how the places of ranks (WhereWords by rank) differ. Returns "" if all are equal.
std::string difference_of(const at::Tensor& places) {
  std::map<WhereWords, std::vector<int64_t>> ranks_by_place;
  for (int64_t rank = 0; rank < places.size(0); ++rank) {
    WhereWords words;
    std::memcpy(words.data(), places[rank].const_data_ptr(), sizeof(words));
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

}  // namespace

Pending Exchanges::start_rows(const std::vector<RowBatch>& batches, const Where& where,
                              const std::string& activity) {
  return opening_.patience->start(where, activity,
                                  [&] { return exchange(*opening_.group, batches); });
}

void Exchanges::let_begin([[maybe_unused]] const c10::Device& device) {
#ifdef DISTCA_WITH_CUDA
  if (!device.is_cpu()) hold_current_stream();
#endif
}

Seal Exchanges::seal([[maybe_unused]] const Where& where, const c10::Device& device) {
#ifdef DISTCA_WITH_CUDA
  if (!device.is_cpu()) return streams_of(device).seal(where);
#endif
  return {};
}

std::vector<ExchangeTime> Exchanges::take_times() {
#ifdef DISTCA_WITH_CUDA
  if (streams_) return streams_->take_times();
#endif
  return {};
}

Gathering Exchanges::start(const std::vector<RowBatch>& batches, const Where& where) {
#ifdef DISTCA_WITH_CUDA
  const c10::Device device = batches[0].sent.device();
  if (!device.is_cpu()) {
    streams_of(device).check();
    streams_->begin(where);
    Pending pending = start_rows(batches, where, "");
    hold_current_stream();
    return {{}, pending};
  }
#endif
  const WhereWords own = words_of(where);
  return calls_.start({reinterpret_cast<const char*>(own.data()), sizeof(own)}, where,
                      describe(where));
}

void Exchanges::finish(const Gathering& started, const std::vector<RowBatch>& batches,
                       [[maybe_unused]] bool may_run_ahead) {
#ifdef DISTCA_WITH_CUDA
  if (!batches[0].sent.device().is_cpu()) return finish_on_device(started, batches, may_run_ahead);
#endif
  Patience& patience = *opening_.patience;
  const auto& [places, pending] = started;
  const Where& where = pending.wait.where;
  // gloo matches messages by their order alone: if sizes differ, it returns stale memory or aborts.
  patience.wait_on_host(pending);
  const std::string difference = difference_of(places);
  if (!difference.empty()) patience.fail_together(where, difference);
  patience.wait_on_host(start_rows(batches, where, describe(where)));
}

#ifdef DISTCA_WITH_CUDA
StreamWaits& Exchanges::streams_of(const c10::Device& device) {
  if (!streams_) streams_ = std::make_unique<StreamWaits>(opening_, device);
  return *streams_;
}

Gathering Exchanges::start_to_receive(const std::vector<RowBatch>& batches, const Where& where) {
  streams_->check();
  const c10::cuda::CUDAStreamGuard aside(streams_->marks());
  streams_->begin(where);
  return {{}, start_rows(batches, where, "")};
}

void Exchanges::finish_on_device(const Gathering& started, const std::vector<RowBatch>& batches,
                                 bool may_run_ahead) {
  Patience& patience = *opening_.patience;
  const Pending& pending = started.pending;
  const Where& where = pending.wait.where;
  const bool receives = std::any_of(batches.begin(), batches.end(), [](const RowBatch& batch) {
    return batch.received.numel() > 0;
  });
  if (receives || !may_run_ahead) {
    patience.wait_on_stream(pending);
    streams_->release();
  } else {
    for (const RowBatch& batch : batches) streams_->hold(batch.sent);
    if (where.is_last()) streams_->release_later();
    const c10::cuda::CUDAStreamGuard aside(streams_->marks());
    patience.wait_on_stream(pending);
  }
  patience.guard(where, [&] { streams_->add(pending, most_bytes(batches)); });
}
#endif

}  // namespace distca::transport
