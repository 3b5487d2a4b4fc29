#include "peer.h"

#include <ATen/cuda/CUDAContext.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAException.h>
#include <cuda.h>

#include <algorithm>
#include <utility>

namespace distca::transport::peer {
namespace {

// Copy engines need 20 us and more for small transfers, stores take multiprocessors.
constexpr int64_t kMaxStoredBytes = int64_t{12} << 20;

// Copies to one rank by turns in as many queues: a copy starts while another ends.
constexpr size_t kQueuesPerRank = 2;

// Of the driver, through the runtime, so that the library needs no libcuda where there is none.
template <typename Function>
Function driver_function(const char* name) {
  void* address = nullptr;
  cudaDriverEntryPointQueryResult found;
  C10_CUDA_CHECK(
      cudaGetDriverEntryPointByVersion(name, &address, 12000, cudaEnableDefault, &found));
  TORCH_CHECK(found == cudaDriverEntryPointSuccess, "distca: ", name,
              " is missing from the CUDA driver; install one of CUDA 12 or newer, or set transport "
              "to process_group");
  return reinterpret_cast<Function>(address);
}

void check_driver(CUresult result, const char* name) {
  TORCH_CHECK(result == CUDA_SUCCESS, "distca: ", name, " failed with error ",
              static_cast<int>(result));
}

void write_word(uint32_t* word, uint32_t value, cudaStream_t stream) {
  static const auto write =
      driver_function<decltype(&cuStreamWriteValue32)>("cuStreamWriteValue32");
  check_driver(write(stream, reinterpret_cast<CUdeviceptr>(word), value, 0),
               "cuStreamWriteValue32");
}

// Until the word stands for the epoch.
void await_word(const uint32_t* word, uint32_t epoch, cudaStream_t stream) {
  static const auto wait = driver_function<decltype(&cuStreamWaitValue32)>("cuStreamWaitValue32");
  check_driver(wait(stream, reinterpret_cast<CUdeviceptr>(word), epoch, CU_STREAM_WAIT_VALUE_GEQ),
               "cuStreamWaitValue32");
}

void copy_rows(const RowBlock& rows, cudaStream_t stream) {
  if (!rows.has_gaps()) {
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

struct GatheredBytes {
  int64_t copied = 0;
  int64_t added = 0;
};

GatheredBytes bytes_of(const std::vector<Gather>& gathers) {
  GatheredBytes bytes;
  for (const Gather& gather : gathers) {
    int64_t& sum = gather.taking == Taking::kAdd ? bytes.added : bytes.copied;
    sum += gather.num_bytes * static_cast<int64_t>(gather.sources.size());
  }
  return bytes;
}

// Words of this rank's board that say that the ranks of all sources have published.
std::vector<FlagRange> results_awaited(const std::vector<Gather>& gathers) {
  std::vector<FlagRange> words;
  for (const Gather& gather : gathers) {
    for (const Gather::Source& source : gather.sources) {
      const int64_t word = word_index(Word::kResults, source.rank);
      words.push_back({word, word + 1});
    }
  }
  return words;
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

PeerTransport::PeerTransport(Members members, Meeting meet, std::shared_ptr<FailureBoard> failures,
                             double timeout_s)
    : memory_(members, std::move(meet)),
      watch_(memory_.host_words()),
      watchdog_(watch_, std::move(failures), timeout_s) {
  counters_ = at::zeros({kMaxPeers + 1}, at::TensorOptions(at::kInt).device(members.device));
  for (size_t i = 0; i < members.num_ranks * kQueuesPerRank; ++i) {
    queues_.push_back({c10::cuda::getStreamFromPool(true, members.device.index()),
                       std::make_unique<Event>(), false, false});
  }
  // Loaded now: while copy engines wait, loading might wait for them, and it is what stops them.
  const int64_t any_word = word_index(Word::kStarted, members.rank);
  const auto stream = at::cuda::getCurrentCUDAStream();
  await_words(memory_.board(), {{any_word, any_word + 1}}, 0, stream);
  stream.synchronize();  // counters are zero for every stream
}

void PeerTransport::begin(int64_t num_bytes, const Where& where) {
  watchdog_.check();
  if (!memory_.holds(num_bytes)) grow(num_bytes, where.in("growth of peer memory"));
  ++epoch_;
  watch_.begin(epoch_, where);
}

void PeerTransport::grow(int64_t num_bytes, const Where& where) {
  C10_CUDA_CHECK(cudaDeviceSynchronize());
  // Earlier calls may have waited for a rank that is gone, until the watchdog released them.
  watchdog_.check();
  // From here on no stream waits, so the watchdog has nothing to say: the meeting has a timeout.
  memory_.grow(num_bytes, where);
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

void PeerTransport::restart_queues() {
  ready_.record(at::cuda::getCurrentCUDAStream());
  for (Queue& queue : queues_) queue.is_ready = false;
}

bool PeerTransport::make_ready(Queue& queue) {
  if (queue.is_ready) return false;
  ready_.block(queue.stream);
  queue.is_ready = queue.in_use = true;
  return true;
}

void PeerTransport::copy(const std::vector<Parcel>& parcels) {
  restart_queues();
  for (size_t i = 0; i < parcels.size(); ++i) {
    const auto& [rank, blocks, flag] = parcels[i];
    Queue& queue = queues_[rank * kQueuesPerRank + i % kQueuesPerRank];
    make_ready(queue);
    for (const RowBlock& rows : blocks) copy_rows(rows, queue.stream);
    write_word(memory_.board().words[rank] + flag, epoch_, queue.stream);
  }
}

void PeerTransport::await_arrivals(std::vector<FlagRange> ranges) {
  for (FlagRange& range : ranges) range = {range.first + kFirstFlag, range.last + kFirstFlag};
  await_words(memory_.board(), ranges, epoch_, at::cuda::getCurrentCUDAStream());
}

void PeerTransport::collect(std::vector<Gather> gathers) {
  const auto stream = at::cuda::getCurrentCUDAStream();
  publish(memory_.board(), epoch_, stream);
  gathers_ = std::move(gathers);
  const GatheredBytes bytes = bytes_of(gathers_);
  if (bytes.copied + bytes.added > kMaxStoredBytes) pull(bytes.added);
}

void PeerTransport::pull(int64_t bytes_to_add) {
  const uint32_t* results =
      memory_.board().words[memory_.board().rank] + word_index(Word::kResults, 0);
  addends_ = at::empty({bytes_to_add}, counters_.options().dtype(at::kByte));
  char* free = reinterpret_cast<char*>(addends_.mutable_data_ptr<uint8_t>());
  restart_queues();
  for (size_t i = 0; i < gathers_.size(); ++i) {
    auto& [dst, num_bytes, sources, taking] = gathers_[i];
    for (auto& [data, rank] : sources) {
      Queue& queue = queues_[rank * kQueuesPerRank + i % kQueuesPerRank];
      if (make_ready(queue)) await_word(results + rank, epoch_, queue.stream);
      char* to = taking == Taking::kAdd ? std::exchange(free, free + num_bytes) : dst;
      C10_CUDA_CHECK(cudaMemcpyAsync(to, data, num_bytes, cudaMemcpyDeviceToDevice, queue.stream));
      data = to;
    }
    if (taking == Taking::kCopy) taking = Taking::kNothing;
  }
}

void PeerTransport::end(Addend addend) {
  const auto stream = at::cuda::getCurrentCUDAStream();
  if (addends_.defined()) {
    // Queues wait for words as long as it takes. This kernel stops where the watchdog has given up,
    // and poisons the words, so that they stop too.
    await_words(memory_.board(), results_awaited(gathers_), epoch_, stream);
  }
  for (Queue& queue : queues_) {
    if (!queue.in_use) continue;
    queue.end->record(queue.stream);
    queue.end->block(stream);
    queue.in_use = false;
  }
  fetch(memory_.board(), gathers_, addend, epoch_,
        reinterpret_cast<uint32_t*>(counters_.mutable_data_ptr<int32_t>()) + kMaxPeers, stream);
  gathers_.clear();
  addends_ = at::Tensor();
}

}  // namespace distca::transport::peer
