#pragma once

#include <cstdint>
#include <vector>

#include "core/head_parts.h"
#include "transport.h"

namespace distca::transport {

// Heads that travel together: some of the query heads and the key heads that they read. If several
// parts share key heads, the first of these parts brings them and the last returns their gradients.
struct HeadPart {
  int64_t index;
  HeadParts all;

  bool shares_keys() const { return all.key_count < all.count; }
  bool brings_keys() const { return index % num_sharing() == 0; }
  bool returns_keys() const { return (index + 1) % num_sharing() == 0; }
  bool is_last() const { return index + 1 == all.count; }

  // Returns this part's heads of rows [rows, heads, ...].
  at::Tensor of_queries(const at::Tensor& rows) const { return of(rows, index, all.count); }
  at::Tensor of_keys(const at::Tensor& rows) const {
    return of(rows, index / num_sharing(), all.key_count);
  }
  // Returns this part's inputs. k and v are undefined if an earlier part brings them.
  Inputs of(const Inputs& rows) const {
    if (!brings_keys()) return {of_queries(rows.q), {}, {}};
    return {of_queries(rows.q), of_keys(rows.k), of_keys(rows.v)};
  }
  // Returns this part of a cargo. `kept` are the part's kept inputs, or null.
  Cargo of(const Cargo& cargo, const Inputs* kept) const {
    Cargo part{.inputs = of(cargo.inputs), .kept = kept};
    for (const at::Tensor& rows : cargo.with_queries) part.with_queries.push_back(of_queries(rows));
    for (const at::Tensor& rows : cargo.query_results) {
      part.query_results.push_back(of_queries(rows));
    }
    if (!returns_keys()) return part;
    for (const at::Tensor& rows : cargo.key_results) part.key_results.push_back(of_keys(rows));
    return part;
  }

 private:
  static at::Tensor of(const at::Tensor& rows, int64_t index, int64_t count) {
    if (count == 1 || !rows.defined()) return rows;
    const int64_t num_heads = rows.size(1) / count;
    return rows.narrow(1, index * num_heads, num_heads);
  }
  int64_t num_sharing() const { return all.count / all.key_count; }
};

// Returns all parts, in the order in which they travel.
inline std::vector<HeadPart> in_order(const HeadParts& all) {
  std::vector<HeadPart> parts;
  for (int64_t i = 0; i < all.count; ++i) parts.push_back({i, all});
  return parts;
}

}  // namespace distca::transport
