#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <tuple>

namespace distca::ops {

// Operators of schemas.cpp.
at::Tensor all_gather(const at::Tensor& tensor, c10::string_view group_name, int64_t step);

std::tuple<at::Tensor, at::Tensor> plan(const at::Tensor& pieces, int64_t num_ranks,
                                        int64_t window_left, int64_t window_right,
                                        const at::Tensor& cost, at::IntArrayRef row_bytes,
                                        const at::Tensor& servers, const at::Tensor& links,
                                        double tolerance, int64_t rounds, double kept_cap_bytes,
                                        at::OptionalIntArrayRef held_bytes,
                                        at::OptionalIntArrayRef kept_bytes);

at::Tensor plan_of_tasks(const at::Tensor& pieces, const at::Tensor& tasks, int64_t num_ranks,
                         int64_t window_left, int64_t window_right);

std::tuple<at::Tensor, at::Tensor> layout(const at::Tensor& pieces, const at::Tensor& plan,
                                          int64_t rank, int64_t step, c10::string_view device_type,
                                          bool deterministic, at::IntArrayRef held_bytes,
                                          std::optional<double> round_bytes, bool by_peer_memory,
                                          std::optional<int64_t> batch);

}  // namespace distca::ops
