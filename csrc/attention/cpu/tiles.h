#pragma once

#include <c10/util/BFloat16.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <type_traits>

#include "../attention.h"
#include "blocks.h"

namespace distca::attention::cpu {

// What a dtype computes and accumulates in.
template <typename T>
using RealOf = std::conditional_t<std::is_same_v<T, double>, double, float>;

// [rows, heads, ...] of one tensor; strides in elements, last dimension contiguous.
template <typename T>
struct Rows {
  T* data;
  int64_t row_stride;
  int64_t head_stride;

  T* at(int64_t row, int64_t head) const { return data + row * row_stride + head * head_stride; }
};

// Query rows [row_begin, row_end) of a task, counted from its first, for all query heads that read
// one kv head. They share each key block as it is loaded.
struct QueryTile {
  PlacedTask task;
  int64_t kv_head;
  int64_t row_begin;
  int64_t row_end;

  // Keys of the task that any of these queries sees.
  Range keys(const Mask& mask) const {
    return keys_seen(mask, {task.q_offset + row_begin, task.q_offset + row_end},
                     {0, task.num_k_rows});
  }
};

// At most a panel of consecutive query rows of one head; `position` is the first one's key index.
struct Panel {
  int64_t head;
  int64_t row;
  int64_t num_rows;
  int64_t position;
};

struct Shape {
  int64_t group;  // query heads per kv head
  int64_t head_dim;
  Mask mask;
  double softmax_scale;

  // A tile's rows over all heads of the group: enough to pay for loading a key block.
  int64_t tile_rows() const { return std::max<int64_t>(32, 256 / group / 32 * 32); }
};

template <typename T>
struct ForwardArgs {
  Shape shape;
  Rows<const T> q, k, v;
  Rows<T> out;
  Rows<RealOf<T>> lse;
};

template <typename T>
struct BackwardArgs {
  Shape shape;
  Rows<const T> grad_out, q, k, v;
  Rows<const RealOf<T>> lse, delta;
  Rows<T> dq;
};

// Sums of dk and dv over key rows [k_row, k_row + num_rows), each laid out
// [panel of dims][num_rows][panel_width].
template <typename Real>
struct KeyGrads {
  Real* dk;
  Real* dv;
  int64_t k_row;
  int64_t num_rows;
};

// 64-byte aligned memory, handed out piece by piece.
template <typename Real>
class Scratch {
 public:
  explicit Scratch(int64_t count)
      : memory_(static_cast<Real*>(::operator new(count * sizeof(Real), kAlignment))) {}

  // Starts over; pieces handed out before are free again.
  void reset() { used_ = 0; }
  Real* take(int64_t count) {
    Real* piece = memory_.get() + used_;
    used_ += padded(count);
    return piece;
  }
  static constexpr int64_t padded(int64_t count) { return round_up(count, 64 / sizeof(Real)); }

 private:
  static constexpr std::align_val_t kAlignment{64};
  struct Free {
    void operator()(Real* memory) const { ::operator delete(memory, kAlignment); }
  };
  std::unique_ptr<Real, Free> memory_;
  int64_t used_ = 0;
};

// The widest instructions of this processor that tiles are compiled for.
enum class Isa { kBaseline, kAvx2, kAvx512 };
Isa isa();

// Queries, or dims of KeyGrads, in one panel.
template <typename Real>
int64_t panel_width() {
  const int64_t vector_bytes = isa() == Isa::kAvx512 ? 64 : isa() == Isa::kAvx2 ? 32 : 16;
  return 2 * vector_bytes / static_cast<int64_t>(sizeof(Real));
}

// Reals of scratch that one tile of this shape needs.
template <typename Real>
int64_t forward_scratch(const Shape& shape);
template <typename Real>
int64_t backward_scratch(const Shape& shape);

template <typename T>
void forward_tile(const ForwardArgs<T>& args, const QueryTile& tile, Scratch<RealOf<T>>& scratch);

// Adds the tile's share to `grads` and writes its dq.
template <typename T>
void backward_tile(const BackwardArgs<T>& args, const QueryTile& tile,
                   const KeyGrads<RealOf<T>>& grads, Scratch<RealOf<T>>& scratch);

}  // namespace distca::attention::cpu
