// The host functions that launch the kernels of typed_rows.cuh.
#include "typed_rows.cuh"

#include "of_storage.cuh"
#include "typed_rows.h"

namespace edgeless::cuda::relational {

using namespace typed_rows;

namespace {

struct Shape {
  dim3 grid, block;

  Shape(const TypedRowsArgs& args, int size) {
    const int vectors = args.width / size;
    unsigned lanes = 1;
    while (lanes < 32 && static_cast<int>(lanes) < vectors) lanes *= 2;
    block = dim3(lanes, kThreads / lanes);
    grid = dim3(static_cast<unsigned>(num_tiles(args.entries.count, args.entries.types, args.chunk)),
                (static_cast<unsigned>(vectors) + lanes - 1) / lanes);
  }
};

bool has_vectors(const TypedRowsArgs& args, int size) {
  const auto aligned = [](const void* at) { return reinterpret_cast<uintptr_t>(at) % 16 == 0; };
  return args.width % size == 0 && aligned(args.grad) && aligned(args.y) && aligned(args.x) && aligned(args.out_y) &&
         aligned(args.out_x);
}

template <class S, int kSize>
cudaError_t blend(const TypedRowsArgs& args, cudaStream_t stream) {
  const Shape shape(args, kSize);
  blend_kernel<S, kSize><<<shape.grid, shape.block, 0, stream>>>(args);
  return cudaGetLastError();
}

template <class S, int kSize>
cudaError_t partial_sums(const TypedRowsArgs& args, cudaStream_t stream) {
  const Shape shape(args, kSize);
  if (args.alpha) {
    partial_sums_kernel<S, kSize, true><<<shape.grid, shape.block, 0, stream>>>(args);
  } else {
    partial_sums_kernel<S, kSize, false><<<shape.grid, shape.block, 0, stream>>>(args);
  }
  return cudaGetLastError();
}

template <class S>
cudaError_t sums(const TypedRowsArgs& args, cudaStream_t stream) {
  const cudaError_t error =
      has_vectors(args, kVec<S>) ? partial_sums<S, kVec<S>>(args, stream) : partial_sums<S, 1>(args, stream);
  if (error != cudaSuccess || !args.partial) return error;
  constexpr int most = 65535;  // of a grid's second dimension
  const dim3 grid(args.total ? 1 : static_cast<unsigned>((args.width + kLanes - 1) / kLanes),
                  static_cast<unsigned>(args.entries.types < most ? args.entries.types : most));
  add_partials_kernel<S><<<grid, dim3(kLanes, kSides), 0, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace

cudaError_t run_typed_blend(Storage storage, const TypedRowsArgs& args, cudaStream_t stream) {
  return of_storage<false>(storage, [&](auto zero) {
    using S = decltype(zero);
    return has_vectors(args, kVec<S>) ? blend<S, kVec<S>>(args, stream) : blend<S, 1>(args, stream);
  });
}

cudaError_t run_typed_sums(Storage storage, const TypedRowsArgs& args, cudaStream_t stream) {
  return of_storage<false>(storage, [&](auto zero) { return sums<decltype(zero)>(args, stream); });
}

}  // namespace edgeless::cuda::relational
