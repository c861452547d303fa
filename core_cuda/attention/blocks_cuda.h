// Attention over weighted sparse blocks, for calls without an unsupported reason (wsb_refusal).
#pragma once

#include "../jit/queue.h"
#include "blocks.h"
#include "cuda/args.h"

namespace edgeless::cuda {

// Returns whether a call runs on blocks: the engine in force selects them, and the device has compute capability 8.0 or
// higher.
bool runs_on_blocks(const AttentionCall& in, bool backward);

// Runs one pass with the arguments of the rowsplit kernels. by_dst writes args.delta, which by_src reads.
void run_on_blocks(Pass pass, const AttentionCall& in, const Args<float>& args, const jit::Queue& queue);

}  // namespace edgeless::cuda
