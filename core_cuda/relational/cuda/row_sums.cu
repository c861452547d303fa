// Launches of the kernel that sums the neighbours of rows and adds a product and a bias (row_sums.cuh).
#include "row_sums.cuh"

#include <atomic>

#include "../../projection/cuda/shared_memory.cuh"
#include "of_storage.cuh"

namespace edgeless::cuda::relational {
namespace {

template <class S, int kWidth, bool kTransposed, int kColumns = kRowColumns<S, kWidth>, bool kTwice = true>
cudaError_t launch(const RowSumsArgs& args, cudaStream_t stream) {
  static std::atomic<uint64_t> done{0};
  using Of = RowSumsShape<S, kWidth, kColumns, kTwice>;
  const cudaError_t error =
      projection::allow_shared_memory(row_sums_kernel<S, kWidth, kColumns, kTransposed, kTwice>, Of::kBytes, done);
  if (error != cudaSuccess) return error;
  const auto blocks = static_cast<unsigned>((args.num_tiles + args.share - 1) / args.share);
  row_sums_kernel<S, kWidth, kColumns, kTransposed, kTwice>
      <<<blocks, TileSums<S, kWidth, kColumns>::kThreads, Of::kBytes, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace

cudaError_t run_row_sums(Storage storage, const RowSumsArgs& args, cudaStream_t stream) {
  return of_storage<true>(storage, [&](auto zero) {
    using S = decltype(zero);
    const bool narrow = args.own_width <= 64 && args.width <= 64;
    if constexpr (sizeof(S) == 4) {
      if (args.own_width <= 32 && args.width <= 32) {
        return args.transposed ? launch<S, 32, true>(args, stream) : launch<S, 32, false>(args, stream);
      }
      if (narrow && args.little) {
        return args.transposed ? launch<S, 64, true, kFewColumns, false>(args, stream)
                               : launch<S, 64, false, kFewColumns, false>(args, stream);
      }
    } else {
      if (narrow && args.few) {
        return args.transposed ? launch<S, 64, true, kFewColumns>(args, stream)
                               : launch<S, 64, false, kFewColumns>(args, stream);
      }
    }
    if (args.transposed) return narrow ? launch<S, 64, true>(args, stream) : launch<S, 128, true>(args, stream);
    return narrow ? launch<S, 64, false>(args, stream) : launch<S, 128, false>(args, stream);
  });
}

}  // namespace edgeless::cuda::relational
