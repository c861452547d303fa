// Outer products of entries on tensor cores: the tiles and the arithmetic of linear maps (projection/cuda), whose depth
// are entries that are gathered where they are. Float32 is as exact as on the other units.
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
template <class S>
struct Tensor {
  using T = uint16_t;
  using A = projection::half::Operand<kTileRows, true>;
  using B = projection::half::Operand<kTileColumns, true>;
  float sum[projection::kDown][projection::kSide][4] = {};

  __device__ __forceinline__ void add(const T* tile_a, const T* tile_b, const WarpPlace& place) {
    projection::half::multiply_tiles<S, A, B>(tile_a, tile_b, place, sum);
  }
};
template <>
struct Tensor<float> {
  using T = float;
  using A = projection::floats::Operand<kTileRows, true>;
  using B = projection::floats::Operand<kTileColumns, true>;
  float sum[projection::kDown][projection::kSide][4] = {}, part[projection::kDown][projection::kSide][4];

  __device__ __forceinline__ void add(const T* tile_a, const T* tile_b, const WarpPlace& place) {
    projection::floats::multiply_tiles<A, B>(tile_a, tile_b, place, sum, part);
  }
};

template <class M>
constexpr int kSharedBytes = kTileStages * (M::A::kNumbers + M::B::kNumbers) * static_cast<int>(sizeof(typename M::T));

// Rows of entries as an operand that lies transposed: a tile has some of their columns, with the entries as the depth.
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

// A block makes 128 by 64 numbers of a matrix, from one chunk of entries.
template <class S>
__global__ void __launch_bounds__(kProductThreads, 2) outer_kernel(const __grid_constant__ OuterArgs args) {
  check_offsets(args.entries);
  extern __shared__ float4 memory[];
  using M = Tensor<S>;
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
                              *reinterpret_cast<float2*>(partial + row * args.columns + column) = make_float2(x, y);
                            });
}

unsigned tiles(int size, int tile) { return static_cast<unsigned>((size + tile - 1) / tile); }

template <class S>
cudaError_t launch(Storage storage, const OuterArgs& args, cudaStream_t stream) {
  static std::atomic<uint64_t> done{0};
  const dim3 grid(static_cast<unsigned>(num_tiles(args.entries.count, args.entries.types, args.chunk)),
                  tiles(args.rows, kTileRows) * tiles(args.columns, kTileColumns), args.blocks);
  const int bytes = kSharedBytes<Tensor<S>>;
  cudaError_t error = projection::allow_shared_memory(outer_kernel<S>, bytes, done);
  if (error != cudaSuccess) return error;
  outer_kernel<S><<<grid, kProductThreads, bytes, stream>>>(args);
  error = cudaGetLastError();
  return error != cudaSuccess ? error : add_chunks(storage, args, stream);
}

}  // namespace

cudaError_t run_outer(Storage storage, const OuterArgs& args, cudaStream_t stream) {
  return of_storage<true>(storage, [&](auto zero) { return launch<decltype(zero)>(storage, args, stream); });
}

}  // namespace edgeless::cuda::relational
