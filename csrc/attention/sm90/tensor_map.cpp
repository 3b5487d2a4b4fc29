#include "tensor_map.h"

#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>

namespace distca::attention::sm90 {
namespace {

// Through the runtime, so that the library needs no libcuda where there is no driver.
decltype(&cuTensorMapEncodeTiled) encode_function() {
  static const auto function = [] {
    void* pointer = nullptr;
    cudaDriverEntryPointQueryResult found;
    const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &pointer,
                                                               12000, cudaEnableDefault, &found);
    if (error != cudaSuccess || found != cudaDriverEntryPointSuccess) {
      throw std::runtime_error(
          "cuTensorMapEncodeTiled is missing from the CUDA driver; install one of CUDA 12 or "
          "newer");
    }
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(pointer);
  }();
  return function;
}

constexpr cuuint64_t kManyRows = 0x7fff0000;

// L2 fetches aligned pieces of this size. If a piece reached into the next head, L2 might evict
// those bytes before the block that needs them runs.
CUtensorMapL2promotion fetched_at_once(const RowTensor& tensor) {
  return tensor.head_stride % 256 == 0 ? CU_TENSOR_MAP_L2_PROMOTION_L2_256B
                                       : CU_TENSOR_MAP_L2_PROMOTION_L2_128B;
}

template <int kDims>
CUtensorMap encode(const RowTensor& tensor, const cuuint64_t (&sizes)[kDims],
                   const cuuint64_t (&strides)[kDims - 1], const cuuint32_t (&box)[kDims]) {
  const cuuint32_t steps[5] = {1, 1, 1, 1, 1};
  CUtensorMap map;
  const CUresult result = encode_function()(
      &map,
      tensor.element == Element::kBfloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                           : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
      kDims, tensor.data, sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
      CU_TENSOR_MAP_SWIZZLE_128B, fetched_at_once(tensor), CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    throw std::runtime_error("cuTensorMapEncodeTiled failed with CUDA error " +
                             std::to_string(static_cast<int>(result)) + " for row stride " +
                             std::to_string(tensor.row_stride) + " and head stride " +
                             std::to_string(tensor.head_stride) + " bytes");
  }
  return map;
}

}  // namespace

CUtensorMap make_ragged_map(const RowTensor& tensor, int32_t box_rows) {
  const auto row_stride = static_cast<cuuint64_t>(tensor.row_stride);
  return encode<5>(tensor,
                   {static_cast<cuuint64_t>(tensor.head_dim), static_cast<cuuint64_t>(tensor.heads),
                    cuuint64_t{1} << 30, kManyRows, kManyRows},
                   {static_cast<cuuint64_t>(tensor.head_stride), row_stride, row_stride,
                    (cuuint64_t{1} << 35) - row_stride},
                   {64, 1, static_cast<cuuint32_t>(box_rows), 1, 1});
}

CUtensorMap make_plain_map(const RowTensor& tensor, int32_t box_rows) {
  return encode<3>(
      tensor,
      {static_cast<cuuint64_t>(tensor.head_dim), static_cast<cuuint64_t>(tensor.heads), kManyRows},
      {static_cast<cuuint64_t>(tensor.head_stride), static_cast<cuuint64_t>(tensor.row_stride)},
      {64, 1, static_cast<cuuint32_t>(box_rows)});
}

}  // namespace distca::attention::sm90
