// The entries of pick.cuh.
#include "pick.cuh"

namespace edgeless::cuda::extrema {

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

cudaError_t pick(const GatherArgs& args, cudaStream_t stream) {
  switch (args.arg_size) {
    case 1: return launch_pick<uint8_t>(args, stream);
    case 2: return launch_pick<uint16_t>(args, stream);
    default: return launch_pick<uint32_t>(args, stream);
  }
}

}  // namespace edgeless::cuda::extrema
