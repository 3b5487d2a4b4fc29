#include "peer.h"

#include <ATen/cuda/CUDAContext.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>

#include <algorithm>
#include <iterator>
#include <torch/csrc/distributed/c10d/symm_mem/SymmetricMemory.hpp>
#include <utility>

#include "core/rows.h"
#include "rendezvous.h"

namespace distca::transport::peer {
namespace {

constexpr int64_t kTableBytes = 2 * kMaxPeers * sizeof(void*);  // of a rendezvous
constexpr int64_t kGranularity = int64_t{2} << 20;              // bytes of a buffer

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

PeerTransport::PeerTransport(PeerOpening opening)
    : members_(std::move(opening.members)),
      meet_(std::move(opening.meet)),
      reserved_bytes_(opening.reserved_bytes),
      words_(share(kNumWords * sizeof(uint32_t), {"opening of peer memory", "", -1, -1})),
      copies_(c10::cuda::getStreamFromPool(true, members_.device.index())),
      failures_(std::move(opening.failures)),
      watchdog_(
          host_words_, [this] { host_words_.write(HostWord::kReleased, 1); }, failures_,
          opening.timeout_s) {
  board_.host = host_words_.on_device();
  board_.rank = static_cast<int>(members_.rank);
  board_.num_ranks = static_cast<int>(members_.num_ranks);
  board_.first_rank = static_cast<int>(members_.first_rank);
  for (int64_t rank = 0; rank < members_.num_ranks; ++rank) {
    board_.words[rank] = reinterpret_cast<uint32_t*>(words_.addresses[rank]);
  }
  counters_ = at::zeros({kMaxPeers + 1}, at::TensorOptions(at::kInt).device(members_.device));
  at::cuda::getCurrentCUDAStream().synchronize();  // counters are zero for every stream
}

PeerTransport::~PeerTransport() {
  // Freeing peer memory waits for the device, and the device perhaps for a rank that is gone: the
  // watchdog still looks.
  C10_CUDA_CHECK_WARN(cudaDeviceSynchronize());
}

// Shares `num_bytes`, which are equal on all ranks. Collective; waits for this rank's device.
SharedMemory PeerTransport::share(int64_t num_bytes, const Where& where) const {
  TORCH_CHECK_VALUE(members_.num_ranks <= kMaxPeers, "the group has ", members_.num_ranks,
                    " ranks; peer memory serves up to ", kMaxPeers);
  at::Tensor tensor;
  std::string here;
  // PyTorch holds back what tensors have freed: where memory is short, tries again without that.
  for (int attempt = 0; attempt < 2 && !tensor.defined(); ++attempt) {
    try {
      if (attempt > 0) c10::cuda::CUDACachingAllocator::emptyCache();
      // Taken and given back: rendezvous needs two small tables, and then may not lack memory.
      at::empty({kTableBytes}, at::TensorOptions(at::kByte).device(members_.device));
      tensor = c10d::symmetric_memory::empty_strided_p2p(
          {num_bytes}, {1}, at::kByte, members_.device, members_.group_name, std::nullopt);
    } catch (const c10::Error& error) {
      here = " Here: " + message_of(error);
    }
  }
  if (tensor.defined()) tensor.zero_();  // nobody may write before this: rendezvous is a barrier
  C10_CUDA_CHECK(cudaDeviceSynchronize());
  // Rendezvous waits for the others as long as the store does, and names nobody: only ranks that
  // have just met, all with memory, may enter it.
  const std::vector<int64_t> has_memory = meet_(tensor.defined() ? 1 : 0, where);
  std::string without;
  for (size_t rank = 0; rank < has_memory.size(); ++rank) {
    if (has_memory[rank] == 0) without += " " + std::to_string(rank);
  }
  if (!without.empty()) {
    throw GroupOutOfMemory(
        {__func__, __FILE__, static_cast<uint32_t>(__LINE__)},
        c10::str("distca: ", describe(where), ": out of memory on rank(s)", without, ", where ",
                 num_bytes, " bytes for other ranks' rows were wanted. Every rank keeps the ",
                 kNumBuffers * buffer_bytes_,
                 " bytes it has, and the group goes on: free memory, or lower ",
                 "memory_cap_gb (and raise rounds where no plan keeps to it), or peer_memory_gb.",
                 tensor.defined() ? "" : here));
  }
  std::vector<char*> addresses = rendezvous(tensor, members_.group_name);
  return {std::move(tensor), std::move(addresses)};
}

void PeerTransport::open(int64_t num_bytes, const Where& where) {
  watchdog_.check();
  if (!buffers_.tensor.defined() || num_bytes > buffer_bytes_) {  // calls of 0 bytes need addresses
    C10_CUDA_CHECK(cudaDeviceSynchronize());
    // Earlier calls may have waited for a rank that is gone, until the watchdog released them.
    watchdog_.check();
    // From here on no stream waits, so the watchdog has nothing to say: the meeting has a timeout.
    // Nobody uses this rank's old buffers: the others' devices are idle too when they meet.
    const int64_t with_room = num_bytes + num_bytes / 4;  // plans differ from step to step
    const int64_t wanted =
        round_up(std::max({with_room, reserved_bytes_ / kNumBuffers, int64_t{1}}), kGranularity);
    buffers_ = share(kNumBuffers * wanted, where.in("growth of peer memory"));
    buffer_bytes_ = wanted;
  }
  const c10::cuda::CUDAStream current = at::cuda::getCurrentCUDAStream();
  if (last_stream_ && *last_stream_ != current) {  // calls share buffers, counters and words
    last_call_.record(*last_stream_);
    last_call_.block(current);
  }
  last_stream_ = current;
  ++epoch_;
  tag_ = tag_of(where);
  const Where dispatch = where.in(kDispatch);
  watchdog_.note(epoch_, failures_->begin(kLayers, dispatch, ""), kCombine);
  failures_->complete(kLayers);  // nothing that the host waits for
}

void PeerTransport::send(std::vector<Parcel> parcels) {
  if (!parcels.empty() && are_few_bytes(parcels)) return store(parcels, CallWord::kArrived);
  start(board_, last_use(), epoch_, at::cuda::getCurrentCUDAStream());
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
  peer::store(board_, parcels, word, last_use(), call(), counters(),
              at::cuda::getCurrentCUDAStream());
}

// Ranks send to the next one first, then to the one after it: as long as they keep step no two send
// to the same one, which they do where all send to all at once, at half the speed. Words raised in
// a stream of their own would spare 3 us a parcel, but ranks fall out of step: a tenth of the
// speed.
void PeerTransport::copy(std::vector<Parcel> parcels, CallWord word) {
  const auto distance = [this](int64_t rank) {
    return (rank - board_.rank + board_.num_ranks) % board_.num_ranks;
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
    words.push_back(reinterpret_cast<uint64_t*>(board_.words[parcel.rank] + kFirstCallWord) +
                    call_word_index(word, epoch_, board_.rank));
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
  await_rows(board_, ranks, call(), at::cuda::getCurrentCUDAStream());
}

void PeerTransport::return_results(std::vector<Parcel> parcels) {
  publish(board_, call(), at::cuda::getCurrentCUDAStream());
  if (parcels.empty()) return;
  if (are_few_bytes(parcels)) return store(parcels, CallWord::kReturned);
  copy(std::move(parcels), CallWord::kReturned);
}

void PeerTransport::await_sent() {
  if (std::exchange(is_sending_, false)) sent_.block(at::cuda::getCurrentCUDAStream());
}

void PeerTransport::end_on_arrival(RankSet ranks) {
  finish_on_arrival(board_, ranks, call(), at::cuda::getCurrentCUDAStream());
  await_sent();
}

void PeerTransport::end(const std::vector<Gather>& gathers, Addend addend) {
  await_sent();
  fetch(board_, gathers, addend, call(), counters() + kMaxPeers, at::cuda::getCurrentCUDAStream());
}

}  // namespace distca::transport::peer
