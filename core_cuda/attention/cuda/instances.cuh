// Generates the kernels of one score and one storage type: those of the table in plan.h.
#pragma once

#include "by_dst.cuh"
#include "by_src.cuh"
#include "forward.cuh"
#include "plan.h"

namespace edgeless::cuda {

template <class S, class I, class Fn, int kVecs, int kWidth, int kMode>
cudaError_t launch_kernel(Pass pass, const Args<Arithmetic<S>>& args, cudaStream_t stream) {
  const int slices = (args.heads + args.layout.heads_per_slice - 1) / args.layout.heads_per_slice;
  const dim3 grid(static_cast<unsigned>(args.part.num_ranges), static_cast<unsigned>(slices));
  switch (pass) {
    case Pass::forward:
      forward_kernel<Fn, S, I, kVecs, kWidth, kMode><<<grid, kBlockThreads, 0, stream>>>(args);
      break;
    case Pass::by_dst:
      by_dst_kernel<Fn, S, I, kVecs, kWidth, kMode><<<grid, kBlockThreads, 0, stream>>>(args);
      break;
    case Pass::by_src:
      by_src_kernel<Fn, S, I, kVecs, kWidth, kMode><<<grid, kBlockThreads, 0, stream>>>(args);
      break;
  }
  return cudaGetLastError();
}

template <class S, class Fn>
cudaError_t run_instance(const Problem& problem, const Plan& plan, const Args<Arithmetic<S>>& args,
                         cudaStream_t stream) {
  constexpr int kTop = Fn::kScore == Score::gatv2 ? kEdgeTerm : kOptions, kFew = sizeof(S) == 2 ? 1 : 2;
  const Pass pass = problem.pass;
  if (problem.wide_index) return launch_kernel<S, int64_t, Fn, 4, 0, kTop>(pass, args, stream);
  const int vectors = plan.layout.vectors;
  if constexpr (std::is_same_v<S, double>) {
    return launch_kernel<S, int32_t, Fn, 4, 0, kTop>(pass, args, stream);
  } else {
    if (plan.mode == kTop && vectors == 4) return launch_kernel<S, int32_t, Fn, 4, 0, kTop>(pass, args, stream);
    if constexpr (kTop == kEdgeTerm) {
      if (plan.mode == kEdgeTerm) return launch_kernel<S, int32_t, Fn, kFew, 0, kEdgeTerm>(pass, args, stream);
    }
    if (plan.mode == kOptions) return launch_kernel<S, int32_t, Fn, kFew, 0, kOptions>(pass, args, stream);
    if (vectors == 1 && plan.width == 4) return launch_kernel<S, int32_t, Fn, 1, 4, kPlain>(pass, args, stream);
    if (vectors == 2 && plan.width == 32) return launch_kernel<S, int32_t, Fn, 2, 32, kPlain>(pass, args, stream);
    if (vectors == kFew) {
      switch (plan.width) {
        case 4: return launch_kernel<S, int32_t, Fn, kFew, 4, kPlain>(pass, args, stream);
        case 8: return launch_kernel<S, int32_t, Fn, kFew, 8, kPlain>(pass, args, stream);
        case 16: return launch_kernel<S, int32_t, Fn, kFew, 16, kPlain>(pass, args, stream);
        case 32: return launch_kernel<S, int32_t, Fn, kFew, 32, kPlain>(pass, args, stream);
      }
    }
    return cudaErrorInvalidDeviceFunction;
  }
}

}  // namespace edgeless::cuda
