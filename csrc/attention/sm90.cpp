#include "sm90.h"

#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>

#include <algorithm>

#include "sm90/kernels.h"

namespace distca::attention::sm90 {
namespace {

constexpr int64_t kMaxHeadDim = 128;
constexpr int64_t kCopyAlignment = 16;  // bytes, of the copy engine's addresses and strides

// `tensor`, or a copy of it that the copy engine can read.
at::Tensor aligned(const at::Tensor& tensor) {
  const auto is_aligned = [&](int64_t stride) {
    return stride * tensor.element_size() % kCopyAlignment == 0;
  };
  const bool can = reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % kCopyAlignment == 0 &&
                   is_aligned(tensor.stride(0)) && is_aligned(tensor.stride(1)) &&
                   tensor.stride(2) == 1;
  return can ? tensor : tensor.clone(at::MemoryFormat::Contiguous);
}

// `like` lends its address to a tensor without rows, which has none and is never read.
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

// Tables for tiles of tile_rows rows.
const TileTable& table_of(const TaskList& tasks, int32_t tile_rows) {
  const auto found = std::find_if(tasks.tiles.begin(), tasks.tiles.end(),
                                  [&](const TileTable& t) { return t.tile_rows == tile_rows; });
  TORCH_CHECK_VALUE(found != tasks.tiles.end(),
                    "layout: no tile lists, it was made for another device than q's; pass "
                    "device= to distca.plan");
  return *found;
}

DeviceTiles device_tiles(const TileTable& table) {
  const auto* tiles = reinterpret_cast<const QueryTile*>(table.words.const_data_ptr<int32_t>());
  return {.tiles = tiles,
          .blocks = reinterpret_cast<const KeyBlock*>(tiles + table.num_tiles),
          .num_tiles = static_cast<int32_t>(table.num_tiles),
          .num_blocks = static_cast<int32_t>(table.num_blocks),
          .num_runs = static_cast<int32_t>(table.num_runs)};
}

Window window_of(const Mask& mask) {
  const auto side = [](int64_t width) {
    return static_cast<int32_t>(std::min<int64_t>(width, int64_t{1} << 30));
  };
  return {side(mask.window_left), side(mask.window_right)};
}

// Memory of this call, not filled with NaN as new tensors are in deterministic mode.
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

}  // namespace

bool supports(const at::Tensor& q) {
  if (!q.is_cuda() || q.dim() != 3 || q.size(2) % 8 != 0 || q.size(2) > kMaxHeadDim) return false;
  if (q.scalar_type() != at::kBFloat16 && q.scalar_type() != at::kHalf) return false;
  const cudaDeviceProp* device = at::cuda::getDeviceProperties(q.get_device());
  return device->major == 9 && device->minor == 0;
}

void forward(const ForwardRows& rows, const Params& params) {
  const DeviceTiles tiles = device_tiles(table_of(rows.tasks, forward_tile_rows(rows.q.size(2))));
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
                      .softmax_scale = static_cast<float>(params.softmax_scale)},
          stream);
}

void backward(const BackwardRows& rows, const Params& params) {
  const DeviceTiles tiles = device_tiles(table_of(rows.tasks, backward_tile_rows(rows.q.size(2))));
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
                    .deterministic = is_deterministic(params)};
  const cudaStream_t stream = at::cuda::getCurrentCUDAStream();
  const BackwardSizes sizes = backward_sizes(call);
  const c10::DataPtr ticket = zeros(sizeof(int32_t), stream), dq_sums = workspace(sizes.dq_sums),
                     row_stats = workspace(sizes.row_stats), bounds = workspace(sizes.bounds);
  call.ticket = static_cast<int32_t*>(ticket.get());
  call.dq_sums = dq_sums.get();
  call.row_stats = static_cast<float*>(row_stats.get());
  call.bounds = static_cast<float*>(bounds.get());
  backward(call, stream);
}

bool write_all_keys(const at::Tensor& k, std::initializer_list<const TaskList*> lists) {
  int64_t num_written = 0;
  for (const TaskList* tasks : lists) {
    num_written += table_of(*tasks, backward_tile_rows(k.size(2))).num_key_rows;
  }
  return num_written == k.size(0);
}

}  // namespace distca::attention::sm90
