// Launches the kernels of edge_products.cuh and of edge_product_tiles.cuh.
#include "edge_products.cuh"

#include <type_traits>

#include "../../common/with_storage.cuh"
#include "edge_product_tiles.cuh"
#include "edge_terms.h"

namespace edgeless::cuda {
namespace {

// Threads per edge: a power of two, such that a block processes at most kUnit edges at once.
int width_of(int columns, int of_thread) {
  int width = kThreads / kUnit;
  while (width * of_thread < columns && width < kThreads) width *= 2;
  return width;
}

// bytes: dynamic shared memory.
template <class Kernel, class A>
cudaError_t start(Kernel kernel, dim3 grid, int width, size_t bytes, const EdgeProducts<A>& args, cudaStream_t stream) {
  if (bytes > 0) {
    const cudaError_t error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
    if (error != cudaSuccess) return error;
  }
  kernel<<<grid, kThreads, bytes, stream>>>(args, width);
  return cudaGetLastError();
}

template <class S, int kDim, int kColumns, bool kHidden, bool kAttrGrad>
cudaError_t launch(const EdgeProducts<Arithmetic<S>>& args, cudaStream_t stream) {
  using A = Arithmetic<S>;
  const int columns = args.edges.heads * args.channels, width = width_of(columns, kColumns), all = width * kColumns;
  const dim3 grid(args.blocks, (columns + all - 1) / all, (args.edges.dim + kDim - 1) / kDim);
  return start(edge_products_kernel<S, kDim, kColumns, kHidden, kAttrGrad>, grid, width,
               kAttrGrad ? static_cast<size_t>(all) * (kEdgesOfTile<A, kDim, kAttrGrad> + kDim) * sizeof(A) : 0, args,
               stream);
}

template <class S, int kDim, bool kAttrGrad>
cudaError_t launch_tiles(const EdgeProducts<float>& args, cudaStream_t stream) {
  const int columns = args.edges.heads * args.channels;
  int width = 1;
  while (width * kTileColumns < columns && width < kThreads / 32) width *= 2;
  const int all = width * kTileColumns;
  const dim3 grid(args.blocks, (columns + all - 1) / all);
  const int numbers = kEdgesOfTiles<kDim, kAttrGrad> * pitch_of_g(all) + all * kPitchOfWeighted<kDim>;
  return start(edge_tiles_kernel<S, kDim, kAttrGrad>, grid, width, kAttrGrad ? numbers * sizeof(float) : 0, args,
               stream);
}

template <class S, int kDim, int kColumns>
cudaError_t launch_hidden(const EdgeProducts<Arithmetic<S>>& args, cudaStream_t stream) {
  return args.weighted ? launch<S, kDim, kColumns, true, true>(args, stream)
                       : launch<S, kDim, kColumns, true, false>(args, stream);
}

template <class S, int kDim>
cudaError_t launch_mode(const EdgeProducts<Arithmetic<S>>& args, cudaStream_t stream) {
  if (!args.proj) return launch<S, kDim, 1, false, false>(args, stream);
  if constexpr (!std::is_same_v<S, double>) {
    if (args.channels % 2 == 0) {
      return args.weighted ? launch_tiles<S, kDim, true>(args, stream) : launch_tiles<S, kDim, false>(args, stream);
    }
  } else {
    constexpr int kColumns = kMostHidden / kDim;
    if (kColumns > 1 && args.channels % kColumns == 0) return launch_hidden<S, kDim, kColumns>(args, stream);
  }
  return launch_hidden<S, kDim, 1>(args, stream);
}

}  // namespace

template <class A>
bool makes_attr_grad(int heads, int channels) {
  constexpr int kMostBytes = 48 << 10;
  const int columns = heads * channels, all = width_of(columns, 1);  // the same for any columns per thread
  return columns <= all && all * (kUnit + kMostHidden) * sizeof(A) <= kMostBytes;
}

template <class A>
cudaError_t edge_products(const EdgeProducts<A>& args, cudaStream_t stream) {
  cudaError_t error = cudaSuccess;
  const cudaError_t last = with_storage<A>(args.edges.storage, [&](auto zero) {
    using S = decltype(zero);
    error = args.edges.dim <= 8    ? launch_mode<S, 8>(args, stream)
            : args.edges.dim <= 16 ? launch_mode<S, 16>(args, stream)
                                   : launch_mode<S, kMostHidden>(args, stream);
  });
  return error != cudaSuccess ? error : last;
}

template <class A>
cudaError_t hidden_gradients(const EdgeProducts<A>& args, int64_t first, int64_t count, const void* dst_end,
                             const void* src_end, A* term, cudaStream_t stream) {
  const int64_t threads = count * args.edges.heads * args.channels;
  if (threads == 0) return cudaSuccess;
  return with_storage<A>(args.edges.storage, [&](auto zero) {
    hidden_gradients_kernel<decltype(zero)>
        <<<blocks_for(threads), kThreads, 0, stream>>>(args, first, count, dst_end, src_end, term);
  });
}

template bool makes_attr_grad<float>(int, int);
template bool makes_attr_grad<double>(int, int);
template cudaError_t edge_products(const EdgeProducts<float>&, cudaStream_t);
template cudaError_t edge_products(const EdgeProducts<double>&, cudaStream_t);
template cudaError_t hidden_gradients(const EdgeProducts<float>&, int64_t, int64_t, const void*, const void*, float*,
                                      cudaStream_t);
template cudaError_t hidden_gradients(const EdgeProducts<double>&, int64_t, int64_t, const void*, const void*, double*,
                                      cudaStream_t);

}  // namespace edgeless::cuda
