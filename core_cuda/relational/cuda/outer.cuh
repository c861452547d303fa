// Outer products on tensor cores: for every chunk of entries of one type, partial[chunk] = x^T y over the entries' rows
// of x and y (OuterArgs in kernels.h has the shapes); add_chunks_kernel of any_product.cuh adds the chunks of a type.
// The matrix instructions are those of dense linear maps (projection/cuda). The entries are the depth of the product,
// and their rows are gathered into shared memory. Results for float32 are as exact as on CUDA cores.
//
// A thread block computes 64 by 64 elements of a matrix. It does so little arithmetic per byte that memory latency is
// the limit, so it keeps many bytes in flight: its pipeline has eight stages of 32 entries, four for float32, and it
// prefetches the row ids one tile further ahead.
#pragma once

#include <type_traits>

#include "../../projection/cuda/float_tiles.cuh"
#include "../../projection/cuda/half_tiles.cuh"
#include "geometry.h"
#include "product_parts.cuh"
#include "shared_access.cuh"

namespace edgeless::cuda::relational::outer {

using projection::kTileDepth;
using Tiling = projection::SquareTiling;

static_assert(kSize == Tiling::kRows && kThreads == Tiling::kThreads);

// The accumulators of a block's matrix. add() adds the product of two tiles with elements S.
template <class S>
struct Outer {
  using T = uint16_t;
  using Operand = projection::half::Operand<kSize, true, kThreads>;
  static constexpr int kStages = stages(2);
  Tiling::Sum sum = {};

  __device__ __forceinline__ void add(const T* x, const T* y, const projection::WarpPlace<Tiling>& place) {
    projection::half::multiply_tiles<S, Operand, Operand>(x, y, place, sum);
  }
};
template <>
struct Outer<float> {
  using T = float;
  using Operand = projection::floats::Operand<kSize, true, kThreads>;
  static constexpr int kStages = stages(4);
  Tiling::Sum sum = {}, part;

  __device__ __forceinline__ void add(const T* x, const T* y, const projection::WarpPlace<Tiling>& place) {
    projection::floats::multiply_tiles<Operand, Operand>(x, y, place, sum, part);
  }
};

static_assert(kTileNumbers == Outer<float>::Operand::kNumbers && kTileNumbers == Outer<__half>::Operand::kNumbers);

// Copies the rows of a range's entries to shared memory in tiles of 32 entries: 64 columns of x from the block's first
// row of the matrix on, and 64 columns of y from its first column on. A warp copies 8 rows of x and 8 of y. For each of
// these rows one lane prefetches the id a tile ahead, because waiting for the id and then for the row would leave
// memory idle, and broadcasts the row's address.
template <class S>
class GatheredTiles {
 public:
  using T = typename Outer<S>::T;

  __device__ __forceinline__ GatheredTiles(const OuterArgs& args, const Range& range, int block, int first_row,
                                           int first_column, T* tiles)
      : wide_(args.entries.wide), count_(static_cast<int>(range.end - range.begin)) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, line = warp * kOfWarp + lane / kInLine;
    const int in_line = lane % kInLine * kVector;
    first_ = line, bytes_ = in_line * static_cast<int>(sizeof(T));
    inside_[0] = first_row + in_line < args.rows, inside_[1] = first_column + in_line < args.columns;
    to_ = projection::shared_address(tiles + line * kStride + in_line);
    // The row whose id this lane prefetches is one of x or one of y.
    const bool of_y = lane / kRows % 2;
    const EntryRows& of = of_y ? args.y : args.x;
    const int64_t column =
        begin_of_block(of, block, args.blocks, of_y ? args.columns : args.rows) + (of_y ? first_column : first_row);
    at_ = lane % kRows / kOfWarp * kLines + warp * kOfWarp + lane % kOfWarp;
    ids_ = static_cast<const char*>(of.rows);
    row_bytes_ = of.stride * static_cast<int64_t>(sizeof(T));
    rows_ = static_cast<const char*>(of.numbers) + column * static_cast<int64_t>(sizeof(T));
    if (ids_) {
      ids_ += range.begin << (wide_ ? 3 : 2);
    } else {
      rows_ += range.begin * row_bytes_;
    }
    prefetch();
  }

  // Prefetches the next tile's rows, and the ids of the tile after it. To be called by the whole block.
  __device__ __forceinline__ void load(int stage) {
    const auto row = reinterpret_cast<uint64_t>(rows_ + id_.get() * row_bytes_);
    const uint32_t to = to_ + stage * 2 * kTileBytes;
#pragma unroll
    for (int y = 0; y < 2; ++y) {
#pragma unroll
      for (int i = 0; i < kCopies; ++i) {
        const int from = y * kRows + i * kOfWarp + threadIdx.x % 32 / kInLine;
        const uint64_t begin = __shfl_sync(0xffffffffu, row, from);
        copy_shared(to + y * kTileBytes + i * kLines * kStride * static_cast<int>(sizeof(T)),
                    reinterpret_cast<const char*>(begin) + bytes_, inside_[y] && first_ + i * kLines < count_);
      }
    }
    first_ += kTileDepth, at_ += kTileDepth;
    prefetch();
  }

 private:
  static constexpr int kStride = Outer<S>::Operand::kStride, kVector = 16 / sizeof(T);
  static constexpr int kTileBytes = kTileNumbers * static_cast<int>(sizeof(T));
  static constexpr int kInLine = kSize / kVector, kOfWarp = 32 / kInLine;  // threads per row, rows of a warp's copy
  static constexpr int kLines = kThreads / kInLine, kCopies = kTileDepth / kLines;
  static constexpr int kRows = kOfWarp * kCopies;

  __device__ __forceinline__ void prefetch() {
    id_ = at_ < count_ ? (ids_ ? IdInFlight(ids_, wide_, at_) : IdInFlight(at_)) : IdInFlight();
  }

  bool wide_, inside_[2];
  int count_;       // entries of the range
  int first_, at_;  // the next entry to copy, and the next whose id the lane prefetches
  int bytes_;       // offset in a row of the 16 bytes that the thread copies
  uint32_t to_;
  const char *ids_, *rows_;
  int64_t row_bytes_;
  IdInFlight id_;
};

// A block computes 64 by 64 elements of a matrix from one chunk of entries.
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
  GatheredTiles<S> tiles(args, range, block, first_row, first_column, shared);
  Outer<S> outer;
  projection::walk_depth<Outer<S>::kStages>(
      projection::tile_steps(range.end - range.begin), [&](int stage) { tiles.load(stage); },
      [&](int stage) {
        const T* x = shared + stage * 2 * kTileNumbers;
        outer.add(x, x + kTileNumbers, place);
      });
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

}  // namespace edgeless::cuda::relational::outer
