#include "record.h"

#include <ATen/ops/empty.h>

#include "core/rows.h"
#include "rows.h"

namespace distca::transport {
namespace {

constexpr int64_t kPartAlignment = 16;  // bytes

}  // namespace

Record::Record(const std::vector<at::Tensor>& prototypes, bool is_sealed)
    : device_(prototypes.at(0).device()) {
  for (const at::Tensor& prototype : prototypes) {
    Part part{prototype.scalar_type(), prototype.sizes().slice(1).vec(), row_bytes_};
    int64_t bytes = prototype.element_size();
    for (const int64_t size : part.row_shape) bytes *= size;
    row_bytes_ += round_up(bytes, kPartAlignment);
    parts_.push_back(std::move(part));
  }
  if (is_sealed) row_bytes_ += kSealBytes;
}

at::Tensor Record::allocate(int64_t num_rows) const {
  return at::empty({num_rows, row_bytes_}, at::TensorOptions().dtype(at::kByte).device(device_));
}

at::Tensor Record::part(const at::Tensor& records, size_t idx) const {
  const Part& part = parts_.at(idx);
  const int64_t element = c10::elementSize(part.dtype);
  std::vector<int64_t> sizes{records.size(0)};
  sizes.insert(sizes.end(), part.row_shape.begin(), part.row_shape.end());
  std::vector<int64_t> strides(sizes.size(), 1);
  for (size_t dim = sizes.size() - 1; dim > 1; --dim) {
    strides[dim - 1] = strides[dim] * sizes[dim];
  }
  strides[0] = row_bytes_ / element;
  return records.view(part.dtype).as_strided(sizes, strides, part.offset_bytes / element);
}

}  // namespace distca::transport
