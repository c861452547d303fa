// The host function that launches the kernel of hub_sums.cuh.
#include "hub_sums.cuh"

#include "of_storage.cuh"

namespace edgeless::cuda::relational {

cudaError_t run_hub_sums(Storage storage, const HubSumsArgs& args, cudaStream_t stream) {
  if (args.count == 0) return cudaSuccess;
  return of_storage<true>(storage, [&](auto zero) {
    hub_sums_kernel<decltype(zero)><<<static_cast<unsigned>(args.count), kFusedThreads, 0, stream>>>(args);
    return cudaGetLastError();
  });
}

}  // namespace edgeless::cuda::relational
