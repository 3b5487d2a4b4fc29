#include "peer.h"

#include <ATen/cuda/CUDAContext.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAException.h>
#include <cuda.h>

#include <algorithm>

namespace distca::transport::peer {
namespace {

// Copy engines need 20 us and more for small transfers, stores take multiprocessors.
constexpr int64_t kMaxStoredBytes = int64_t{12} << 20;

// Copies to one rank by turns in as many queues: a copy starts while another ends.
constexpr size_t kQueuesPerRank = 2;

// Through the runtime, so that the library needs no libcuda where there is no driver.
decltype(&cuStreamWriteValue32) stream_write_value() {
  static const auto function = [] {
    void* address = nullptr;
    cudaDriverEntryPointQueryResult found;
    C10_CUDA_CHECK(cudaGetDriverEntryPointByVersion("cuStreamWriteValue32", &address, 12000,
                                                    cudaEnableDefault, &found));
    TORCH_CHECK(found == cudaDriverEntryPointSuccess,
                "distca: cuStreamWriteValue32 is missing from the CUDA driver; install one of CUDA "
                "12 or newer, or set transport to process_group");
    return reinterpret_cast<decltype(&cuStreamWriteValue32)>(address);
  }();
  return function;
}

void write_word(uint32_t* word, uint32_t value, cudaStream_t stream) {
  const CUresult result =
      stream_write_value()(stream, reinterpret_cast<CUdeviceptr>(word), value, 0);
  TORCH_CHECK(result == CUDA_SUCCESS, "distca: cuStreamWriteValue32 failed with error ",
              static_cast<int>(result));
}

void copy_rows(const RowBlock& rows, cudaStream_t stream) {
  const bool has_gaps =
      rows.num_rows > 1 && (rows.src_stride != rows.row_bytes || rows.dst_stride != rows.row_bytes);
  if (!has_gaps) {
    C10_CUDA_CHECK(
        cudaMemcpyAsync(rows.dst, rows.src, rows.num_bytes(), cudaMemcpyDeviceToDevice, stream));
    return;
  }
  C10_CUDA_CHECK(cudaMemcpy2DAsync(rows.dst, rows.dst_stride, rows.src, rows.src_stride,
                                   rows.row_bytes, rows.num_rows, cudaMemcpyDeviceToDevice,
                                   stream));
}

int64_t bytes_of(const std::vector<Parcel>& parcels) {
  int64_t num_bytes = 0;
  for (const Parcel& parcel : parcels) {
    for (const RowBlock& rows : parcel.blocks) num_bytes += rows.num_bytes();
  }
  return num_bytes;
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

PeerTransport::PeerTransport(Members members, std::shared_ptr<FailureBoard> failures,
                             double timeout_s)
    : memory_(members), watchdog_(memory_.board(), members.device, std::move(failures), timeout_s) {
  counters_ = at::zeros({kMaxPeers + 1}, at::TensorOptions(at::kInt).device(members.device));
  for (size_t i = 0; i < members.num_ranks * kQueuesPerRank; ++i) {
    queues_.push_back({c10::cuda::getStreamFromPool(true, members.device.index()),
                       std::make_unique<Event>(), false});
  }
  at::cuda::getCurrentCUDAStream().synchronize();  // counters are zero for every stream
}

void PeerTransport::begin(int64_t num_bytes, const Where& where) {
  watchdog_.begin(epoch_ + 1, where);
  memory_.reserve(num_bytes);
  ++epoch_;
}

void PeerTransport::send(std::vector<Parcel> parcels) {
  for (Parcel& parcel : parcels) parcel.flag += kFirstFlag;
  const Board& board = memory_.board();
  const auto stream = at::cuda::getCurrentCUDAStream();
  const uint32_t last_use = epoch_ - PeerMemory::kNumBuffers;
  const int64_t num_bytes = bytes_of(parcels);
  if (!parcels.empty() && num_bytes <= kMaxStoredBytes) {
    auto* counters = reinterpret_cast<uint32_t*>(counters_.mutable_data_ptr<int32_t>());
    return store(board, parcels, last_use, epoch_, counters, stream);
  }
  start(board, last_use, epoch_, stream);
  copy(parcels);
}

void PeerTransport::copy(const std::vector<Parcel>& parcels) {
  ready_.record(at::cuda::getCurrentCUDAStream());
  for (size_t i = 0; i < parcels.size(); ++i) {
    const auto& [rank, blocks, flag] = parcels[i];
    Queue& queue = queues_[rank * kQueuesPerRank + i % kQueuesPerRank];
    if (!queue.in_use) ready_.block(queue.stream);
    queue.in_use = true;
    for (const RowBlock& rows : blocks) copy_rows(rows, queue.stream);
    write_word(memory_.board().words[rank] + flag, epoch_, queue.stream);
  }
}

void PeerTransport::await_arrivals(std::vector<FlagRange> ranges) {
  for (FlagRange& range : ranges) range = {range.first + kFirstFlag, range.last + kFirstFlag};
  await_words(memory_.board(), ranges, epoch_, at::cuda::getCurrentCUDAStream());
}

void PeerTransport::fetch(const std::vector<Gather>& gathers, Addend addend) {
  const auto stream = at::cuda::getCurrentCUDAStream();
  transport::peer::fetch(
      memory_.board(), gathers, addend, epoch_,
      reinterpret_cast<uint32_t*>(counters_.mutable_data_ptr<int32_t>()) + kMaxPeers, stream);
  for (Queue& queue : queues_) {
    if (!queue.in_use) continue;
    queue.end->record(queue.stream);
    queue.end->block(stream);
    queue.in_use = false;
  }
}

}  // namespace distca::transport::peer
