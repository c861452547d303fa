// The host functions that launch the kernels of own_gradients.cuh.
#include "own_gradients.cuh"

#include <atomic>

#include "../../projection/cuda/shared_memory.cuh"
#include "of_storage.cuh"

namespace edgeless::cuda::relational {

using namespace own_gradients;

namespace {

cudaError_t launch_squares(const OwnGradientsArgs& args, cudaStream_t stream) {
  static std::atomic<uint64_t> done{0};
  constexpr int kBytes = 2 * sizeof(OwnTile);
  static_assert(kBytes <= GradientsLayout<float, 64>::kBytes, "the plan knows the memory of that kernel alone");
  const cudaError_t error = projection::allow_shared_memory(own_squares_kernel, kBytes, done);
  if (error != cudaSuccess) return error;
  const int64_t rows = int64_t{args.share} * kTilePieces;
  const auto blocks = static_cast<unsigned>((args.num_rows + rows - 1) / rows);
  own_squares_kernel<<<blocks, kSquareThreads, kBytes, stream>>>(args);
  return cudaGetLastError();
}

template <class S, int kWidth>
cudaError_t launch(const OwnGradientsArgs& args, cudaStream_t stream) {
  static std::atomic<uint64_t> done{0};
  using Of = Shape<S, kWidth>;
  static_assert(Of::kBytes <= GradientsLayout<S, kWidth>::kBytes, "the plan knows the memory of that kernel alone");
  const cudaError_t error = projection::allow_shared_memory(own_gradients_kernel<S, kWidth>, Of::kBytes, done);
  if (error != cudaSuccess) return error;
  const int64_t rows = int64_t{args.share} * kTilePieces;
  const auto blocks = static_cast<unsigned>((args.num_rows + rows - 1) / rows);
  own_gradients_kernel<S, kWidth><<<blocks, kFusedThreads, Of::kBytes, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace

cudaError_t run_own_gradients(Storage storage, const OwnGradientsArgs& args, cudaStream_t stream) {
  return of_storage<true>(storage, [&](auto zero) {
    using S = decltype(zero);
    const bool narrow = args.own_width <= 64 && args.width <= 64;
    if constexpr (sizeof(S) == 4) {
      if (narrow && args.own.numbers && args.partial && !args.rows) return launch_squares(args, stream);
    }
    return narrow ? launch<S, 64>(args, stream) : launch<S, 128>(args, stream);
  });
}

}  // namespace edgeless::cuda::relational
