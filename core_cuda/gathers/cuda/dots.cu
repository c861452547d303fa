// Launches the kernel of dots.cuh.
#include "dots.cuh"

namespace edgeless::cuda::gathers {
namespace {

template <class Index, class Load>
void launch(bool by_neighbor, const DotsArgs& args, cudaStream_t stream) {
  const auto kernel = by_neighbor ? dots_kernel<Index, Load, true> : dots_kernel<Index, Load, false>;
  const auto blocks = static_cast<unsigned>((args.graph.num_rows * 32 + kThreads - 1) / kThreads);
  kernel<<<blocks, kThreads, 0, stream>>>(args);
}

template <class Index>
void launch(bool by_neighbor, bool vectors, const DotsArgs& args, cudaStream_t stream) {
  if (vectors) {
    launch<Index, float4>(by_neighbor, args, stream);
  } else {
    launch<Index, float>(by_neighbor, args, stream);
  }
}

}  // namespace

cudaError_t run_dots(bool wide_index, bool by_neighbor, bool vectors, const DotsArgs& args, cudaStream_t stream) {
  if (args.graph.num_rows == 0) return cudaSuccess;
  if (wide_index) {
    launch<int64_t>(by_neighbor, vectors, args, stream);
  } else {
    launch<int32_t>(by_neighbor, vectors, args, stream);
  }
  return cudaGetLastError();
}

}  // namespace edgeless::cuda::gathers
