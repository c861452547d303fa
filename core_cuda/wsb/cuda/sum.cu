// Launches the kernels of sum.cuh.
#include "sum.cuh"

#include <atomic>

#include "../../projection/cuda/shared_memory.cuh"

namespace edgeless::cuda::wsb {
namespace {

template <class S, int kSplit>
cudaError_t launch(const SumArgs& args, cudaStream_t stream) {
  static std::atomic<uint64_t> done{0};
  const cudaError_t error = projection::allow_shared_memory(sum_kernel<S, kSplit>, kSharedBytes, done);
  if (error != cudaSuccess) return error;
  const auto blocks = static_cast<unsigned>(int64_t{args.blocks.windows} * num_parts(args, kSplit));
  if (blocks > 0) sum_kernel<S, kSplit><<<blocks, kSumWarps * 32, kSharedBytes, stream>>>(args);
  return cudaGetLastError();
}

template <class S>
cudaError_t of_split(const SumArgs& args, cudaStream_t stream) {
  return args.shared_windows ? launch<S, kSumWarps>(args, stream) : launch<S, 1>(args, stream);
}

}  // namespace

cudaError_t run_sum(Storage storage, const SumArgs& args, cudaStream_t stream) {
  switch (storage) {
    case Storage::bf16: return of_split<__nv_bfloat16>(args, stream);
    case Storage::f16: return of_split<__half>(args, stream);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace edgeless::cuda::wsb
