// Sums of the neighbours of rows, a node's own row times a matrix, and a bias, written once: a block sums the
// neighbours of 64 rows into shared memory, as tile_sums.cuh does, while the rows' own are on their way there,
// multiplies these and adds. Shared memory: own rows [64][width], the matrix [width][width] as it lies in memory, sums
// [64][width] of floats, what teams leave each other.
#include <atomic>

#include "../../projection/cuda/shared_memory.cuh"
#include "of_storage.cuh"
#include "tile_products.cuh"

namespace edgeless::cuda::relational {
namespace {

template <class S, int kWidth>
struct Shape {
  static constexpr int kStride = kTileStride<S, kWidth>, kSumStride = kWidth + 8;
  static constexpr int kBytes = (kTilePieces + kWidth) * kStride * static_cast<int>(sizeof(S)) +
                                kTilePieces * kSumStride * static_cast<int>(sizeof(float)) + kLeadBytes<S>;
  // That a multiprocessor has registers for.
  static constexpr int kBlocks = kWidth > 64 ? (sizeof(S) == 4 ? 1 : 2) : sizeof(S) == 4 ? 3 : 4;
};

// The bias at `column` and the one behind it.
template <class S>
__device__ __forceinline__ float2 bias_at(const void* bias, int column) {
  if (!bias) return make_float2(0, 0);
  const S* at = static_cast<const S*>(bias) + column;
  return make_float2(to_arithmetic(at[0]), to_arithmetic(at[1]));
}

template <class S, int kWidth, bool kTransposed>
__global__ void __launch_bounds__(kFusedThreads, Shape<S, kWidth>::kBlocks)
    row_sums_kernel(const __grid_constant__ RowSumsArgs args) {
  using T = TileNumber<S>;
  using Of = Shape<S, kWidth>;
  constexpr int kStride = Of::kStride, kPer = kVec<S>;
  extern __shared__ float4 memory[];
  __shared__ int begins[kTilePieces + 1];
  T* own = reinterpret_cast<T*>(memory);
  T* root = own + kTilePieces * kStride;
  float* sums = reinterpret_cast<float*>(root + kWidth * kStride);
  float* leads = sums + kTilePieces * Of::kSumStride;
  const int width = args.width;
  if (args.own.numbers) {
    ask_for_matrix<kWidth, kWidth, kStride>(root, args.root.numbers, args.root.row_numbers,
                                            kTransposed ? width : args.own_width, kTransposed ? args.own_width : width);
  }
  const FusedPlace<kWidth> place;
  const int lane = threadIdx.x & ((1 << args.neighbors.team_log2) - 1);
  const auto store = [&](int row, const float (&sum)[kPer]) {
    if (lane >= args.neighbors.vectors) return;
    float* to = sums + row * Of::kSumStride + lane * kPer;
#pragma unroll
    for (int k = 0; k < kPer; k += 4) {
      *reinterpret_cast<float4*>(to + k) = make_float4(sum[k], sum[k + 1], sum[k + 2], sum[k + 3]);
    }
  };
  int ahead = 0;
  const auto ask = [&](int64_t first) {
    if (threadIdx.x <= kTilePieces) ahead = args.ptr[min(first + threadIdx.x, args.num_rows)];
  };
  const int64_t tiles = (args.num_rows + kTilePieces - 1) / kTilePieces;
  ask(blockIdx.x * int64_t{kTilePieces});
  for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const int64_t first = tile * kTilePieces;
    const int count = static_cast<int>(min(args.num_rows - first, int64_t{kTilePieces}));
    if (threadIdx.x <= kTilePieces) begins[threadIdx.x] = ahead;
    __syncthreads();
    if (args.own.numbers) {
      const int64_t left = max(args.own_rows - first, int64_t{0});
      ask_for_matrix<kTilePieces, kWidth, kStride>(
          own, static_cast<const T*>(args.own.numbers) + (left ? first * args.own.row_numbers : 0),
          args.own.row_numbers, static_cast<int>(min(left, int64_t{kTilePieces})), args.own_width);
    }
    ask(first + gridDim.x * int64_t{kTilePieces});
    for (int i = threadIdx.x; i < kTilePieces * kWidth / 4; i += kFusedThreads) {
      const int row = i / (kWidth / 4);
      if (row >= count || begins[row] < begins[row + 1]) continue;
      *reinterpret_cast<float4*>(sums + row * Of::kSumStride + i % (kWidth / 4) * 4) = make_float4(0, 0, 0, 0);
    }
    sum_pieces<S>(args.neighbors, begins, count, leads, store);
    await_all();
    __syncthreads();
    if (place.down >= count || place.side >= width) continue;
    WarpSum<1, place.kSides> product;
    if (args.own.numbers) {
      add_product<S, false, !kTransposed, kStride, 0>(own, root, place.down, place.side,
                                                      round_up(args.own_width, kMmaDepth<S>), product);
      make_again<S>(product.of[0], place.down, place.side, count, width, {own, kStride, 1},
                    {root, kTransposed ? kStride : 1, kTransposed ? 1 : kStride}, args.own_width);
    }
    const int in_group = threadIdx.x % 4;
#pragma unroll
    for (int j = 0; j < place.kSides; ++j) {
      const int column = place.side + 8 * j + 2 * in_group;
      if (column >= width) continue;
      const float2 bias = bias_at<S>(args.bias, column);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = place.down + threadIdx.x % 32 / 4 + 8 * h;
        const float2 sum = *reinterpret_cast<const float2*>(sums + row * Of::kSumStride + column);
        product.of[0][j][2 * h] += sum.x + bias.x, product.of[0][j][2 * h + 1] += sum.y + bias.y;
      }
    }
    if (args.wide) {
      store_sums(static_cast<float*>(args.out) + first * width, width, count, width, place.down, place.side,
                 product.of[0]);
    } else {
      store_sums(static_cast<S*>(args.out) + first * width, width, count, width, place.down, place.side, product.of[0]);
    }
  }
}

template <class S, int kWidth, bool kTransposed>
cudaError_t launch(const RowSumsArgs& args, cudaStream_t stream) {
  static std::atomic<uint64_t> done{0};
  using Of = Shape<S, kWidth>;
  const cudaError_t error = projection::allow_shared_memory(row_sums_kernel<S, kWidth, kTransposed>, Of::kBytes, done);
  if (error != cudaSuccess) return error;
  row_sums_kernel<S, kWidth, kTransposed><<<args.blocks, kFusedThreads, Of::kBytes, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace

cudaError_t run_row_sums(Storage storage, const RowSumsArgs& args, cudaStream_t stream) {
  return of_storage<true>(storage, [&](auto zero) {
    using S = decltype(zero);
    const bool narrow = args.own_width <= 64 && args.width <= 64;
    if (args.transposed) return narrow ? launch<S, 64, true>(args, stream) : launch<S, 128, true>(args, stream);
    return narrow ? launch<S, 64, false>(args, stream) : launch<S, 128, false>(args, stream);
  });
}

}  // namespace edgeless::cuda::relational
