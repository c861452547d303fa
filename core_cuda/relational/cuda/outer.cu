// The host function that launches the kernel of outer.cuh.
#include "outer.cuh"

#include <atomic>

#include "../../projection/cuda/shared_memory.cuh"
#include "of_storage.cuh"

namespace edgeless::cuda::relational {

using namespace outer;

namespace {

unsigned tiles(int size) { return static_cast<unsigned>((size + kSize - 1) / kSize); }

template <class S>
cudaError_t launch(Storage storage, const OuterArgs& args, cudaStream_t stream) {
  static std::atomic<uint64_t> done{0};
  cudaError_t error = projection::allow_shared_memory(outer_kernel<S>, kSharedBytes<S>, done);
  if (error != cudaSuccess) return error;
  const dim3 grid(static_cast<unsigned>(num_tiles(args.entries.count, args.entries.types, args.chunk)),
                  tiles(args.rows) * tiles(args.columns), args.blocks);
  outer_kernel<S><<<grid, kThreads, kSharedBytes<S>, stream>>>(args);
  error = cudaGetLastError();
  return error != cudaSuccess ? error : add_chunks(storage, args, stream);
}

}  // namespace

cudaError_t run_outer(Storage storage, const OuterArgs& args, cudaStream_t stream) {
  return of_storage<true>(storage, [&](auto zero) { return launch<decltype(zero)>(storage, args, stream); });
}

}  // namespace edgeless::cuda::relational
