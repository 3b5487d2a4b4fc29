#include "control.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/stack.h>
#include <c10/util/Exception.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <chrono>
#include <cstring>
#include <map>

namespace distca::transport {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::milliseconds kSlice{50};  // after which signals and stop() are noticed
constexpr std::chrono::milliseconds kLook{500};  // from one look at failures to the next

// Runs pending signal handlers of Python, which Python does only between its own instructions, and
// on the main thread alone. An operator implemented in Python keeps the library independent of
// Python's ABI.
void handle_signals() {
  static const auto run_handlers =
      c10::Dispatcher::singleton().findSchemaOrThrow("distca::handle_signals", "").typed<void()>();
  const bool is_main_thread = syscall(SYS_gettid) == getpid();
  if (is_main_thread) run_handlers.call();
}

// Returns whether the work ends within a slice. Throws the work's error.
bool ends_soon(c10d::Work& work) {
  try {
    work.wait(kSlice);
    return true;
  } catch (const std::exception&) {
    // The slice is over, or the operation has failed; or it ended just now.
  }
  if (!work.isCompleted()) return false;
  work.wait();
  return true;
}

[[noreturn]] void part(const Where& where, const std::string& text) {
  TORCH_CHECK_WITH(DistBackendError, false, "distca: ", describe(where), ": ", text);
}

// The beginning of a frame. As much of the text follows as the frame has room for.
struct FrameHeader {
  std::array<char, 40> phase{};
  int64_t num_bytes = 0;  // of the text
};

constexpr size_t kMaxRoom = 65536;  // bytes of text in a frame: 1600 pieces of documents

std::string frame_of(std::string_view own, const char* phase, size_t room) {
  FrameHeader header;
  std::strncpy(header.phase.data(), phase, header.phase.size() - 1);
  header.num_bytes = static_cast<int64_t>(own.size());
  std::string frame(reinterpret_cast<const char*>(&header), sizeof(header));
  frame += own.substr(0, room);
  frame.resize(sizeof(header) + room);
  return frame;
}

std::vector<FrameHeader> headers_of(const at::Tensor& frames) {
  std::vector<FrameHeader> headers(frames.size(0));
  const uint8_t* next = frames.const_data_ptr<uint8_t>();
  for (FrameHeader& header : headers) {
    std::memcpy(&header, next, sizeof(header));
    next += frames.size(1);
  }
  return headers;
}

void check_phases(const std::vector<FrameHeader>& headers, const Where& where) {
  std::map<std::string, std::string> ranks_by_phase;
  for (size_t rank = 0; rank < headers.size(); ++rank) {
    ranks_by_phase[headers[rank].phase.data()] += " " + std::to_string(rank);
  }
  if (ranks_by_phase.size() == 1) return;
  std::string text;
  for (const auto& [phase, ranks] : ranks_by_phase) {
    text += (text.empty() ? "" : "; ") + phase + " on rank(s)" + ranks;
  }
  TORCH_CHECK_VALUE(false, "distca: ", describe(where),
                    ": ranks disagree on what comes next, nothing was sent: ", text,
                    ". All ranks of a group make the same calls in the same order.");
}

}  // namespace

void Patience::fail(const Where& where, const std::string& error) {
  part(where, failures_->diagnose(channel_, error, describe(where)));
}

void Patience::fail_together(const Where& where, const std::string& mismatch) {
  failures_->announce_mismatch(mismatch);
  part(where, failures_->diagnose(mismatch, describe(where)));
}

void Patience::check_stopped(const Where& where) const {
  if (is_stopped_) part(where, "given up, because this rank leaves the group");
}

void Patience::wait_in_slices(c10d::Work& work, Wait wait) {
  const Clock::time_point start = Clock::now();
  Clock::time_point next_look = start + kLook, next_question = start + pause_after({});
  while (!guard(wait.where, [&] { return ends_soon(work); })) {
    check_stopped(wait.where);
    handle_signals();
    const Clock::time_point now = Clock::now();
    if (now < next_look) continue;
    next_look = now + kLook;
    if (!failures_->find_departed(channel_).empty() || failures_->alarmed()) {
      fail(wait.where, "given up, because a rank of the group has failed");
    }
    if (now < next_question || !is_awaited_) continue;
    next_question = now + pause_after(now - start);
    wait.seconds = std::chrono::duration<double>(now - start).count();
    const std::string deadlock = failures_->find_deadlock(wait);
    if (!deadlock.empty()) fail_together(wait.where, deadlock);
  }
}

void Patience::wait_on_host(const Pending& pending) {
  std::lock_guard<std::mutex> lock(mutex_);
  try {
    for (const auto& work : pending.works) wait_in_slices(*work, pending.wait);
  } catch (...) {
    failures_->abandon();
    throw;
  }
  failures_->complete(channel_);
}

void Patience::wait_on_stream(const Pending& pending) {
  std::lock_guard<std::mutex> lock(mutex_);
  guard(pending.wait.where, [&] {
    for (const auto& work : pending.works) work->wait();
  });
  failures_->complete(channel_);
}

Gathering ControlPlane::start(std::string_view own, const Where& where,
                              const std::string& activity) {
  const auto num_bytes = static_cast<int64_t>(own.size());
  at::Tensor sent = at::empty({1, num_bytes}, at::kByte);
  at::Tensor gathered = at::empty({group_->getSize(), num_bytes}, at::kByte);
  std::copy_n(own.data(), own.size(), sent.mutable_data_ptr<uint8_t>());
  return {gathered, patience_->start(where, activity, [&] {
            return Works{group_->_allgather_base(gathered, sent)};
          })};
}

at::Tensor ControlPlane::exchange(std::string_view own, const Where& where,
                                  const std::string& activity) {
  const Gathering gathering = start(own, where, activity);
  patience_->wait_on_host(gathering.pending);
  return gathering.bytes;
}

std::vector<std::string> ControlPlane::gather(std::string_view own, const Where& where,
                                              const std::string& activity) {
  at::Tensor bytes = exchange(frame_of(own, where.phase, room_), where, activity);
  const std::vector<FrameHeader> headers = headers_of(bytes);
  check_phases(headers, where);
  size_t begin = sizeof(FrameHeader);
  const auto most =
      static_cast<size_t>(std::ranges::max(headers, {}, &FrameHeader::num_bytes).num_bytes);
  if (most > room_) {
    room_ = std::max(room_, std::min(kMaxRoom, std::bit_ceil(most)));
    std::string padded(own);
    padded.resize(most);
    bytes = exchange(padded, where, activity);
    begin = 0;
  }
  std::vector<std::string> texts;
  const auto* row = reinterpret_cast<const char*>(bytes.const_data_ptr<uint8_t>());
  for (const FrameHeader& header : headers) {
    texts.emplace_back(row + begin, header.num_bytes);
    row += bytes.size(1);
  }
  return texts;
}

at::Tensor ControlPlane::all_gather(const at::Tensor& tensor, const Where& where,
                                    const std::string& activity) {
  const at::Tensor own = tensor.contiguous();
  const std::string_view bytes(static_cast<const char*>(own.const_data_ptr()), own.nbytes());
  std::vector<std::string> texts = gather(bytes, where, activity);
  std::vector<at::Tensor> tensors;
  for (size_t rank = 0; rank < texts.size(); ++rank) {
    TORCH_CHECK_VALUE(texts[rank].size() == bytes.size(), "distca: ", describe(where), ": rank ",
                      rank, " sends ", texts[rank].size(), " bytes, this rank ", bytes.size(),
                      "; all ranks of a group must run the same version and make the same calls");
    tensors.push_back(at::from_blob(texts[rank].data(), own.sizes(), own.options()));
  }
  return at::stack(tensors);
}

}  // namespace distca::transport
