#include "control.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <map>

namespace distca::transport {
namespace {

// What ranks exchange first. It has the same size in all phases, because gloo aborts or returns
// stale memory if sizes differ. Most texts fit in it.
struct Frame {
  std::array<char, 40> phase{};
  int64_t num_bytes = 0;
  std::array<char, 208> text{};
};
static_assert(sizeof(Frame) == 256);

Frame frame_of(std::string_view own, const char* phase) {
  Frame frame;
  std::strncpy(frame.phase.data(), phase, frame.phase.size() - 1);
  frame.num_bytes = static_cast<int64_t>(own.size());
  std::copy_n(own.data(), std::min(own.size(), frame.text.size()), frame.text.data());
  return frame;
}

void check_phases(const std::vector<Frame>& frames, const Where& where) {
  std::map<std::string, std::string> ranks_by_phase;
  for (size_t rank = 0; rank < frames.size(); ++rank) {
    ranks_by_phase[frames[rank].phase.data()] += " " + std::to_string(rank);
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

at::Tensor ControlPlane::exchange(std::string_view own, const Where& where,
                                  const std::string& activity) {
  const auto num_bytes = static_cast<int64_t>(own.size());
  at::Tensor sent = at::empty({1, num_bytes}, at::kByte);
  at::Tensor gathered = at::empty({group_->getSize(), num_bytes}, at::kByte);
  std::copy_n(own.data(), own.size(), sent.mutable_data_ptr<uint8_t>());
  const Wait wait = patience_->enter(where, activity);
  c10::intrusive_ptr<c10d::Work> work;
  patience_->guard(where, [&] {
    patience_->check_stopped();
    work = group_->_allgather_base(gathered, sent);
  });
  patience_->wait_on_host({work}, wait);
  return gathered;
}

std::vector<std::string> ControlPlane::gather(std::string_view own, const Where& where,
                                              const std::string& activity) {
  const Frame mine = frame_of(own, where.phase);
  std::vector<Frame> frames(group_->getSize());
  const at::Tensor first =
      exchange({reinterpret_cast<const char*>(&mine), sizeof(Frame)}, where, activity);
  std::memcpy(frames.data(), first.const_data_ptr<uint8_t>(), first.numel());
  check_phases(frames, where);
  int64_t most = 0;
  for (const Frame& frame : frames) most = std::max(most, frame.num_bytes);
  std::vector<std::string> texts;
  if (most <= static_cast<int64_t>(mine.text.size())) {
    for (const Frame& frame : frames) texts.emplace_back(frame.text.data(), frame.num_bytes);
    return texts;
  }
  std::string padded(own);
  padded.resize(most);
  const at::Tensor whole = exchange(padded, where, activity);
  const auto* bytes = reinterpret_cast<const char*>(whole.const_data_ptr<uint8_t>());
  for (size_t rank = 0; rank < frames.size(); ++rank) {
    texts.emplace_back(bytes + static_cast<int64_t>(rank) * most, frames[rank].num_bytes);
  }
  return texts;
}

at::Tensor ControlPlane::all_gather(const at::Tensor& tensor, const Where& where,
                                    const std::string& activity) {
  const at::Tensor own = tensor.contiguous();
  const std::string_view bytes(static_cast<const char*>(own.const_data_ptr()), own.nbytes());
  const std::vector<std::string> texts = gather(bytes, where, activity);
  std::vector<int64_t> sizes = own.sizes().vec();
  sizes.insert(sizes.begin(), static_cast<int64_t>(texts.size()));
  at::Tensor gathered = at::empty(sizes, own.options());
  auto* next = static_cast<char*>(gathered.mutable_data_ptr());
  for (size_t rank = 0; rank < texts.size(); ++rank) {
    TORCH_CHECK_VALUE(texts[rank].size() == bytes.size(), "distca: ", describe(where), ": rank ",
                      rank, " sends ", texts[rank].size(), " bytes, this rank ", bytes.size(),
                      "; all ranks of a group must run the same version and make the same calls");
    next = std::copy(texts[rank].begin(), texts[rank].end(), next);
  }
  return gathered;
}

}  // namespace distca::transport
