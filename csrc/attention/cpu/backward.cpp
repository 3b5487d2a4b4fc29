#include <numeric>

#include "../delta.h"
#include "cpu.h"
#include "run.h"

namespace distca::attention::cpu {
namespace {

// Tasks whose key rows overlap, directly or through one another. Different groups share no key
// row, so that each group and kv head can sum its dk and dv alone, in an order of its own.
struct KeyGroup {
  int64_t k_begin;
  int64_t k_end;
  std::vector<PlacedTask> tasks;
};

std::vector<KeyGroup> key_groups(std::vector<PlacedTask> tasks) {
  std::sort(tasks.begin(), tasks.end(), [](const PlacedTask& a, const PlacedTask& b) {
    return std::tie(a.k_row, a.q_row) < std::tie(b.k_row, b.q_row);
  });
  std::vector<KeyGroup> groups;
  for (const PlacedTask& task : tasks) {
    const int64_t k_end = key_rows(task).end;
    if (groups.empty() || task.k_row >= groups.back().k_end) {
      groups.push_back({task.k_row, k_end, {}});
    }
    groups.back().k_end = std::max(groups.back().k_end, k_end);
    groups.back().tasks.push_back(task);
  }
  return groups;
}

// Indices of groups, the longest work first: the last to finish should be short.
std::vector<int64_t> longest_first(const std::vector<KeyGroup>& groups) {
  std::vector<int64_t> work(groups.size()), order(groups.size());
  for (size_t i = 0; i < groups.size(); ++i) {
    for (const PlacedTask& task : groups[i].tasks) work[i] += task.num_q_rows * task.num_k_rows;
  }
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t a, int64_t b) { return work[a] > work[b]; });
  return order;
}

// dst rows [k_row, k_row + num_rows) = sums.
template <typename T>
void store_key_grads(const Rows<T>& dst, int64_t kv_head, const KeyGrads<RealOf<T>>& grads,
                     const RealOf<T>* sums, int64_t head_dim) {
  const int64_t width = panel_width<RealOf<T>>();
  for (int64_t row = 0; row < grads.num_rows; ++row) {
    T* to = dst.at(grads.k_row + row, kv_head);
    for (int64_t begin = 0; begin < head_dim; begin += width) {
      const int64_t panel = begin * grads.num_rows;
      const RealOf<T>* from = sums + panel + row * width;
      const int64_t num_dims = std::min(width, head_dim - begin);
      for (int64_t d = 0; d < num_dims; ++d) to[begin + d] = static_cast<T>(from[d]);
    }
  }
}

template <typename T>
struct KeyGradRows {
  Rows<T> dk;
  Rows<T> dv;
};

// All of one group and kv head: its queries' dq, its keys' dk and dv.
template <typename T>
void run_group(const BackwardArgs<T>& args, const KeyGradRows<T>& out, const KeyGroup& group,
               int64_t kv_head, Scratch<RealOf<T>>& scratch) {
  using Real = RealOf<T>;
  const Shape& shape = args.shape;
  const int64_t num_rows = group.k_end - group.k_begin;
  const int64_t size = num_rows * round_up(shape.head_dim, panel_width<Real>());
  Scratch<Real> sums(2 * Scratch<Real>::padded(size));
  const KeyGrads<Real> grads{sums.take(size), sums.take(size), group.k_begin, num_rows};
  std::fill_n(grads.dk, size, Real(0));
  std::fill_n(grads.dv, size, Real(0));
  for (const PlacedTask& task : group.tasks) {
    for (int64_t row = 0; row < task.num_q_rows; row += shape.tile_rows()) {
      const int64_t row_end = std::min(row + shape.tile_rows(), task.num_q_rows);
      backward_tile(args, {task, kv_head, row, row_end}, grads, scratch);
    }
  }
  store_key_grads(out.dk, kv_head, grads, grads.dk, shape.head_dim);
  store_key_grads(out.dv, kv_head, grads, grads.dv, shape.head_dim);
}

template <typename T>
void run_backward(const BackwardArgs<T>& args, const KeyGradRows<T>& out,
                  const std::vector<PlacedTask>& tasks, int64_t num_kv_heads) {
  using Real = RealOf<T>;
  const std::vector<KeyGroup> groups = key_groups(tasks);
  const std::vector<int64_t> order = longest_first(groups);
  const int64_t count = static_cast<int64_t>(groups.size()) * num_kv_heads;
  for_each_ticket<Real>(
      count, backward_scratch<Real>(args.shape), [&](int64_t i, Scratch<Real>& scratch) {
        run_group(args, out, groups[order[i / num_kv_heads]], i % num_kv_heads, scratch);
      });
}

}  // namespace

void backward(const BackwardRows& rows, const Params& params) {
  const at::Tensor delta = rows.saved.delta.defined()
                               ? rows.saved.delta
                               : row_dots(rows.saved.out.contiguous(), rows.grad_out.contiguous());
  visit_dtype(rows.q, [&](auto element) {
    using T = decltype(element);
    const BackwardArgs<T> args{.shape = shape_of(rows, params),
                               .grad_out = rows_of<const T>(rows.grad_out),
                               .q = rows_of<const T>(rows.q),
                               .k = rows_of<const T>(rows.k),
                               .v = rows_of<const T>(rows.v),
                               .lse = rows_of<const RealOf<T>>(rows.saved.lse),
                               .delta = rows_of<const RealOf<T>>(delta),
                               .dq = rows_of<T>(rows.dq)};
    run_backward(args, {rows_of<T>(rows.dk), rows_of<T>(rows.dv)}, rows.tasks.tasks,
                 rows.k.size(1));
  });
}

}  // namespace distca::attention::cpu
