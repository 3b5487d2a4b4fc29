#include <cmath>

#include "tile_versions.h"

namespace distca::attention::cpu {
namespace {

template <typename S, typename T>
struct ForwardTile {
  using Real = typename S::Real;
  using Vec = typename S::Vec;

  const ForwardArgs<T>& args;
  const QueryTile& tile;
  Panels<S> panels;
  int64_t head_dim;
  int64_t dims;   // head_dim in whole register blocks
  Real* q;        // per panel [head_dim][kPanel], times softmax_scale
  Real* acc;      // per panel [dims][kPanel]
  Real* maximum;  // per panel [kPanel]
  Real* sum;      // per panel [kPanel]
  Real* x;        // [kKeys][kPanel]
  KeyBlock<S> block;

  DISTCA_BLOCK ForwardTile(const ForwardArgs<T>& args, const QueryTile& tile,
                           Scratch<Real>& scratch)
      : args(args),
        tile(tile),
        panels(tile, args.shape.group),
        head_dim(args.shape.head_dim),
        dims(round_up(head_dim, S::kRows)),
        q(scratch.take(panels.count() * head_dim * S::kPanel)),
        acc(scratch.take(panels.count() * dims * S::kPanel)),
        maximum(scratch.take(panels.count() * S::kPanel)),
        sum(scratch.take(panels.count() * S::kPanel)),
        x(scratch.take(kKeys * S::kPanel)),
        block(dims, scratch) {}

  // Online softmax of one block: x[num_keys][kPanel] scores become weights relative to the new
  // maximum; `sum`, `acc` [rows][kPanel] are brought to it.
  DISTCA_BLOCK static void softmax_block(Real* x, int64_t num_keys, Real* maximum, Real* sum,
                                         Real* acc, int64_t rows) {
    for (int n = 0; n < S::kVecs; ++n) {
      Vec* column = reinterpret_cast<Vec*>(x) + n;
      Vec& old_max = reinterpret_cast<Vec*>(maximum)[n];
      Vec& total = reinterpret_cast<Vec*>(sum)[n];
      Vec new_max = old_max;
      for (int64_t key = 0; key < num_keys; ++key) {
        const Vec score = column[key * S::kVecs];
        new_max = score > new_max ? score : new_max;
      }
      // A query that has seen no key yet has maximum -infinity; 0 keeps the differences defined.
      const Vec base = new_max == -kInfinity<Real> ? Vec{} : new_max;
      Vec block_sum = {};
      for (int64_t key = 0; key < num_keys; ++key) {
        Vec weight = column[key * S::kVecs] - base;
        exp_inplace<S>(weight);
        column[key * S::kVecs] = weight;
        block_sum += weight;
      }
      Vec correction = old_max - base;
      exp_inplace<S>(correction);
      total = total * correction + block_sum;
      old_max = new_max;
      Vec* out = reinterpret_cast<Vec*>(acc) + n;
      for (int64_t d = 0; d < rows; ++d) out[d * S::kVecs] *= correction;
    }
  }

  DISTCA_BLOCK void load_queries() {
    const int64_t num_panels = panels.count();
    std::fill_n(acc, num_panels * dims * S::kPanel, Real(0));
    std::fill_n(sum, num_panels * S::kPanel, Real(0));
    std::fill_n(maximum, num_panels * S::kPanel, -kInfinity<Real>);
    for (int64_t i = 0; i < num_panels; ++i) {
      const Panel panel = panels.at(i);
      load_transposed<S>(q + i * head_dim * S::kPanel, args.q.at(panel.row, panel.head),
                         args.q.row_stride, panel.num_rows, head_dim,
                         static_cast<Real>(args.shape.softmax_scale));
    }
  }

  DISTCA_BLOCK void attend_block() {
    for (int64_t i = 0; i < panels.count(); ++i) {
      const BlockMask mask = block_mask(args.shape.mask, panels.at(i), block.first, block.num_keys);
      if (mask.num_keys == 0) continue;
      panel_gemm<S, false, false>(x, block.k, dims, q + i * head_dim * S::kPanel,
                                  round_up(mask.num_keys, S::kRows), head_dim);
      if (mask.hides_some) mask_panel<S>(x, mask.num_keys, mask.lo, mask.hi);
      Real* panel_acc = acc + i * dims * S::kPanel;
      softmax_block(x, mask.num_keys, maximum + i * S::kPanel, sum + i * S::kPanel, panel_acc,
                    dims);
      panel_gemm<S, true, true>(panel_acc, block.v, dims, x, dims, mask.num_keys);
    }
  }

  DISTCA_BLOCK void store() {
    for (int64_t i = 0; i < panels.count(); ++i) {
      const Panel panel = panels.at(i);
      Real factor[S::kPanel];
      for (int64_t lane = 0; lane < panel.num_rows; ++lane) {
        const Real total = sum[i * S::kPanel + lane];
        // Rounded once and never below the maximum: see BackwardTile::softmax_grad.
        *args.lse.at(panel.row + lane, panel.head) =
            total == 0 ? -kInfinity<Real> : maximum[i * S::kPanel + lane] + std::log(total);
        factor[lane] = total == 0 ? 0 : 1 / total;
      }
      store_transposed<S>(args.out.at(panel.row, panel.head), args.out.row_stride,
                          acc + i * dims * S::kPanel, panel.num_rows, head_dim, factor);
    }
  }

  DISTCA_BLOCK void run() {
    load_queries();
    const Range keys = tile.keys(args.shape.mask);
    for (int64_t key = keys.begin; key < keys.end; key += kKeys) {
      block.load(args, tile, key, keys.end);
      attend_block();
    }
    store();
  }
};

DISTCA_TILE_VERSIONS(ForwardTile)

}  // namespace

template <typename Real>
int64_t forward_scratch(const Shape& shape) {
  const int64_t max_panel = kMaxPanelBytes / sizeof(Real);
  const int64_t lanes = shape.group * round_up(shape.tile_rows(), max_panel);
  const int64_t dims = round_up(shape.head_dim, kMaxBlockRows);
  const auto padded = Scratch<Real>::padded;
  return 2 * padded(lanes * dims) + 2 * padded(lanes) + 2 * padded(kKeys * dims) +
         padded(kKeys * max_panel);
}

template <typename T>
void forward_tile(const ForwardArgs<T>& args, const QueryTile& tile, Scratch<RealOf<T>>& scratch) {
  scratch.reset();
  run_tile<T>(args, tile, scratch);
}

template int64_t forward_scratch<float>(const Shape&);
template int64_t forward_scratch<double>(const Shape&);
template void forward_tile(const ForwardArgs<float>&, const QueryTile&, Scratch<float>&);
template void forward_tile(const ForwardArgs<double>&, const QueryTile&, Scratch<double>&);
template void forward_tile(const ForwardArgs<c10::BFloat16>&, const QueryTile&, Scratch<float>&);

}  // namespace distca::attention::cpu
