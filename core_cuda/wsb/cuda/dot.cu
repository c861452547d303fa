// Launches the kernels of dot.cuh.
#include "dot.cuh"

#include <atomic>

#include "../../projection/cuda/shared_memory.cuh"

namespace edgeless::cuda::wsb {
namespace {

template <DotPass kPass, class S, int kDim>
cudaError_t launch(const DotArgs& args, cudaStream_t stream) {
  static std::atomic<uint64_t> done{0};
  constexpr int kBytes = DotShape<kPass, kDim>::kBytes;
  const cudaError_t error = projection::allow_shared_memory(dot_kernel<kPass, S, kDim>, kBytes, done);
  if (error != cudaSuccess) return error;
  const auto blocks = static_cast<unsigned>(int64_t{args.blocks.windows} * args.heads);
  if (blocks > 0) dot_kernel<kPass, S, kDim><<<blocks, kDotThreads, kBytes, stream>>>(args);
  return cudaGetLastError();
}

template <DotPass kPass, class S>
cudaError_t of_dim(int dim, const DotArgs& args, cudaStream_t stream) {
  switch (dim) {
    case 32: return launch<kPass, S, 32>(args, stream);
    case 64: return launch<kPass, S, 64>(args, stream);
    case 128: return launch<kPass, S, 128>(args, stream);
    default: return cudaErrorInvalidValue;
  }
}

template <class S>
cudaError_t of_pass(DotPass pass, int dim, const DotArgs& args, cudaStream_t stream) {
  switch (pass) {
    case DotPass::forward: return of_dim<DotPass::forward, S>(dim, args, stream);
    case DotPass::by_dst: return of_dim<DotPass::by_dst, S>(dim, args, stream);
    case DotPass::by_src: return of_dim<DotPass::by_src, S>(dim, args, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace

cudaError_t run_dot(DotPass pass, Storage storage, int dim, const DotArgs& args, cudaStream_t stream) {
  switch (storage) {
    case Storage::bf16: return of_pass<__nv_bfloat16>(pass, dim, args, stream);
    case Storage::f16: return of_pass<__half>(pass, dim, args, stream);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace edgeless::cuda::wsb
