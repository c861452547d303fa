// Launches of the float32 GEMM kernel (product.cuh), and the choice of its tiling and its split-K.
#include "product.cuh"

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "../../thresholds.h"
#include "shared_memory.cuh"

namespace edgeless::cuda::projection {
namespace {

template <class Tiling, bool kTransposedA, bool kTransposedB, bool kTwo = false>
cudaError_t launch(const ProductArgs& args, cudaStream_t stream) {
  static std::atomic<uint64_t> done{0};
  constexpr int kBytes = ProductShared<Tiling, kTransposedA, kTransposedB>::kBytes;
  const auto kernel = product_kernel<Tiling, kTransposedA, kTransposedB, kTwo>;
  const cudaError_t error = allow_shared_memory(kernel, kBytes, done);
  if (error != cudaSuccess) return error;
  kernel<<<product_grid<Tiling>(args), Tiling::kThreads, kBytes, stream>>>(args);
  return cudaGetLastError();
}

template <class Tiling>
cudaError_t launch_tiling(bool transposed_a, bool transposed_b, const ProductArgs& args, cudaStream_t stream) {
  if (transposed_a) return transposed_b ? launch<Tiling, true, true>(args, stream) : cudaErrorInvalidValue;
  if (args.more.a) return transposed_b ? cudaErrorInvalidValue : launch<Tiling, false, false, true>(args, stream);
  return transposed_b ? launch<Tiling, false, true>(args, stream) : launch<Tiling, false, false>(args, stream);
}

// divided: split-K.
bool is_wide(int64_t rows, int64_t columns, int64_t depth, bool divided) {
  if (divided) return rows * columns >= kWideResult && depth >= kWideDividedDepth;
  return depth >= kWideDepth && WideTiling::blocks(rows, columns) >= kWideTiles;
}

}  // namespace

int64_t product_share(bool half, int64_t rows, int64_t columns, int64_t count, int64_t depth, int multiprocessors,
                      int64_t most_shares) {
  const auto share_of = [&](auto tiling) {
    using Of = decltype(tiling);
    const int64_t blocks = Of::blocks(rows, columns) * count;
    const int64_t most = std::min(most_shares, (depth + 2 * kTileDepth - 1) / (2 * kTileDepth));
    const int64_t shares = std::max<int64_t>(1, std::min(most, Of::kBlocks * multiprocessors / blocks));
    const int64_t share = (depth + shares - 1) / shares;
    return (share + kTileDepth - 1) / kTileDepth * kTileDepth;
  };
  if (half) return share_of(HalfTiling());
  return is_wide(rows, columns, depth, true) ? share_of(WideTiling()) : share_of(SquareTiling());
}

cudaError_t run_product(bool transposed_a, bool transposed_b, const ProductArgs& args, cudaStream_t stream) {
  return is_wide(args.rows, args.columns, args.depth, transposed_a)
             ? launch_tiling<WideTiling>(transposed_a, transposed_b, args, stream)
             : launch_tiling<SquareTiling>(transposed_a, transposed_b, args, stream);
}

}  // namespace edgeless::cuda::projection
