// The host function that launches the kernel of add_gradients.cuh.
#include "add_gradients.cuh"

#include <algorithm>

#include "of_storage.cuh"

namespace edgeless::cuda::relational {

using namespace add_gradients;

namespace {

constexpr int kManyThreads = 1 << 18;  // that a device has at once

template <class S>
cudaError_t launch(const AddGradientsArgs& args, cudaStream_t stream) {
  const auto blocks = [](int size, int sides) { return (size + 4 * kThreads / sides - 1) / (4 * kThreads / sides); };
  // Until the device is full, or each has a chunk.
  const int64_t types = std::max(args.tiles.types, 1), chunks = args.tiles.count / (args.share * types);
  int sides = 1;
  while (sides < std::min<int64_t>(chunks, kOwnSides) && types * args.size / 4 * sides < kManyThreads) sides *= 2;
  const int of_type = args.partial ? blocks(args.size, sides) : 0;
  const int64_t of_types = int64_t{of_type} * args.tiles.types;
  const int64_t all = of_types + (args.own_partial ? blocks(args.own_size, kOwnSides) : 0);
  if (all == 0) return cudaSuccess;
  add_gradients_kernel<S><<<static_cast<unsigned>(all), kThreads, 0, stream>>>(args, of_type, of_types, sides);
  return cudaGetLastError();
}

}  // namespace

cudaError_t run_add_gradients(Storage storage, const AddGradientsArgs& args, cudaStream_t stream) {
  return of_storage<true>(storage, [&](auto zero) { return launch<decltype(zero)>(args, stream); });
}

}  // namespace edgeless::cuda::relational
