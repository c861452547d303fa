// Launches of the kernel that sums the neighbours of rows that have few each, and adds a product and a bias
// (short_rows.cuh).
#include "short_rows.cuh"

#include <algorithm>

#include "of_storage.cuh"

namespace edgeless::cuda::relational {
namespace {

template <class S, bool kTransposed>
cudaError_t launch(const RowSumsArgs& args, int processors, cudaStream_t stream) {
  const auto kernel = args.width == kMostShortWidth ? short_rows_kernel<S, kTransposed, true>
                                                    : short_rows_kernel<S, kTransposed, false>;
  const int64_t turns = (args.num_rows + ShortRows::kWarps * kWarpPieces - 1) / (ShortRows::kWarps * kWarpPieces);
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(ShortRows::kBlocks * processors, turns));
  kernel<<<blocks, ShortRows::kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace

cudaError_t run_short_rows(Storage storage, const RowSumsArgs& args, int processors, cudaStream_t stream) {
  return of_storage<true>(storage, [&](auto zero) {
    using S = decltype(zero);
    return args.transposed ? launch<S, true>(args, processors, stream) : launch<S, false>(args, processors, stream);
  });
}

}  // namespace edgeless::cuda::relational
