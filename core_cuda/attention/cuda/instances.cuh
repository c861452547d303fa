// Generates the kernels of one score and one storage type: those of the table in plan.h.
#pragma once

#include "by_dst.cuh"
#include "by_src.cuh"
#include "forward.cuh"
#include "mma_by_dst.cuh"
#include "mma_by_src.cuh"
#include "mma_forward.cuh"
#include "plan.h"

namespace edgeless::cuda {

inline dim3 grid_of(const Partition& part, const Layout& layout, int heads) {
  const int slices = (heads + layout.heads_per_slice - 1) / layout.heads_per_slice;
  return dim3(static_cast<unsigned>(part.num_ranges), static_cast<unsigned>(slices));
}

template <Pass kPass, class Fn, class S, class I, int kVecs, int kWidth, int kMode, int kEdges = 4>
cudaError_t launch(const Args<Arithmetic<S>>& args, cudaStream_t stream) {
  const dim3 grid = grid_of(args.part, args.layout, args.heads);
  if constexpr (kPass == Pass::forward) {
    forward_kernel<Fn, S, I, kVecs, kWidth, kEdges, kMode><<<grid, kBlockThreads, 0, stream>>>(args);
  } else if constexpr (kPass == Pass::by_dst) {
    by_dst_kernel<Fn, S, I, kVecs, kWidth, kEdges, kMode><<<grid, kBlockThreads, 0, stream>>>(args);
  } else {
    by_src_kernel<Fn, S, I, kVecs, kWidth, kEdges, kMode><<<grid, kBlockThreads, 0, stream>>>(args);
  }
  return cudaGetLastError();
}

template <Pass kPass, class Fn, class S, int kTeam, int kVecs, bool kWhole, int kMode>
cudaError_t launch_mma(const Args<float>& args, cudaStream_t stream) {
  constexpr int kEdges = mma_edges(kPass, kVecs);
  const dim3 grid = grid_of(args.part, args.layout, args.heads);
  if constexpr (kPass == Pass::forward) {
    mma_forward_kernel<Fn, S, kTeam, kVecs, kEdges, kWhole, kMode><<<grid, kBlockThreads, 0, stream>>>(args);
  } else if constexpr (kPass == Pass::by_dst) {
    mma_by_dst_kernel<Fn, S, kTeam, kVecs, kEdges, kWhole, kMode><<<grid, kBlockThreads, 0, stream>>>(args);
  } else {
    mma_by_src_kernel<Fn, S, kTeam, kVecs, kEdges, kWhole, kMode><<<grid, kBlockThreads, 0, stream>>>(args);
  }
  return cudaGetLastError();
}

template <Pass kPass, class Fn, class S, int kTeam, int kVecs>
cudaError_t run_mma(const Plan& plan, const Args<float>& args, cudaStream_t stream) {
  if (plan.mode == kOptions) return launch_mma<kPass, Fn, S, kTeam, kVecs, false, kOptions>(args, stream);
  if constexpr (kTeam * kVecs > most_without_mma(kPass, Fn::kScore, true)) {
    return plan.whole ? launch_mma<kPass, Fn, S, kTeam, kVecs, true, kPlain>(args, stream)
                      : launch_mma<kPass, Fn, S, kTeam, kVecs, false, kPlain>(args, stream);
  }
  return cudaErrorInvalidDeviceFunction;
}

template <Pass kPass, class Fn, class S>
cudaError_t run_mma(const Plan& plan, const Args<float>& args, cudaStream_t stream) {
  const bool wide = plan.layout.team_log2 == 3, two = plan.layout.vectors == 2;
  if (wide && two) return run_mma<kPass, Fn, S, 8, 2>(plan, args, stream);
  if constexpr (kPass == Pass::by_src) {
    if (wide) return run_mma<kPass, Fn, S, 8, 1>(plan, args, stream);
  } else {
    if (two) return run_mma<kPass, Fn, S, 4, 2>(plan, args, stream);
  }
  if constexpr (kPass == Pass::forward && Fn::kAtt) {
    if (!wide && !two) return run_mma<kPass, Fn, S, 4, 1>(plan, args, stream);
  }
  return cudaErrorInvalidDeviceFunction;
}

template <Pass kPass, class Fn, class S, int kEdges>
cudaError_t run_plain(const Plan& plan, const Args<float>& args, cudaStream_t stream) {
  constexpr int kMost = sizeof(S) == 4 || !Fn::kMma ? 32 : most_without_mma(kPass, Fn::kScore, true);
  if constexpr (kMost >= 8) {  // else the tensor cores'
    if (plan.width == 8) return launch<kPass, Fn, S, int32_t, 1, 8, kPlain, kEdges>(args, stream);
  }
  if constexpr (kMost >= 16) {
    if (plan.width == 16) return launch<kPass, Fn, S, int32_t, 1, 16, kPlain, kEdges>(args, stream);
  }
  if (plan.width == 32) return launch<kPass, Fn, S, int32_t, 1, 32, kPlain, kEdges>(args, stream);
  return cudaErrorInvalidDeviceFunction;
}

template <Pass kPass, class Fn, class S>
cudaError_t run_plain(const Plan& plan, const Args<float>& args, cudaStream_t stream) {
  if (plan.layout.vectors == 2) return launch<kPass, Fn, S, int32_t, 2, 32, kPlain>(args, stream);
  if (plan.width == 4) return launch<kPass, Fn, S, int32_t, 1, 4, kPlain>(args, stream);
  if constexpr (sizeof(S) == 4 && few_edges_pay(kPass, Fn::kScore)) {
    if (plan.edges < 4) return run_plain<kPass, Fn, S, kFewEdges>(plan, args, stream);
  }
  if constexpr (many_edges(kPass, Fn::kScore) > 4) {
    if (plan.edges > 4) return run_plain<kPass, Fn, S, many_edges(kPass, Fn::kScore)>(plan, args, stream);
  }
  return run_plain<kPass, Fn, S, 4>(plan, args, stream);
}

template <Pass kPass, class Fn, class S>
cudaError_t run(const Problem& problem, const Plan& plan, const Args<Arithmetic<S>>& args, cudaStream_t stream) {
  constexpr int kTop = Fn::kScore == Score::gatv2 ? kEdgeTerm : kOptions;
  if (problem.wide_index) return launch<kPass, Fn, S, int64_t, 4, 0, kTop>(args, stream);
  if constexpr (std::is_same_v<S, double>) {
    return launch<kPass, Fn, S, int32_t, 4, 0, kTop>(args, stream);
  } else {
    if constexpr (sizeof(S) == 2 && Fn::kMma) {
      if (plan.mma) return run_mma<kPass, Fn, S>(plan, args, stream);
    }
    if (plan.mode == kPlain) return run_plain<kPass, Fn, S>(plan, args, stream);
    if (plan.layout.vectors == 4) return launch<kPass, Fn, S, int32_t, 4, 0, kTop>(args, stream);
    if constexpr (kTop == kEdgeTerm) {
      if (plan.mode == kEdgeTerm) return launch<kPass, Fn, S, int32_t, 1, 0, kEdgeTerm>(args, stream);
    }
    return launch<kPass, Fn, S, int32_t, 1, 0, kOptions>(args, stream);
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
