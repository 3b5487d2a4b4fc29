#include <ATen/ops/_flash_attention_backward.h>
#include <ATen/ops/_flash_attention_forward.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/zeros.h>

#include <limits>

#include "aten.h"

namespace distca::attention::aten {
namespace {

void check_element(const at::Tensor& q) {
  TORCH_CHECK_VALUE(q.scalar_type() == at::kBFloat16 || q.scalar_type() == at::kHalf, "q is ",
                    q.scalar_type(), "; attention on CUDA takes bfloat16 or float16");
  TORCH_CHECK_VALUE(q.size(2) % 8 == 0 && q.size(2) <= 256, "q has head_dim ", q.size(2),
                    "; attention on CUDA takes multiples of 8 up to 256");
}

void check_waves(const TaskList& tasks, const at::Tensor& q) {
  int64_t count = 0;
  for (const VarlenWave& wave : tasks.waves) count += 2 * (wave.num_sequences + 1);
  TORCH_INTERNAL_ASSERT(count == 0 || (tasks.cu_seqlens.device() == q.device() &&
                                       tasks.cu_seqlens.scalar_type() == at::kInt &&
                                       tasks.cu_seqlens.numel() == count));
}

// What one wave's call takes beside the tensors.
struct Call {
  at::Tensor cu_seqlens_q;
  at::Tensor cu_seqlens_k;
  int64_t max_q;
  int64_t max_k;
  bool is_causal;
  std::optional<int64_t> window_left;
  std::optional<int64_t> window_right;
};

std::vector<Call> calls_of(const TaskList& tasks) {
  std::vector<Call> calls;
  int64_t offset = 0;
  for (const VarlenWave& wave : tasks.waves) {
    const int64_t count = wave.num_sequences + 1;
    Call call{.cu_seqlens_q = tasks.cu_seqlens.narrow(0, offset, count),
              .cu_seqlens_k = tasks.cu_seqlens.narrow(0, offset + count, count),
              // At 1 ATen takes every sequence, fillers included, to have exactly one query.
              .max_q = std::max<int64_t>(wave.max_q, 2),
              .max_k = wave.max_k,
              .is_causal = tasks.mask.window_right == 0};
    if (tasks.mask.window_left >= 0) {
      call.window_left = tasks.mask.window_left;
      call.window_right = tasks.mask.window_right;
    }
    calls.push_back(std::move(call));
    offset += 2 * count;
  }
  return calls;
}

void copy_rows(const at::Tensor& from, const at::Tensor& to, int64_t first, int64_t count) {
  to.narrow(0, first, count).copy_(from.narrow(0, first, count));
}

const PlacedTask& task_at(const TaskList& tasks, int64_t i) {
  return tasks.tasks[tasks.wave_order[i]];
}

// An `out` with rowsum(out * grad_out) = delta, which is all that the backward kernel takes from
// it: the shortest such vector along grad_out, as exact as its dtype allows.
at::Tensor surrogate_out(const at::Tensor& grad_out, const at::Tensor& delta) {
  const at::Tensor norm = at::linalg_vector_norm(grad_out, 2, {-1}, /*keepdim=*/true, at::kFloat);
  const at::Tensor square = norm.square().clamp_min(std::numeric_limits<float>::min());
  at::Tensor out = at::empty(grad_out.sizes(), grad_out.options());
  return at::mul_out(out, grad_out, delta.unsqueeze(-1).div(square));
}

// dk and dv over several waves. A wave's call writes rows from 0 to its last key, as zeros where no
// task of its reads them, and leaves the rest as allocated.
class KeyGradSum {
 public:
  explicit KeyGradSum(bool is_single) : is_single_(is_single) {}

  // `grad` holds rows [begin, end) of this wave.
  void add(const at::Tensor& grad, int64_t begin, int64_t end) {
    if (!sum_.defined()) {
      grad.narrow(0, end, grad.size(0) - end).zero_();
      sum_ = is_single_ ? grad.contiguous()
                        : grad.to(at::kFloat, false, false, at::MemoryFormat::Contiguous);
    } else {
      sum_.narrow(0, begin, end - begin).add_(grad.narrow(0, begin, end - begin));
    }
  }
  at::Tensor result(at::ScalarType dtype) const { return sum_.to(dtype); }

 private:
  bool is_single_;  // then nothing is added up and the sum needs no float32
  at::Tensor sum_;
};

}  // namespace

void check_supported(const std::vector<PlacedTask>& tasks, const Mask& mask) {
  TORCH_CHECK_VALUE(is_full(mask) || mask.window_right == 0, "window is (", mask.window_left, ", ",
                    mask.window_right,
                    "); attention on CUDA takes (-1, 0) causal, (-1, -1) full or (W, 0) sliding "
                    "window. Use one of them, or tensors on the CPU");
  for (const PlacedTask& task : tasks) {
    if (task.num_q_rows == 0) continue;
    TORCH_CHECK_VALUE(task.num_k_rows > 0, "task at query row ", task.q_row,
                      " has no keys; attention on CUDA needs one for every query");
    if (is_full(mask)) continue;
    TORCH_CHECK_VALUE(task.q_offset >= 0 && task.q_offset + task.num_q_rows == task.num_k_rows,
                      "task at query row ", task.q_row, " has q_offset ", task.q_offset, ", ",
                      task.num_q_rows, " queries and ", task.num_k_rows,
                      " keys; on CUDA the last query must stand at the last key. Give a task the "
                      "keys up to its last query and no more");
  }
}

std::tuple<at::Tensor, at::Tensor> forward(const at::Tensor& q, const at::Tensor& k,
                                           const at::Tensor& v, const TaskList& tasks,
                                           const Params& params) {
  check_element(q);
  check_supported(tasks.tasks, tasks.mask);
  check_waves(tasks, q);
  at::Tensor out, lse;  // lse [heads_q, rows_q]
  const std::vector<Call> calls = calls_of(tasks);
  for (size_t w = 0; w < calls.size(); ++w) {
    const Call& call = calls[w];
    auto [wave_out, wave_lse, rng_state, unused, debug_mask] = at::_flash_attention_forward(
        q, k, v, call.cu_seqlens_q, call.cu_seqlens_k, call.max_q, call.max_k, /*dropout_p=*/0.0,
        call.is_causal, /*return_debug_mask=*/false, params.softmax_scale, call.window_left,
        call.window_right);
    if (w == 0) {
      out = wave_out.contiguous();
      lse = wave_lse;
      continue;
    }
    for (int64_t i = tasks.waves[w].first_task; i < tasks.waves[w].last_task; ++i) {
      const PlacedTask& task = task_at(tasks, i);
      copy_rows(wave_out, out, task.q_row, task.num_q_rows);
      lse.narrow(1, task.q_row, task.num_q_rows)
          .copy_(wave_lse.narrow(1, task.q_row, task.num_q_rows));
    }
  }
  if (calls.empty()) {
    return {at::empty(q.sizes(), q.options()),
            at::empty({q.size(0), q.size(1)}, q.options().dtype(at::kFloat))};
  }
  return {out, lse.t().contiguous()};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> backward(const at::Tensor& grad_out,
                                                        const at::Tensor& q, const at::Tensor& k,
                                                        const at::Tensor& v, const Saved& saved,
                                                        const TaskList& tasks,
                                                        const Params& params) {
  check_element(q);
  check_supported(tasks.tasks, tasks.mask);
  check_waves(tasks, q);
  const std::vector<Call> calls = calls_of(tasks);
  if (calls.empty()) {
    return {at::empty(q.sizes(), q.options()), at::zeros(k.sizes(), k.options()),
            at::zeros(v.sizes(), v.options())};
  }
  const at::Tensor out = saved.out.defined() ? saved.out : surrogate_out(grad_out, saved.delta);
  const at::Tensor lse = saved.lse.t().contiguous();
  // State of dropout, which is off: read by no kernel, only passed on.
  const at::Tensor rng_state = at::empty({2}, q.options().dtype(at::kUInt64));
  const at::Tensor unused = at::empty({}, q.options().dtype(at::kUInt64));
  at::Tensor dq;
  KeyGradSum dk(calls.size() == 1), dv(calls.size() == 1);
  for (size_t w = 0; w < calls.size(); ++w) {
    const Call& call = calls[w];
    auto [wave_dq, wave_dk, wave_dv] = at::_flash_attention_backward(
        grad_out, q, k, v, out, lse, call.cu_seqlens_q, call.cu_seqlens_k, call.max_q, call.max_k,
        /*dropout_p=*/0.0, call.is_causal, rng_state, unused, params.softmax_scale,
        call.window_left, call.window_right);
    const PlacedTask& first = task_at(tasks, tasks.waves[w].first_task);
    const PlacedTask& last = task_at(tasks, tasks.waves[w].last_task - 1);
    dk.add(wave_dk, first.k_row, last.k_row + last.num_k_rows);
    dv.add(wave_dv, first.k_row, last.k_row + last.num_k_rows);
    if (w == 0) {
      dq = wave_dq.contiguous();
      continue;
    }
    for (int64_t i = tasks.waves[w].first_task; i < tasks.waves[w].last_task; ++i) {
      const PlacedTask& task = task_at(tasks, i);
      copy_rows(wave_dq, dq, task.q_row, task.num_q_rows);
    }
  }
  return {dq, dk.result(k.scalar_type()), dv.result(v.scalar_type())};
}

void forward(const ForwardRows& rows, const Params& params) {
  const auto [out, lse] = aten::forward(rows.q, rows.k, rows.v, rows.tasks, params);
  for (const PlacedTask& task : rows.tasks.tasks) {
    copy_rows(out, rows.out, task.q_row, task.num_q_rows);
    copy_rows(lse, rows.lse, task.q_row, task.num_q_rows);
  }
}

void backward(const BackwardRows& rows, const Params& params) {
  const auto [dq, dk, dv] =
      aten::backward(rows.grad_out, rows.q, rows.k, rows.v, rows.saved, rows.tasks, params);
  for (const PlacedTask& task : rows.tasks.tasks) {
    copy_rows(dq, rows.dq, task.q_row, task.num_q_rows);
    copy_rows(dk, rows.dk, task.k_row, task.num_k_rows);
    copy_rows(dv, rows.dv, task.k_row, task.num_k_rows);
  }
}

}  // namespace distca::attention::aten
