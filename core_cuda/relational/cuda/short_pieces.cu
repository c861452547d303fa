// Launches of the kernel that makes products of pieces that have few edges each, of rows of up to 64 floats
// (short_pieces.cuh).
#include "short_pieces.cuh"

#include <algorithm>
#include <atomic>

#include "../../projection/cuda/shared_memory.cuh"

namespace edgeless::cuda::relational {
namespace {

template <int kWidth, Weights kWeights, bool kFull>
cudaError_t launch(const PieceProductsArgs& args, void* memory, int processors, cudaStream_t stream) {
  static std::atomic<uint64_t> done{0};
  constexpr int kBytes = 2 * WeightParts<kWidth>::kVectors * 16;
  static_assert(kBytes + sizeof(Chunk[kBegun]) <= ProductsLayout<float, 64>::kBytes,
                "the plan knows the memory of that kernel alone");
  const auto kernel = short_products_kernel<kWidth, kWeights, kFull>;
  const cudaError_t error = projection::allow_shared_memory(kernel, kBytes, done);
  if (error != cudaSuccess) return error;
  const auto num_chunks = static_cast<int>(num_tiles(args.pieces.count, args.pieces.types, args.share));
  const Scratch<kWidth> scratch(memory, args.pieces.types, num_chunks);
  prepare_products_kernel<kWidth>
      <<<args.pieces.types + num_chunks / kPartThreads + 1, kPartThreads, 0, stream>>>(args, scratch, num_chunks);
  kernel<<<std::min(ShortProducts::kBlocks * processors, num_chunks), ShortProducts::kThreads, kBytes, stream>>>(
      args, scratch, num_chunks);
  return cudaGetLastError();
}

}  // namespace

int64_t short_products_scratch(const PieceProductsArgs& args) {
  const int64_t chunks = num_tiles(args.pieces.count, args.pieces.types, args.share) + 2;  // one for `taken`
  return args.pieces.types * int64_t{WeightParts<kMostShortWidth>::kVectors} * 16 + chunks * 16;
}

cudaError_t run_short_products(const PieceProductsArgs& args, void* scratch, int processors, cudaStream_t stream) {
  const int in = args.in_width;
  const bool narrow = in <= 32 && args.out_width <= 32;
  return of_weights<Weights::of_pieces>(args.neighbors, [&](auto weights) {
    if (narrow) {
      return in == 32 ? launch<32, weights(), true>(args, scratch, processors, stream)
                      : launch<32, weights(), false>(args, scratch, processors, stream);
    }
    return in == 64 ? launch<64, weights(), true>(args, scratch, processors, stream)
                    : launch<64, weights(), false>(args, scratch, processors, stream);
  });
}

}  // namespace edgeless::cuda::relational
