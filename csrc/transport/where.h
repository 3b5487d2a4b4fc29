#pragma once

#include <array>
#include <cstdint>
#include <string>

namespace distca::transport {

// Phases of a call that moves rows.
inline constexpr const char* kDispatch = "dispatch";
inline constexpr const char* kCombine = "combine";

// The place in a step where a rank communicates. Ranks compare it, so that rows of one call never
// serve another, and errors name it.
struct Where {
  const char* phase;    // "plan", "agreement", "dispatch", "combine", ...
  const char* pass;     // "forward", "recomputed forward", "backward"; "" outside the layers
  int64_t layer;        // number of the call in this pass and plan, from 0; -1 outside the layers
  int64_t step;         // number of plans this group used before this one; -1 before the first
  int64_t caller = -1;  // number of the calling module, see name_caller; -1: unknown

  Where in(const char* another_phase) const { return {another_phase, pass, layer, step, caller}; }
};

std::string describe(const Where& where);

// Converts a place to numbers, which mean the same on all ranks, and back.
constexpr size_t kWhereWords = 5;
using WhereWords = std::array<int64_t, kWhereWords>;
WhereWords words_of(const Where& where);
Where where_of(const WhereWords& words);

// Returns the call in 32 bits, for kernels to compare: step, pass, layer and caller, without the
// phase. Tags repeat after 256 steps, 1024 layers or 4095 callers. Calls that ranks can confuse are
// closer together.
uint32_t tag_of(const Where& where);

// Returns the call with this tag that is nearest to `near`.
Where where_of(uint32_t tag, const Where& near);

// Sets a caller's name for errors. Callers have the same numbers on all ranks.
void name_caller(int64_t caller, const std::string& name);

}  // namespace distca::transport
