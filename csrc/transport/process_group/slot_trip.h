#pragma once

#include <memory>

#include "../head_part.h"
#include "exchanges.h"

namespace distca::transport {

// Returns a call whose rows travel in slots (see Slots), one exchange a part and direction.
std::unique_ptr<RoundTrip> new_slot_trip(Exchanges& exchanges, const Routes& routes,
                                         const Cargo& cargo, const HeadParts& parts,
                                         const Where& where);

}  // namespace distca::transport
