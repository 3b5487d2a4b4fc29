#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <bit>
#include <vector>

#include "host_words.h"
#include "rows.h"

namespace distca::transport {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMaxBlocks = 4096;  // rows are strided over blocks beyond this

constexpr unsigned kHoldNs = 20000;  // a launch that is ready begins within about 5 us

__global__ void hold_kernel() {
  __nanosleep(kHoldNs);
}

// A seal in memory. It ends with the complements of its words, so that the bytes of a row, which
// lie in its place if records have another size, do not pass for a seal.
__device__ __forceinline__ uint4 words_of(const Seal& seal) {
  return make_uint4(seal.tag, seal.rank, ~seal.tag, ~seal.rank);
}

// Reports a seal to the host, the first ones only: any of them will do. Without atomics, which not
// every host's memory takes from a device.
__device__ __forceinline__ void report(const Seal& own, const uint4& found) {
  *own.spoiled = 1;
  if (found.z != ~found.x || found.w != ~found.y) return;  // the first record of its peer has one
  volatile uint32_t* words = own.host;
  if (words[static_cast<int>(HostWord::kMismatch)] != 0) return;
  words[static_cast<int>(HostWord::kTheirTag)] = found.x;
  words[static_cast<int>(HostWord::kTheirRank)] = found.y;
  words[static_cast<int>(HostWord::kOwnTag)] = own.tag;
  __threadfence_system();
  words[static_cast<int>(HostWord::kMismatch)] = 1;
}

// Copies of one tensor's rows, or seals alone if row_bytes is 0. A block takes a unit at a time: as
// many rows as it has threads for, threads_per_row each.
struct Item {
  const char* src;
  char* dst;
  int64_t src_stride;  // strides and row_bytes in bytes
  int64_t dst_stride;
  int64_t row_bytes;
  int64_t num_rows;
  const int32_t* src_row;  // null: row i is row i
  const int32_t* dst_row;
  uint4* seals;  // of row i at seals + i * seal_stride bytes; null: none
  int64_t seal_stride;
  int32_t word_bytes;       // 16, 4 or 1
  int32_t threads_per_row;  // a power of 2
  int64_t end;              // of the item's units among those of all items
};

struct Items {
  static constexpr int kMax = 8;
  Item items[kMax];
  int32_t num_items;
};

struct RowReduction {
  RowView src;
  RowView dst;
  int64_t num_rows;
  const int32_t* row;
  const int32_t* begin;
  const int32_t* slot;
  const uint32_t* spoiled;
};

template <typename Word>
__device__ __forceinline__ Word nan_word() {
  Word word;
  memset(&word, 0xff, sizeof(Word));
  return word;
}

template <typename Word>
__device__ __forceinline__ void copy_words(const Item& item, const char* from, char* to,
                                           int32_t thread, bool is_nan) {
  const auto* src = reinterpret_cast<const Word*>(from);
  auto* dst = reinterpret_cast<Word*>(to);
  const int64_t num_words = item.row_bytes / static_cast<int64_t>(sizeof(Word));
  for (int64_t w = thread; w < num_words; w += item.threads_per_row) {
    dst[w] = is_nan ? nan_word<Word>() : src[w];
  }
}

__device__ __forceinline__ void copy_row(const Item& item, int64_t i, int32_t thread, bool is_nan) {
  const char* src = item.src + (item.src_row ? item.src_row[i] : i) * item.src_stride;
  char* dst = item.dst + (item.dst_row ? item.dst_row[i] : i) * item.dst_stride;
  if (item.word_bytes == 16) return copy_words<uint4>(item, src, dst, thread, is_nan);
  if (item.word_bytes == 4) return copy_words<uint32_t>(item, src, dst, thread, is_nan);
  copy_words<uint8_t>(item, src, dst, thread, is_nan);
}

template <bool kPacks>
__global__ void copy_rows_kernel(const __grid_constant__ Items all, Seal seal) {
  const bool is_spoiled = seal.spoiled != nullptr && *seal.spoiled != 0;
  int k = 0;
  for (int64_t unit = blockIdx.x; unit < all.items[all.num_items - 1].end; unit += gridDim.x) {
    while (unit >= all.items[k].end) ++k;
    const Item& item = all.items[k];
    const int32_t rows_per_unit = kThreads / item.threads_per_row;
    const int64_t i = (unit - (k == 0 ? 0 : all.items[k - 1].end)) * rows_per_unit +
                      threadIdx.x / item.threads_per_row;
    const auto thread = static_cast<int32_t>(threadIdx.x % item.threads_per_row);
    if (i >= item.num_rows) continue;
    bool is_nan = is_spoiled;
    if (item.seals != nullptr) {
      auto* of_row =
          reinterpret_cast<uint4*>(reinterpret_cast<char*>(item.seals) + i * item.seal_stride);
      if constexpr (kPacks) {
        if (thread == 0) *of_row = words_of(seal);
      } else {
        const uint4 found = *of_row;
        const bool differs = found.x != seal.tag || found.z != ~seal.tag;
        is_nan |= differs;
        if (differs && thread == 0) report(seal, found);
      }
    }
    copy_row(item, i, thread, is_nan);
  }
}

template <typename scalar_t>
__global__ void reduce_rows_kernel(RowReduction reduction, int64_t num_columns) {
  using acc_t = at::opmath_type<scalar_t>;
  const bool is_nan = reduction.spoiled != nullptr && *reduction.spoiled != 0;
  for (int64_t i = blockIdx.x; i < reduction.num_rows; i += gridDim.x) {
    auto* dst = reinterpret_cast<scalar_t*>(reduction.dst.data +
                                            reduction.row[i] * reduction.dst.stride_bytes);
    const int32_t first = reduction.begin[i];
    const int32_t last = reduction.begin[i + 1];
    for (int64_t c = threadIdx.x; c < num_columns; c += blockDim.x) {
      acc_t sum = is_nan ? static_cast<acc_t>(NAN) : static_cast<acc_t>(dst[c]);
      for (int32_t j = first; j < last; ++j) {
        const auto* src = reinterpret_cast<const scalar_t*>(
            reduction.src.data + reduction.slot[j] * reduction.src.stride_bytes);
        sum += static_cast<acc_t>(src[c]);
      }
      dst[c] = static_cast<scalar_t>(sum);
    }
  }
}

int num_blocks(int64_t num_rows) {
  return static_cast<int>(std::min(num_rows, kMaxBlocks));
}

Item item_of(const RowCopy& copy) {
  const RowView src = row_view(copy.src), dst = row_view(copy.dst);
  TORCH_INTERNAL_ASSERT(src.row_bytes == dst.row_bytes, "rows of ", src.row_bytes,
                        " bytes copied to rows of ", dst.row_bytes);
  const auto rows_of = [](const at::Tensor& index) {
    return index.defined() && index.numel() > 0 ? index.const_data_ptr<int32_t>() : nullptr;
  };
  Item item{.src = src.data,
            .dst = dst.data,
            .src_stride = src.stride_bytes,
            .dst_stride = dst.stride_bytes,
            .row_bytes = src.row_bytes,
            .num_rows = std::min(src.num_rows, dst.num_rows),
            .src_row = rows_of(copy.src_row),
            .dst_row = rows_of(copy.dst_row)};
  if (item.src_row != nullptr) item.num_rows = copy.src_row.numel();
  if (item.dst_row != nullptr) item.num_rows = copy.dst_row.numel();
  return item;
}

void set_units(Item& item, int64_t first_unit) {
  const uint64_t together = reinterpret_cast<uintptr_t>(item.src) |
                            reinterpret_cast<uintptr_t>(item.dst) | item.src_stride |
                            item.dst_stride | item.row_bytes;
  item.word_bytes = together % 16 == 0 ? 16 : together % 4 == 0 ? 4 : 1;
  const int64_t num_words = std::clamp<int64_t>(item.row_bytes / item.word_bytes, 1, kThreads);
  item.threads_per_row = static_cast<int32_t>(std::bit_ceil(static_cast<uint64_t>(num_words)));
  const int64_t rows_per_unit = kThreads / item.threads_per_row;
  item.end = first_unit + (item.num_rows + rows_per_unit - 1) / rows_per_unit;
}

template <bool kPacks>
void launch(const std::vector<Item>& items, const Seal& seal) {
  Items all{};
  const auto flush = [&] {
    if (all.num_items == 0) return;
    const int64_t num_units = all.items[all.num_items - 1].end;
    copy_rows_kernel<kPacks>
        <<<num_blocks(num_units), kThreads, 0, c10::cuda::getCurrentCUDAStream()>>>(all, seal);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
    all.num_items = 0;
  };
  for (Item item : items) {
    if (item.num_rows == 0) continue;
    if (all.num_items == Items::kMax) flush();
    set_units(item, all.num_items == 0 ? 0 : all.items[all.num_items - 1].end);
    all.items[all.num_items++] = item;
  }
  flush();
}

// Packing writes a record's seal with the first of its copies. Unpacking compares it in each, since
// blocks do not wait for one another, and without copies too.
template <bool kPacks>
void launch(const std::vector<Packing>& packings, const Seal& seal) {
  std::vector<Item> items;
  for (const auto& [records, copies] : packings) {
    const RowView view = row_view(records);
    const bool has_seals = seal.host != nullptr && view.num_rows > 0;
    const auto add = [&](Item item, bool with_seal) {
      if (with_seal && has_seals) {
        item.seals = reinterpret_cast<uint4*>(view.data);
        item.seal_stride = view.stride_bytes;
      }
      items.push_back(item);
    };
    for (const RowCopy& copy : copies) add(item_of(copy), !kPacks || &copy == copies.data());
    if (copies.empty() && has_seals) add({.num_rows = view.num_rows}, true);
  }
  launch<kPacks>(items, seal);
}

}  // namespace

void copy_rows_cuda(const std::vector<RowCopy>& copies) {
  std::vector<Item> items;
  for (const RowCopy& copy : copies) items.push_back(item_of(copy));
  launch<true>(items, Seal{});
}

void pack_rows_cuda(const std::vector<Packing>& packings, const Seal& seal) {
  launch<true>(packings, seal);
}

void unpack_rows_cuda(const std::vector<Packing>& packings, const Seal& seal) {
  launch<false>(packings, seal);
}

void reduce_rows_cuda(const at::Tensor& src, const Reduction& reduction, const at::Tensor& dst,
                      const uint32_t* spoiled) {
  const RowReduction plain{row_view(src),
                           row_view(dst),
                           reduction.row.numel(),
                           reduction.row.const_data_ptr<int32_t>(),
                           reduction.begin.const_data_ptr<int32_t>(),
                           reduction.slot.const_data_ptr<int32_t>(),
                           spoiled};
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kBFloat16, at::kHalf, dst.scalar_type(), "reduce_rows", [&] {
    const int64_t num_columns = plain.dst.row_bytes / static_cast<int64_t>(sizeof(scalar_t));
    reduce_rows_kernel<scalar_t>
        <<<num_blocks(plain.num_rows), kThreads, 0, c10::cuda::getCurrentCUDAStream()>>>(
            plain, num_columns);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  });
}

void hold_current_stream() {
  hold_kernel<<<1, 1, 0, c10::cuda::getCurrentCUDAStream()>>>();
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace distca::transport
