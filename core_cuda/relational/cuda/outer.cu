// Outer products of entries on tensor cores: the arithmetic of linear maps (projection/cuda), whose depth are entries
// that are gathered where they are. Float32 is as exact as on the other units.
//
// A matrix of 64 by 64 needs so little arithmetic for a byte that memory decides, and so how many bytes are on their
// way: a block asks for eight tiles of 32 entries ahead, four in float32, and for the ids of the next one before that.
#include <atomic>
#include <type_traits>

#include "../../projection/cuda/float_tiles.cuh"
#include "../../projection/cuda/half_tiles.cuh"
#include "../../projection/cuda/shared_memory.cuh"
#include "of_storage.cuh"
#include "product_parts.cuh"

namespace edgeless::cuda::relational {
namespace {

using projection::kTileDepth;
using Tiling = projection::SquareTiling;

constexpr int kSize = Tiling::kRows, kThreads = Tiling::kThreads;  // a block makes 64 by 64 numbers of a matrix

// Two tiles of numbers S, and the sum of their products.
template <class S>
struct Outer {
  using T = uint16_t;
  using Operand = projection::half::Operand<kSize, true, kThreads>;
  static constexpr int kStages = 8;
  Tiling::Sum sum = {};

  __device__ __forceinline__ void add(const T* x, const T* y, const projection::WarpPlace<Tiling>& place) {
    projection::half::multiply_tiles<S, Operand, Operand>(x, y, place, sum);
  }
};
template <>
struct Outer<float> {
  using T = float;
  using Operand = projection::floats::Operand<kSize, true, kThreads>;
  static constexpr int kStages = 4;
  Tiling::Sum sum = {}, part;

  __device__ __forceinline__ void add(const T* x, const T* y, const projection::WarpPlace<Tiling>& place) {
    projection::floats::multiply_tiles<Operand, Operand>(x, y, place, sum, part);
  }
};

template <class S>
constexpr int kTileNumbers = Outer<S>::Operand::kNumbers;
template <class S>
constexpr int kSharedBytes = Outer<S>::kStages * 2 * kTileNumbers<S> * static_cast<int>(sizeof(S));

// Columns [first_column, first_column + 64) of the rows of a range's entries, a tile of 32 entries at a time. The rows'
// ids are read a tile ahead: to wait for an id and then for its row would leave memory idle.
template <class S>
struct GatheredTiles {
  using T = typename Outer<S>::T;
  static constexpr int kStride = Outer<S>::Operand::kStride, kVector = 16 / sizeof(T);
  static constexpr int kInLine = kSize / kVector, kLines = kThreads / kInLine, kCopies = kTileDepth / kLines;
  const EntryRows& of;
  const Entries& entries;
  const T* base;
  int64_t next, end;
  int line, in_line;
  bool inside;
  int64_t rows[kCopies];  // of the tile that is asked for next, -1 where there is none

  __device__ __forceinline__ GatheredTiles(const EntryRows& of, const Entries& entries, const Range& range, int block,
                                           int first_column, int columns)
      : of(of), entries(entries), base(static_cast<const T*>(of.numbers)), next(range.begin), end(range.end) {
    line = threadIdx.x / kInLine, in_line = threadIdx.x % kInLine * kVector;
    inside = first_column + in_line < columns;
    if (inside) base += static_cast<int64_t>(block) * columns + first_column + in_line;
    find_rows();
  }

  __device__ __forceinline__ void find_rows() {
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const int64_t entry = next + line + i * kLines;
      rows[i] = inside && entry < end ? row_of(of, entries, entry) : -1;
    }
  }

  __device__ __forceinline__ void load(T* tile) {
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const bool there = rows[i] >= 0;
      projection::copy_vector(tile + (line + i * kLines) * kStride + in_line, there ? base + rows[i] * of.stride : base,
                              there);
    }
    next += kTileDepth;
    find_rows();
  }
};

// A block makes 64 by 64 numbers of a matrix, from one chunk of entries.
template <class S>
__global__ void __launch_bounds__(kThreads, 3) outer_kernel(const __grid_constant__ OuterArgs args) {
  check_offsets(args.entries);
  extern __shared__ float4 memory[];
  using T = typename Outer<S>::T;
  T* shared = reinterpret_cast<T*>(memory);
  const int across = (args.columns + kSize - 1) / kSize, block = blockIdx.z;
  const int first_column = static_cast<int>(blockIdx.y % across) * kSize;
  const int first_row = static_cast<int>(blockIdx.y / across) * kSize;
  const Range range = range_of_tile(args.entries, blockIdx.x, args.chunk);
  if (range.begin >= range.end) return;
  const projection::WarpPlace<Tiling> place;
  GatheredTiles<S> x(args.x, args.entries, range, block, first_row, args.rows);
  GatheredTiles<S> y(args.y, args.entries, range, block, first_column, args.columns);
  const auto stage_x = [&](int stage) { return shared + stage * 2 * kTileNumbers<S>; };
  const auto stage_y = [&](int stage) { return stage_x(stage) + kTileNumbers<S>; };
  Outer<S> outer;
  projection::walk_depth<Outer<S>::kStages>(
      projection::tile_steps(range.end - range.begin),
      [&](int stage) { x.load(stage_x(stage)), y.load(stage_y(stage)); },
      [&](int stage) { outer.add(stage_x(stage), stage_y(stage), place); });
  const int64_t size = static_cast<int64_t>(args.rows) * args.columns;
  float* partial = static_cast<float*>(args.partial) + (static_cast<int64_t>(blockIdx.x) * args.blocks + block) * size;
  projection::for_each_pair(place, first_row, args.rows, first_column, args.columns, outer.sum,
                            [&](int64_t row, int column, float u, float v) {
                              if constexpr (std::is_same_v<S, float>) {
                                if (!isfinite(u)) u = outer_in_floats(args, range, block, row, column);
                                if (!isfinite(v)) v = outer_in_floats(args, range, block, row, column + 1);
                              }
                              *reinterpret_cast<float2*>(partial + row * args.columns + column) = make_float2(u, v);
                            });
}

unsigned tiles(int size) { return static_cast<unsigned>((size + kSize - 1) / kSize); }

template <class S>
cudaError_t launch(Storage storage, const OuterArgs& args, cudaStream_t stream) {
  static std::atomic<uint64_t> done{0};
  cudaError_t error = projection::allow_shared_memory(outer_kernel<S>, kSharedBytes<S>, done);
  if (error != cudaSuccess) return error;
  const dim3 grid(static_cast<unsigned>(num_tiles(args.entries.count, args.entries.types, args.chunk)),
                  tiles(args.rows) * tiles(args.columns), args.blocks);
  outer_kernel<S><<<grid, kThreads, kSharedBytes<S>, stream>>>(args);
  error = cudaGetLastError();
  return error != cudaSuccess ? error : add_chunks(storage, args, stream);
}

}  // namespace

cudaError_t run_outer(Storage storage, const OuterArgs& args, cudaStream_t stream) {
  return of_storage<true>(storage, [&](auto zero) { return launch<decltype(zero)>(storage, args, stream); });
}

}  // namespace edgeless::cuda::relational
