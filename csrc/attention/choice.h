#pragma once

#include "backend.h"

namespace distca::attention {

// What decides which back end computes a call.
struct Request {
  const at::Tensor& q;  // [rows, heads, head_dim]
  Mask mask;
  double softmax_scale = 1;
  bool deterministic = false;
};

// The first back end of the table that takes the request; null if none does.
const Backend* find_backend(const Request& request);

// The same; throws ValueError, naming what is allowed, if none does.
const Backend& choose_backend(const Request& request);

}  // namespace distca::attention
