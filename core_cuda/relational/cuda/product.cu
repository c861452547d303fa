// Typed products on tensor cores: the tiles and the arithmetic of linear maps (projection/cuda), whose rows are
// gathered where they are and whose weight is that of the block's type. Float32 is as exact as on the other units.
#include <algorithm>
#include <atomic>
#include <type_traits>

#include "../../projection/cuda/float_tiles.cuh"
#include "../../projection/cuda/half_tiles.cuh"
#include "../../projection/cuda/shared_memory.cuh"
#include "of_storage.cuh"
#include "product_parts.cuh"

namespace edgeless::cuda::relational {
namespace {

using projection::kProductThreads, projection::kTileColumns, projection::kTileDepth, projection::kTileRows,
    projection::kTileStages;
using projection::WarpPlace;

// Two tiles of numbers S and the sum of their products.
template <class S, bool kTransposedA, bool kTransposedB>
struct Tensor {
  using T = uint16_t;
  using A = projection::half::Operand<kTileRows, kTransposedA>;
  using B = projection::half::Operand<kTileColumns, kTransposedB>;
  float sum[projection::kDown][projection::kSide][4] = {};

  __device__ __forceinline__ void add(const T* tile_a, const T* tile_b, const WarpPlace& place) {
    projection::half::multiply_tiles<S, A, B>(tile_a, tile_b, place, sum);
  }
};
template <bool kTransposedA, bool kTransposedB>
struct Tensor<float, kTransposedA, kTransposedB> {
  using T = float;
  using A = projection::floats::Operand<kTileRows, kTransposedA>;
  using B = projection::floats::Operand<kTileColumns, kTransposedB>;
  float sum[projection::kDown][projection::kSide][4] = {}, part[projection::kDown][projection::kSide][4];

  __device__ __forceinline__ void add(const T* tile_a, const T* tile_b, const WarpPlace& place) {
    projection::floats::multiply_tiles<A, B>(tile_a, tile_b, place, sum, part);
  }
};

template <class M>
constexpr int kSharedBytes = kTileStages * (M::A::kNumbers + M::B::kNumbers) * static_cast<int>(sizeof(typename M::T));

// Rows of entries as an operand that lies row by row: those of a tile, with the depth as columns.
template <class T, class Tile>
struct GatheredRows {
  const T* from[Tile::kCopies];  // null outside
  const T* base;
  int line, in_line, left_depth;

  __device__ __forceinline__ GatheredRows(const EntryRows& x, const Entries& entries, const Range& range, int block,
                                          int depth)
      : base(static_cast<const T*>(x.numbers)), left_depth(depth) {
    line = threadIdx.x / Tile::kInLine, in_line = threadIdx.x % Tile::kInLine * Tile::kVector;
#pragma unroll
    for (int i = 0; i < Tile::kCopies; ++i) {
      const int64_t entry = range.begin + line + i * Tile::kLines;
      const bool there = entry < range.end;
      from[i] =
          there ? base + row_of(x, entries, entry) * x.stride + static_cast<int64_t>(block) * depth + in_line : nullptr;
    }
  }

  __device__ __forceinline__ void load(T* tile) {
#pragma unroll
    for (int i = 0; i < Tile::kCopies; ++i) {
      const bool there = from[i] && in_line < left_depth;
      projection::copy_vector(tile + (line + i * Tile::kLines) * Tile::kStride + in_line, there ? from[i] : base,
                              there);
      if (there) from[i] += kTileDepth;
    }
    left_depth -= kTileDepth;
  }
};

// The same as an operand that lies transposed: a tile has some of their columns, with the entries as the depth.
template <class T, class Tile>
struct GatheredDepth {
  const EntryRows& x;
  const Entries& entries;
  const T* base;
  int64_t next, end;
  int line, in_line;
  bool inside;

  __device__ __forceinline__ GatheredDepth(const EntryRows& x, const Entries& entries, const Range& range, int block,
                                           int first_column, int columns)
      : x(x), entries(entries), base(static_cast<const T*>(x.numbers)), next(range.begin), end(range.end) {
    line = threadIdx.x / Tile::kInLine, in_line = threadIdx.x % Tile::kInLine * Tile::kVector;
    inside = first_column + in_line < columns;
    if (inside) base += static_cast<int64_t>(block) * columns + first_column + in_line;
  }

  __device__ __forceinline__ void load(T* tile) {
#pragma unroll
    for (int i = 0; i < Tile::kCopies; ++i) {
      const int at = line + i * Tile::kLines;
      const bool there = inside && next + at < end;
      const T* from = there ? base + row_of(x, entries, next + at) * x.stride : base;
      projection::copy_vector(tile + at * Tile::kStride + in_line, from, there);
    }
    next += kTileDepth;
  }
};

template <class S>
__device__ __forceinline__ void store_pair(S* to, float x, float y) {
  struct alignas(2 * sizeof(S)) Pair {
    S x, y;
  };
  *reinterpret_cast<Pair*>(to) = {to_storage<S>(x), to_storage<S>(y)};
}

// A block makes 128 rows, or what is left of its type, by 64 columns.
template <class S, bool kTransposed>
__global__ void __launch_bounds__(kProductThreads, 2) product_kernel(const __grid_constant__ ProductArgs args) {
  check_offsets(args.entries);
  extern __shared__ float4 memory[];
  using M = Tensor<S, false, !kTransposed>;
  using T = typename M::T;
  T* shared = reinterpret_cast<T*>(memory);
  const int across = (args.columns + kTileColumns - 1) / kTileColumns, block = blockIdx.y;
  const int first_column = static_cast<int>(blockIdx.x % across) * kTileColumns;
  const Range range = range_of_tile(args.entries, blockIdx.x / across, kTileRows);
  if (range.begin >= range.end) return;
  const WarpPlace place;
  GatheredRows<T, typename M::A> a(args.x, args.entries, range, block, args.depth);
  const T* weight = static_cast<const T*>(args.weight) + range.type * args.weight_type + block * args.weight_block;
  typename M::B b(weight, args.weight_row, first_column, args.columns, 0, args.depth);
  const auto stage_a = [&](int stage) { return shared + stage * (M::A::kNumbers + M::B::kNumbers); };
  const auto stage_b = [&](int stage) { return stage_a(stage) + M::A::kNumbers; };
  M product;
  projection::walk_depth(
      projection::tile_steps(args.depth), [&](int stage) { a.load(stage_a(stage)), b.load(stage_b(stage)); },
      [&](int stage) { product.add(stage_a(stage), stage_b(stage), place); });
  S* out = const_cast<S*>(static_cast<const S*>(args.out.numbers)) + static_cast<int64_t>(block) * args.columns;
  const int64_t bias_at = (static_cast<int64_t>(range.type) * args.blocks + block) * args.columns;
  const S* bias = args.bias ? static_cast<const S*>(args.bias) + bias_at : nullptr;
  projection::for_each_pair(place, range.begin, range.end, first_column, args.columns, product.sum,
                            [&](int64_t entry, int column, float x, float y) {
                              if constexpr (std::is_same_v<S, float>) {
                                if (!isfinite(x)) x = product_in_floats(args, entry, range.type, block, column);
                                if (!isfinite(y)) y = product_in_floats(args, entry, range.type, block, column + 1);
                              }
                              if (bias) x += to_arithmetic(bias[column]), y += to_arithmetic(bias[column + 1]);
                              store_pair(out + row_of(args.out, args.entries, entry) * args.out.stride + column, x, y);
                            });
}

// A block makes 128 by 64 numbers of a matrix, from one chunk of entries.
template <class S>
__global__ void __launch_bounds__(kProductThreads, 2) outer_kernel(const __grid_constant__ OuterArgs args) {
  check_offsets(args.entries);
  extern __shared__ float4 memory[];
  using M = Tensor<S, true, true>;
  using T = typename M::T;
  T* shared = reinterpret_cast<T*>(memory);
  const int across = (args.columns + kTileColumns - 1) / kTileColumns, block = blockIdx.z;
  const int first_column = static_cast<int>(blockIdx.y % across) * kTileColumns;
  const int first_row = static_cast<int>(blockIdx.y / across) * kTileRows;
  const Range range = range_of_tile(args.entries, blockIdx.x, args.chunk);
  if (range.begin >= range.end) return;
  const WarpPlace place;
  GatheredDepth<T, typename M::A> a(args.x, args.entries, range, block, first_row, args.rows);
  GatheredDepth<T, typename M::B> b(args.y, args.entries, range, block, first_column, args.columns);
  const auto stage_a = [&](int stage) { return shared + stage * (M::A::kNumbers + M::B::kNumbers); };
  const auto stage_b = [&](int stage) { return stage_a(stage) + M::A::kNumbers; };
  M product;
  projection::walk_depth(
      projection::tile_steps(range.end - range.begin),
      [&](int stage) { a.load(stage_a(stage)), b.load(stage_b(stage)); },
      [&](int stage) { product.add(stage_a(stage), stage_b(stage), place); });
  const int64_t size = static_cast<int64_t>(args.rows) * args.columns;
  float* partial = static_cast<float*>(args.partial) + (static_cast<int64_t>(blockIdx.x) * args.blocks + block) * size;
  projection::for_each_pair(place, first_row, args.rows, first_column, args.columns, product.sum,
                            [&](int64_t row, int column, float x, float y) {
                              if constexpr (std::is_same_v<S, float>) {
                                if (!isfinite(x)) x = outer_in_floats(args, range, block, row, column);
                                if (!isfinite(y)) y = outer_in_floats(args, range, block, row, column + 1);
                              }
                              store_pair(partial + row * args.columns + column, x, y);
                            });
}

template <class M, class Kernel, class Args>
cudaError_t start(Kernel kernel, std::atomic<uint64_t>& done, dim3 grid, const Args& args, cudaStream_t stream) {
  const cudaError_t error = projection::allow_shared_memory(kernel, kSharedBytes<M>, done);
  if (error != cudaSuccess) return error;
  kernel<<<grid, kProductThreads, kSharedBytes<M>, stream>>>(args);
  return cudaGetLastError();
}

unsigned tiles(int size, int tile) { return static_cast<unsigned>((size + tile - 1) / tile); }

template <class S, bool kTransposed>
cudaError_t launch(const ProductArgs& args, cudaStream_t stream) {
  static std::atomic<uint64_t> done{0};
  const int64_t down = num_tiles(args.entries.count, args.entries.types, kTileRows);
  const dim3 grid(static_cast<unsigned>(down * tiles(args.columns, kTileColumns)), args.blocks);
  return start<Tensor<S, false, !kTransposed>>(product_kernel<S, kTransposed>, done, grid, args, stream);
}

template <class S>
cudaError_t launch(Storage storage, const OuterArgs& args, cudaStream_t stream) {
  static std::atomic<uint64_t> done{0};
  const dim3 grid(static_cast<unsigned>(num_tiles(args.entries.count, args.entries.types, args.chunk)),
                  tiles(args.rows, kTileRows) * tiles(args.columns, kTileColumns), args.blocks);
  const cudaError_t error = start<Tensor<S, true, true>>(outer_kernel<S>, done, grid, args, stream);
  return error != cudaSuccess ? error : add_chunks(storage, args, stream);
}

}  // namespace

cudaError_t run_product(Storage storage, const ProductArgs& args, cudaStream_t stream) {
  return of_storage<true>(storage, [&](auto zero) {
    using S = decltype(zero);
    return args.transposed ? launch<S, true>(args, stream) : launch<S, false>(args, stream);
  });
}

cudaError_t run_outer(Storage storage, const OuterArgs& args, cudaStream_t stream) {
  return of_storage<true>(storage, [&](auto zero) { return launch<decltype(zero)>(storage, args, stream); });
}

}  // namespace edgeless::cuda::relational
