// The kernels that build the index arrays of attention over pairs (../walks.h): one thread per edge and then, when the
// offsets of segments are known, one thread per segment.
#pragma once

#include <cstdint>

#include "../../common/threads.cuh"
#include "../walks.h"

namespace edgeless::cuda {

constexpr int kWarp = 32;

template <class I>
__global__ void prepare_walks_kernel(WalksArgs<I> args) {
  prepare_walks(args, thread_id());
}

template <class I>
__global__ void walk_segments_kernel(WalksArgs<I> args) {
  const int64_t i = thread_id();
  if (i < args.segments) walk_segment(args, i);
  for (int which = 0; which < 3; ++which) {
    int64_t most = walk_length(args, which, i);
    for (int lanes = kWarp / 2; lanes > 0; lanes /= 2) {
      const int64_t other = __shfl_xor_sync(~0u, static_cast<long long>(most), lanes);
      most = most < other ? other : most;
    }
    // *longest never decreases, so a stale read causes a redundant atomic at worst.
    auto* longest = reinterpret_cast<long long*>(args.longest + which);
    if (threadIdx.x % kWarp == 0 && most > *static_cast<volatile long long*>(longest)) {
      atomicMax(longest, static_cast<long long>(most));
    }
  }
}

}  // namespace edgeless::cuda
