#include "cpu.h"
#include "run.h"

namespace distca::attention::cpu {
namespace {

// Tiles of one kv head after the other, so that neighbours in time share keys.
std::vector<QueryTile> query_tiles(const std::vector<PlacedTask>& tasks, int64_t num_kv_heads,
                                   int64_t tile_rows) {
  std::vector<QueryTile> tiles;
  for (const PlacedTask& task : tasks) {
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

void forward(const ForwardRows& rows, const Params& params) {
  const Shape shape = shape_of(rows, params);
  const auto tiles = query_tiles(rows.tasks.tasks, rows.k.size(1), shape.tile_rows());
  visit_dtype(rows.q, [&](auto element) {
    using T = decltype(element);
    const ForwardArgs<T> args{.shape = shape,
                              .q = rows_of<const T>(rows.q),
                              .k = rows_of<const T>(rows.k),
                              .v = rows_of<const T>(rows.v),
                              .out = rows_of<T>(rows.out),
                              .lse = rows_of<RealOf<T>>(rows.lse)};
    run_forward(args, tiles);
  });
}

}  // namespace distca::attention::cpu
