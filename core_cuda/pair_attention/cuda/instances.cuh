// Compiles the passes over pairs for one storage type.
#pragma once

#include "by_src.cuh"
#include "forward.cuh"

namespace edgeless::cuda {

template <class S, int kWidth, int kEdges, bool kDropout>
cudaError_t launch_pair_pass(const Problem& problem, const PairArgs& args, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(args.part.num_ranges);
  if (problem.pass == Pass::forward) {
    pair_forward_kernel<S, kWidth, kEdges, kDropout><<<blocks, kBlockThreads, 0, stream>>>(args);
  } else {
    pair_by_src_kernel<S, kWidth, kEdges, kDropout><<<blocks, kBlockThreads, 0, stream>>>(args);
  }
  return cudaGetLastError();
}

template <class S, int kWidth, int kEdges>
cudaError_t launch_pair_pass(const Problem& problem, const PairArgs& args, cudaStream_t stream) {
  return args.drawn_by ? launch_pair_pass<S, kWidth, kEdges, true>(problem, args, stream)
                       : launch_pair_pass<S, kWidth, kEdges, false>(problem, args, stream);
}

template <class S, int kWidth>
cudaError_t pair_pass_of_width(const Problem& problem, const Kernel& kernel, const PairArgs& args,
                               cudaStream_t stream) {
  switch (kernel.edges) {
    case 2: return launch_pair_pass<S, kWidth, 2>(problem, args, stream);
    case 4: return launch_pair_pass<S, kWidth, 4>(problem, args, stream);
    default: return launch_pair_pass<S, kWidth, 8>(problem, args, stream);
  }
}

template <class S>
cudaError_t pair_pass_instance(const Problem& problem, const Kernel& kernel, const PairArgs& args,
                               cudaStream_t stream) {
  switch (kernel.lanes) {
    case 8: return pair_pass_of_width<S, 8>(problem, kernel, args, stream);
    case 16: return pair_pass_of_width<S, 16>(problem, kernel, args, stream);
    default: return pair_pass_of_width<S, 32>(problem, kernel, args, stream);
  }
}

}  // namespace edgeless::cuda
