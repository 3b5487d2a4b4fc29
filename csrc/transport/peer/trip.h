#pragma once

#include <memory>

#include "../transport.h"

namespace distca::transport::peer {

class PeerTransport;

// Starts a round trip through peer memory. It turns places of rows into addresses in the ranks'
// buffers.
std::unique_ptr<RoundTrip> make_trip(PeerTransport& transport, const Routes& routes, Cargo cargo,
                                     const Where& where);

}  // namespace distca::transport::peer
