// Generates the kernels of one score and one storage type: those of the table in plan.h.
#pragma once

#include "by_dst.cuh"
#include "by_src.cuh"
#include "forward.cuh"
#include "plan.h"

namespace edgeless::cuda {

template <Pass kPass, class Fn, class S, class I, int kVecs, int kWidth, int kMode>
cudaError_t launch(const Args<Arithmetic<S>>& args, cudaStream_t stream) {
  const int slices = (args.heads + args.layout.heads_per_slice - 1) / args.layout.heads_per_slice;
  const dim3 grid(static_cast<unsigned>(args.part.num_ranges), static_cast<unsigned>(slices));
  if constexpr (kPass == Pass::forward) {
    forward_kernel<Fn, S, I, kVecs, kWidth, kMode><<<grid, kBlockThreads, 0, stream>>>(args);
  } else if constexpr (kPass == Pass::by_dst) {
    by_dst_kernel<Fn, S, I, kVecs, kWidth, kMode><<<grid, kBlockThreads, 0, stream>>>(args);
  } else {
    by_src_kernel<Fn, S, I, kVecs, kWidth, kMode><<<grid, kBlockThreads, 0, stream>>>(args);
  }
  return cudaGetLastError();
}

template <Pass kPass, class Fn, class S>
cudaError_t run(const Problem& problem, const Plan& plan, const Args<Arithmetic<S>>& args, cudaStream_t stream) {
  constexpr bool kFloat = std::is_same_v<S, float>;
  constexpr int kTop = Fn::kScore == Score::gatv2 ? kEdgeTerm : kOptions;
  constexpr int kFew = vectors_of_choice(kPass, kFloat ? Dtype::f32 : Dtype::bf16);
  const int vectors = plan.layout.vectors;
  if (problem.wide_index) return launch<kPass, Fn, S, int64_t, 4, 0, kTop>(args, stream);
  if constexpr (std::is_same_v<S, double>) {
    return launch<kPass, Fn, S, int32_t, 4, 0, kTop>(args, stream);
  } else {
    if (plan.mode == kTop && vectors == 4) return launch<kPass, Fn, S, int32_t, 4, 0, kTop>(args, stream);
    if constexpr (kTop == kEdgeTerm) {
      if (plan.mode == kEdgeTerm) return launch<kPass, Fn, S, int32_t, kFew, 0, kEdgeTerm>(args, stream);
    }
    if (plan.mode == kOptions) return launch<kPass, Fn, S, int32_t, kFew, 0, kOptions>(args, stream);
    if (vectors == 1 && plan.width == 4) return launch<kPass, Fn, S, int32_t, 1, 4, kPlain>(args, stream);
    if (vectors == 2 && plan.width == 32) return launch<kPass, Fn, S, int32_t, 2, 32, kPlain>(args, stream);
    if (vectors != kFew) return cudaErrorInvalidDeviceFunction;
    switch (plan.width) {
      case 4: return launch<kPass, Fn, S, int32_t, kFew, 4, kPlain>(args, stream);
      case 8: return launch<kPass, Fn, S, int32_t, kFew, 8, kPlain>(args, stream);
      case 16: return launch<kPass, Fn, S, int32_t, kFew, 16, kPlain>(args, stream);
      case 32: return launch<kPass, Fn, S, int32_t, kFew, 32, kPlain>(args, stream);
    }
    return cudaErrorInvalidDeviceFunction;
  }
}

template <class S, class Fn>
cudaError_t run_instance(const Problem& problem, const Plan& plan, const Args<Arithmetic<S>>& args,
                         cudaStream_t stream) {
  switch (problem.pass) {
    case Pass::forward: return run<Pass::forward, Fn, S>(problem, plan, args, stream);
    case Pass::by_dst: return run<Pass::by_dst, Fn, S>(problem, plan, args, stream);
    case Pass::by_src: return run<Pass::by_src, Fn, S>(problem, plan, args, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace edgeless::cuda
