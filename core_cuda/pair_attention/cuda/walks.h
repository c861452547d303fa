// Builds the index arrays of attention over pairs (../walks.h) on the GPU. No CUDA and no torch, no host sync.
#pragma once

#include <cstddef>

#include "../../common/scan.h"
#include "../walks.h"

namespace edgeless::cuda {

template <class I>
constexpr size_t walks_scratch(int64_t segments) {
  return scan_scratch(segments + 1, sizeof(I) == sizeof(int64_t));
}
// args.longest must be zeroed. `scratch` has walks_scratch<I>(segments) bytes.
template <class I>
void make_walks(const WalksArgs<I>& args, void* scratch, const jit::Queue& queue);

}  // namespace edgeless::cuda
