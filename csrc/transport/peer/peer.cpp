#include "peer.h"

#include <ATen/cuda/CUDAContext.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAException.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include "../streams.h"
#include "trip.h"

namespace distca::transport::peer {
namespace {

// Copy engines need 20 us and more for small transfers, stores take multiprocessors.
constexpr int64_t kMaxStoredBytes = int64_t{12} << 20;

// Parcels wait for each other up to here, 0.3 ms: a copy engine needs 6 us to raise a word and go
// on.
constexpr int64_t kMinBytesTogether = int64_t{96} << 20;

// In any order: a copy engine needs 3 us from the end of a copy to the start of one that comes
// after it in the stream.
void copy_together(const std::vector<RowBlock>& blocks, cudaStream_t stream) {
  std::vector<void*> to;
  std::vector<const void*> from;
  std::vector<size_t> sizes;
  for (const RowBlock& rows : blocks) {
    if (rows.num_bytes() == 0) continue;
    if (rows.has_gaps()) {
      C10_CUDA_CHECK(cudaMemcpy2DAsync(rows.dst, rows.dst_stride, rows.src, rows.src_stride,
                                       rows.row_bytes, rows.num_rows, cudaMemcpyDeviceToDevice,
                                       stream));
      continue;
    }
    to.push_back(rows.dst);
    from.push_back(rows.src);
    sizes.push_back(rows.num_bytes());
  }
  if (to.empty()) return;
#if CUDART_VERSION >= 13000
  cudaMemcpyAttributes attributes = {};
  attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
  attributes.flags = cudaMemcpyFlagPreferOverlapWithCompute;
  size_t first = 0;
  C10_CUDA_CHECK(cudaMemcpyBatchAsync(to.data(), from.data(), sizes.data(), to.size(), &attributes,
                                      &first, 1, stream));
#else
  for (size_t i = 0; i < to.size(); ++i) {
    C10_CUDA_CHECK(cudaMemcpyAsync(to[i], from[i], sizes[i], cudaMemcpyDeviceToDevice, stream));
  }
#endif
}

bool are_few_bytes(const std::vector<Parcel>& parcels) {
  int64_t sum = 0;
  for (const Parcel& parcel : parcels) sum += parcel.num_bytes();
  return sum <= kMaxStoredBytes;
}

}  // namespace

Event::Event() {
  C10_CUDA_CHECK(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming));
}

Event::~Event() {
  C10_CUDA_CHECK_WARN(cudaEventDestroy(event_));
}

void Event::record(cudaStream_t stream) {
  C10_CUDA_CHECK(cudaEventRecord(event_, stream));
}

void Event::block(cudaStream_t stream) const {
  C10_CUDA_CHECK(cudaStreamWaitEvent(stream, event_));
}

PeerTransport::PeerTransport(Members members, Meeting meet, int64_t reserved_bytes,
                             std::shared_ptr<FailureBoard> failures, double timeout_s)
    : memory_(members, std::move(meet), reserved_bytes),
      copies_(c10::cuda::getStreamFromPool(true, members.device.index())),
      group_(failures->group()),
      channel_(failures->find_channel("layers")),
      watch_(memory_.host_words(), members.rank),
      watchdog_(watch_, std::move(failures), timeout_s) {
  counters_ = at::zeros({kMaxPeers + 1}, at::TensorOptions(at::kInt).device(members.device));
  at::cuda::getCurrentCUDAStream().synchronize();  // counters are zero for every stream
}

PeerTransport::~PeerTransport() {
  // Freeing peer memory waits for the device, and the device perhaps for a rank that is gone: the
  // watchdog still looks.
  C10_CUDA_CHECK_WARN(cudaDeviceSynchronize());
}

std::unique_ptr<RoundTrip> PeerTransport::begin(const Routes& routes, Cargo cargo,
                                                const Where& where) {
  return make_trip(*this, routes, std::move(cargo), where);
}

void PeerTransport::open(int64_t num_bytes, const Where& where) {
  watchdog_.check();
  if (!memory_.holds(num_bytes)) grow(num_bytes, where.in("growth of peer memory"));
  follow_last_call();
  ++epoch_;
  tag_ = tag_of(where);
  const Where dispatch = where.in(kDispatch);
  watch_.begin(epoch_, {group_, channel_->name(), channel_->enter(dispatch), dispatch, ""});
  channel_->complete();  // nothing that the host waits for
}

// Calls share buffers, counters and words.
void PeerTransport::follow_last_call() {
  const c10::cuda::CUDAStream current = at::cuda::getCurrentCUDAStream();
  if (last_stream_ && *last_stream_ != current) {
    last_call_.record(*last_stream_);
    last_call_.block(current);
  }
  last_stream_ = current;
}

void PeerTransport::grow(int64_t num_bytes, const Where& where) {
  C10_CUDA_CHECK(cudaDeviceSynchronize());
  // Earlier calls may have waited for a rank that is gone, until the watchdog released them.
  watchdog_.check();
  // From here on no stream waits, so the watchdog has nothing to say: the meeting has a timeout.
  memory_.grow(num_bytes, where);
}

void PeerTransport::send(std::vector<Parcel> parcels) {
  if (!parcels.empty() && are_few_bytes(parcels)) return store(parcels, CallWord::kArrived);
  start(memory_.board(), last_use(), epoch_, at::cuda::getCurrentCUDAStream());
  // No link is in the way of what stays on this device.
  const auto own = std::partition(parcels.begin(), parcels.end(),
                                  [this](const Parcel& parcel) { return parcel.rank != rank(); });
  const std::vector<Parcel> stays(std::make_move_iterator(own),
                                  std::make_move_iterator(parcels.end()));
  parcels.erase(own, parcels.end());
  if (!parcels.empty()) {
    copy(std::move(parcels), CallWord::kArrived);
    sent_.record(copies_);
    is_sending_ = true;
  }
  if (!stays.empty()) store(stays, CallWord::kArrived);
}

void PeerTransport::store(const std::vector<Parcel>& parcels, CallWord word) {
  auto* counters = reinterpret_cast<uint32_t*>(counters_.mutable_data_ptr<int32_t>());
  peer::store(memory_.board(), parcels, word, last_use(), call(), counters,
              at::cuda::getCurrentCUDAStream());
}

// Ranks send to the next one first, then to the one after it: as long as they keep step no two send
// to the same one, which they do where all send to all at once, at half the speed. Words raised in
// a stream of their own would spare 3 us a parcel, but ranks fall out of step: a tenth of the
// speed.
void PeerTransport::copy(std::vector<Parcel> parcels, CallWord word) {
  const Board& board = memory_.board();
  const auto distance = [&board](int64_t rank) {
    return (rank - board.rank + board.num_ranks) % board.num_ranks;
  };
  std::sort(parcels.begin(), parcels.end(),
            [&](const Parcel& a, const Parcel& b) { return distance(a.rank) < distance(b.rank); });
  ready_.record(at::cuda::getCurrentCUDAStream());
  ready_.block(copies_);
  std::vector<RowBlock> blocks;
  std::vector<uint64_t*> words;
  int64_t num_bytes = 0;
  for (const Parcel& parcel : parcels) {
    blocks.insert(blocks.end(), parcel.blocks.begin(), parcel.blocks.end());
    words.push_back(reinterpret_cast<uint64_t*>(board.words[parcel.rank] + kFirstCallWord) +
                    call_word_index(word, epoch_, board.rank));
    num_bytes += parcel.num_bytes();
    if (num_bytes < kMinBytesTogether && &parcel != &parcels.back()) continue;
    copy_together(std::exchange(blocks, {}), copies_);
    for (uint64_t* each : std::exchange(words, {})) {
      write_on_stream(each, call_word_of(call()), copies_);
    }
    num_bytes = 0;
  }
}

void PeerTransport::await_arrivals(RankSet ranks) {
  await_rows(memory_.board(), ranks, call(), at::cuda::getCurrentCUDAStream());
}

void PeerTransport::return_results(std::vector<Parcel> parcels) {
  publish(memory_.board(), call(), at::cuda::getCurrentCUDAStream());
  if (parcels.empty()) return;
  if (are_few_bytes(parcels)) return store(parcels, CallWord::kReturned);
  copy(std::move(parcels), CallWord::kReturned);
}

void PeerTransport::await_sent() {
  if (std::exchange(is_sending_, false)) sent_.block(at::cuda::getCurrentCUDAStream());
}

void PeerTransport::end_on_arrival(RankSet ranks) {
  finish_on_arrival(memory_.board(), ranks, call(), at::cuda::getCurrentCUDAStream());
  await_sent();
}

void PeerTransport::end(const std::vector<Gather>& gathers, Addend addend) {
  await_sent();
  fetch(memory_.board(), gathers, addend, call(),
        reinterpret_cast<uint32_t*>(counters_.mutable_data_ptr<int32_t>()) + kMaxPeers,
        at::cuda::getCurrentCUDAStream());
}

}  // namespace distca::transport::peer
