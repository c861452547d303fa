// Compiles all kernels of kernel_table.h for one score and one storage type.
#pragma once

#include <type_traits>
#include <utility>

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

template <class S>
constexpr Storage kStorageOf = std::is_same_v<S, float>            ? Storage::f32
                               : std::is_same_v<S, double>         ? Storage::f64
                               : std::is_same_v<S, __half>         ? Storage::f16
                               : std::is_same_v<S, OfFour<__half>> ? Storage::f16x4
                               : std::is_same_v<S, __nv_bfloat16>  ? Storage::bf16
                                                                   : Storage::bf16x4;

// Launches kernel `kAt` of the table.
template <Pass kPass, class Fn, class S, int kAt>
cudaError_t launch(const Args<Arithmetic<S>>& args, cudaStream_t stream) {
  constexpr Kernel k = kernels_of(kPass, Fn::kScore, kStorageOf<S>).at[kAt];
  using I = std::conditional_t<k.wide_index, int64_t, int32_t>;
  using Team = TeamShape<k.lanes, k.edges, k.spread>;
  const dim3 grid = grid_of(args.part, args.layout, args.heads);
  const auto start = [&](auto kernel) { kernel<<<grid, kBlockThreads, 0, stream>>>(args); };
  if constexpr (kPass == Pass::forward) {
    if constexpr (k.mma) {
      start(mma_forward_kernel<Fn, S, k.lanes, k.vectors, k.edges, k.whole, k.mode>);
    } else {
      start(forward_kernel<Fn, S, I, k.vectors, Team, k.mode>);
    }
  } else if constexpr (kPass == Pass::by_dst) {
    if constexpr (k.mma) {
      start(mma_by_dst_kernel<Fn, S, k.lanes, k.vectors, k.edges, k.whole, k.mode>);
    } else {
      start(by_dst_kernel<Fn, S, I, k.vectors, Team, k.mode>);
    }
  } else {
    if constexpr (k.mma) {
      start(mma_by_src_kernel<Fn, S, k.lanes, k.vectors, k.edges, k.whole, k.mode>);
    } else {
      start(by_src_kernel<Fn, S, I, k.vectors, Team, k.mode>);
    }
  }
  return cudaGetLastError();
}

// All kernels, or only every n-th for a check that the sources compile.
#ifdef EDGELESS_EVERY_NTH_KERNEL
constexpr int kEveryNth = EDGELESS_EVERY_NTH_KERNEL;
#else
constexpr int kEveryNth = 1;
#endif

template <Pass kPass, class Fn, class S, int... kNth>
cudaError_t run(const Plan& plan, const Args<Arithmetic<S>>& args, cudaStream_t stream,
                std::integer_sequence<int, kNth...>) {
  constexpr KernelTable table = kernels_of(kPass, Fn::kScore, kStorageOf<S>);
  cudaError_t error = cudaErrorInvalidDeviceFunction;
  const bool found = ((plan.kernel == table.at[kNth * kEveryNth] &&
                       (error = launch<kPass, Fn, S, kNth * kEveryNth>(args, stream), true)) ||
                      ...);
  return found ? error : cudaErrorInvalidDeviceFunction;
}

template <Pass kPass, class Fn, class S>
cudaError_t run(const Plan& plan, const Args<Arithmetic<S>>& args, cudaStream_t stream) {
  constexpr int kSize = kernels_of(kPass, Fn::kScore, kStorageOf<S>).size;
  return run<kPass, Fn, S>(plan, args, stream, std::make_integer_sequence<int, (kSize + kEveryNth - 1) / kEveryNth>());
}

template <class S, class Fn>
cudaError_t run_instance(const Problem& problem, const Plan& plan, const Args<Arithmetic<S>>& args,
                         cudaStream_t stream) {
  switch (problem.pass) {
    case Pass::forward: return run<Pass::forward, Fn, S>(plan, args, stream);
    case Pass::by_dst: return run<Pass::by_dst, Fn, S>(plan, args, stream);
    case Pass::by_src: return run<Pass::by_src, Fn, S>(plan, args, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace edgeless::cuda
