// Launches of the GEMM kernel for 16-bit matrices of few rows (half_gemm.cuh).
#include "half_gemm.cuh"

namespace edgeless::cuda::projection {
namespace {

template <class S, bool kTransposedA, bool kTransposedB, bool kTwo = false>
cudaError_t launch(const ProductArgs& args, cudaStream_t stream) {
  half_gemm_kernel<S, kTransposedA, kTransposedB, kTwo>
      <<<product_grid<HalfTiling>(args), HalfTiling::kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

template <class S>
cudaError_t launch(bool transposed_a, bool transposed_b, const ProductArgs& args, cudaStream_t stream) {
  if (transposed_a) return transposed_b ? launch<S, true, true>(args, stream) : cudaErrorInvalidValue;
  if (args.more.a) return transposed_b ? cudaErrorInvalidValue : launch<S, false, false, true>(args, stream);
  return transposed_b ? launch<S, false, true>(args, stream) : launch<S, false, false>(args, stream);
}

}  // namespace

cudaError_t run_half_gemm(Storage storage, bool transposed_a, bool transposed_b, const ProductArgs& args,
                          cudaStream_t stream) {
  switch (storage) {
    case Storage::f16: return launch<__half>(transposed_a, transposed_b, args, stream);
    case Storage::bf16: return launch<__nv_bfloat16>(transposed_a, transposed_b, args, stream);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace edgeless::cuda::projection
