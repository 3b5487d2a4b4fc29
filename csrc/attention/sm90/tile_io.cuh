#pragma once

#include "ptx.cuh"
#include "tensor_map.h"

// Tiles in shared memory: rows of 64 columns to a panel, panels side by side, in the 128-byte
// swizzle that copies and products share.
namespace distca::attention::sm90 {

template <int kRows, int kColumns>
struct SharedTile {
  static constexpr int kPanels = kColumns / 64;
  static constexpr uint32_t kPanelBytes = kRows * 128;
  static constexpr uint32_t kBytes = kPanels * kPanelBytes;
};

constexpr uint32_t kMaxSharedBytes = 227 * 1024;  // limit of a block on sm_90
constexpr uint32_t kPanelAlignment = 1024;        // of swizzled panels, in bytes

// What lies at byte `offset` of the block's dynamic shared memory.
template <typename T = uint8_t>
__device__ __forceinline__ T* in_block(uint32_t offset) {
  extern __shared__ __align__(kPanelAlignment) uint8_t memory[];
  return reinterpret_cast<T*>(memory + offset);
}

// Rows of a tensor and head: `row` and num_rows on.
struct RowRange {
  int32_t head;
  int32_t row;
  int32_t num_rows;
};

// By one thread, which has told `barrier` to expect Tile::kBytes.
template <typename Tile>
__device__ __forceinline__ void load_tile(uint32_t to, const CUtensorMap* map, const RowRange& rows,
                                          uint32_t barrier) {
  for (int panel = 0; panel < Tile::kPanels; ++panel) {
    copy_to_shared(to + panel * Tile::kPanelBytes, map,
                   {64 * panel, rows.head, rows.row, rows.num_rows}, barrier);
  }
}

// The same by a plain map, for a tile whose rows are all rows of the tensor.
template <typename Tile>
__device__ __forceinline__ void load_whole_tile(uint32_t to, const CUtensorMap* plain_map,
                                                int32_t head, int32_t row, uint32_t barrier) {
  for (int panel = 0; panel < Tile::kPanels; ++panel) {
    copy_whole_to_shared(to + panel * Tile::kPanelBytes, plain_map, 64 * panel, head, row, barrier);
  }
}

// By one thread; closes no group of copies.
template <typename Tile>
__device__ __forceinline__ void store_tile(const CUtensorMap* map, const RowRange& rows,
                                           uint32_t from) {
  for (int panel = 0; panel < Tile::kPanels; ++panel) {
    copy_to_global(map, {64 * panel, rows.head, rows.row, rows.num_rows},
                   from + panel * Tile::kPanelBytes);
  }
}

// A warpgroup's accumulators, 64 rows, to such a tile from row `first_row` on, as T: rows
// lane / 4 of each warp's 16 times scale[0], those 8 further times scale[1].
template <typename T, typename Tile, int kSize>
__device__ __forceinline__ void stage_rows(uint32_t tile, uint32_t first_row,
                                           const float (&sums)[kSize], const float (&scale)[2]) {
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
  const uint32_t row = first_row + 16 * warp + (lane & 15);
#pragma unroll
  for (int i = 0; i < kSize / 8; ++i) {
    const float* part = sums + 8 * i;
    store_matrices(tile + (i / 4) * Tile::kPanelBytes + swizzled(row, 2 * (i % 4) + (lane >> 4)),
                   pack<T>(part[0] * scale[0], part[1] * scale[0]),
                   pack<T>(part[2] * scale[1], part[3] * scale[1]),
                   pack<T>(part[4] * scale[0], part[5] * scale[0]),
                   pack<T>(part[6] * scale[1], part[7] * scale[1]));
  }
  fence_shared_writes();
}

// The same straight to rows of a tensor, by the warpgroup's threads. The four that hold a row store
// 64 bytes of it at a time. __syncwarp keeps the compiler from preparing several of these stores
// together, which would take too many registers.
template <typename T, int kSize>
__device__ __forceinline__ void store_rows(const RowTensor& to, const RowRange& rows,
                                           const float (&sums)[kSize], const float (&scale)[2]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = 16 * warp + lane / 4 + 8 * r;
    uint8_t* const bytes = static_cast<uint8_t*>(to.data) + rows.head * to.head_stride +
                           (rows.row + row) * to.row_stride;
#pragma unroll
    for (int i = 0; i < kSize / 16; ++i) {
      uint32_t words[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float* pair = sums + 4 * (4 * i + j) + 2 * r;
        words[j] = pack<T>(pair[0] * scale[r], pair[1] * scale[r]);
      }
      __syncwarp();
      transpose_quad(words);
      const int chunk = 4 * i + lane % 4;
      if (row < rows.num_rows && 8 * chunk < to.head_dim) {
        reinterpret_cast<uint4*>(bytes)[chunk] = {words[0], words[1], words[2], words[3]};
      }
    }
  }
}

}  // namespace distca::attention::sm90
