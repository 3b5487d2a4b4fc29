#include "../backend.h"

#include <ATen/ops/_flash_attention_backward.h>
#include <ATen/ops/_flash_attention_forward.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/where.h>

#include <algorithm>
#include <array>
#include <limits>

#include "waves.h"

// PyTorch's varlen flash attention (compute capability 8.0 and up). Keys are read where they lie;
// PyTorch allocates its results, and rows of tasks are copied from there. It takes one head_dim for
// all tensors, so the narrower ones are copied and padded with zeros.
namespace distca::attention::aten {
namespace {

constexpr const char* kName = "aten";

// Every query must see a key, and no key may lie past the window of the last query: PyTorch takes a
// negative window to have no limit.
void check_tasks(const std::vector<PlacedTask>& tasks, const Mask& mask) {
  for (const PlacedTask& task : tasks) {
    if (task.num_q_rows == 0) continue;
    TORCH_CHECK_VALUE(task.num_k_rows > 0, "task at query row ", task.q_row,
                      " has no keys; attention on CUDA needs one for every query");
    if (is_full(mask)) continue;
    const int64_t later = num_later_keys(task), right = mask.window_right;
    TORCH_CHECK_VALUE(
        task.q_offset >= 0 && later >= 0 && (right < 0 || later <= right), "task at query row ",
        task.q_row, " has q_offset ", task.q_offset, ", ", task.num_q_rows, " queries and ",
        task.num_k_rows,
        " keys; on CUDA a task must have the keys of its queries' positions, and none "
        "past the window of its last query");
  }
}

// The arguments of one wave's call, apart from the tensors.
struct Call {
  at::Tensor cu_seqlens_q;
  at::Tensor cu_seqlens_k;
  int64_t max_q;
  int64_t max_k;
  bool is_causal;
  std::optional<int64_t> window_left;
  std::optional<int64_t> window_right;
  std::vector<Range> queries;  // rows of its tasks
  Range keys;                  // from the first to the last row that its tasks read
};

std::vector<Call> calls_of(const TaskList& list) {
  check_tasks(list.tasks, list.mask);
  at::Tensor offsets = words_of(list, kName).device;
  const auto take = [&](const std::vector<int32_t>& cu_seqlens) {
    const auto count = static_cast<int64_t>(cu_seqlens.size());
    const at::Tensor taken = offsets.slice(0, 0, count);
    offsets = offsets.slice(0, count);
    return taken;
  };
  std::vector<Call> calls;
  for (const Wave& wave : make_waves(list.tasks, list.mask)) {
    const auto [left, right] = wave.window;
    Call call{.cu_seqlens_q = take(wave.cu_seqlens_q),
              .cu_seqlens_k = take(wave.cu_seqlens_k),
              // At 1 ATen takes every sequence, fillers included, to have exactly one query.
              .max_q = std::max<int64_t>(wave.max_q, 2),
              .max_k = wave.max_k,
              .is_causal = right == 0,
              .keys = {key_rows(wave.tasks.front()).begin, key_rows(wave.tasks.back()).end}};
    if (!is_causal(wave.window)) {
      call.window_left = left;
      call.window_right = right;
    }
    for (const PlacedTask& task : wave.tasks) call.queries.push_back(query_rows(task));
    call.queries = joined(std::move(call.queries));
    calls.push_back(std::move(call));
  }
  return calls;
}

struct PositiveScale {
  double softmax_scale;
  double q_factor;  // q times this, at softmax_scale, gives the scores of the original scale
};

// PyTorch's kernels multiply masked scores, which are -inf, by the scale. Only a positive scale
// leaves them at -inf.
PositiveScale positive_scale(const Params& params) {
  const double scale = params.softmax_scale;
  if (scale > 0) return {scale, 1};
  return scale == 0 ? PositiveScale{1, 0} : PositiveScale{-scale, -1};
}

at::Tensor times(const at::Tensor& x, double factor) {
  return factor == 1 ? x : at::mul(x, factor);
}

// Leaves out columns of `from` that `to` does not have.
void copy_rows(const at::Tensor& from, const at::Tensor& to, const std::vector<Range>& ranges) {
  const at::Tensor columns = from.narrow(-1, 0, to.size(-1));
  for (const Range range : ranges) {
    to.slice(0, range.begin, range.end).copy_(columns.slice(0, range.begin, range.end));
  }
}

at::Tensor widened(const at::Tensor& x, int64_t width) {
  return x.size(2) == width ? x : at::constant_pad_nd(x, {0, width - x.size(2)});
}

// Returns the inputs as wide as the widest of them.
std::array<at::Tensor, 3> of_one_width(const at::Tensor& q, const at::Tensor& k,
                                       const at::Tensor& v) {
  const int64_t width = std::max(q.size(2), v.size(2));
  return {widened(q, width), widened(k, width), widened(v, width)};
}

// Returns an `out` with rowsum(out * grad_out) = delta, since the backward kernel uses `out` for
// that sum alone: the shortest such vector, a multiple of grad_out, as exact as its dtype allows.
at::Tensor surrogate_out(const at::Tensor& grad_out, const at::Tensor& delta) {
  const at::Tensor norm = at::linalg_vector_norm(grad_out, 2, {-1}, /*keepdim=*/true, at::kFloat);
  const at::Tensor square = norm.square().clamp_min(std::numeric_limits<float>::min());
  at::Tensor out = at::empty(grad_out.sizes(), grad_out.options());
  return at::mul_out(out, grad_out, delta.unsqueeze(-1).div(square));
}

// With a gradient of lse, delta may be large where grad_out is tiny or 0: no surrogate_out is then
// finite. Such rows get tiny elements, |delta| / `largest` in sum, which hardly change gradients.
at::Tensor grad_for_delta(const at::Tensor& grad_out, const at::Tensor& delta) {
  const bool is_half = grad_out.scalar_type() == at::kHalf;
  const double largest = is_half ? 0x1p15 : 0x1p40, smallest = is_half ? 0x1p-24 : 0x1p-60;
  const at::Tensor norm = at::linalg_vector_norm(grad_out, 2, {-1}, /*keepdim=*/true, at::kFloat);
  const at::Tensor size = delta.unsqueeze(-1).abs();
  const at::Tensor element = size.div(largest * grad_out.size(2)).clamp_min(smallest);
  return at::where(norm.mul(largest).lt(size), element.to(grad_out.scalar_type()), grad_out);
}

// Sums dk, or dv, over several waves. A wave's call writes the rows from 0 to its last key, zero if
// none of its tasks reads them. It leaves the rest uninitialised.
class KeyGradSum {
 public:
  explicit KeyGradSum(bool is_single) : is_single_(is_single) {}

  void add(const at::Tensor& grad, Range keys) {
    if (!sum_.defined()) {
      grad.slice(0, keys.end).zero_();
      sum_ = is_single_ ? grad : grad.to(at::kFloat);
    } else {
      sum_.slice(0, keys.begin, keys.end).add_(grad.slice(0, keys.begin, keys.end));
    }
  }
  const at::Tensor& sum() const { return sum_; }

 private:
  bool is_single_;  // then there is no sum, and no need for float32
  at::Tensor sum_;
};

void forward(const ForwardRows& rows, const Params& params) {
  const std::vector<Call> calls = calls_of(rows.tasks);
  if (calls.empty()) return;
  const auto [softmax_scale, q_factor] = positive_scale(params);
  const auto [q, k, v] = of_one_width(times(rows.q, q_factor), rows.k, rows.v);
  for (const Call& call : calls) {
    const auto [out, lse, rng_state, unused, debug_mask] = at::_flash_attention_forward(
        q, k, v, call.cu_seqlens_q, call.cu_seqlens_k, call.max_q, call.max_k,
        /*dropout_p=*/0.0, call.is_causal, /*return_debug_mask=*/false, softmax_scale,
        call.window_left, call.window_right);
    copy_rows(out, rows.out, call.queries);
    copy_rows(lse.t(), rows.lse, call.queries);  // lse [heads_q, rows_q]
  }
}

void backward(const BackwardRows& rows, const Params& params) {
  const std::vector<Call> calls = calls_of(rows.tasks);
  std::vector<Range> keys;
  for (const PlacedTask& task : rows.tasks.tasks) keys.push_back(key_rows(task));
  keys = joined(std::move(keys));
  if (calls.empty()) {  // no task has queries
    for (const Range range : keys) {
      rows.dk.slice(0, range.begin, range.end).zero_();
      rows.dv.slice(0, range.begin, range.end).zero_();
    }
    return;
  }
  const Saved& saved = rows.saved;
  const auto [softmax_scale, q_factor] = positive_scale(params);
  const auto [q, k, v] = of_one_width(times(rows.q, q_factor), rows.k, rows.v);
  const at::Tensor grad_out = widened(rows.grad_out, v.size(2));
  const at::Tensor out =
      saved.out.defined() ? widened(saved.out, v.size(2)) : surrogate_out(grad_out, saved.delta);
  const at::Tensor lse = saved.lse.t().contiguous();
  // The state of dropout. Dropout is off, so no kernel reads it.
  const at::Tensor rng_state = at::empty({2}, rows.q.options().dtype(at::kUInt64));
  const at::Tensor unused = at::empty({}, rows.q.options().dtype(at::kUInt64));
  KeyGradSum dk_sum(calls.size() == 1), dv_sum(calls.size() == 1);
  for (const Call& call : calls) {
    const auto [dq, dk, dv] = at::_flash_attention_backward(
        grad_out, q, k, v, out, lse, call.cu_seqlens_q, call.cu_seqlens_k, call.max_q, call.max_k,
        /*dropout_p=*/0.0, call.is_causal, rng_state, unused, softmax_scale, call.window_left,
        call.window_right);
    copy_rows(times(dq, q_factor), rows.dq, call.queries);
    dk_sum.add(dk, call.keys);
    dv_sum.add(dv, call.keys);
  }
  copy_rows(dk_sum.sum(), rows.dk, keys);
  copy_rows(dv_sum.sum(), rows.dv, keys);
}

// Plans no words for the host, because waves follow from the tasks.
PlannedWords plan_words(const std::vector<PlacedTask>& tasks, const Mask& mask) {
  PlannedWords words;
  for (const Wave& wave : make_waves(tasks, mask)) {
    for (const auto& cu_seqlens : {wave.cu_seqlens_q, wave.cu_seqlens_k}) {
      words.device.insert(words.device.end(), cu_seqlens.begin(), cu_seqlens.end());
    }
  }
  return words;
}

}  // namespace

Backend backend() {
  return {.name = kName,
          .device = at::kCUDA,
          .dtypes = {at::kBFloat16, at::kHalf},
          .head_dim_multiple = 8,
          .max_head_dim = 256,
          .is_deterministic = false,
          .reads_in_place = false,
          .forward = forward,
          .backward = backward,
          .row_dots = row_dots_cuda,
          .grad_for_delta = grad_for_delta,
          .plan_words = plan_words};
}

}  // namespace distca::attention::aten
