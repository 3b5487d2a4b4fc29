#include "tile_versions.h"

namespace distca::attention::cpu {
namespace {

template <typename S, typename T>
struct BackwardTile {
  using Real = typename S::Real;
  using Vec = typename S::Vec;
  static constexpr int64_t kSquare = S::kPanel * S::kPanel;

  // What is kept of one panel of queries; q carries the factor softmax_scale.
  struct Queries {
    Real* q;          // [head_dim][kPanel]
    Real* grad_out;   // [head_dim][kPanel]
    Real* q_rows;     // [panel of dims][kPanel queries][kPanel dims]
    Real* grad_rows;  // [panel of dims][kPanel queries][kPanel dims]
    Real* dq;         // [dims][kPanel]
    Real* lse;        // [kPanel]
    Real* delta;      // [kPanel]
  };

  const BackwardArgs<T>& args;
  const QueryTile& tile;
  const KeyGrads<Real>& grads;
  Panels<S> panels;
  int64_t head_dim;
  int64_t dims;        // head_dim in whole register blocks
  int64_t dim_panels;  // head_dim in panels
  Queries first;       // of panel 0; the others follow, array by array
  Real* p;             // [kKeys][kPanel]
  Real* dp;            // [kKeys][kPanel]
  Real* dk;            // [panel of dims][kKeys][kPanel], this tile's share of one block
  Real* dv;            // [panel of dims][kKeys][kPanel]
  KeyBlock<S> block;

  DISTCA_BLOCK BackwardTile(const BackwardArgs<T>& args, const QueryTile& tile,
                            const KeyGrads<Real>& grads, Scratch<Real>& scratch)
      : args(args),
        tile(tile),
        grads(grads),
        panels(tile, args.shape.group),
        head_dim(args.shape.head_dim),
        dims(round_up(head_dim, S::kRows)),
        dim_panels(ceil_div(head_dim, S::kPanel)),
        first{.q = scratch.take(panels.count() * head_dim * S::kPanel),
              .grad_out = scratch.take(panels.count() * head_dim * S::kPanel),
              .q_rows = scratch.take(panels.count() * dim_panels * kSquare),
              .grad_rows = scratch.take(panels.count() * dim_panels * kSquare),
              .dq = scratch.take(panels.count() * dims * S::kPanel),
              .lse = scratch.take(panels.count() * S::kPanel),
              .delta = scratch.take(panels.count() * S::kPanel)},
        p(scratch.take(kKeys * S::kPanel)),
        dp(scratch.take(kKeys * S::kPanel)),
        dk(scratch.take(dim_panels * kKeys * S::kPanel)),
        dv(scratch.take(dim_panels * kKeys * S::kPanel)),
        block(dims, scratch) {}

  DISTCA_BLOCK Queries queries(int64_t i) const {
    return {.q = first.q + i * head_dim * S::kPanel,
            .grad_out = first.grad_out + i * head_dim * S::kPanel,
            .q_rows = first.q_rows + i * dim_panels * kSquare,
            .grad_rows = first.grad_rows + i * dim_panels * kSquare,
            .dq = first.dq + i * dims * S::kPanel,
            .lse = first.lse + i * S::kPanel,
            .delta = first.delta + i * S::kPanel};
  }

  // dst[d / kPanel][lane][d % kPanel] = factor * src[lane][d], zero from head_dim on.
  DISTCA_BLOCK void load_panels(Real* dst, const T* src, int64_t row_stride, int64_t num_rows,
                                Real factor) const {
    for (int64_t lane = 0; lane < num_rows; ++lane) {
      for (int64_t begin = 0; begin < head_dim; begin += S::kPanel) {
        const T* from = src + lane * row_stride + begin;
        Real* to = dst + begin * S::kPanel + lane * S::kPanel;
        const int64_t num_dims = std::min<int64_t>(S::kPanel, head_dim - begin);
        for (int64_t d = 0; d < num_dims; ++d) to[d] = static_cast<Real>(from[d]) * factor;
        for (int64_t d = num_dims; d < S::kPanel; ++d) to[d] = 0;
      }
    }
  }

  DISTCA_BLOCK void clear_lane(const Queries& of, int64_t lane) const {
    for (int64_t d = 0; d < dim_panels * S::kPanel; ++d) {
      const int64_t at = d / S::kPanel * kSquare + lane * S::kPanel + d % S::kPanel;
      of.q_rows[at] = of.grad_rows[at] = 0;
      if (d < head_dim) of.q[d * S::kPanel + lane] = of.grad_out[d * S::kPanel + lane] = 0;
    }
  }

  // A query that saw no key, and a lane without a query, takes part as zeros of weight e^-inf.
  DISTCA_BLOCK void load_statistics(const Panel& panel, const Queries& to) const {
    for (int64_t i = 0; i < S::kPanel; ++i) {
      const Real lse =
          i < panel.num_rows ? *args.lse.at(panel.row + i, panel.head) : -kInfinity<Real>;
      const bool saw_key = lse != -kInfinity<Real>;
      to.lse[i] = saw_key ? lse : kInfinity<Real>;
      to.delta[i] = saw_key ? *args.delta.at(panel.row + i, panel.head) : 0;
      if (!saw_key) clear_lane(to, i);
    }
  }

  DISTCA_BLOCK void load_queries() {
    const Real q_factor = static_cast<Real>(args.shape.softmax_scale);
    for (int64_t i = 0; i < panels.count(); ++i) {
      const Panel panel = panels.at(i);
      const Queries to = queries(i);
      const T* q = args.q.at(panel.row, panel.head);
      const T* grad_out = args.grad_out.at(panel.row, panel.head);
      const int64_t q_stride = args.q.row_stride, grad_stride = args.grad_out.row_stride;
      load_transposed<S>(to.q, q, q_stride, panel.num_rows, head_dim, q_factor);
      load_transposed<S>(to.grad_out, grad_out, grad_stride, panel.num_rows, head_dim, Real(1));
      load_panels(to.q_rows, q, q_stride, panel.num_rows, q_factor);
      load_panels(to.grad_rows, grad_out, grad_stride, panel.num_rows, Real(1));
      load_statistics(panel, to);
      std::fill_n(to.dq, dims * S::kPanel, Real(0));
    }
  }

  // p: scores become weights. dp: gradient of the weights becomes that of the scores.
  //
  // Scores are those of the forward pass to the last bit, and lse is the largest plus a logarithm,
  // rounded once: of large scores, whose spacing is above 1, no other unit or rounding would do, as
  // an error of one spacing is a factor of e^64 at 1e9. No weight is above 1, also where lse comes
  // from a processor that rounds otherwise.
  DISTCA_BLOCK void softmax_grad(const Queries& of, int64_t num_keys, int64_t padded_keys) {
    for (int n = 0; n < S::kVecs; ++n) {
      const Vec lse = reinterpret_cast<const Vec*>(of.lse)[n];
      const Vec delta = reinterpret_cast<const Vec*>(of.delta)[n];
      Vec* weights = reinterpret_cast<Vec*>(p) + n;
      Vec* gradients = reinterpret_cast<Vec*>(dp) + n;
      for (int64_t key = 0; key < num_keys; ++key) {
        Vec weight = weights[key * S::kVecs] - lse;
        weight = weight > Vec{} ? Vec{} : weight;
        exp_inplace<S>(weight);
        weights[key * S::kVecs] = weight;
        gradients[key * S::kVecs] = weight * (gradients[key * S::kVecs] - delta);
      }
      for (int64_t key = num_keys; key < padded_keys; ++key) {
        weights[key * S::kVecs] = gradients[key * S::kVecs] = Vec{};
      }
    }
  }

  DISTCA_BLOCK void attend_block() {
    std::fill_n(dk, dim_panels * kKeys * S::kPanel, Real(0));
    std::fill_n(dv, dim_panels * kKeys * S::kPanel, Real(0));
    for (int64_t i = 0; i < panels.count(); ++i) {
      const Panel panel = panels.at(i);
      const BlockMask mask = block_mask(args.shape.mask, panel, block.first, block.num_keys);
      if (mask.num_keys == 0) continue;
      const int64_t padded_keys = round_up(mask.num_keys, S::kRows);
      const Queries of = queries(i);
      panel_gemm<S, false, false>(p, block.k, dims, of.q, padded_keys, head_dim);
      panel_gemm<S, false, false>(dp, block.v, dims, of.grad_out, padded_keys, head_dim);
      if (mask.hides_some) mask_panel<S>(p, mask.num_keys, mask.lo, mask.hi);
      softmax_grad(of, mask.num_keys, padded_keys);
      panel_gemm<S, true, true>(of.dq, block.k, dims, dp, dims, mask.num_keys);
      for (int64_t j = 0; j < dim_panels; ++j) {
        panel_gemm<S, false, true>(dv + j * kKeys * S::kPanel, p, S::kPanel,
                                   of.grad_rows + j * kSquare, padded_keys, panel.num_rows);
        panel_gemm<S, false, true>(dk + j * kKeys * S::kPanel, dp, S::kPanel,
                                   of.q_rows + j * kSquare, padded_keys, panel.num_rows);
      }
    }
    add_to_grads();
  }

  // Sums of a tile first, then sums of tiles: float32 rounding grows with the longer of the two
  // and not with all queries.
  DISTCA_BLOCK void add_to_grads() {
    const int64_t k_row = tile.task.k_row + block.first - grads.k_row;
    for (int64_t j = 0; j < dim_panels; ++j) {
      const int64_t to = (j * grads.num_rows + k_row) * S::kPanel, from = j * kKeys * S::kPanel;
      for (int64_t i = 0; i < block.num_keys * S::kPanel; ++i) {
        grads.dk[to + i] += dk[from + i];
        grads.dv[to + i] += dv[from + i];
      }
    }
  }

  DISTCA_BLOCK void store() {
    Real factor[S::kPanel];
    std::fill_n(factor, S::kPanel, static_cast<Real>(args.shape.softmax_scale));
    for (int64_t i = 0; i < panels.count(); ++i) {
      const Panel panel = panels.at(i);
      store_transposed<S>(args.dq.at(panel.row, panel.head), args.dq.row_stride, queries(i).dq,
                          panel.num_rows, head_dim, factor);
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

DISTCA_TILE_VERSIONS(BackwardTile)

}  // namespace

template <typename Real>
int64_t backward_scratch(const Shape& shape) {
  const int64_t max_panel = kMaxPanelBytes / sizeof(Real);
  const int64_t lanes = shape.group * round_up(shape.tile_rows(), max_panel);
  const int64_t dims = round_up(shape.head_dim, kMaxBlockRows);
  const int64_t panel_dims = round_up(shape.head_dim, max_panel);
  const auto padded = Scratch<Real>::padded;
  return 3 * padded(lanes * dims) + 2 * padded(lanes * panel_dims) + 2 * padded(lanes) +
         2 * padded(kKeys * dims) + 2 * padded(kKeys * max_panel) + 2 * padded(kKeys * panel_dims);
}

template <typename T>
void backward_tile(const BackwardArgs<T>& args, const QueryTile& tile,
                   const KeyGrads<RealOf<T>>& grads, Scratch<RealOf<T>>& scratch) {
  scratch.reset();
  run_tile<T>(args, tile, grads, scratch);
}

template int64_t backward_scratch<float>(const Shape&);
template int64_t backward_scratch<double>(const Shape&);
template void backward_tile(const BackwardArgs<float>&, const QueryTile&, const KeyGrads<float>&,
                            Scratch<float>&);
template void backward_tile(const BackwardArgs<double>&, const QueryTile&, const KeyGrads<double>&,
                            Scratch<double>&);
template void backward_tile(const BackwardArgs<c10::BFloat16>&, const QueryTile&,
                            const KeyGrads<float>&, Scratch<float>&);

}  // namespace distca::attention::cpu
