#pragma once

#include <limits>
#include <string_view>
#include <vector>

#include "attention.h"

namespace distca::attention {

// A way to compute core attention: a folder of its own and one row of the table in backends.cpp.
// Functions get rows and tasks that attention.cpp has checked, on q's device.
struct Backend {
  const char* name;

  // What it takes. A call goes to the first row of the table that takes it.
  c10::DeviceType device;
  std::vector<at::ScalarType> dtypes;
  int64_t head_dim_multiple = 1;
  int64_t max_head_dim = std::numeric_limits<int64_t>::max();
  bool takes_any_window = true;  // else (-1, 0) causal, (W, 0) sliding and (-1, -1) full
  bool takes_any_scale = true;   // else positive ones
  bool is_deterministic = true;  // where Params asks; else only where torch asks
  bool reads_in_place = true;    // see attention.h
  bool (*takes)(const at::Tensor& q) = nullptr;  // beyond this; null: all

  void (*forward)(const ForwardRows& rows, const Params& params) = nullptr;
  void (*backward)(const BackwardRows& rows, const Params& params) = nullptr;

  // sum over head_dim of a * b, [rows, heads, head_dim] contiguous, in lse's dtype into `dots`. The
  // first row of a device that has it serves all tensors there.
  void (*row_dots)(const at::Tensor& a, const at::Tensor& b, const at::Tensor& dots) = nullptr;

  // The words that it reads of a list, and a check that keeps its reads inside them and the list:
  // it throws ValueError. Null: it reads none.
  PlannedWords (*plan_words)(const std::vector<PlacedTask>& tasks, const Mask& mask) = nullptr;
  void (*check_words)(const TaskList& list, const TaskWords& words) = nullptr;
};

// Back ends in order of preference.
const std::vector<Backend>& backends();

// Puts a row before all others. Call it before the first plan; it is not safe beside other calls.
[[gnu::visibility("default")]] void register_backend(const Backend& backend);

// What decides which back end computes a call.
struct Request {
  const at::Tensor& q;  // [rows, heads, head_dim]
  Mask mask;
  double softmax_scale = 1;
  bool deterministic = false;
};

// The first back end of the table that takes the request; null if none does.
const Backend* find_backend(const Request& request);

// The same; throws ValueError, naming what is allowed, if none does.
const Backend& choose_backend(const Request& request);

// What stands for a back end in layouts.
constexpr int64_t id_of(std::string_view name) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (const char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
  return static_cast<int64_t>(hash);
}

// The words of a list for the back end of this name. Throws ValueError where it has none.
[[gnu::visibility("default")]] const TaskWords& words_of(const TaskList& list,
                                                         std::string_view name);

}  // namespace distca::attention
