#pragma once

#include <cstdint>
#include <tuple>

#include "../model/cost.h"

namespace distca::planner {

// Query rows of one document on one server. Items are packed into servers, the bins.
struct Item {
  int64_t document;
  Range rows;
  double seconds;  // at speed 1
};

inline bool is_larger(const Item& a, const Item& b) {
  return std::tie(b.seconds, a.document, a.rows.begin) <
         std::tie(a.seconds, b.document, b.rows.begin);
}

}  // namespace distca::planner
