// The launch of the kernel that copies tensors into another dtype (cast.cuh).
#include "cast.cuh"

namespace edgeless::cuda::projection {
namespace {

constexpr int kMostBlocks = 2048;

}  // namespace

cudaError_t run_cast(Storage to, const CastArgs& args, cudaStream_t stream) {
  int64_t most = 1;
  for (int t = 0; t < args.tensors; ++t) most = args.numbers[t] > most ? args.numbers[t] : most;
  const int64_t blocks = (most + kCastThreads * kCastPer - 1) / (kCastThreads * kCastPer);
  const dim3 grid(static_cast<unsigned>(blocks < kMostBlocks ? blocks : kMostBlocks),
                  static_cast<unsigned>(args.tensors));
  switch (to) {
    case Storage::f32: cast_kernel<float><<<grid, kCastThreads, 0, stream>>>(args); break;
    case Storage::f16: cast_kernel<__half><<<grid, kCastThreads, 0, stream>>>(args); break;
    case Storage::bf16: cast_kernel<__nv_bfloat16><<<grid, kCastThreads, 0, stream>>>(args); break;
    default: cast_kernel<double><<<grid, kCastThreads, 0, stream>>>(args);
  }
  return cudaGetLastError();
}

}  // namespace edgeless::cuda::projection
