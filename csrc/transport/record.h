#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace distca::transport {

// The bytes of one travelling row: parts of several tensors side by side, each at a multiple of 16
// bytes so that every part is a valid strided tensor at the other end and rows copy as 16-byte
// words.
class Record {
 public:
  // Parts take dtype and row shape from `prototypes` [rows, ...]; rows of the prototypes are
  // ignored.
  // A sealed record ends with kSealBytes of room for a seal: see Seal.
  explicit Record(const std::vector<at::Tensor>& prototypes, bool is_sealed = false);

  int64_t row_bytes() const { return row_bytes_; }
  size_t num_parts() const { return parts_.size(); }

  // Uninitialised records, uint8 [num_rows, row_bytes], on the prototypes' device.
  at::Tensor allocate(int64_t num_rows) const;

  // Part `idx` of `records` as a strided tensor [num_rows, ...]; shares memory.
  at::Tensor part(const at::Tensor& records, size_t idx) const;

 private:
  struct Part {
    at::ScalarType dtype;
    std::vector<int64_t> row_shape;
    int64_t offset_bytes;
  };
  std::vector<Part> parts_;
  int64_t row_bytes_ = 0;
  at::Device device_;
};

}  // namespace distca::transport
