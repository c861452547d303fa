// Launches of the kernel that makes the gradients of products of pieces, of rows of up to 64 floats
// (short_gradients.cuh).
#include "short_gradients.cuh"

#include <atomic>

#include "../../projection/cuda/shared_memory.cuh"

namespace edgeless::cuda::relational {
namespace {

template <Weights kWeights, bool kFull>
cudaError_t launch(const PieceGradientsArgs& args, uint4* parts, cudaStream_t stream) {
  static std::atomic<uint64_t> done{0};
  const auto kernel = short_gradients_kernel<kWeights, kFull>;
  const cudaError_t error = projection::allow_shared_memory(kernel, sizeof(Memory), done);
  if (error != cudaSuccess) return error;
  if (args.out) prepare_gradients_kernel<<<args.pieces.types, kPartThreads, 0, stream>>>(args, parts);
  const auto blocks = static_cast<unsigned>(num_tiles(args.pieces.count, args.pieces.types, args.share));
  kernel<<<blocks, ShortGradients::kThreads, sizeof(Memory), stream>>>(args, parts);
  return cudaGetLastError();
}

}  // namespace

int64_t short_gradients_scratch(const PieceGradientsArgs& args) {
  return args.pieces.types * int64_t{WeightParts<kMostShortWidth>::kVectors} * 16;
}

cudaError_t run_short_gradients(const PieceGradientsArgs& args, void* scratch, cudaStream_t stream) {
  auto* const parts = static_cast<uint4*>(scratch);
  return of_weights<Weights::in_order>(args.neighbors, [&](auto weights) {
    return args.out_width == kMostShortWidth ? launch<weights(), true>(args, parts, stream)
                                             : launch<weights(), false>(args, parts, stream);
  });
}

}  // namespace edgeless::cuda::relational
