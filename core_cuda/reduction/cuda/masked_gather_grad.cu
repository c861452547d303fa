// Launches the kernels of masked_gather_grad.cuh.
#include "masked_gather_grad.cuh"

namespace edgeless::cuda::reduction {

cudaError_t argument_bytes(const void* arg, int arg_size, int64_t count, uint8_t* bytes, cudaStream_t stream) {
  const int64_t fours = count / 4, blocks = (fours + kByteThreads - 1) / kByteThreads;
  auto* to = reinterpret_cast<uint32_t*>(bytes);
  if (arg_size == 2) {
    bytes_kernel<<<static_cast<unsigned>(blocks), kByteThreads, 0, stream>>>(static_cast<const uint16_t*>(arg), fours,
                                                                             to);
  } else {
    bytes_kernel<<<static_cast<unsigned>(blocks), kByteThreads, 0, stream>>>(static_cast<const uint32_t*>(arg), fours,
                                                                             to);
  }
  return cudaGetLastError();
}

cudaError_t masked_gather_grad(const GatherArgs& args, cudaStream_t stream) {
  switch (args.arg_size) {
    case 1: return launch_masked_gather_grad<uint8_t>(args, stream);
    case 2: return launch_masked_gather_grad<uint16_t>(args, stream);
    default: return launch_masked_gather_grad<uint32_t>(args, stream);
  }
}

}  // namespace edgeless::cuda::reduction
