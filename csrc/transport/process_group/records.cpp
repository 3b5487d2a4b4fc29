#include "records.h"

#include <ATen/ops/empty.h>

#include <numeric>

#include "core/rows.h"

namespace distca::transport {
namespace {

constexpr int64_t kPartAlignment = 16;  // bytes

int64_t row_bytes(const at::Tensor& tensor) {
  return c10::multiply_integers(tensor.sizes().slice(1)) * tensor.element_size();
}

int64_t seal_bytes(const Seal& seal) {
  return seal.host != nullptr ? kSealBytes : 0;
}

}  // namespace

RowBatch new_batch(const Load& load, const RowCounts& counts, const Seal& seal) {
  int64_t record_bytes = seal_bytes(seal);
  for (const at::Tensor& tensor : load.tensors) {
    record_bytes += round_up(row_bytes(tensor), kPartAlignment);
  }
  const auto records = [&](const std::vector<int64_t>& num_rows) {
    const int64_t sum = std::accumulate(num_rows.begin(), num_rows.end(), int64_t{0});
    return at::empty({sum, record_bytes}, load.tensors[0].options().dtype(at::kByte));
  };
  return {records(counts.send), records(counts.recv), counts};
}

Tensors parts_of(const at::Tensor& records, const Load& load, const Seal& seal) {
  Tensors parts;
  int64_t offset = seal_bytes(seal);
  for (const at::Tensor& tensor : load.tensors) {
    const at::Tensor bytes = records.narrow(1, offset, row_bytes(tensor));
    parts.push_back(bytes.view(tensor.scalar_type()).view(sizes_with(tensor, records.size(0))));
    offset += round_up(row_bytes(tensor), kPartAlignment);
  }
  return parts;
}

Tensors rows_like(const Tensors& tensors, int64_t num_rows) {
  Tensors rows;
  for (const at::Tensor& tensor : tensors) {
    rows.push_back(at::empty(sizes_with(tensor, num_rows), tensor.options()));
  }
  return rows;
}

}  // namespace distca::transport
