// Attention over weighted sparse blocks, for what wsb_refusal does not refuse.
#pragma once

#include "../attention/cuda/args.h"
#include "kept_blocks.h"

namespace edgeless::cuda {

// Whether a call runs on blocks: the engine in force says so, and the device has tensor cores for it.
bool runs_on_blocks(const AttentionCall& in, bool backward);

// A pass over the graph, for arguments as our own kernels take them. The pass by destination leaves args.delta for the
// one by source.
void run_on_blocks(Pass pass, const AttentionCall& in, const Args<float>& args, cudaStream_t stream);

}  // namespace edgeless::cuda
