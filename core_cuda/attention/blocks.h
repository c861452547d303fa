// Decides whether dot product attention runs on weighted sparse blocks, on any device.
#pragma once

#include "../wsb/kept_blocks.h"
#include "inputs.h"

namespace edgeless {

// Returns why a call cannot run on blocks, worded to follow "wsb: ", or null if it can. backward: for all passes of the
// backward. The arguments must have passed the checks of the op.
const char* wsb_refusal(const AttentionCall& in, bool backward);

// Returns whether a call on blocks is supported and profitable: engine `automatic` then uses them.
bool blocks_pay(const AttentionCall& in, bool backward);

}  // namespace edgeless
