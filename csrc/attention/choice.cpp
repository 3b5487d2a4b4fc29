#include <ATen/Context.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <string>
#include <utility>

#include "backend.h"

namespace distca::attention {
namespace {

// "float64, float32 or bfloat16"
std::string names_of(const std::vector<at::ScalarType>& dtypes) {
  std::string names;
  for (size_t i = 0; i < dtypes.size(); ++i) {
    const bool is_last = i + 1 == dtypes.size();
    names += i == 0 ? "" : is_last ? " or " : ", ";
    names += c10::getDtypeNames(dtypes[i]).first;
  }
  return names;
}

// Returns why a back end for q's device does not take the request, or "" if it does.
std::string refusal(const Backend& backend, const Request& request) {
  const auto& [q, head_dim_v, mask, scores, deterministic] = request;
  const int64_t head_dim = q.size(2);
  const std::string device = c10::DeviceTypeName(backend.device);
  if (std::ranges::find(backend.dtypes, q.scalar_type()) == backend.dtypes.end()) {
    return c10::str("q is ", q.scalar_type(), "; core attention on ", device, " takes ",
                    names_of(backend.dtypes), " (cast, or use autocast)");
  }
  for (const auto& [name, width] :
       {std::pair("head_dim", head_dim), {"v's head_dim", head_dim_v}}) {
    if (width % backend.head_dim_multiple == 0 && width <= backend.max_head_dim) continue;
    return c10::str(name, " is ", width, "; core attention on ", device, " takes multiples of ",
                    backend.head_dim_multiple, " up to ", backend.max_head_dim);
  }
  if (!backend.takes_any_window && !is_full(mask) && mask.window_right != 0) {
    return c10::str("window_size is (", mask.window_left, ", ", mask.window_right,
                    "); core attention of head_dim ", head_dim,
                    " on this device takes (-1, 0) causal, (W, 0) sliding or (-1, -1) full");
  }
  if (!backend.is_deterministic && deterministic &&
      !at::globalContext().deterministicAlgorithms()) {
    return c10::str("deterministic is set, but core attention of head_dim ", head_dim,
                    " on this device is PyTorch's, which follows another switch: call "
                    "torch.use_deterministic_algorithms(True) too");
  }
  if (scores.softcap > backend.max_softcap) {
    return c10::str("softcap is ", scores.softcap, "; core attention on ", device,
                    " takes softcaps up to 1000 on Hopper GPUs, and none on others");
  }
  if (!backend.takes_any_scale && !(scores.softmax_scale > 0)) {
    return c10::str("softmax_scale is ", scores.softmax_scale,
                    "; core attention on this device takes positive ones");
  }
  return backend.takes && !backend.takes(request) ? "q is on another kind of device" : "";
}

}  // namespace

const Backend* find_backend(const Request& request) {
  for (const Backend& backend : backends()) {
    if (backend.device == request.q.device().type() && refusal(backend, request).empty()) {
      return &backend;
    }
  }
  return nullptr;
}

const Backend& choose_backend(const Request& request) {
  if (const Backend* found = find_backend(request)) return *found;
  const at::Device device = request.q.device();
  for (auto last = backends().rbegin(); last != backends().rend(); ++last) {  // it supports most
    TORCH_CHECK_VALUE(last->device != device.type(), refusal(*last, request));
  }
  TORCH_CHECK_VALUE(!device.is_cuda(), "q is on ", device,
                    ", but distca was built without CUDA; rebuild it where nvcc is installed: "
                    "FORCE_CUDA=1 pip install --force-reinstall --no-deps .");
  TORCH_CHECK_VALUE(false, "q is on ", device, "; expected cpu or cuda");
}

}  // namespace distca::attention
