// Launches of the kernel that makes the gradients of a typed product of sums (piece_gradients.cuh).
#include "piece_gradients.cuh"

#include <atomic>

#include "../../projection/cuda/shared_memory.cuh"
#include "of_storage.cuh"

namespace edgeless::cuda::relational {
namespace {

template <class S, int kWidth, int kColumns = kWarpColumns<kWidth>>
cudaError_t launch(const PieceGradientsArgs& args, cudaStream_t stream) {
  static std::atomic<uint64_t> done{0};
  using Of = PieceGradientsShape<S, kWidth, kColumns>;
  const cudaError_t error =
      projection::allow_shared_memory(piece_gradients_kernel<S, kWidth, kColumns>, Of::kBytes, done);
  if (error != cudaSuccess) return error;
  const auto blocks = static_cast<unsigned>(num_tiles(args.pieces.count, args.pieces.types, args.share));
  piece_gradients_kernel<S, kWidth, kColumns>
      <<<blocks, TileSums<S, kWidth, kColumns>::kThreads, Of::kBytes, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace

cudaError_t run_piece_gradients(Storage storage, const PieceGradientsArgs& args, cudaStream_t stream) {
  return of_storage<true>(storage, [&](auto zero) {
    using S = decltype(zero);
    const bool narrow = args.in_width <= 64 && args.out_width <= 64;
    if constexpr (sizeof(S) == 4) {
      if (args.in_width <= 32 && args.out_width <= 32) return launch<S, 32>(args, stream);
    }
    if (narrow && args.few) return launch<S, 64, kFewColumns>(args, stream);
    return narrow ? launch<S, 64>(args, stream) : launch<S, 128>(args, stream);
  });
}

}  // namespace edgeless::cuda::relational
