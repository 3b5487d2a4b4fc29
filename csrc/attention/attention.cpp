#include "attention.h"

#include <ATen/OpMathType.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <span>
#include <stdexcept>

#include "backend.h"

namespace distca::attention {
namespace {

void check_rows(const char* name, const at::Tensor& x, const at::Tensor& q) {
  TORCH_CHECK_VALUE(x.dim() == 3, name, " has shape ", x.sizes(),
                    "; expected [rows, heads, head_dim]");
  TORCH_CHECK_VALUE(x.stride(2) == 1 || x.size(2) == 1 || x.numel() == 0, name, " has strides ",
                    x.strides(), "; its last dimension must be contiguous, call ", name,
                    ".contiguous()");
  TORCH_CHECK_VALUE(x.scalar_type() == q.scalar_type() && x.device() == q.device(), name, " is ",
                    x.scalar_type(), " on ", x.device(), ", q is ", q.scalar_type(), " on ",
                    q.device(), "; they must be equal");
}

void check_qkv(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
  check_rows("q", q, q);
  check_rows("k", k, q);
  check_rows("v", v, q);
  TORCH_CHECK_VALUE(k.size(2) == q.size(2), "k has head_dim ", k.size(2), ", q has ", q.size(2),
                    "; they must be equal");
  TORCH_CHECK_VALUE(k.sizes().slice(0, 2) == v.sizes().slice(0, 2), "k has shape ", k.sizes(),
                    ", v has ", v.sizes(), "; they must be equal except for head_dim");
  TORCH_CHECK_VALUE(k.size(1) > 0 && q.size(1) % k.size(1) == 0, "q has ", q.size(1),
                    " heads, k has ", k.size(1), "; k's must divide q's");
}

void check_tasks(const std::vector<PlacedTask>& tasks, int64_t rows_q, int64_t rows_k) {
  for (const PlacedTask& task : tasks) {
    const auto inside = [](int64_t begin, int64_t count, int64_t rows) {
      return begin >= 0 && count >= 0 && count <= rows && begin <= rows - count;
    };
    TORCH_CHECK_VALUE(
        inside(task.q_row, task.num_q_rows, rows_q) && inside(task.k_row, task.num_k_rows, rows_k),
        "tasks: query rows [", task.q_row, ", +", task.num_q_rows, ") and key rows [", task.k_row,
        ", +", task.num_k_rows, ") must lie in the ", rows_q, " rows of q and the ", rows_k,
        " rows of k");
  }
}

// Returns the back end of a call whose arguments have passed their checks.
template <typename Rows>
const Backend& backend_of(const Rows& rows, const Params& params) {
  const auto& [q, v, tasks] = std::tie(rows.q, rows.v, rows.tasks);
  const Backend& backend = choose_backend({q, v.size(2), tasks.mask, params, params.deterministic});
  if (backend.plan_words) words_of(tasks, backend.name);
  return backend;
}

void check_like_out(const char* name, const at::Tensor& x, const at::Tensor& q,
                    const at::Tensor& v) {
  check_rows(name, x, q);
  const std::vector<int64_t> expected = out_sizes(q, v);
  TORCH_CHECK_VALUE(x.sizes() == expected, name, " has shape ", x.sizes(), "; expected ",
                    at::IntArrayRef(expected), ", rows and heads of q and head_dim of v");
}

// Results of the forward pass that the backward pass is given: `out` or `delta`, and `lse`.
void check_saved(const Saved& saved, const at::Tensor& q, const at::Tensor& v) {
  const auto dtype = at::toOpMathType(q.scalar_type());
  const auto check_by_head = [&](const char* name, const at::Tensor& x) {
    TORCH_CHECK_VALUE(x.dim() == 2 && x.size(0) == q.size(0) && x.size(1) == q.size(1), name,
                      " has shape ", x.sizes(), "; expected [", q.size(0), ", ", q.size(1), "]");
    TORCH_CHECK_VALUE(x.scalar_type() == dtype && x.device() == q.device(), name, " is ",
                      x.scalar_type(), " on ", x.device(), "; expected ", dtype, " on ",
                      q.device());
  };
  check_by_head("lse", saved.lse);
  if (saved.delta.defined()) check_by_head("delta", saved.delta);
  if (saved.out.defined()) check_like_out("out", saved.out, q, v);
}

void check_words(const Backend& backend, const TaskList& list, const TaskWords& words) {
  const bool is_counted = backend.count_words && !words.device.is_cpu();
  const PlannedWords planned =
      is_counted ? PlannedWords{} : backend.plan_words(list.tasks, list.mask);
  const WordCounts counts =
      is_counted ? backend.count_words(list.tasks)
                 : WordCounts{planned.host, static_cast<int64_t>(planned.device.size())};
  bool are_equal = words.host == counts.host && words.device.numel() == counts.num_device;
  if (are_equal && words.device.is_cpu()) {
    are_equal = std::ranges::equal(
        planned.device, std::span(words.device.const_data_ptr<int32_t>(), planned.device.size()));
  }
  TORCH_CHECK_VALUE(are_equal, "layout: the words of back end ", backend.name,
                    " do not match the layout's tasks; create both with distca.plan");
}

// Returns whether the tasks of these lists read every key row.
bool read_all_keys(int64_t num_rows, std::initializer_list<const TaskList*> lists) {
  std::vector<Range> keys;
  for (const TaskList* list : lists) {
    for (const PlacedTask& task : list->tasks) keys.push_back(key_rows(task));
  }
  keys = joined(std::move(keys));
  return num_rows == 0 || (keys.size() == 1 && keys[0].begin == 0 && keys[0].end == num_rows);
}

}  // namespace

std::vector<PlannedWords> plan_words(const std::vector<PlacedTask>& tasks, const Mask& mask,
                                     c10::string_view device_type) {
  std::vector<PlannedWords> all;
  for (const Backend& backend : backends()) {
    const std::string name = c10::DeviceTypeName(backend.device, /*lower_case=*/true);
    if (!backend.plan_words || name != device_type) continue;
    all.push_back(backend.plan_words(tasks, mask));
    all.back().backend = id_of(backend.name);
  }
  return all;
}

void check_words(const TaskList& list) {
  for (const TaskWords& words : list.words) {
    const auto& all = backends();
    const auto backend = std::find_if(all.begin(), all.end(), [&](const Backend& b) {
      return b.plan_words && id_of(b.name) == words.backend;
    });
    TORCH_CHECK_VALUE(backend != all.end(), "layout: words of an unknown back end, ", words.backend,
                      "; create the layout with distca.plan in this process");
    try {
      check_words(*backend, list, words);
    } catch (const std::length_error& error) {
      TORCH_CHECK_VALUE(false, "layout: ", error.what());
    }
  }
}

const TaskWords& words_of(const TaskList& list, std::string_view name) {
  const auto found =
      std::find_if(list.words.begin(), list.words.end(),
                   [&](const TaskWords& words) { return words.backend == id_of(name); });
  TORCH_CHECK_VALUE(found != list.words.end(), "layout: no words for back end ", name,
                    "; it is for another device than q's. Pass device= to distca.plan");
  return *found;
}

void check_supported(const at::Tensor& q, const at::Tensor& v, const Mask& mask, double softcap,
                     bool deterministic) {
  const double any_scale = 1;
  choose_backend({q, v.size(2), mask, {any_scale, softcap}, deterministic});
}

bool reads_in_place(const at::Tensor& q, const at::Tensor& v, const Scores& scores) {
  const Backend* backend = find_backend({q, v.size(2), {}, scores});
  return backend && backend->reads_in_place;
}

void forward(const ForwardRows& rows, const Params& params) {
  check_qkv(rows.q, rows.k, rows.v);
  check_tasks(rows.tasks.tasks, rows.q.size(0), rows.k.size(0));
  backend_of(rows, params).forward(rows, params);
}

void backward(const BackwardRows& rows, const Params& params) {
  check_qkv(rows.q, rows.k, rows.v);
  check_tasks(rows.tasks.tasks, rows.q.size(0), rows.k.size(0));
  check_like_out("grad_out", rows.grad_out, rows.q, rows.v);
  check_saved(rows.saved, rows.q, rows.v);
  backend_of(rows, params).backward(rows, params);
}

std::tuple<at::Tensor, at::Tensor> forward(const at::Tensor& q, const at::Tensor& k,
                                           const at::Tensor& v, const TaskList& tasks,
                                           const Params& params) {
  check_qkv(q, k, v);
  const auto [out, lse] = new_results(q, v);
  forward({q, k, v, tasks, out, lse}, params);
  return {out, lse};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> backward(const at::Tensor& grad_out,
                                                        const at::Tensor& q, const at::Tensor& k,
                                                        const at::Tensor& v, const Saved& saved,
                                                        const TaskList& tasks,
                                                        const Params& params) {
  // Autograd hands down expanded gradients, whose last dimension has stride 0.
  const at::Tensor grad =
      grad_out.dim() != 3 || grad_out.stride(2) == 1 ? grad_out : grad_out.contiguous();
  check_qkv(q, k, v);
  const at::Tensor dq = at::empty(q.sizes(), q.options());
  const auto [dk, dv] = new_key_gradients(k, v, {&tasks});
  backward({grad, q, k, v, saved, tasks, dq, dk, dv}, params);
  return {dq, dk, dv};
}

void row_dots(const at::Tensor& a, const at::Tensor& b, const at::Tensor& dots) {
  if (dots.numel() == 0) return;
  for (const Backend& backend : backends()) {
    if (backend.row_dots && backend.device == a.device().type())
      return backend.row_dots(a, b, dots);
  }
  dots.copy_(a.to(dots.scalar_type()).mul(b).sum(-1));
}

at::Tensor grad_for_delta(const at::Tensor& grad_out, const at::Tensor& delta, const at::Tensor& q,
                          const Mask& mask, const Params& params) {
  const Backend& backend =
      choose_backend({q, grad_out.size(2), mask, params, params.deterministic});
  return backend.grad_for_delta ? backend.grad_for_delta(grad_out, delta) : grad_out;
}

std::vector<int64_t> out_sizes(const at::Tensor& q, const at::Tensor& v) {
  return {q.size(0), q.size(1), v.size(2)};
}

std::tuple<at::Tensor, at::Tensor> new_results(const at::Tensor& q, const at::Tensor& v) {
  const auto real = at::toOpMathType(q.scalar_type());
  return {at::empty(out_sizes(q, v), q.options()),
          at::empty(q.sizes().slice(0, 2), q.options().dtype(real))};
}

std::pair<at::Tensor, at::Tensor> new_key_gradients(const at::Tensor& k, const at::Tensor& v,
                                                    std::initializer_list<const TaskList*> lists) {
  const auto like = [are_all_written = read_all_keys(k.size(0), lists)](const at::Tensor& x) {
    return are_all_written ? at::empty(x.sizes(), x.options()) : at::zeros(x.sizes(), x.options());
  };
  return {like(k), like(v)};
}

}  // namespace distca::attention
