// The pipeline that copies both operands of a product to shared memory in tiles of depth 32, several stages ahead.
#pragma once

#include <cstdint>

#include "../../common/vec.cuh"
#include "kernels.h"
#include "tilings.h"

namespace edgeless::cuda::projection {

__device__ __forceinline__ uint32_t shared_address(const void* at) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(at));
}

// Starts an asynchronous copy of 16 bytes to shared memory; writes zeros if not `there`.
__device__ __forceinline__ void copy_vector(void* to, const void* from, bool there) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from),
               "r"(there ? 16 : 0));
#endif
}

// ldmatrix: loads four matrices of 8 x 8 16-bit (or 8 x 4 32-bit) elements; each lane passes the shared memory address
// of one row. kTransposed: transposes them on the way.
template <bool kTransposed>
__device__ __forceinline__ void load_matrices(const void* at, uint32_t (&to)[4]) {
#if __CUDA_ARCH__ >= 800
  const uint32_t address = shared_address(at);
  if constexpr (kTransposed) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(address));
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(address));
  }
#endif
}

// The lane's elements of four 8 x 8 matrices (8 x 4 of floats) of a tile as mma operands. kTransposed: the tile's rows
// are depths. Rows from `first` on and the eight after them, depths from `inner` on and those after them; depth_first:
// the second matrix is the next one in depth, not in rows.
template <bool kTransposed, int kStride>
__device__ __forceinline__ void load_fragment(const uint16_t* tile, int first, int inner, bool depth_first,
                                              uint32_t (&to)[4]) {
  const int lane = threadIdx.x % 32, second = lane / 8 % 2 * 8, third = lane / 16 * 8;
  int at = first + (depth_first ? third : second), depth = inner + (depth_first ? second : third);
  (kTransposed ? depth : at) += lane % 8;
  load_matrices<kTransposed>(tile + (kTransposed ? depth * kStride + at : at * kStride + depth), to);
}

template <bool kTransposed, int kStride>
__device__ __forceinline__ void load_fragment(const float* tile, int first, int inner, bool depth_first,
                                              uint32_t (&to)[4]) {
  const int lane = threadIdx.x % 32;
  if constexpr (kTransposed) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = first + (depth_first ? i / 2 : i % 2) * 8 + lane / 4;
      const int depth = inner + (depth_first ? i % 2 : i / 2) * 4 + lane % 4;
      to[i] = __float_as_uint(tile[depth * kStride + row]);
    }
  } else {
    const int second = lane / 8 % 2, third = lane / 16;
    const int row = first + (depth_first ? third : second) * 8 + lane % 8;
    load_matrices<false>(tile + row * kStride + inner + (depth_first ? second : third) * 4, to);
  }
}

// One operand with elements T, whose tiles have the same layout in shared memory as in global memory: rows of one depth
// if kTransposed, else rows of the operand. Elements outside the matrix are zero. kPad: elements of padding per row,
// which avoids bank conflicts of fragment loads. kThreads: threads of the block.
template <class T, int kSize, bool kTransposed, int kPad, int kThreads>
struct Tiles {
  static constexpr int kVector = 16 / sizeof(T), kWidth = kTransposed ? kSize : kTileDepth;
  static constexpr int kStride = kWidth + kPad, kNumbers = tile_numbers(kSize, kTransposed, kPad);
  static constexpr int kInLine = kWidth / kVector, kLines = kThreads / kInLine;
  static constexpr int kCopies = kSize * kTileDepth / kVector / kThreads;
  const T* from;                  // source of the thread's first copy
  int64_t row;                    // elements from row to row
  int64_t left_rows, left_depth;  // remaining from the tile's first row and depth
  int line, in_line;

  __device__ __forceinline__ Tiles(const void* base, int64_t row, int64_t first, int64_t rows, int64_t depth,
                                   int64_t end)
      : row(row), left_rows(rows - first), left_depth(end - depth) {
    line = threadIdx.x / kInLine, in_line = threadIdx.x % kInLine * kVector;
    from = static_cast<const T*>(base) +
           (kTransposed ? (depth + line) * row + first + in_line : (first + line) * row + depth + in_line);
  }

  __device__ __forceinline__ void load(T* tile) {
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const int at = line + i * kLines;
      const bool there = kTransposed ? at < left_depth && in_line < left_rows : at < left_rows && in_line < left_depth;
      copy_vector(tile + at * kStride + in_line, there ? from + i * kLines * row : from, there);
    }
    from += kTransposed ? kTileDepth * row : kTileDepth, left_depth -= kTileDepth;
  }

  static __device__ __forceinline__ void get(const T* tile, int first, int inner, bool depth_first, uint32_t (&to)[4]) {
    load_fragment<kTransposed, kStride>(tile, first, inner, depth_first, to);
  }
};

// Commits the copies issued since the last call as one stage.
__device__ __forceinline__ void commit_stage() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;");
#endif
}

enum class StagesOf { block, warp };  // who loads a stage, and so synchronizes before it is read

// Waits until the oldest of kStages stages has arrived.
template <int kStages, StagesOf kOf>
__device__ __forceinline__ void await_stage() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(kStages - 2));
#endif
  kOf == StagesOf::block ? __syncthreads() : __syncwarp();
}

// Prologue of the pipeline: load(stage) starts the copies of all stages but one.
template <int kStages, class Load>
__device__ __forceinline__ void begin_depth(int steps, Load&& load) {
#pragma unroll
  for (int stage = 0; stage < kStages - 1; ++stage) {
    if (stage < steps) load(stage);
    commit_stage();
  }
}

// Main loop of the pipeline, after begin_depth: load(stage) starts the copies of a stage, use(stage) consumes one that
// has arrived.
template <int kStages, StagesOf kOf, class Load, class Use>
__device__ __forceinline__ void finish_depth(int steps, Load&& load, Use&& use) {
  for (int step = 0; step < steps; ++step) {
    await_stage<kStages, kOf>();
    if (step + kStages - 1 < steps) load((step + kStages - 1) % kStages);
    commit_stage();
    use(step % kStages);
  }
}

template <int kStages, StagesOf kOf = StagesOf::block, class Load, class Use>
__device__ __forceinline__ void walk_depth(int steps, Load&& load, Use&& use) {
  begin_depth<kStages>(steps, load);
  finish_depth<kStages, kOf>(steps, load, use);
}

inline __host__ __device__ int tile_steps(int64_t depth) {
  return static_cast<int>((depth + kTileDepth - 1) / kTileDepth);
}

// A thread's elements in the tile of its block: in mma (i, j), rows down + 16 i + group and 8 rows below, columns
// side + 8 j + 2 in_group and the next one.
template <class Tiling>
struct WarpPlace {
  int down, side, group, in_group;

  __device__ __forceinline__ WarpPlace() {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    down = warp / Tiling::kAcross * 16 * Tiling::kDown, side = warp % Tiling::kAcross * 8 * Tiling::kSide;
    group = lane / 4, in_group = lane % 4;
  }
};

// The tile of C and the range of the depth of a block.
template <class Tiling>
struct TilePlace : WarpPlace<Tiling> {
  int64_t first_row, begin, end;  // begin, end: range of the depth
  int first_column;

  __device__ __forceinline__ explicit TilePlace(const ProductArgs& args) {
    const int across = (args.columns + Tiling::kColumns - 1) / Tiling::kColumns;
    first_row = static_cast<int64_t>(blockIdx.x / across) * Tiling::kRows;
    first_column = static_cast<int>(blockIdx.x % across) * Tiling::kColumns;
    begin = blockIdx.y * args.share, end = min(args.depth, begin + args.share);
  }

  // Returns whether the thread sums a row of `a`. Of the blocks that read the same rows, only one does.
  __device__ __forceinline__ bool makes_sums() const {
    return first_column == 0 && blockIdx.z == 0 && threadIdx.x < Tiling::kRows;
  }

  __device__ __forceinline__ int steps() const { return tile_steps(end - begin); }
};

// The two operands of a block. kTwo: the tiles of the first pair of operands, then those of the second pair.
template <class A, class B, bool kTwo, class Place>
struct Operands {
  const ProductArgs& args;
  const Place& place;
  A a;
  B b;
  int left;  // remaining tiles of the first pair

  __device__ __forceinline__ Operands(const ProductArgs& args, const Place& place)
      : args(args),
        place(place),
        a(args.a, args.a_row, place.first_row, args.rows, place.begin, place.end),
        b(args.of[blockIdx.z].b, args.of[blockIdx.z].b_row, place.first_column, args.columns, place.begin, place.end),
        left(place.steps()) {}

  __device__ __forceinline__ int steps() const { return place.steps() + (kTwo ? tile_steps(args.more.depth) : 0); }

  template <class T>
  __device__ __forceinline__ void load(T* tile_a, T* tile_b) {
    if (kTwo && left-- == 0) {
      a = A(args.more.a, args.more.a_row, place.first_row, args.rows, 0, args.more.depth);
      b = B(args.more.b, args.more.b_row, place.first_column, args.columns, 0, args.more.depth);
    }
    a.load(tile_a);
    b.load(tile_b);
  }
};

// Calls use(row, column, x, y) for every pair of adjacent accumulators of the thread, for the tile at (first_row,
// first_column) of a matrix [rows, columns]. `sum` is indexed by mma.
template <class Place, int kDown, int kSide, class Use>
__device__ __forceinline__ void for_each_pair(const Place& place, int64_t first_row, int64_t rows, int first_column,
                                              int columns, float (&sum)[kDown][kSide][4], Use&& use) {
#pragma unroll
  for (int i = 0; i < kDown; ++i) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int64_t row = first_row + place.down + i * 16 + place.group + h * 8;
      if (row >= rows) continue;
#pragma unroll
      for (int j = 0; j < kSide; ++j) {
        const int column = first_column + place.side + j * 8 + place.in_group * 2;
        if (column < columns) use(row, column, sum[i][j][2 * h], sum[i][j][2 * h + 1]);  // columns is even
      }
    }
  }
}

template <class T>
struct alignas(2 * sizeof(T)) NumberPair {
  T x, y;
};

// Adds the tile of c, whose rows are c_row elements apart, to `sum`. This is a separate loop from the stores: if each
// pair were loaded, added and stored in turn, every load would wait for the store before it.
template <class T, class Place, class Sum>
__device__ __forceinline__ void add_numbers(const T* c, int64_t c_row, const Place& place, const ProductArgs& args,
                                            Sum& sum) {
  for_each_pair(place, place.first_row, args.rows, place.first_column, args.columns, sum,
                [&](int64_t row, int column, float& x, float& y) {
                  const auto pair = *reinterpret_cast<const NumberPair<T>*>(c + row * c_row + column);
                  x += to_arithmetic(pair.x), y += to_arithmetic(pair.y);
                });
}

}  // namespace edgeless::cuda::projection
