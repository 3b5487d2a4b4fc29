#pragma once

#include <array>
#include <cstdint>
#include <string>

namespace distca::transport {

// Where in a step a rank communicates. Ranks compare it, so that rows of one call never serve
// another, and errors name it.
struct Where {
  const char* phase;    // "plan", "agreement", "dispatch", "combine", ...
  const char* pass;     // "forward", "recomputed forward", "backward"; "" outside the layers
  int64_t layer;        // attention calls of this pass under the current plan, from 0; -1 outside
  int64_t step;         // plans this group has used before; -1 before the first
  int64_t caller = -1;  // the module that calls attention, see name_caller; -1: unknown

  Where in(const char* another_phase) const { return {another_phase, pass, layer, step, caller}; }
};

std::string describe(const Where& where);

// The same place as numbers that mean the same on all ranks, and back.
constexpr size_t kWhereWords = 5;
using WhereWords = std::array<int64_t, kWhereWords>;
WhereWords words_of(const Where& where);
Where where_of(const WhereWords& words);

// The call (step, pass, layer and caller, without the phase) in 32 bits, for words and rows that
// kernels compare. Calls that ranks can confuse differ in it: 256 steps, 1024 layers and 4095
// callers in turn.
uint32_t tag_of(const Where& where);

// The call of a tag, of all that have it the one nearest to `near`.
Where where_of(uint32_t tag, const Where& near);

// Names callers for errors. They are numbered alike on all ranks.
void name_caller(int64_t caller, const std::string& name);

}  // namespace distca::transport
