#include "../backend.h"

#include <ATen/Context.h>
#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>

#include <algorithm>
#include <array>
#include <bit>
#include <iterator>

#include "kernels.h"

// The back end for bfloat16 and float16 on compute capability 9.0. Tasks read shared keys in place,
// and a key's gradient is written once.
namespace distca::attention::sm90 {
namespace {

constexpr const char* kName = "sm90";
constexpr int64_t kCopyAlignment = 16;  // bytes, for the copy engine's addresses and strides

// Returns `tensor`, or a copy of it that the copy engine can read.
at::Tensor aligned(const at::Tensor& tensor) {
  const auto is_aligned = [&](int64_t stride) {
    return stride * tensor.element_size() % kCopyAlignment == 0;
  };
  const bool can = reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % kCopyAlignment == 0 &&
                   is_aligned(tensor.stride(0)) && is_aligned(tensor.stride(1)) &&
                   tensor.stride(2) == 1;
  return can ? tensor : tensor.clone(at::MemoryFormat::Contiguous);
}

// A tensor without rows has no address and is never read, so it gets the address of `like`.
RowTensor row_tensor(const at::Tensor& tensor, const at::Tensor& like) {
  const bool is_empty = tensor.numel() == 0;
  const int64_t size = tensor.element_size(), head_dim = tensor.size(2);
  return {.data = const_cast<void*>((is_empty ? like : tensor).const_data_ptr()),
          .element = tensor.scalar_type() == at::kHalf ? Element::kFloat16 : Element::kBfloat16,
          .heads = tensor.size(1),
          .head_dim = head_dim,
          .row_stride = (is_empty ? tensor.size(1) * head_dim : tensor.stride(0)) * size,
          .head_stride = (is_empty ? head_dim : tensor.stride(1)) * size};
}

// Host words: the counts of key blocks and runs, which do not depend on the height of tiles, then
// the count of tiles of each height. Device words: tiles and key blocks of each height.
constexpr int64_t kItemWords = 8;
static_assert(sizeof(QueryTile) == kItemWords * sizeof(int32_t));
static_assert(sizeof(KeyBlock) == kItemWords * sizeof(int32_t));

WordCounts count_words(const std::vector<PlacedTask>& tasks) {
  const KeyCounts keys = count_keys(tasks);
  WordCounts words{.host = {keys.blocks, keys.runs}};
  for (const int32_t tile_rows : kTileRows) {
    words.host.push_back(count_tiles(tasks, tile_rows));
    words.num_device += kItemWords * (words.host.back() + keys.blocks);
  }
  return words;
}

PlannedWords plan_words(const std::vector<PlacedTask>& tasks, const Mask& mask) {
  PlannedWords words{.host = count_words(tasks).host};
  const auto append = [&](const auto& item) {
    const auto item_words = std::bit_cast<std::array<int32_t, kItemWords>>(item);
    words.device.insert(words.device.end(), item_words.begin(), item_words.end());
  };
  for (const int32_t tile_rows : kTileRows) {
    const TileLists lists = make_tile_lists(tasks, mask, tile_rows);
    for (const QueryTile& tile : lists.tiles) append(tile);
    for (const KeyBlock& block : lists.blocks) append(block);
  }
  return words;
}

DeviceTiles tiles_of(const TaskList& list, int32_t tile_rows) {
  const TaskWords& words = words_of(list, kName);
  const int64_t num_blocks = words.host[0];
  const auto* items = reinterpret_cast<const QueryTile*>(words.device.const_data_ptr<int32_t>());
  int64_t height = 0;
  for (; kTileRows[height] != tile_rows; ++height) items += words.host[2 + height] + num_blocks;
  const int64_t num_tiles = words.host[2 + height];
  return {.tiles = items,
          .blocks = reinterpret_cast<const KeyBlock*>(items + num_tiles),
          .num_tiles = static_cast<int32_t>(num_tiles),
          .num_blocks = static_cast<int32_t>(num_blocks),
          .num_runs = static_cast<int32_t>(words.host[1])};
}

int32_t width_of(const at::Tensor& q, const at::Tensor& v, const Params& params) {
  return computed_widths(q.size(2), v.size(2), params.softcap).queries;
}

Window window_of(const Mask& mask) {
  const auto side = [](int64_t width) {
    return static_cast<int32_t>(std::min<int64_t>(width, int64_t{1} << 30));
  };
  return {side(mask.window_left), side(mask.window_right)};
}

// Memory of this call. Unlike new tensors in deterministic mode, it is not filled with NaN.
c10::DataPtr workspace(int64_t num_bytes) {
  return c10::cuda::CUDACachingAllocator::get()->allocate(std::max<int64_t>(num_bytes, 16));
}

c10::DataPtr zeros(int64_t num_bytes, cudaStream_t stream) {
  c10::DataPtr memory = workspace(num_bytes);
  C10_CUDA_CHECK(cudaMemsetAsync(memory.get(), 0, num_bytes, stream));
  return memory;
}

bool is_deterministic(const Params& params) {
  return params.deterministic || at::globalContext().deterministicAlgorithms();
}

// Returns the FLOPs of one matrix product of queries and keys.
double flops_of_products(const TaskList& tasks, const at::Tensor& q) {
  return 2.0 * static_cast<double>(tasks.num_pairs * q.size(1) * q.size(2));
}

void forward(const ForwardRows& rows, const Params& params) {
  const DeviceTiles tiles =
      tiles_of(rows.tasks, forward_tile_rows(width_of(rows.q, rows.v, params)));
  if (tiles.num_tiles == 0) return;
  const at::Tensor q = aligned(rows.q), k = aligned(rows.k), v = aligned(rows.v);
  const cudaStream_t stream = at::cuda::getCurrentCUDAStream();
  const c10::DataPtr words = zeros(kNumFronts * sizeof(uint64_t) + sizeof(int32_t), stream);
  auto* fronts = static_cast<uint64_t*>(words.get());
  forward(ForwardCall{.q = row_tensor(q, rows.q),
                      .k = row_tensor(k, rows.out),
                      .v = row_tensor(v, rows.out),
                      .out = row_tensor(rows.out, rows.out),
                      .lse = rows.lse.mutable_data_ptr<float>(),
                      .tiles = tiles,
                      .ticket = reinterpret_cast<int32_t*>(fronts + kNumFronts),
                      .fronts = is_deterministic(params) ? nullptr : fronts,
                      .window = window_of(rows.tasks.mask),
                      .softmax_scale = static_cast<float>(params.softmax_scale),
                      .softcap = static_cast<float>(params.softcap),
                      .flops = 2 * flops_of_products(rows.tasks, rows.q),
                      .shares_device = params.shares_device},
          stream);
}

// dq is summed in float32 in no fixed order. In deterministic mode it is summed in fixed point, so
// that equal inputs give equal bits, whatever the order of tasks.
void backward(const BackwardRows& rows, const Params& params) {
  const DeviceTiles tiles =
      tiles_of(rows.tasks, backward_tile_rows(width_of(rows.q, rows.v, params)));
  if (tiles.num_tiles + tiles.num_blocks == 0) return;
  const bool takes_delta = rows.saved.delta.defined();
  const at::Tensor q = aligned(rows.q), k = aligned(rows.k), v = aligned(rows.v),
                   grads = aligned(rows.grad_out),
                   out = takes_delta ? grads : aligned(rows.saved.out),
                   lse = rows.saved.lse.contiguous(),
                   delta = takes_delta ? rows.saved.delta.contiguous() : at::Tensor();
  BackwardCall call{.q = row_tensor(q, rows.dk),
                    .k = row_tensor(k, rows.dq),
                    .v = row_tensor(v, rows.dq),
                    .grad_out = row_tensor(grads, rows.dk),
                    .out = row_tensor(out, rows.dk),
                    .lse = lse.const_data_ptr<float>(),
                    .delta = takes_delta ? delta.const_data_ptr<float>() : nullptr,
                    .dq = row_tensor(rows.dq, rows.dk),
                    .dk = row_tensor(rows.dk, rows.dq),
                    .dv = row_tensor(rows.dv, rows.dq),
                    .tiles = tiles,
                    .window = window_of(rows.tasks.mask),
                    .softmax_scale = static_cast<float>(params.softmax_scale),
                    .softcap = static_cast<float>(params.softcap),
                    .deterministic = is_deterministic(params),
                    .flops = 5 * flops_of_products(rows.tasks, rows.q),
                    .shares_device = params.shares_device};
  const cudaStream_t stream = at::cuda::getCurrentCUDAStream();
  const BackwardSizes sizes = backward_sizes(call);
  const c10::DataPtr ticket = zeros(sizeof(int32_t), stream), dq_sums = workspace(sizes.dq_sums),
                     row_stats = workspace(sizes.row_stats), bounds = workspace(sizes.bounds);
  call.ticket = static_cast<int32_t*>(ticket.get());
  call.dq_sums = dq_sums.get();
  call.row_stats = static_cast<uint8_t*>(row_stats.get());
  call.bounds = static_cast<float*>(bounds.get());
  backward(call, stream);
}

bool is_sm90(const Request& request) {
  const cudaDeviceProp* device = at::cuda::getDeviceProperties(request.q.get_device());
  return device->major == 9 && device->minor == 0;
}

}  // namespace

// A scale that is not positive would reverse the order of scores, which the kernels' running
// maximum cannot follow. Capped scores are off by softcap / 2^22.
Backend backend() {
  return {.name = kName,
          .device = at::kCUDA,
          .dtypes = {at::kBFloat16, at::kHalf},
          .head_dim_multiple = 8,
          .max_head_dim = 256,
          .takes_any_scale = false,
          .max_softcap = 1000,
          .takes = is_sm90,
          .forward = forward,
          .backward = backward,
          .row_dots = row_dots_cuda,
          .plan_words = plan_words,
          .count_words = count_words};
}

}  // namespace distca::attention::sm90
