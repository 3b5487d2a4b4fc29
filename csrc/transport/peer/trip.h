#pragma once

#include <memory>

#include "../transport.h"

namespace distca::transport::peer {

class PeerTransport;

// A round trip by a transport's primitives: places of rows become addresses in the ranks' buffers.
std::unique_ptr<RoundTrip> make_trip(PeerTransport& transport, const Routes& routes, Cargo cargo,
                                     const Where& where);

}  // namespace distca::transport::peer
