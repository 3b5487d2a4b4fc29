#include "board_watch.h"

#include <c10/core/DeviceGuard.h>
#include <c10/cuda/CUDAException.h>

#include <algorithm>

namespace distca::transport::peer {
namespace {

constexpr size_t kMaxCalls = 64;  // remembered, to say where a rank is

}  // namespace

BoardWatch::BoardWatch(const Board& board, c10::Device device)
    : board_(board), device_(device), words_(kFirstFlag) {
  const c10::DeviceGuard guard(device_);
  C10_CUDA_CHECK(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
}

BoardWatch::~BoardWatch() {
  cudaStreamDestroy(stream_);  // fails where the process is ending: then it is gone already
}

void BoardWatch::begin(uint32_t epoch, const Where& where) {
  std::lock_guard lock(mutex_);
  if (calls_.size() == kMaxCalls) calls_.pop_front();
  calls_.push_back({epoch, where});
}

Watched::State BoardWatch::look() {
  const std::vector<uint32_t> last = words_;
  if (!read_words()) return State::kGone;
  if (word(Word::kStarted) == word(Word::kFinished)) return State::kIdle;
  return words_ == last ? State::kStill : State::kMoving;
}

// The device is set without a guard: its end would call into PyTorch, which a process that is
// ending has torn down.
bool BoardWatch::read_words() {
  const size_t num_bytes = words_.size() * sizeof(uint32_t);
  return cudaSetDevice(device_.index()) == cudaSuccess &&
         cudaMemcpyAsync(words_.data(), board_.words[board_.rank], num_bytes,
                         cudaMemcpyDeviceToHost, stream_) == cudaSuccess &&
         cudaStreamSynchronize(stream_) == cudaSuccess;
}

Where BoardWatch::place() {
  const uint32_t epoch = word(Word::kStarted);
  const bool has_results = word(Word::kResults) == epoch;
  std::lock_guard lock(mutex_);
  const auto call = std::find_if(calls_.begin(), calls_.end(),
                                 [epoch](const Call& call) { return call.epoch == epoch; });
  const Where where = call == calls_.end() ? Where{"", "", -1, -1} : call->where;
  return where.in(has_results ? "combine" : "dispatch");
}

bool BoardWatch::release() {
  uint32_t latest = 0;
  {
    std::lock_guard lock(mutex_);
    if (!calls_.empty()) latest = calls_.back().epoch;
  }
  const std::vector<uint32_t> words(kFirstFlag + kMaxFlags, latest + kPoison);
  return cudaMemcpyAsync(board_.words[board_.rank], words.data(), words.size() * sizeof(uint32_t),
                         cudaMemcpyHostToDevice, stream_) == cudaSuccess &&
         cudaStreamSynchronize(stream_) == cudaSuccess;
}

}  // namespace distca::transport::peer
