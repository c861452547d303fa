// Copies of several tensors in another dtype, in one launch: what autocast does to an input and its maps.
#include "fours.cuh"
#include "kernels.h"

namespace edgeless::cuda::projection {
namespace {

constexpr int kThreads = 256, kPer = 4, kMostBlocks = 2048;

template <class From, class To>
__device__ __forceinline__ To convert(From x) {
  if constexpr (std::is_same_v<From, To>) return x;
  if constexpr (std::is_same_v<To, double>) return static_cast<double>(to_arithmetic(x));
  return to_storage<To>(static_cast<Arithmetic<To>>(to_arithmetic(x)));
}

template <class From, class To>
__device__ __forceinline__ void copy(const From* from, To* to, int64_t numbers) {
  const int64_t step = int64_t(gridDim.x) * kThreads, fours = numbers / kPer;
  const int64_t thread = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  const bool aligned = reinterpret_cast<uintptr_t>(from) % sizeof(Four<From>) == 0;  // the copy always is
  int64_t rest = 0;
  if (aligned) {
    for (int64_t i = thread; i < fours; i += step) {
      const Four<From> x = reinterpret_cast<const Four<From>*>(from)[i];
      Four<To> y;
#pragma unroll
      for (int k = 0; k < kPer; ++k) y.x[k] = convert<From, To>(x.x[k]);
      reinterpret_cast<Four<To>*>(to)[i] = y;
    }
    rest = fours * kPer;
  }
  for (int64_t i = rest + thread; i < numbers; i += step) to[i] = convert<From, To>(from[i]);
}

template <class To>
__global__ void __launch_bounds__(kThreads) cast_kernel(const __grid_constant__ CastArgs args) {
  const int t = blockIdx.y;
  To* to = static_cast<To*>(args.to[t]);
  switch (args.dtype[t]) {
    case Storage::f32: return copy(static_cast<const float*>(args.from[t]), to, args.numbers[t]);
    case Storage::f16: return copy(static_cast<const __half*>(args.from[t]), to, args.numbers[t]);
    case Storage::bf16: return copy(static_cast<const __nv_bfloat16*>(args.from[t]), to, args.numbers[t]);
    default: return copy(static_cast<const double*>(args.from[t]), to, args.numbers[t]);
  }
}

}  // namespace

cudaError_t run_cast(Storage to, const CastArgs& args, cudaStream_t stream) {
  int64_t most = 1;
  for (int t = 0; t < args.tensors; ++t) most = args.numbers[t] > most ? args.numbers[t] : most;
  const int64_t blocks = (most + kThreads * kPer - 1) / (kThreads * kPer);
  const dim3 grid(static_cast<unsigned>(blocks < kMostBlocks ? blocks : kMostBlocks),
                  static_cast<unsigned>(args.tensors));
  switch (to) {
    case Storage::f32: cast_kernel<float><<<grid, kThreads, 0, stream>>>(args); break;
    case Storage::f16: cast_kernel<__half><<<grid, kThreads, 0, stream>>>(args); break;
    case Storage::bf16: cast_kernel<__nv_bfloat16><<<grid, kThreads, 0, stream>>>(args); break;
    default: cast_kernel<double><<<grid, kThreads, 0, stream>>>(args);
  }
  return cudaGetLastError();
}

}  // namespace edgeless::cuda::projection
