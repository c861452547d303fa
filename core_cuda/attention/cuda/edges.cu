// Launches the kernels of edges.cuh.
#include "edges.cuh"

#include <type_traits>
#include <utility>

#include "../../common/with_storage.cuh"
#include "kernels.h"

namespace edgeless::cuda {
namespace {

// with_storage() for rows that are read in vectors, which adds those of four 16-bit values.
template <class A, class F>
cudaError_t with_vectors(Storage storage, F&& f) {
  if constexpr (std::is_same_v<A, float>) {
    if (storage == Storage::f16x4 || storage == Storage::bf16x4) {
      storage == Storage::f16x4 ? f(OfFour<__half>{}) : f(OfFour<__nv_bfloat16>{});
      return cudaGetLastError();
    }
  }
  return with_storage<A>(storage, std::forward<F>(f));
}

}  // namespace

template <class A>
cudaError_t sum_rows(const A* in, int64_t rows, const A* more, int64_t more_rows, int64_t cols, int sums, void* out,
                     Storage storage, cudaStream_t stream) {
  const unsigned across = static_cast<unsigned>((cols + 31) / 32);
  return with_storage<A>(storage, [&](auto zero) {
    using S = decltype(zero);
    sum_rows_kernel<A, S>
        <<<dim3(across, sums), kThreads, 0, stream>>>(in, rows, more, rows + more_rows, cols, static_cast<S*>(out));
  });
}

cudaError_t row_delta(const Rows& grad, Storage storage, const Rows& out, int64_t rows, int heads, int vectors,
                      void* rounded, float* delta, cudaStream_t stream) {
  if (rows * heads == 0) return cudaSuccess;
  return with_vectors<float>(storage, [&](auto zero) {
    using S = decltype(zero);
    if constexpr (!std::is_same_v<S, float>) {
      const auto kernel = rounded ? row_delta_kernel<S, true> : row_delta_kernel<S, false>;
      kernel<<<blocks_for(rows * heads * 4), kThreads, 0, stream>>>(grad, out, rows, heads, vectors,
                                                                    static_cast<Raw<S>*>(rounded), delta);
    }
  });
}

template <class A>
cudaError_t inverse_norms(const Rows& rows, Storage storage, int64_t num_rows, int heads, int vectors, A least, A* over,
                          cudaStream_t stream) {
  if (num_rows * heads == 0) return cudaSuccess;
  return with_vectors<A>(storage, [&](auto zero) {
    using S = decltype(zero);
    inverse_norms_kernel<A, S>
        <<<blocks_for(num_rows * heads * 4), kThreads, 0, stream>>>(rows, num_rows, heads, vectors, least, over);
  });
}

template <class A, class I>
cudaError_t row_dot(const CompressedGraph& graph, const A* a, const A* b, int heads, A* out, cudaStream_t stream) {
  if (graph.num_rows * heads == 0) return cudaSuccess;
  const dim3 grid(static_cast<unsigned>(graph.num_rows), static_cast<unsigned>(heads));
  row_dot_kernel<A, I><<<grid, kThreads, 0, stream>>>(graph, a, b, heads, out);
  return cudaGetLastError();
}

#define INSTANTIATE(A, I) \
  template cudaError_t row_dot<A, I>(const CompressedGraph&, const A*, const A*, int, A*, cudaStream_t);
INSTANTIATE(float, int32_t)
INSTANTIATE(float, int64_t)
INSTANTIATE(double, int32_t)
INSTANTIATE(double, int64_t)
#undef INSTANTIATE
template cudaError_t sum_rows(const float*, int64_t, const float*, int64_t, int64_t, int, void*, Storage, cudaStream_t);
template cudaError_t sum_rows(const double*, int64_t, const double*, int64_t, int64_t, int, void*, Storage,
                              cudaStream_t);
template cudaError_t inverse_norms(const Rows&, Storage, int64_t, int, int, float, float*, cudaStream_t);
template cudaError_t inverse_norms(const Rows&, Storage, int64_t, int, int, double, double*, cudaStream_t);

}  // namespace edgeless::cuda
