#include "sm90.h"

#include <ATen/cuda/CUDAContext.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
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

}  // namespace

bool supports(const at::Tensor& q) {
  if (!q.is_cuda() || q.dim() != 3 || q.size(2) % 8 != 0 || q.size(2) > kMaxHeadDim) return false;
  if (q.scalar_type() != at::kBFloat16 && q.scalar_type() != at::kHalf) return false;
  const cudaDeviceProp* device = at::cuda::getDeviceProperties(q.get_device());
  return device->major == 9 && device->minor == 0;
}

std::tuple<at::Tensor, at::Tensor> forward(const at::Tensor& q, const at::Tensor& k,
                                           const at::Tensor& v, const TaskList& tasks,
                                           const Params& params) {
  const TileTable& table = table_of(tasks, forward_tile_rows(q.size(2)));
  const at::Tensor out = at::empty(q.sizes(), q.options());
  const at::Tensor lse = at::empty({q.size(0), q.size(1)}, q.options().dtype(at::kFloat));
  if (table.num_tiles == 0) return {out, lse};
  const cudaStream_t stream = at::cuda::getCurrentCUDAStream();
  const at::Tensor queries = aligned(q), keys = aligned(k), values = aligned(v);
  const c10::DataPtr tickets = zeros(kNumTickets * sizeof(int32_t), stream);
  forward(ForwardCall{.home = {.q = row_tensor(queries, q),
                               .k = row_tensor(keys, out),
                               .v = row_tensor(values, out),
                               .out = row_tensor(out, out),
                               .lse = lse.mutable_data_ptr<float>(),
                               .tiles = device_tiles(table)},
                      .tickets = static_cast<int32_t*>(tickets.get()),
                      .window = window_of(params.mask),
                      .softmax_scale = static_cast<float>(params.softmax_scale)},
          stream);
  return {out, lse};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> backward(const at::Tensor& grad_out,
                                                        const at::Tensor& q, const at::Tensor& k,
                                                        const at::Tensor& v, const Saved& saved,
                                                        const TaskList& tasks,
                                                        const Params& params) {
  const TileTable& table = table_of(tasks, backward_tile_rows(q.size(2)));
  const bool writes_all_keys = table.num_key_rows == k.size(0);
  const at::Tensor dq = at::empty(q.sizes(), q.options());
  const auto key_grad = [&] {
    return writes_all_keys ? at::empty(k.sizes(), k.options()) : at::zeros(k.sizes(), k.options());
  };
  const at::Tensor dk = key_grad(), dv = key_grad();
  if (table.num_tiles + table.num_blocks == 0) return {dq, dk, dv};
  const cudaStream_t stream = at::cuda::getCurrentCUDAStream();
  const at::Tensor queries = aligned(q), keys = aligned(k), values = aligned(v);
  const at::Tensor grads = aligned(grad_out);
  const bool takes_delta = saved.delta.defined();
  const at::Tensor out = takes_delta ? grads : aligned(saved.out);
  const at::Tensor lse = saved.lse.contiguous();
  const at::Tensor delta = takes_delta ? saved.delta.contiguous() : at::Tensor();
  BackwardCall call{
      .home = {.q = row_tensor(queries, dk),
               .k = row_tensor(keys, dq),
               .v = row_tensor(values, dq),
               .grad_out = row_tensor(grads, dk),
               .out = row_tensor(out, dk),
               .lse = lse.const_data_ptr<float>(),
               .delta = takes_delta ? delta.const_data_ptr<float>() : nullptr,
               .dq = row_tensor(dq, dk),
               .dk = row_tensor(dk, dq),
               .dv = row_tensor(dv, dq),
               .tiles = device_tiles(table)},
      .window = window_of(params.mask),
      .softmax_scale = static_cast<float>(params.softmax_scale),
      .deterministic = params.deterministic || at::globalContext().deterministicAlgorithms()};
  const BackwardSizes sizes = backward_sizes(call);
  const c10::DataPtr dq_sums = workspace(sizes.dq_sums);
  const c10::DataPtr row_stats = workspace(sizes.row_stats);
  const c10::DataPtr bounds = workspace(sizes.bounds);
  const c10::DataPtr tickets = zeros(kNumTickets * sizeof(int32_t), stream);
  call.tickets = static_cast<int32_t*>(tickets.get());
  call.dq_sums = dq_sums.get();
  call.row_stats = static_cast<float*>(row_stats.get());
  call.bounds = static_cast<float*>(bounds.get());
  backward(call, stream);
  return {dq, dk, dv};
}

}  // namespace distca::attention::sm90
