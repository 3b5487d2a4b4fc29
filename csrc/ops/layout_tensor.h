#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "attention/attention.h"
#include "planner/layout/layout.h"
#include "transport/transport.h"

namespace distca::ops {

constexpr int64_t kMaxRanks = 65536;
constexpr int64_t kMaxParts = 64;

// A part of a plan that a rank computes at a time: rows arrive, tasks run, results travel home.
struct Round {
  transport::Routes routes;
  attention::TaskList early;  // home tasks that run while rows arrive
  attention::TaskList late;   // home tasks that run while results travel home
  attention::TaskList visiting;
};

// The first words of a layout's host tensor.
struct LayoutHeader {
  int64_t magic = 0;
  int64_t length = 0;  // words of the host tensor; it may be padded
  int64_t step = -1;   // number of the group's earlier plans; -1: no group
  uint64_t plan_digest = 0;
  int64_t num_ranks = 1;
  int64_t num_home_rows = 0;  // of keys
  int64_t moves_rows = 0;     // whether any rank sends any row under this plan
  Mask mask;
  int64_t num_rounds = 1;
  int64_t deterministic = 0;
  int64_t num_counted = 0;       // of `rows`: words that runs give
  int64_t num_row_words = 0;     // of `rows`
  int64_t num_context_rows = 0;  // home rows without queries
  int64_t num_kept_queries = 0;  // visiting rows that this rank keeps, over all rounds
  int64_t num_kept_keys = 0;
  int64_t rank = 0;
  int64_t batch = -1;          // step of the first plan for the same documents
  int64_t ranks_per_node = 0;  // of routes that are split by node; 0: not split
  int64_t num_parts = 1;       // of heads; see transport/head_part.h

  int64_t num_home_queries() const { return num_home_rows - num_context_rows; }
};

// A rank's layout as operators use it. `layout` (int64, host) has the header, then the movement of
// each round, then the tasks of each round with the words of back ends. `rows` (int32, on the
// device of attention) has row indices (see row_words.h) and device words of back ends.
struct Layout : LayoutHeader {
  at::Device device{at::kCPU};  // of rows
  std::vector<Round> rounds;    // one or more, as many on every rank; home tasks are of the first
};

struct LayoutOrigin {
  int64_t step;
  int64_t batch;
  bool moves_rows;
  bool deterministic;
  std::string device_type;  // "cpu" or "cuda": what the attention implementation needs
  int64_t ranks_per_node;
  int64_t num_parts;
};

inline attention::Params attention_params(const Layout& layout, const attention::Scores& scores) {
  return {scores, layout.deterministic != 0};
}

// Returns (layout, packed rows), both on the host.
std::tuple<at::Tensor, at::Tensor> encode_layout(const std::vector<planner::Layout>& rounds,
                                                 const planner::Plan& plan,
                                                 const LayoutOrigin& origin);

// Returns the layout's `rows`, on the device of its packed rows. Throws ValueError if the two do
// not belong together.
at::Tensor unpack_rows(const at::Tensor& layout, const at::Tensor& packed_rows);

// Returns the numbers of visiting query rows and key rows that this rank keeps, over all rounds.
// Throws ValueError if `layout` is not a layout.
std::vector<int64_t> kept_rows(const at::Tensor& layout);

// The part of a layout that is equal on all ranks under one plan.
struct PlanIdentity {
  int64_t step;
  int64_t digest;  // of the plan, and of what decides where ranks write in each other's memory
  Mask mask;
};

PlanIdentity identity_of(const Layout& layout);
// Throws ValueError if `layout` is not a layout.
PlanIdentity identity_of(const at::Tensor& layout);

// Throws ValueError unless the tensors are results of encode_layout and unpack_rows.
Layout decode_layout(const at::Tensor& layout, const at::Tensor& rows);

// Does the same, but once for all calls of a plan: while the tensors' memory lives, nobody writes
// to it, and gradients or inference mode do not prevent counting writes.
std::shared_ptr<const Layout> shared_layout(const at::Tensor& layout, const at::Tensor& rows);

}  // namespace distca::ops
