#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

namespace distca::ops {

// Values that must be equal on all ranks before rows travel; compared field by field.
struct Signature {
  enum Field {
    kRefused,  // 1 if this rank's own arguments were refused; its error is on the failure board
    kVersion,
    kStep,
    kPlanDigest,
    kHeadsQ,
    kHeadsKv,
    kHeadDim,
    kHeadDimV,
    kDtype,
    kSoftmaxScale,  // bits of the double
    kSoftcap,       // likewise
    // Number of calls that moved rows, from the first call under one plan to that under the next.
    kForwardCalls,
    kRecomputedCalls,
    kBackwardCalls,
    kNumFields
  };
  static constexpr Field kFirstOfCall = kHeadsQ;  // up to kFirstOfHistory: a call without its plan
  static constexpr Field kFirstOfHistory = kForwardCalls;
  std::array<int64_t, kNumFields> values{};

  bool operator==(const Signature&) const = default;
};

// Describes how signatures differ in fields [first, last): "heads_q: 8 on ranks 0 2, 4 on rank 1;
// ...". Returns "" if they are equal there.
std::string differences(const std::vector<Signature>& all, int first, int last);

// Returns "heads_q 8, heads_kv 4, ..."; if another call was announced, "heads_q 8 instead of 4".
std::string description_of(const Signature& signature, const Signature* announced);

}  // namespace distca::ops
