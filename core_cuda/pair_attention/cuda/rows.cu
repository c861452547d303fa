// Launches the kernels of rows.cuh.
#include "rows.cuh"

#include <type_traits>

#include "kernels.h"

namespace edgeless::cuda {
namespace {

// Calls f with the lanes of a sub-warp as an integral_constant.
template <class F>
cudaError_t with_width(int vectors, F&& f) {
  if (vectors <= 8) return f(std::integral_constant<int, 8>{});
  if (vectors <= 16) return f(std::integral_constant<int, 16>{});
  return f(std::integral_constant<int, 32>{});
}

// Calls f with a value of the storage type.
template <class F>
cudaError_t with_storage(Storage storage, F&& f) {
  switch (storage) {
    case Storage::f32: return f(float{});
    case Storage::f16: return f(__half{});
    case Storage::bf16: return f(__nv_bfloat16{});
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace

cudaError_t run_deltas(Storage storage, const RowSumsArgs& args, cudaStream_t stream) {
  return with_storage(storage, [&](auto zero) {
    return with_width(args.vectors, [&](auto width) {
      deltas_kernel<decltype(zero), decltype(width)::value><<<args.blocks, kRowThreads, 0, stream>>>(args);
      return cudaGetLastError();
    });
  });
}

cudaError_t run_outer_rows(Storage storage, const RowSumsArgs& args, cudaStream_t stream) {
  return with_storage(storage, [&](auto zero) {
    return with_width(args.vectors, [&](auto width) {
      outer_rows_kernel<decltype(zero), decltype(width)::value><<<args.blocks, kRowThreads, 0, stream>>>(args);
      return cudaGetLastError();
    });
  });
}

cudaError_t run_sum_shares(Storage storage, const SharesArgs& args, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>((args.width + 31) / 32), static_cast<unsigned>(args.sums));
  return with_storage(storage, [&](auto zero) {
    sum_shares_kernel<decltype(zero)><<<grid, dim3(32, kSides), 0, stream>>>(args);
    return cudaGetLastError();
  });
}

cudaError_t run_prepare(const PrepareArgs& args, cudaStream_t stream) {
  const int64_t items = args.pieces + args.pairs + args.vector_words;
  prepare_kernel<<<static_cast<unsigned>((items + kRowThreads - 1) / kRowThreads), kRowThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace edgeless::cuda
