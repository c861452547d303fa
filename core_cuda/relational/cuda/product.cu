// The host function that launches the kernel of product.cuh.
#include "product.cuh"

#include <algorithm>
#include <atomic>
#include <type_traits>

#include "../../projection/cuda/shared_memory.cuh"
#include "of_storage.cuh"

namespace edgeless::cuda::relational {

using namespace product;

namespace {

unsigned tiles(int size, int tile) { return static_cast<unsigned>((size + tile - 1) / tile); }

template <class S, bool kTransposed, int kSides>
cudaError_t launch(const ProductArgs& args, cudaStream_t stream) {
  static std::atomic<uint64_t> done{0};
  constexpr int kBytes = kVectors<S> * kSides * 32 * sizeof(Vector);  // of a group of depths
  const auto kernel = product_kernel<S, kTransposed, kSides>;
  constexpr int kRowBytes = kWarps * RowSteps<S>::kBytes;
  const cudaError_t error =
      projection::allow_shared_memory(kernel, kRowBytes + kChunk<S> / kGroupDepth<S> * kBytes, done);
  if (error != cudaSuccess) return error;
  const int64_t down = num_tiles(args.entries.count, args.entries.types, args.share);
  const dim3 grid(static_cast<unsigned>(down * tiles(args.columns, 8 * kSides)), args.blocks);
  const int bytes = kRowBytes + static_cast<int>(tiles(std::min(args.depth, kChunk<S>), kGroupDepth<S>)) * kBytes;
  kernel<<<grid, kThreads, bytes, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace

cudaError_t run_product(Storage storage, const ProductArgs& args, cudaStream_t stream) {
  return of_storage<true>(storage, [&](auto zero) {
    using S = decltype(zero);
    const auto run = [&](auto sides) {
      constexpr int kSides = decltype(sides)::value;
      return args.transposed ? launch<S, true, kSides>(args, stream) : launch<S, false, kSides>(args, stream);
    };
    if (args.columns <= 8 * kNarrowSides<S>) return run(std::integral_constant<int, kNarrowSides<S>>());
    return run(std::integral_constant<int, kWideSides>());
  });
}

}  // namespace edgeless::cuda::relational
