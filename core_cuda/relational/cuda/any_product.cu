// The host functions that launch the kernels of any_product.cuh.
#include "any_product.cuh"

#include "of_storage.cuh"

namespace edgeless::cuda::relational {

using namespace any_product;

namespace {

unsigned tiles(int size) { return static_cast<unsigned>((size + kTile - 1) / kTile); }

template <class S>
cudaError_t add(const OuterArgs& args, cudaStream_t stream) {
  constexpr int most = 65535;  // of a grid's second dimension
  const int64_t size = static_cast<int64_t>(args.blocks) * args.rows * args.columns;
  const dim3 grid(static_cast<unsigned>((size + kAddThreads - 1) / kAddThreads),
                  static_cast<unsigned>(args.entries.types < most ? args.entries.types : most));
  add_chunks_kernel<S><<<grid, kAddThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

template <class S>
cudaError_t launch(const ProductArgs& args, cudaStream_t stream) {
  const int64_t down = num_tiles(args.entries.count, args.entries.types, kTile);
  const dim3 grid(static_cast<unsigned>(down * tiles(args.columns)), args.blocks);
  product_kernel<S><<<grid, dim3(kTile, kDown), 0, stream>>>(args);
  return cudaGetLastError();
}

template <class S>
cudaError_t launch(const OuterArgs& args, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(num_tiles(args.entries.count, args.entries.types, args.chunk)),
                  tiles(args.rows) * tiles(args.columns), args.blocks);
  outer_kernel<S><<<grid, dim3(kTile, kDown), 0, stream>>>(args);
  const cudaError_t error = cudaGetLastError();
  return error != cudaSuccess ? error : add<S>(args, stream);
}

}  // namespace

cudaError_t run_any_product(Storage storage, const ProductArgs& args, cudaStream_t stream) {
  return of_storage<false>(storage, [&](auto zero) { return launch<decltype(zero)>(args, stream); });
}

cudaError_t run_any_outer(Storage storage, const OuterArgs& args, cudaStream_t stream) {
  return of_storage<false>(storage, [&](auto zero) { return launch<decltype(zero)>(args, stream); });
}

cudaError_t add_chunks(Storage storage, const OuterArgs& args, cudaStream_t stream) {
  return of_storage<false>(storage, [&](auto zero) { return add<decltype(zero)>(args, stream); });
}

}  // namespace edgeless::cuda::relational
