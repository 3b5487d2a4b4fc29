#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cmath>
#include <type_traits>

#include "backward_rows.cuh"
#include "launch.cuh"

namespace distca::attention::sm90 {
namespace {

constexpr int kThreads = 256;
constexpr int kLanes = 8;  // threads that share a row
constexpr int kRowsAtOnce = kThreads / kLanes;
constexpr int kFinishThreads = 128;  // of finish_kernel, whose blocks are smaller

template <typename T>
struct Rows {
  T* data;
  int64_t row_stride;  // in elements
  int64_t head_stride;
  int head_dim;

  explicit Rows(const RowTensor& tensor)
      : data(static_cast<T*>(tensor.data)),
        row_stride(tensor.row_stride / static_cast<int64_t>(sizeof(T))),
        head_stride(tensor.head_stride / static_cast<int64_t>(sizeof(T))),
        head_dim(static_cast<int>(tensor.head_dim)) {}
  __device__ T* at(int64_t row, int64_t head) const {
    return data + row * row_stride + head * head_stride;
  }
};

__device__ float to_float(__nv_bfloat16 x) {
  return __bfloat162float(x);
}
__device__ float to_float(__half x) {
  return __half2float(x);
}
template <typename T>
__device__ T from_float(float x) {
  if constexpr (std::is_same_v<T, __half>) {
    return __float2half(x);
  } else {
    return __float2bfloat16(x);
  }
}

// Eight elements as floats; zeros where none are.
template <typename T>
__device__ void load_if(bool is_there, const T* from, float (&values)[8]) {
  alignas(16) T elements[8];
  *reinterpret_cast<uint4*>(elements) = is_there ? *reinterpret_cast<const uint4*>(from) : uint4{};
#pragma unroll
  for (int i = 0; i < 8; ++i) values[i] = to_float(elements[i]);
}

__device__ float sum_of_row(float partial) {
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) {
    partial += __shfl_xor_sync(0xffffffffu, partial, offset);
  }
  return partial;
}

template <typename T>
struct BoundArguments {
  Rows<T> k, v;
  const KeyBlock* blocks;
  int32_t heads_kv;
  float* bounds;  // by run and kv head: the largest |V_j| squared, the largest |K| of one element
};

// One block per key block and kv head. Numbers that are not negative order like their bits, NaN
// above all.
template <typename T, int kHeadDim>
__global__ void bound_kernel(const BoundArguments<T> arguments) {
  const KeyBlock block = arguments.blocks[blockIdx.x / arguments.heads_kv];
  const int32_t head = blockIdx.x % arguments.heads_kv;
  const int lane = threadIdx.x % kLanes;
  int largest_square = 0, largest_key = 0;
#pragma unroll
  for (int first = 0; first < kKeyBlockRows; first += kRowsAtOnce) {
    const int row = first + threadIdx.x / kLanes;
    const bool inside = row < block.num_rows;
    float square = 0.f;
#pragma unroll
    for (int i = 0; i < kHeadDim / (8 * kLanes); ++i) {
      const int column = 8 * (lane + kLanes * i);
      float key[8], value[8];
      load_if(inside && column < arguments.k.head_dim,
              arguments.k.at(block.k_row + row, head) + column, key);
      load_if(inside && column < arguments.v.head_dim,
              arguments.v.at(block.k_row + row, head) + column, value);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        largest_key = max(largest_key, __float_as_int(fabsf(key[j])));
        square += value[j] * value[j];
      }
    }
    largest_square = max(largest_square, __float_as_int(sum_of_row(square)));
  }
  largest_square = __reduce_max_sync(0xffffffffu, largest_square);
  largest_key = __reduce_max_sync(0xffffffffu, largest_key);
  if (threadIdx.x % 32 != 0) return;
  int* to = reinterpret_cast<int*>(arguments.bounds) + 2 * (block.run * arguments.heads_kv + head);
  atomicMax(to, largest_square);
  atomicMax(to + 1, largest_key);
}

template <typename T>
struct PrepareArguments {
  Rows<T> out, grad_out;
  const QueryTile* tiles;
  int32_t heads_q;
  int32_t heads_kv;
  const float* lse;
  const float* delta;   // or null: from out
  const float* bounds;  // or null: sums are in float32
  uint8_t* row_stats;
  void* dq_sums;
  float score_scale;  // softmax_scale, or the softcap: P = exp(score_scale * score - lse)
};

// Splits x / 2 into bfloat16 numbers. TileSteps::multiply_stats counts each of them twice.
__device__ void split_half(float x, uint16_t (&pieces)[RowStats::kPieces]) {
  x *= 0.5f;
#pragma unroll
  for (uint16_t& bits : pieces) {
    const __nv_bfloat16 piece = __float2bfloat16(x);
    bits = __bfloat16_as_ushort(piece);
    x -= __bfloat162float(piece);
  }
}

// Returns -lse / score_scale, from which the kernels' scores start. In rows past the tile's end and
// rows that see no key, lse is infinite. They get a finite number so low that their probabilities
// are 0. An infinite one would become NaN in the product for delta, which multiplies it by 0.
__device__ float minus_log_sum(float lse, float score_scale) {
  constexpr float kLowest = -1e38f;
  const float value = -lse / score_scale;
  return isnan(value) || fabsf(value) <= -kLowest ? value : kLowest;
}

// The exponent bits of one over the smallest power of two that is at least bound / 2^30; 0 without
// a finite bound.
__device__ uint8_t inverse_quantum(float bound) {
  constexpr int kBias = 127;
  if (bound == 0.f) return kBias;
  if (!isfinite(bound)) return 0;
  int exponent;
  frexpf(bound, &exponent);
  return static_cast<uint8_t>(kBias + max(-126, min(126, 30 - exponent)));
}

// The block's share, of that many 16 bytes.
template <int kChunks>
__device__ void clear_sums(void* sums) {
  uint4* chunks = static_cast<uint4*>(sums) + blockIdx.x * int64_t{kChunks};
#pragma unroll
  for (int i = 0; i < kChunks; i += kThreads) chunks[i + threadIdx.x] = {};
}

// One block per (tile, head). Eight threads read a row, and kTurns rows one after the other. Then
// each of the first kTurns of them has a row, so that these finish together.
template <typename T, int kHeadDim, int kRows>
__global__ void prepare_kernel(const PrepareArguments<T> arguments) {
  constexpr int kTurns = kRows / kRowsAtOnce;
  static_assert(kTurns <= kLanes);
  clear_sums<kRows * kHeadDim / 4>(arguments.dq_sums);
  const QueryTile tile = arguments.tiles[blockIdx.x / arguments.heads_q];
  const int32_t head = blockIdx.x % arguments.heads_q;
  const int lane = threadIdx.x % kLanes;
  float dot = 0.f, square = 0.f;
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) {
    const int row = kRowsAtOnce * turn + threadIdx.x / kLanes;
    float dot_of_turn = 0.f, square_of_turn = 0.f;
#pragma unroll
    for (int i = 0; i < kHeadDim / (8 * kLanes); ++i) {
      const int column = 8 * (lane + kLanes * i);
      const bool is_there = row < tile.num_rows && column < arguments.grad_out.head_dim;
      float grad[8], out[8];
      load_if(is_there, arguments.grad_out.at(tile.q_row + row, head) + column, grad);
      load_if(is_there && !arguments.delta, arguments.out.at(tile.q_row + row, head) + column, out);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        square_of_turn += grad[j] * grad[j];
        dot_of_turn += out[j] * grad[j];
      }
    }
    dot_of_turn = sum_of_row(dot_of_turn);
    square_of_turn = sum_of_row(square_of_turn);
    if (lane == turn) {
      dot = dot_of_turn;
      square = square_of_turn;
    }
  }
  if (lane >= kTurns) return;
  const int row = kRowsAtOnce * lane + threadIdx.x / kLanes;
  const bool inside = row < tile.num_rows;
  const int64_t at = static_cast<int64_t>(tile.q_row + row) * arguments.heads_q + head;
  const float lse = inside ? arguments.lse[at] : INFINITY;
  const float mean = !arguments.delta ? dot : inside ? arguments.delta[at] : 0.f;
  uint8_t* to = arguments.row_stats + static_cast<int64_t>(blockIdx.x) * row_stats_bytes(kRows);
  RowStats stats{};
  split_half(minus_log_sum(lse, arguments.score_scale), stats.minus_log_sum);
  split_half(-mean, stats.minus_delta);
  reinterpret_cast<RowStats*>(to)[row] = stats;
  if (!arguments.bounds) return;
  const int32_t key_head = head / (arguments.heads_q / arguments.heads_kv);
  const float* bound = arguments.bounds + 2 * (tile.run * arguments.heads_kv + key_head);
  to[quanta_offset(kRows) + row] =
      inverse_quantum((sqrtf(square) * sqrtf(bound[0]) + fabsf(mean)) * bound[1]);
}

template <typename T>
struct FinishArguments {
  Rows<T> dq;
  const QueryTile* tiles;
  int32_t heads_q;
  const void* dq_sums;
  const uint8_t* row_stats;
  float softmax_scale;
};

// Where TileSteps::add_dq left word `word` of a piece: in the order of the products' registers,
// kAtOnce of a thread's side by side.
struct SumPlace {
  int row;
  int column;
};
template <int kAtOnce>
__device__ SumPlace sum_place(int word) {
  const int thread = word / kAtOnce % 128, warp = thread / 32, lane = thread % 32;
  const int e = word / (128 * kAtOnce) * kAtOnce + word % kAtOnce;
  return {8 * (e >> 2) + 2 * (lane % 4) + (e & 1), 16 * warp + lane / 4 + 8 * (e >> 1 & 1)};
}

// One block per piece takes sums to rows, by way of shared memory.
template <typename T, int kHeadDim, int kRows, bool kDeterministic>
__global__ void finish_kernel(const FinishArguments<T> arguments) {
  constexpr int kPitch = kPieceColumns + 8;
  constexpr int kPieces = pieces_of_dq(kRows, kHeadDim), kRowPieces = kRows / kPieceRows;
  static_assert(kRowPieces == 1 || kRowPieces == kPieces);
  __shared__ alignas(16) T rows[kPieceRows * kPitch];
  __shared__ float scales[kPieceRows];
  const int32_t piece = blockIdx.x % kPieces, of_tile = blockIdx.x / kPieces;
  const int first_row = kRowPieces > 1 ? kPieceRows * piece : 0;
  const int first_column = kRowPieces > 1 ? 0 : kPieceColumns * piece;
  if (first_column >= arguments.dq.head_dim) return;
  using Sum = std::conditional_t<kDeterministic, int32_t, float>;
  constexpr int kAtOnce = kDeterministic ? 2 : 4;
  constexpr int kChunks = kPieceWords / 4;
  const uint4* chunks =
      static_cast<const uint4*>(arguments.dq_sums) + blockIdx.x * int64_t{kChunks};
  alignas(16) Sum sums[kChunks / kFinishThreads][4];
#pragma unroll
  for (int i = 0; i < kChunks / kFinishThreads; ++i) {
    *reinterpret_cast<uint4*>(sums[i]) = chunks[i * kFinishThreads + threadIdx.x];
    if constexpr (kDeterministic) {
      sums[i][1] = high_of(sums[i][0], sums[i][1]);
      sums[i][3] = high_of(sums[i][2], sums[i][3]);
    }
  }
  if (threadIdx.x < kPieceRows) {
    float scale = arguments.softmax_scale;
    if constexpr (kDeterministic) {
      const uint8_t* quanta =
          arguments.row_stats + int64_t{of_tile} * row_stats_bytes(kRows) + quanta_offset(kRows);
      const uint32_t exponent = quanta[first_row + threadIdx.x];
      scale = exponent == 0 ? NAN : scale / __uint_as_float(exponent << 23);
    }
    scales[threadIdx.x] = scale;
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kChunks / kFinishThreads; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const SumPlace place = sum_place<kAtOnce>(4 * (i * kFinishThreads + threadIdx.x) + j);
      rows[place.row * kPitch + place.column] =
          from_float<T>(static_cast<float>(sums[i][j]) * scales[place.row]);
    }
  }
  __syncthreads();
  const QueryTile tile = arguments.tiles[of_tile / arguments.heads_q];
  const int32_t head = of_tile % arguments.heads_q;
  constexpr int kRowChunks = kPieceColumns / 8;
  const int column = 8 * (threadIdx.x % kRowChunks);
  if (first_column + column >= arguments.dq.head_dim) return;
#pragma unroll
  for (int row = threadIdx.x / kRowChunks; row < kPieceRows; row += kFinishThreads / kRowChunks) {
    if (first_row + row >= tile.num_rows) break;
    T* to = arguments.dq.at(tile.q_row + first_row + row, head) + first_column + column;
    *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(rows + row * kPitch + column);
  }
}

template <typename T, int kHeadDim>
void prepare(const BackwardCall& call, cudaStream_t stream) {
  const auto heads_q = static_cast<int32_t>(call.q.heads);
  const auto heads_kv = static_cast<int32_t>(call.k.heads);
  if (call.deterministic) {
    const size_t num_bytes = call.tiles.num_runs * heads_kv * 2 * sizeof(float);
    check(cudaMemsetAsync(call.bounds, 0, num_bytes, stream), "cudaMemsetAsync");
    launch_kernel(bound_kernel<T, kHeadDim>, {call.tiles.num_blocks * heads_kv, kThreads, 0},
                  stream,
                  BoundArguments<T>{Rows<T>(call.k), Rows<T>(call.v), call.tiles.blocks, heads_kv,
                                    call.bounds});
  }
  launch_kernel(
      prepare_kernel<T, kHeadDim, backward_tile_rows(kHeadDim)>,
      {call.tiles.num_tiles * heads_q, kThreads, 0}, stream,
      PrepareArguments<T>{Rows<T>(call.out), Rows<T>(call.grad_out), call.tiles.tiles, heads_q,
                          heads_kv, call.lse, call.delta,
                          call.deterministic ? call.bounds : nullptr, call.row_stats, call.dq_sums,
                          call.softcap == 0.f ? call.softmax_scale : call.softcap});
}

template <typename T, int kHeadDim>
void finish(const BackwardCall& call, cudaStream_t stream) {
  constexpr int32_t kRows = backward_tile_rows(kHeadDim);
  const auto heads_q = static_cast<int32_t>(call.q.heads);
  const FinishArguments<T> arguments{Rows<T>(call.dq), call.tiles.tiles, heads_q,
                                     call.dq_sums,     call.row_stats,   call.softmax_scale};
  launch_kernel(call.deterministic ? finish_kernel<T, kHeadDim, kRows, true>
                                   : finish_kernel<T, kHeadDim, kRows, false>,
                {call.tiles.num_tiles * heads_q * pieces_of_dq(kRows, kHeadDim), kFinishThreads, 0},
                stream, arguments);
}

}  // namespace

void prepare_rows(const BackwardCall& call, cudaStream_t stream) {
  if (call.tiles.num_tiles == 0) return;
  by_element_and_widths(
      call, [&]<typename T, int kHeadDim, int kValueDim>() { prepare<T, kHeadDim>(call, stream); });
}

void finish_dq(const BackwardCall& call, cudaStream_t stream) {
  if (call.tiles.num_tiles == 0) return;
  by_element_and_widths(
      call, [&]<typename T, int kHeadDim, int kValueDim>() { finish<T, kHeadDim>(call, stream); });
}

}  // namespace distca::attention::sm90
