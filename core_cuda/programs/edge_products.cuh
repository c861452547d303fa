// Products per edge in generated walks: the lanes of a warp store values of kEdges edges to rows of shared memory, and
// the warp multiplies these rows by a matrix on the tensor cores, or the block multiplies the rows of all its warps by
// each other, summed over the edges. Between products, and after the last one, lanes compute with the values in rows.
//
// Rows hold floats, or 16-bit values if their product is computed in 16 bits; kPad floats follow each row.
//
// tiles.cuh describes how lanes hold the factors of mma.m16n8k8, and the order of matrices in shared memory.
#pragma once

#include "../common/half_mma.cuh"
#include "tiles.cuh"

namespace edgeless::cuda::programs {

// The pitch of rows, in values.
template <class S, int kColumns>
constexpr int kStep = kColumns + kPad * 4 / sizeof(S);

// The edges of a sub-warp's window, one in each lane: the gathered index (`near`) and the row of the edge, and whether
// the edge exists.
template <class I, int kSubWarp>
struct EdgesOfWindow {
  int64_t near = 0, row = 0;
  I end = 0, left = 0;  // the end of `row`; edges of the sub-warp from this window on
  bool exists = false;

  // position: that of this lane's edge in the first window; last: the end of the sub-warp's edges.
  __device__ __forceinline__ void start(int64_t first_row, I position, I last, const I* indptr, unsigned sub_warp) {
    left = last - __shfl_sync(sub_warp, position, 0, kSubWarp);
    row = first_row, end = indptr[row + 1];
  }
  __device__ __forceinline__ void next(I index, I position, const I* indptr) {
    near = index;
    exists = static_cast<int>(threadIdx.x % kSubWarp) < left;
    left -= kSubWarp;
    if (!exists) return;
    while (end <= position) end = indptr[++row + 1];
  }
};

// The column, in a block of eight columns, of which a lane has four or eight features.
__device__ __forceinline__ int tile_column(int block, int lane) {
  return block / 2 * 16 + lane / 8 * 4 + block % 2 * 2 + lane / 4 % 2;
}

// Copies a matrix of kDepth features by kColumns columns into the order in which multiply_rows() reads it, with zeros
// up to kPaddedDepth and kPaddedColumns.
template <int kColumns, int kDepth, int kPaddedColumns, int kPaddedDepth, class S>
__device__ inline void fill_floats(const S* from, int column, int feature, float* to) {
  for (int i = threadIdx.x; i < kPaddedColumns * kPaddedDepth; i += kReduceThreads) {
    const int j = i / 128 % (kPaddedColumns / 8), c = i / 128 / (kPaddedColumns / 8);
    const int of = tile_column(j, i / 4 % 32), k = 16 * c + i / 4 % 4 * 4 + i % 4;
    to[i] = of < kColumns && k < kDepth ? static_cast<float>(value_of(from[of * column + k * feature])) : 0;
  }
}
// A matrix that fill_floats() has copied.
struct MatrixInOrder {
  const float* from;

  // Loads the lane's factors from a chunk of 16 features and a block of 8 columns: four features of one column.
  template <int kColumns>
  __device__ __forceinline__ float4 four(int chunk, int block) const {
    return reinterpret_cast<const float4*>(from)[(chunk * (kColumns / 8) + block) * 32 + threadIdx.x % 32];
  }
};
// A matrix in global memory whose columns are kColumn and whose features are kFeature values apart. It begins kPlace
// values after a multiple of four.
template <class S, int kColumn, int kFeature, int kPlace, int kColumns, int kDepth, int kPaddedColumns,
          int kPaddedDepth>
struct MatrixAsItIs {
  const S* from;

  __device__ __forceinline__ auto at(int column, int feature) const {
    const bool exists = column < kColumns && feature < kDepth;  // always true without padding, as the compiler sees
    return value_of(exists ? __ldg(from + column * kColumn + feature * kFeature) : S{});
  }

  template <int kOfBlocks>
  __device__ __forceinline__ float4 four(int chunk, int block) const {
    const int column = tile_column(block, threadIdx.x % 32), first = 16 * chunk + threadIdx.x % 4 * 4;
    constexpr bool kExact = kColumns == kPaddedColumns && kDepth == kPaddedDepth;
    if constexpr (kExact && kFeature == 1 && kPlace == 0 && kColumn % 4 == 0) {
      Loaded<S, 4> x;
      x.gather(from + column * kColumn + first);
      return {value_of(x[0]), value_of(x[1]), value_of(x[2]), value_of(x[3])};
    }
    return {at(column, first), at(column, first + 1), at(column, first + 2), at(column, first + 3)};
  }
  // Like four(), for chunks of 32 features in 16 bits: eight features of one column.
  template <class H, int kOfBlocks>
  __device__ __forceinline__ uint4 eight(int chunk, int block) const {
    const int column = tile_column(block, threadIdx.x % 32), first = 32 * chunk + threadIdx.x % 4 * 8;
    H x[8];
#pragma unroll
    for (int q = 0; q < 8; ++q) x[q] = stored<H>(at(column, first + q));
    uint4 packed;
    memcpy(&packed, x, sizeof(x));
    return packed;
  }
};

// fill_floats() for multiply_half_rows().
template <int kColumns, int kDepth, int kPaddedColumns, int kPaddedDepth, class S, class H>
__device__ inline void fill_halves(const S* from, int column, int feature, H* to) {
  for (int i = threadIdx.x; i < kPaddedColumns * kPaddedDepth; i += kReduceThreads) {
    const int j = i / 256 % (kPaddedColumns / 8), c = i / 256 / (kPaddedColumns / 8);
    const int of = tile_column(j, i / 8 % 32), k = 32 * c + i / 8 % 4 * 8 + i % 8;
    to[i] = stored<H>(of < kColumns && k < kDepth ? value_of(from[of * column + k * feature]) : 0);
  }
}
struct HalvesInOrder {
  const char* from;

  template <class H, int kColumns>
  __device__ __forceinline__ uint4 eight(int chunk, int block) const {
    return reinterpret_cast<const uint4*>(from)[(chunk * (kColumns / 8) + block) * 32 + threadIdx.x % 32];
  }
};

// Writes the products of 16 kTiles edges to rows, once all lanes have read their factors from rows.
template <int kTiles, int kColumns>
__device__ __forceinline__ void write_products(const float (&sum)[kTiles][kColumns / 8][4], float* to) {
  __syncwarp();
#pragma unroll
  for (int i = 0; i < 2 * kTiles; ++i) {
    float4* const row = reinterpret_cast<float4*>(to + (8 * i + tile_edge()) * kStep<float, kColumns>) + tile_place();
#pragma unroll
    for (int m = 0; m < kColumns / 16; ++m) {
      const float (&a)[4] = sum[i / 2][2 * m], (&b)[4] = sum[i / 2][2 * m + 1];
      row[4 * m] = {a[i % 2 * 2], a[i % 2 * 2 + 1], b[i % 2 * 2], b[i % 2 * 2 + 1]};
    }
  }
}

// Multiplies rows of kDepth + kPad floats by a matrix and writes the products to rows of kColumns + kPad floats. `to`
// may be `from`.
template <int kEdges, int kDepth, int kColumns, bool kLeftRest, bool kRightRest, class Matrix>
__device__ __forceinline__ void multiply_rows(const float* from, const Matrix& matrix, float* to) {
  constexpr int kTiles = kColumns <= 64 ? kEdges / 16 : 1;  // tiles that are multiplied per load of the matrix
#pragma unroll 1
  for (int first = 0; first < kEdges; first += 16 * kTiles) {
    const float4* const row =
        reinterpret_cast<const float4*>(from + (first + tile_edge()) * (kDepth + kPad)) + tile_place();
    float sum[kTiles][kColumns / 8][4] = {};
#pragma unroll 1
    for (int c = 0; c < kDepth / 16; ++c) {
      SplitNumbers<4> left[kTiles][2];
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        const float4 x = row[4 * tile * (kDepth + kPad) + 4 * c], y = row[(4 * tile + 2) * (kDepth + kPad) + 4 * c];
        left[tile][0].set(0, x.x), left[tile][0].set(1, y.x), left[tile][0].set(2, x.y), left[tile][0].set(3, y.y);
        left[tile][1].set(0, x.z), left[tile][1].set(1, y.z), left[tile][1].set(2, x.w), left[tile][1].set(3, y.w);
      }
#pragma unroll
      for (int j = 0; j < kColumns / 8; ++j) {
        const float4 x = matrix.template four<kColumns>(c, j);
        SplitNumbers<2> right[2];
        right[0].set(0, x.x), right[0].set(1, x.y), right[1].set(0, x.z), right[1].set(1, x.w);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
          for (int tile = 0; tile < kTiles; ++tile) {
            multiply_split<kLeftRest, kRightRest>(sum[tile][j], left[tile][half], right[half]);
          }
        }
      }
    }
    write_products<kTiles, kColumns>(sum, to + first * kStep<float, kColumns>);
  }
}

// multiply_rows() for rows of kDepth 16-bit values.
template <int kEdges, int kDepth, int kColumns, class H, class Matrix>
__device__ __forceinline__ void multiply_half_rows(const H* from, const Matrix& matrix, float* to) {
  constexpr int kTiles = kColumns <= 64 ? kEdges / 16 : 1, kFrom = kStep<H, kDepth>;
#pragma unroll 1
  for (int first = 0; first < kEdges; first += 16 * kTiles) {
    const H* const row = from + (first + tile_edge()) * kFrom + 8 * tile_place();
    float sum[kTiles][kColumns / 8][4] = {};
#pragma unroll 1
    for (int c = 0; c < kDepth / 32; ++c) {
      uint32_t left[kTiles][2][4];
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        const uint4 x = *reinterpret_cast<const uint4*>(row + 16 * tile * kFrom + 32 * c);
        const uint4 y = *reinterpret_cast<const uint4*>(row + (16 * tile + 8) * kFrom + 32 * c);
        left[tile][0][0] = x.x, left[tile][0][1] = y.x, left[tile][0][2] = x.y, left[tile][0][3] = y.y;
        left[tile][1][0] = x.z, left[tile][1][1] = y.z, left[tile][1][2] = x.w, left[tile][1][3] = y.w;
      }
#pragma unroll
      for (int j = 0; j < kColumns / 8; ++j) {
        const uint4 right = matrix.template eight<H, kColumns>(c, j);
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) multiply_add<H>(sum[tile][j], left[tile][0], right.x, right.y);
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) multiply_add<H>(sum[tile][j], left[tile][1], right.z, right.w);
      }
    }
    write_products<kTiles, kColumns>(sum, to + first * kStep<float, kColumns>);
  }
}

// The sum over all edges of left^T right, [kRows, kColumns]. Each warp of a block holds a part of this matrix.
template <int kRows, int kColumns>
struct BlockTotals {
  static constexpr int kWarps = kReduceThreads / 32, kRowParts = kRows % 128 == 0 ? 4 : kRows % 64 == 0 ? 2 : 1;
  static constexpr int kHeight = kRows / kRowParts, kWidth = kColumns * kRowParts / kWarps;
  static constexpr int kCount = kHeight * kWidth / 128;  // a lane's values, in groups of four
  float sum[kHeight / 16][kWidth / 8][4] = {};

  // left, right: rows of the first warp's edges; the rows of each further warp are `warp` floats later.
  template <int kEdges, bool kLeftRest, bool kRightRest, class L, class R>
  __device__ __forceinline__ void add(const L* left, const R* right, int warp) {
    left += static_cast<int>(threadIdx.x) / 32 % kRowParts * kHeight + 4 * tile_group();
    right += static_cast<int>(threadIdx.x) / 32 / kRowParts * kWidth + tile_group();
#pragma unroll 1
    for (int i = 0; i < kWarps * kEdges / 16; ++i) {
      const int tile = i / (kEdges / 16) * warp, edges = i % (kEdges / 16) * 16 + 2 * tile_place();
      SplitNumbers<2> b[2][kWidth / 8];  // eight edges
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const R* const row = right + tile * (4 / sizeof(R)) + (edges + e / 2 * 8 + e % 2) * kStep<R, kColumns>;
#pragma unroll
        for (int n = 0; n < kWidth / 8; ++n) b[e / 2][n].set(e % 2, value_of(row[8 * n]));
      }
#pragma unroll
      for (int h = 0; h < kHeight / 32; ++h) {
        SplitNumbers<4> a[2][2];  // side, eight edges
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          Loaded<L, 4> x;
          x.near(left + tile * (4 / sizeof(L)) + (edges + e / 2 * 8 + e % 2) * kStep<L, kRows> + 32 * h);
          a[0][e / 2].set(e % 2 * 2, value_of(x[0])), a[0][e / 2].set(e % 2 * 2 + 1, value_of(x[1]));
          a[1][e / 2].set(e % 2 * 2, value_of(x[2])), a[1][e / 2].set(e % 2 * 2 + 1, value_of(x[3]));
        }
#pragma unroll
        for (int side = 0; side < 2; ++side) {
#pragma unroll
          for (int n = 0; n < kWidth / 8; ++n) {
            float d[4] = {};  // tensor cores truncate when they add
            multiply_split<kLeftRest, kRightRest>(d, a[side][0], b[0][n]);
            multiply_split<kLeftRest, kRightRest>(d, a[side][1], b[1][n]);
#pragma unroll
            for (int k = 0; k < 4; ++k) sum[2 * h + side][n][k] += d[k];
          }
        }
      }
    }
  }

  // Writes the block's partial sums; those of neighbouring blocks are of_block floats apart. Value k of a lane of a
  // warp has the index ((warp * kCount + k / 4) * 32 + lane) * 4 + k % 4 (shared/programs/cuda_products.py).
  __device__ inline void finish(float* parts, int of_block) const {
    float4* const part = reinterpret_cast<float4*>(parts + static_cast<int64_t>(blockIdx.x) * of_block) +
                         threadIdx.x / 32 * kCount * 32 + threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const float (&x)[4] = sum[i / (kWidth / 8)][i % (kWidth / 8)];
      part[i * 32] = {x[0], x[1], x[2], x[3]};
    }
  }
};

}  // namespace edgeless::cuda::programs
