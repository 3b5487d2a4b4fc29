#include "../backend.h"

#include <ATen/OpMathType.h>
#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <atomic>

// The formula in PyTorch's matrix products, to try and to test distca without a GPU.
namespace distca::attention::cpu {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr int64_t kMaxScores = 1 << 18;  // of a tile: 1 MB in float32 stays in cache
constexpr int64_t kMinTileRows = 32, kMaxTileRows = 128;  // for products, against hidden keys

// Tasks that share keys, for some kv heads. Different units share no row of dk and dv, so that each
// sums its own in a fixed order.
struct Unit : TaskRun {
  Range kv_heads;
  int64_t num_kv_heads;  // of all units
};

// Short tasks run with all heads at once, to save calls; others head by head, for all threads.
std::vector<Unit> units_of(const std::vector<PlacedTask>& tasks, int64_t num_heads,
                           int64_t num_kv_heads) {
  std::vector<Unit> units;
  for (const TaskRun& run : runs_of(tasks)) {
    int64_t num_scores = 0;
    for (const PlacedTask& task : run.tasks) {
      num_scores += num_heads * task.num_q_rows * task.num_k_rows;
    }
    const int64_t num_at_once = num_scores <= kMaxScores ? num_kv_heads : 1;
    for (int64_t head = 0; head < num_kv_heads; head += num_at_once) {
      units.push_back({run, {head, head + num_at_once}, num_kv_heads});
    }
  }
  return units;
}

// Runs all units on torch's threads. Each takes the next unit when it is free: they differ in size.
// Inside a parallel region PyTorch and MKL compute on one thread, so that no bit depends on the
// number of threads. parallel_for opens none for a range of one.
template <typename Rows, typename Run>
void for_each_unit(const Rows& rows, const Run& run) {
  const auto units = units_of(rows.tasks.tasks, rows.q.size(1), rows.k.size(1));
  std::atomic<size_t> next{0};
  at::parallel_for(0, std::max(2, at::get_num_threads()), 1, [&](int64_t, int64_t) {
    const at::AutoDispatchBelowADInplaceOrView below;  // threads do not inherit the caller's
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    for (size_t i = next++; i < units.size(); i = next++) run(units[i]);
  });
}

// Some query rows of a task, and the keys that any of them sees.
struct Tile {
  Range queries;     // rows of q
  Range keys;        // rows of the unit's keys
  int64_t diagonal;  // position of the first query, counted from the first key
};

template <typename Visit>
void for_each_tile(const Unit& unit, int64_t num_heads, const Mask& mask, const Visit& visit) {
  const int64_t scores_per_key = num_heads / unit.num_kv_heads * num_rows(unit.kv_heads);
  for (const PlacedTask& task : unit.tasks) {
    int64_t count;
    for (int64_t row = 0; row < task.num_q_rows; row += count) {
      const int64_t position = task.q_offset + row;
      const auto seen_by = [&](int64_t num_queries) {
        return keys_seen(mask, {position, position + num_queries}, {0, task.num_k_rows});
      };
      const int64_t scores_per_row = scores_per_key * std::max<int64_t>(1, num_rows(seen_by(1)));
      count = std::clamp(kMaxScores / scores_per_row, kMinTileRows, kMaxTileRows);
      count = std::min(count, task.num_q_rows - row);
      const Range seen = seen_by(count);
      const int64_t q_row = task.q_row + row, k_row = task.k_row - unit.keys.begin;
      visit(Tile{.queries = {q_row, q_row + count},
                 .keys = {k_row + seen.begin, k_row + seen.end},
                 .diagonal = position - seen.begin});
    }
  }
}

// Some rows of x [rows, heads, ...] as [kv heads of the unit, heads of x for each, rows, ...].
at::Tensor by_head(const at::Tensor& x, Range rows, const Unit& unit) {
  const int64_t group = x.size(1) / unit.num_kv_heads, width = x.dim() == 3 ? x.size(2) : 1;
  const int64_t first = rows.begin * x.stride(0) + unit.kv_heads.begin * group * x.stride(1);
  return x.as_strided({num_rows(unit.kv_heads), group, num_rows(rows), width},
                      {group * x.stride(1), x.stride(1), x.stride(0), 1},
                      x.storage_offset() + first);
}

// A copy of the same as [kv heads, heads * rows, ...], of the type that x computes in.
at::Tensor load(const at::Tensor& x, Range rows, const Unit& unit) {
  return by_head(x, rows, unit)
      .to(at::toOpMathType(x.scalar_type()), /*non_blocking=*/false, /*copy=*/true,
          at::MemoryFormat::Contiguous)
      .flatten(1, 2);
}

// The reverse, into x.
void store(const at::Tensor& x, Range rows, const Unit& unit, const at::Tensor& from) {
  const at::Tensor to = by_head(x, rows, unit);
  to.copy_(from.view(to.sizes()));
}

at::Tensor seen(const at::Tensor& keys, const Tile& tile) {
  return keys.slice(1, tile.keys.begin, tile.keys.end);
}

// q k^T [kv heads, heads * rows, keys], -inf where a query does not see the key. The backward pass
// repeats the forward pass's to the last bit, as neighbouring floats of large scores are more than
// 1 apart. q is scaled.
at::Tensor scores_of(const at::Tensor& q, const at::Tensor& k, const Tile& tile, const Mask& mask,
                     double softcap) {
  const at::Tensor scores = at::bmm(q, seen(k, tile).transpose(1, 2));
  if (softcap != 0) scores.div_(softcap).tanh_().mul_(softcap);
  const int64_t num_queries = num_rows(tile.queries), num_keys = num_rows(tile.keys);
  const at::Tensor by_row = scores.view({scores.size(0), -1, num_queries, num_keys});
  const auto square = [&](int64_t count) { return at::ones({num_queries, count}, at::kBool); };
  if (mask.window_right >= 0 && mask.window_right < num_keys - 1 - tile.diagonal) {
    const int64_t first = tile.diagonal + mask.window_right + 1;  // that a query does not see
    by_row.slice(3, first).masked_fill_(square(num_keys - first).triu(), -kInfinity);
  }
  if (mask.window_left >= 0 && mask.window_left < num_queries - 1 + tile.diagonal) {
    const int64_t first = tile.diagonal - mask.window_left;  // that the first query sees
    const int64_t end = std::min(num_keys, first + num_queries - 1);
    by_row.slice(3, 0, end).masked_fill_(square(end).tril(first - 1), -kInfinity);
  }
  return scores;
}

// x = e^x. MKL's exp, which torch uses, is three times slower, and more for -inf.
void exp_(const at::Tensor& x) {
  constexpr double kLog2E = 1.44269504088896340736;
  x.mul_(kLog2E).exp2_();
}

void forward(const ForwardRows& rows, const Params& params) {
  const auto& [q, k, v, tasks, out, lse] = rows;
  for_each_unit(rows, [&](const Unit& unit) {
    const at::Tensor keys = load(k, unit.keys, unit), values = load(v, unit.keys, unit);
    for_each_tile(unit, q.size(1), tasks.mask, [&](const Tile& tile) {
      if (num_rows(tile.keys) == 0) {
        by_head(out, tile.queries, unit).zero_();
        by_head(lse, tile.queries, unit).fill_(-kInfinity);
        return;
      }
      const at::Tensor queries = load(q, tile.queries, unit).mul_(params.softmax_scale);
      const at::Tensor p = scores_of(queries, keys, tile, tasks.mask, params.softcap);
      const at::Tensor maximum = p.amax(2, /*keepdim=*/true);
      // 0 keeps the differences defined where a query sees no key.
      exp_(p.sub_(maximum.masked_fill(maximum.eq(-kInfinity), 0)));
      const at::Tensor sum = p.sum(2, /*keepdim=*/true);  // 0, or 1 and more
      store(lse, tile.queries, unit, sum.log().add_(maximum));
      store(out, tile.queries, unit, at::bmm(p, seen(values, tile)).div_(sum.clamp_min_(1)));
    });
  });
}

void backward(const BackwardRows& rows, const Params& params) {
  const auto& [grad_out, q, k, v, saved, tasks, dq, dk, dv] = rows;
  for_each_unit(rows, [&](const Unit& unit) {
    const at::Tensor keys = load(k, unit.keys, unit), values = load(v, unit.keys, unit);
    const at::Tensor dk_sum = at::zeros_like(keys), dv_sum = at::zeros_like(values);
    for_each_tile(unit, q.size(1), tasks.mask, [&](const Tile& tile) {
      const auto of_tile = [&](const at::Tensor& x) { return load(x, tile.queries, unit); };
      const at::Tensor queries = of_tile(q).mul_(params.softmax_scale);
      const at::Tensor grad = of_tile(grad_out), lse = of_tile(saved.lse);
      const at::Tensor delta = saved.delta.defined()
                                   ? of_tile(saved.delta)
                                   : of_tile(saved.out).mul_(grad).sum(2, /*keepdim=*/true);
      const at::Tensor p = scores_of(queries, keys, tile, tasks.mask, params.softcap);
      // d tanh(x) = 1 - tanh(x)^2, and 0 for hidden keys.
      const at::Tensor slope = params.softcap == 0
                                   ? at::Tensor()
                                   : p.div(params.softcap).square_().neg_().add_(1).clamp_min_(0);
      // A query that saw no key has weights of 0. None is above 1, also where lse comes from a
      // processor that rounds otherwise.
      exp_(p.sub_(lse.masked_fill(lse.eq(-kInfinity), kInfinity)).clamp_max_(0));
      const at::Tensor ds = at::bmm(grad, seen(values, tile).transpose(1, 2)).sub_(delta).mul_(p);
      if (slope.defined()) ds.mul_(slope);
      store(dq, tile.queries, unit, at::bmm(ds, seen(keys, tile)).mul_(params.softmax_scale));
      seen(dk_sum, tile).baddbmm_(ds.transpose(1, 2), queries);
      seen(dv_sum, tile).baddbmm_(p.transpose(1, 2), grad);
    });
    store(dk, unit.keys, unit, dk_sum);
    store(dv, unit.keys, unit, dv_sum);
  });
}

}  // namespace

Backend backend() {
  return {.name = "cpu",
          .device = at::kCPU,
          .dtypes = {at::kDouble, at::kFloat, at::kBFloat16, at::kHalf},
          .max_softcap = kInfinity,
          .forward = forward,
          .backward = backward};
}

}  // namespace distca::attention::cpu
