#include <ATen/ops/empty.h>

#include "cpu.h"
#include "run.h"

namespace distca::attention::cpu {
namespace {

// Tiles of one kv head after the other, so that neighbours in time share keys.
std::vector<QueryTile> query_tiles(const std::vector<Task>& tasks, int64_t num_kv_heads,
                                   int64_t tile_rows) {
  std::vector<QueryTile> tiles;
  for (const Task& task : tasks) {
    for (int64_t kv_head = 0; kv_head < num_kv_heads; ++kv_head) {
      for (int64_t row = 0; row < task.num_q_rows; row += tile_rows) {
        const int64_t row_end = std::min(row + tile_rows, task.num_q_rows);
        tiles.push_back({task, kv_head, row, row_end});
      }
    }
  }
  return tiles;
}

template <typename T>
void run_forward(const ForwardArgs<T>& args, const std::vector<QueryTile>& tiles) {
  const int64_t count = static_cast<int64_t>(tiles.size());
  for_each_ticket<RealOf<T>>(
      count, forward_scratch<RealOf<T>>(args.shape),
      [&](int64_t i, Scratch<RealOf<T>>& scratch) { forward_tile(args, tiles[i], scratch); });
}

}  // namespace

Isa isa() {
#if defined(__x86_64__) && defined(__GNUC__)
  static const Isa best = [] {
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
      return Isa::kAvx512;
    }
    const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    return has_avx2 ? Isa::kAvx2 : Isa::kBaseline;
  }();
  return best;
#else
  return Isa::kBaseline;
#endif
}

std::tuple<at::Tensor, at::Tensor> forward(const at::Tensor& q, const at::Tensor& k,
                                           const at::Tensor& v, const TaskList& tasks,
                                           const Params& params) {
  const auto real = q.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  at::Tensor out = at::empty(q.sizes(), q.options());
  at::Tensor lse = at::empty({q.size(0), q.size(1)}, q.options().dtype(real));
  const Shape shape = shape_of(q, k, params);
  const auto tiles = query_tiles(tasks.tasks, k.size(1), shape.tile_rows());
  visit_dtype(q, [&](auto element) {
    using T = decltype(element);
    const ForwardArgs<T> args{.shape = shape,
                              .q = rows_of<const T>(q),
                              .k = rows_of<const T>(k),
                              .v = rows_of<const T>(v),
                              .out = rows_of<T>(out),
                              .lse = rows_of<RealOf<T>>(lse)};
    run_forward(args, tiles);
  });
  return {out, lse};
}

}  // namespace distca::attention::cpu
