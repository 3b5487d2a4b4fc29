// A back end from outside the library, for test_backends.py. It computes the formula in float64 on
// the CPU, for head_dim 24 and v no wider than that. Its words give the keys that each query row of
// a list sees.
#include <ATen/ATen.h>
#include <torch/library.h>

#include <atomic>

#include "attention/backend.h"

namespace distca::attention::reference {
namespace {

constexpr const char* kName = "reference";
constexpr int64_t kHeadDim = 24;
std::atomic<int64_t> num_calls{0};

PlannedWords plan_words(const std::vector<PlacedTask>& tasks, const Mask& mask) {
  PlannedWords words{.host = {static_cast<int64_t>(tasks.size())}};
  for (const PlacedTask& task : tasks) {
    for (int64_t i = task.q_offset; i < task.q_offset + task.num_q_rows; ++i) {
      const Range seen = keys_seen(mask, {i, i + 1}, {0, task.num_k_rows});
      words.device.push_back(static_cast<int32_t>(seen.begin));
      words.device.push_back(static_cast<int32_t>(seen.end));
    }
  }
  return words;
}

WordCounts count_words(const std::vector<PlacedTask>& tasks) {
  WordCounts counts{.host = {static_cast<int64_t>(tasks.size())}};
  for (const PlacedTask& task : tasks) counts.num_device += 2 * task.num_q_rows;
  return counts;
}

bool takes(const Request& request) {
  return request.q.size(2) == kHeadDim && request.head_dim_v <= kHeadDim;
}

// Returns [heads, rows, head_dim]. Repeats each kv head for all of its query heads.
at::Tensor by_head(const at::Tensor& x, Range rows, int64_t num_heads) {
  const at::Tensor part = x.slice(0, rows.begin, rows.end);
  return part.repeat_interleave(num_heads / x.size(1), 1).transpose(0, 1);
}

// The reverse: each kv head gets the sum over its query heads.
at::Tensor by_row(const at::Tensor& x, int64_t num_heads) {
  const at::Tensor rows = x.transpose(0, 1);
  return rows.reshape({rows.size(0), num_heads, -1, rows.size(2)}).sum(2);
}

// Calls visit(task, q, k, v, scores) with -inf for scores of keys that a query does not see.
template <typename Rows, typename Visit>
void for_each_task(const Rows& rows, const Params& params, const Visit& visit) {
  ++num_calls;
  const at::Tensor seen = words_of(rows.tasks, kName).device.view({-1, 2});
  int64_t first = 0;
  for (const PlacedTask& task : rows.tasks.tasks) {
    const int64_t heads = rows.q.size(1);
    const at::Tensor q = by_head(rows.q, query_rows(task), heads),
                     k = by_head(rows.k, key_rows(task), heads),
                     v = by_head(rows.v, key_rows(task), heads);
    const at::Tensor of_task = seen.slice(0, first, first + task.num_q_rows);
    first += task.num_q_rows;
    const at::Tensor key = at::arange(task.num_k_rows);
    const at::Tensor visible = (key >= of_task.select(1, 0).unsqueeze(1))
                                   .logical_and(key < of_task.select(1, 1).unsqueeze(1));
    const at::Tensor scores = params.softmax_scale * q.matmul(k.transpose(1, 2));
    visit(task, q, k, v, scores.masked_fill(visible.logical_not(), -INFINITY));
  }
}

void forward(const ForwardRows& rows, const Params& params) {
  for_each_task(rows, params, [&](const PlacedTask& task, auto, auto, auto v, at::Tensor scores) {
    const at::Tensor lse = scores.logsumexp(2);
    const at::Tensor out = (scores - lse.unsqueeze(2)).exp().matmul(v);
    const Range queries = query_rows(task);
    rows.out.slice(0, queries.begin, queries.end).copy_(out.transpose(0, 1));
    rows.lse.slice(0, queries.begin, queries.end).copy_(lse.t());
  });
}

void backward(const BackwardRows& rows, const Params& params) {
  const Saved& saved = rows.saved;
  const at::Tensor delta = saved.delta.defined() ? saved.delta : (saved.out * rows.grad_out).sum(2);
  for (const PlacedTask& task : rows.tasks.tasks) {
    rows.dk.slice(0, task.k_row, key_rows(task).end).zero_();
    rows.dv.slice(0, task.k_row, key_rows(task).end).zero_();
  }
  for_each_task(rows, params, [&](const PlacedTask& task, auto q, auto k, auto v, auto scores) {
    const Range queries = query_rows(task), keys = key_rows(task);
    const auto of_queries = [&](const at::Tensor& x) {
      return x.slice(0, queries.begin, queries.end).t().unsqueeze(2);
    };
    const at::Tensor grad = by_head(rows.grad_out, queries, rows.q.size(1));
    const at::Tensor p = (scores - of_queries(saved.lse)).exp();
    const at::Tensor ds =
        params.softmax_scale * p * (grad.matmul(v.transpose(1, 2)) - of_queries(delta));
    const int64_t heads_kv = rows.k.size(1);
    rows.dq.slice(0, queries.begin, queries.end).copy_(ds.matmul(k).transpose(0, 1));
    rows.dk.slice(0, keys.begin, keys.end).add_(by_row(ds.transpose(1, 2).matmul(q), heads_kv));
    rows.dv.slice(0, keys.begin, keys.end).add_(by_row(p.transpose(1, 2).matmul(grad), heads_kv));
  });
}

void add_reference_backend() {
  register_backend({.name = kName,
                    .device = at::kCPU,
                    .dtypes = {at::kDouble},
                    .takes = takes,
                    .forward = forward,
                    .backward = backward,
                    .plan_words = plan_words,
                    .count_words = count_words});
}

int64_t num_reference_calls() {
  return num_calls;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(distca_tests, m) {
  m.def("add_reference_backend() -> ()", add_reference_backend);
  m.def("num_reference_calls() -> int", num_reference_calls);
}

}  // namespace distca::attention::reference
