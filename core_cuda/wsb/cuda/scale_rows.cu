// Launches the kernel of scale_rows.cuh.
#include "scale_rows.cuh"

namespace edgeless::cuda::wsb {

cudaError_t run_scale(Storage storage, const ScaleArgs& args, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>((args.rows * args.vectors + kThreads - 1) / kThreads);
  if (blocks == 0) return cudaSuccess;
  if (storage == Storage::bf16) {
    scale_kernel<__nv_bfloat16><<<blocks, kThreads, 0, stream>>>(args);
  } else {
    scale_kernel<__half><<<blocks, kThreads, 0, stream>>>(args);
  }
  return cudaGetLastError();
}

}  // namespace edgeless::cuda::wsb
