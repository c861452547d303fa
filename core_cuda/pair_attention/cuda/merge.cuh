// Kernels that merge the segments of hubs, rows that several blocks share (common/partition.cuh), in the order of the
// row's edges, after a pass over pairs. Storage: float, half, bfloat16; sums in float.
#pragma once

#include "../../common/merge.cuh"
#include "args.h"

namespace edgeless::cuda {

// Segment `segment` of a hub in the fix-up workspace.
__device__ inline const float* segment_at(const PairArgs& args, const Hub& hub, int64_t segment) {
  const int64_t slots = number_of_slots(args.graph.num_edges, args.part.segment);
  return args.carry + (segment == 0 ? hub.slot : slots + hub.slot + segment - 1) * args.carry_size;
}

template <class S>
__global__ void __launch_bounds__(kMergeThreads) merge_forward_kernel(const __grid_constant__ PairArgs args) {
  const int dim = args.out.dim;
  for_each_hub<int32_t>(args.graph, args.part, [&](const Hub& hub) {
    merge_softmax<float, true>(
        hub.segments, 1, args.carry_size, [&](int64_t p) { return segment_at(args, hub, p); },
        [&](int k, float sum, float top, float total) {
          if (k == 0) args.shift[hub.row] = top, args.shift[args.graph.num_rows + hub.row] = log_base_two(total);
          if (k >= dim) return;
          const float bias = args.bias ? to_arithmetic(static_cast<const S*>(args.bias)[k]) : 0.0f;
          const int64_t at = hub.row * dim + k;
          if (args.sums) reinterpret_cast<S*>(args.sums.base)[at] = to_storage<S>(sum / total);
          reinterpret_cast<S*>(args.out.base)[at] = to_storage<S>(sum / total + bias);
        });
  });
}

template <class S>
__global__ void __launch_bounds__(kMergeThreads) merge_by_src_kernel(const __grid_constant__ PairArgs args) {
  const int dim = args.grad_value.dim;
  for_each_hub<int32_t>(args.graph, args.part, [&](const Hub& hub) {
    sum_segments<float>(
        hub.segments, dim, [&](int64_t p) { return segment_at(args, hub, p); },
        [&](int k, float sum) { reinterpret_cast<S*>(args.grad_value.base)[hub.row * dim + k] = to_storage<S>(sum); });
  });
}

}  // namespace edgeless::cuda
