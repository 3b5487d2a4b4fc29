#pragma once

#include <limits>
#include <string_view>
#include <vector>

#include "attention.h"

namespace distca::attention {

// What follows from a list's tasks alone: the words on the host, and the number of words on the
// device.
struct WordCounts {
  std::vector<int64_t> host;
  int64_t num_device = 0;
};

// The properties of a call that decide which back end computes it.
struct Request {
  const at::Tensor& q;  // [rows, heads, head_dim]
  int64_t head_dim_v;   // of v and out
  Mask mask;
  Scores scores;
  bool deterministic = false;
};

// One implementation of core attention. It has a folder of its own and one entry in the table in
// backends.cpp. attention.cpp checks rows and tasks before it calls these functions. All tensors
// are on q's device.
struct Backend {
  const char* name;

  // The calls that it supports. The first entry of the table that supports a call computes it.
  c10::DeviceType device;
  std::vector<at::ScalarType> dtypes;
  int64_t head_dim_multiple = 1;  // of q and k, and of v
  int64_t max_head_dim = std::numeric_limits<int64_t>::max();
  bool takes_any_window = true;  // else only (-1, 0), (W, 0) and (-1, -1)
  bool takes_any_scale = true;   // else only positive scales
  double max_softcap = 0;        // 0: takes none
  bool is_deterministic = true;  // if Params asks for it; else only if torch does
  bool reads_in_place = true;    // see attention.h
  bool (*takes)(const Request& request) = nullptr;  // further conditions; null: none

  void (*forward)(const ForwardRows& rows, const Params& params) = nullptr;
  void (*backward)(const BackwardRows& rows, const Params& params) = nullptr;

  // row_dots of attention.h. The first entry of a device type that has it serves all tensors there.
  // Null: PyTorch's operators.
  void (*row_dots)(const at::Tensor& a, const at::Tensor& b, const at::Tensor& dots) = nullptr;

  // grad_for_delta of attention.h. Null: grad_out serves for any delta.
  at::Tensor (*grad_for_delta)(const at::Tensor& grad_out, const at::Tensor& delta) = nullptr;

  // Plans the words that the back end reads for a list. Null: it reads none. Checks of layouts use
  // count_words where it is faster.
  PlannedWords (*plan_words)(const std::vector<PlacedTask>& tasks, const Mask& mask) = nullptr;
  WordCounts (*count_words)(const std::vector<PlacedTask>& tasks) = nullptr;
};

// row_dots of the back ends on CUDA.
void row_dots_cuda(const at::Tensor& a, const at::Tensor& b, const at::Tensor& dots);

// Returns the table of back ends, in order of preference.
const std::vector<Backend>& backends();

// Puts a back end first in the table. Call it before the first plan. Not thread-safe.
[[gnu::visibility("default")]] void register_backend(const Backend& backend);

// Returns the first back end of the table that supports the request, or null.
const Backend* find_backend(const Request& request);

// The same, but throws ValueError if none does. The message names what is supported.
const Backend& choose_backend(const Request& request);

// Returns the number that stands for a back end in layouts.
constexpr int64_t id_of(std::string_view name) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (const char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
  return static_cast<int64_t>(hash);
}

// Returns the list's words for the back end of this name. Throws ValueError if there are none.
[[gnu::visibility("default")]] const TaskWords& words_of(const TaskList& list,
                                                         std::string_view name);

}  // namespace distca::attention
