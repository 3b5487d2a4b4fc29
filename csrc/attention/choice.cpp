#include <ATen/Context.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <string>

#include "backend.h"

namespace distca::attention {
namespace {

const char* name_of(at::ScalarType dtype) {
  switch (dtype) {
    case at::kDouble:
      return "float64";
    case at::kFloat:
      return "float32";
    case at::kBFloat16:
      return "bfloat16";
    case at::kHalf:
      return "float16";
    default:
      return c10::toString(dtype);
  }
}

// "float64, float32 or bfloat16"
std::string names_of(const std::vector<at::ScalarType>& dtypes) {
  std::string names;
  for (size_t i = 0; i < dtypes.size(); ++i) {
    const bool is_last = i + 1 == dtypes.size();
    names += std::string(i == 0 ? "" : is_last ? " or " : ", ") + name_of(dtypes[i]);
  }
  return names;
}

bool takes_dtype(const Backend& backend, const Request& request) {
  const auto& dtypes = backend.dtypes;
  return std::find(dtypes.begin(), dtypes.end(), request.q.scalar_type()) != dtypes.end();
}

bool takes_head_dim(const Backend& backend, const Request& request) {
  const int64_t head_dim = request.q.size(2);
  return head_dim % backend.head_dim_multiple == 0 && head_dim <= backend.max_head_dim;
}

bool takes_window(const Backend& backend, const Request& request) {
  return backend.takes_any_window || is_full(request.mask) || request.mask.window_right == 0;
}

bool takes_determinism(const Backend& backend, const Request& request) {
  return backend.is_deterministic || !request.deterministic ||
         at::globalContext().deterministicAlgorithms();
}

bool takes(const Backend& backend, const Request& request) {
  return backend.device == request.q.device().type() && takes_dtype(backend, request) &&
         takes_head_dim(backend, request) && takes_window(backend, request) &&
         takes_determinism(backend, request) &&
         (backend.takes_any_scale || request.softmax_scale > 0) &&
         (!backend.takes || backend.takes(request.q));
}

// Throws ValueError for a request that the device's last back end, which supports most, refuses.
[[noreturn]] void refuse(const Backend& backend, const Request& request) {
  const at::Tensor& q = request.q;
  const std::string device = c10::DeviceTypeName(backend.device);
  TORCH_CHECK_VALUE(takes_dtype(backend, request), "q is ", q.scalar_type(), "; core attention on ",
                    device, " takes ", names_of(backend.dtypes), " (cast, or use autocast)");
  TORCH_CHECK_VALUE(takes_head_dim(backend, request), "head_dim is ", q.size(2),
                    "; core attention on ", device, " takes multiples of ",
                    backend.head_dim_multiple, " up to ", backend.max_head_dim);
  TORCH_CHECK_VALUE(takes_window(backend, request), "window_size is (", request.mask.window_left,
                    ", ", request.mask.window_right, "); core attention of head_dim ", q.size(2),
                    " on this device takes (-1, 0) causal, (W, 0) sliding or (-1, -1) full");
  TORCH_CHECK_VALUE(takes_determinism(backend, request),
                    "deterministic is set, but core attention of head_dim ", q.size(2),
                    " on this device is PyTorch's, which follows another switch: call "
                    "torch.use_deterministic_algorithms(True) too");
  TORCH_CHECK_VALUE(false, "softmax_scale is ", request.softmax_scale,
                    "; core attention on this device takes positive ones");
}

}  // namespace

const Backend* find_backend(const Request& request) {
  for (const Backend& backend : backends()) {
    if (takes(backend, request)) return &backend;
  }
  return nullptr;
}

const Backend& choose_backend(const Request& request) {
  if (const Backend* found = find_backend(request)) return *found;
  const at::Device device = request.q.device();
  const auto& all = backends();
  const auto last = std::find_if(all.rbegin(), all.rend(), [&](const Backend& backend) {
    return backend.device == device.type();
  });
  if (last != all.rend()) refuse(*last, request);
  TORCH_CHECK_VALUE(!device.is_cuda(), "q is on ", device,
                    ", but distca was built without CUDA; rebuild it where nvcc is installed: "
                    "FORCE_CUDA=1 pip install --no-build-isolation .");
  TORCH_CHECK_VALUE(false, "q is on ", device, "; expected cpu or cuda");
}

}  // namespace distca::attention
