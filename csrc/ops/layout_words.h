#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <numeric>
#include <vector>

// The format of a layout's two tensors, shared by layout_writer.cpp and layout_reader.cpp.
namespace distca::ops {

constexpr int64_t kMagic = 0x646973746361000d;  // "distca", format 13
constexpr int64_t kMinLength = 16;   // torch.compile specialises tensors of length 0 and 1
constexpr int64_t kVectorWords = 4;  // device sections read by 16-byte loads start at multiples
constexpr int64_t kTaskWords = 5;

// The header of the host tensor. The routes of all rounds follow, then their tasks with the words
// of back ends, in the order of encode_layout.
enum Header : int64_t {
  kMagicWord,
  kLength,
  kStep,
  kPlanDigest,
  kNumRanks,
  kNumHomeRows,
  kMovesRows,
  kWindowLeft,
  kWindowRight,
  kNumRounds,
  kDeterministic,
  kNumCounted,
  kNumRowWords,
  kNumContextRows,
  kNumKeptQueries,
  kNumKeptKeys,
  kRank,
  kBatch,
  kHeaderLength
};

inline int64_t sum(const std::vector<int64_t>& values) {
  return std::accumulate(values.begin(), values.end(), int64_t{0});
}

}  // namespace distca::ops
