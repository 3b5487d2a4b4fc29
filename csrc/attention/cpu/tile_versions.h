#pragma once

#include "tiles.h"

// What the tiles share, and how one tile becomes a function per instruction set. A build for plain
// x86-64 carries all versions and picks one at run time; elsewhere there is one, of 16-byte
// vectors.
namespace distca::attention::cpu {

// A tile's rows as panels, head by head.
template <typename S>
struct Panels {
  const QueryTile& tile;
  int64_t group;
  int64_t per_head;

  DISTCA_BLOCK Panels(const QueryTile& tile, int64_t group)
      : tile(tile), group(group), per_head(ceil_div(tile.row_end - tile.row_begin, S::kPanel)) {}

  DISTCA_BLOCK int64_t count() const { return group * per_head; }
  DISTCA_BLOCK Panel at(int64_t i) const {
    const int64_t row = tile.row_begin + i % per_head * S::kPanel;
    return {.head = tile.kv_head * group + i / per_head,
            .row = tile.task.q_row + row,
            .num_rows = std::min<int64_t>(S::kPanel, tile.row_end - row),
            .position = tile.task.q_offset + row};
  }
};

// A block of one task's keys and values, [kKeys][width] each, zero past the last key.
template <typename S>
struct KeyBlock {
  using Real = typename S::Real;

  int64_t width;
  Real* k;
  Real* v;
  int64_t first = 0;  // key index in the task
  int64_t num_keys = 0;

  DISTCA_BLOCK KeyBlock(int64_t width, Scratch<Real>& scratch)
      : width(width), k(scratch.take(kKeys * width)), v(scratch.take(kKeys * width)) {}

  template <typename Args>
  DISTCA_BLOCK void load(const Args& args, const QueryTile& tile, int64_t key, int64_t end) {
    first = key;
    num_keys = std::min(kKeys, end - key);
    const int64_t padded_keys = round_up(num_keys, S::kRows);
    const int64_t row = tile.task.k_row + key, head_dim = args.shape.head_dim;
    load_rows(k, width, args.k.at(row, tile.kv_head), args.k.row_stride, num_keys, padded_keys,
              head_dim);
    load_rows(v, width, args.v.at(row, tile.kv_head), args.v.row_stride, num_keys, padded_keys,
              head_dim);
  }
};

// What a panel sees of a block: keys [0, num_keys), and of those its lanes [lo + key, hi + key].
struct BlockMask {
  int64_t num_keys;
  bool hides_some;
  int64_t lo;
  int64_t hi;
};

DISTCA_BLOCK BlockMask block_mask(const Mask& mask, const Panel& panel, int64_t key,
                                  int64_t num_keys) {
  constexpr int64_t kFar = int64_t{1} << 40;
  const Range queries{panel.position, panel.position + panel.num_rows};
  const Range seen{key, keys_seen(mask, queries, {key, key + num_keys}).end};
  const Range lanes = queries_seeing(mask, key, {-kFar, kFar});
  const Sight sight = sight_of(mask, queries, seen);
  return {.num_keys = sight == Sight::kNone ? 0 : num_rows(seen),
          .hides_some = sight == Sight::kSome,
          .lo = lanes.begin - panel.position,
          .hi = lanes.end - 1 - panel.position};
}

}  // namespace distca::attention::cpu

#define DISTCA_TILE_VERSION(name, target, bytes, Tile) \
  template <typename T, typename... Args>              \
  target void name(Args&... args) {                    \
    Tile<Simd<RealOf<T>, bytes>, T>{args...}.run();    \
  }

#if defined(__x86_64__) && defined(__GNUC__)
#define DISTCA_TILE_VERSIONS(Tile)                                                               \
  DISTCA_TILE_VERSION(run_baseline, , 16, Tile)                                                  \
  DISTCA_TILE_VERSION(run_avx2, [[gnu::target("avx2,fma")]], 32, Tile)                           \
  DISTCA_TILE_VERSION(run_avx512, [[gnu::target("avx512f,avx512bw,avx512dq,avx512vl,fma")]], 64, \
                      Tile)                                                                      \
  template <typename T, typename... Args>                                                        \
  void run_tile(Args&... args) {                                                                 \
    if (isa() == Isa::kAvx512) return run_avx512<T>(args...);                                    \
    if (isa() == Isa::kAvx2) return run_avx2<T>(args...);                                        \
    run_baseline<T>(args...);                                                                    \
  }
#else
#define DISTCA_TILE_VERSIONS(Tile) DISTCA_TILE_VERSION(run_tile, , 16, Tile)
#endif
