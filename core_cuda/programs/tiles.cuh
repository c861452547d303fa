// Products of narrow edge features on the tensor cores, for generated walks: a warp multiplies the features of 16 edges
// by a matrix, the values that its lanes have computed for these edges by another matrix, or both by each other, summed
// over the edges. The values of an edge that more than one lane reads are in a row of shared memory.
//
// A tile is 16 edges, of which each sub-warp of the warp has an equal part, kSubWarp / 2. In the instruction
// mma.m16n8k8 lane 4 g + t holds rows g and g + 8 of the left factor at depths t and t + 4, column g of the right
// factor at these depths, and columns 2 t and 2 t + 1 of rows g and g + 8 of the result. Which edges, columns and
// features have these indices is free, as long as both factors agree. They are chosen so that a lane reads four
// contiguous values at once and no two lanes read the same bank of shared memory.
//
// Values are split as in common/tf32.cuh; kLeftRest and kRightRest are false for factors that TF32 holds exactly.
#pragma once

#include "../common/segment_reduce.h"
#include "../common/tf32.cuh"
#include "../common/warp.cuh"
#include "loaded.cuh"

namespace edgeless::cuda::programs {

constexpr int kTileEdges = 16;
constexpr int kPad = 4;  // floats of padding after a row in shared memory

__device__ __forceinline__ int tile_group() { return threadIdx.x % 32 / 4; }  // g
__device__ __forceinline__ int tile_place() { return threadIdx.x % 4; }       // t
// The index, among eight edges, of the edge in row or column g of a product.
__device__ __forceinline__ int tile_edge() { return tile_group() / 2 + tile_group() % 2 * 4; }

// The edges of a tile, one in each lane; lanes l and l + 16 hold the same edge. A window has two tiles.
template <int kSubWarp>
struct TileOfWarp {
  static constexpr int kOfSubWarp = kSubWarp / 2;
  int64_t id, ahead;     // edge ids of this tile and of the next, whose features are loaded while this one is processed
  int begin, count = 0;  // index in the window of the tile's first edge; edges of this lane's sub-warp so far
  bool runs = false;     // the first tile has begun

  static __device__ __forceinline__ int slot() { return threadIdx.x % kTileEdges; }

  // The ids of the edges from b on of a window. own_id: the id of the lane's edge in the window.
  static __device__ __forceinline__ int64_t of_window(int64_t own_id, int b) {
    return __shfl_sync(kFullWarp, own_id, slot() / kOfSubWarp * kSubWarp + b + slot() % kOfSubWarp);
  }
  // Returns whether this is the first tile, whose features are not loaded yet.
  __device__ __forceinline__ bool starts(int64_t own_id, int b) {
    if (runs) return false;
    runs = true, ahead = of_window(own_id, b);
    return true;
  }
  __device__ __forceinline__ void open(int b) { id = ahead, begin = b, count = 0; }
  __device__ __forceinline__ void look_ahead(int64_t own_id, int64_t next_id) {
    ahead = begin == 0 ? of_window(own_id, kOfSubWarp) : of_window(next_id, 0);
  }
  // The index in the tile of edge b of the window of this lane's sub-warp.
  __device__ __forceinline__ int place(int b) const { return threadIdx.x % 32 / kSubWarp * kOfSubWarp + b - begin; }
  __device__ __forceinline__ int64_t id_of(int edge) const { return __shfl_sync(kFullWarp, id, edge); }
  // The mask of the edges of the tile that exist.
  __device__ __forceinline__ unsigned existing() const {
    const int of_slot = __shfl_sync(kFullWarp, count, slot() / kOfSubWarp * kSubWarp);
    return __ballot_sync(kFullWarp, slot() % kOfSubWarp < of_slot);
  }
};

template <int kCount>
struct SplitNumbers {
  uint32_t nearest[kCount], rest[kCount];

  __device__ __forceinline__ void set(int i, float x) { split(x, nearest[i], rest[i]); }
};

// d += a b.
template <bool kLeftRest, bool kRightRest>
__device__ __forceinline__ void multiply_split(float (&d)[4], const SplitNumbers<4>& a, const SplitNumbers<2>& b) {
  if constexpr (kLeftRest) multiply_add(d, a.rest, b.nearest, false);
  if constexpr (kRightRest) multiply_add(d, a.nearest, b.rest, false);
  multiply_add(d, a.nearest, b.nearest, false);
}

// Features of a tile's edges in registers: rows of kRow values, of which kDepth from `from` on are read.
template <class S, int kDepth, int kRow>
struct TileFeatures {
  static constexpr int kChunks = kDepth / 16;
  Loaded<S, 4> of[2][kChunks];  // edge, sixteen features

  // id: in each lane the id of an edge of the tile.
  __device__ __forceinline__ void load(const S* from, int64_t id) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int64_t of_edge = __shfl_sync(kFullWarp, id, 8 * e + tile_edge());
      const S* const row = from + of_edge * kRow + 4 * tile_place();
#pragma unroll
      for (int c = 0; c < kChunks; ++c) of[e][c].once(row + 16 * c);
    }
  }
  // Copies the features to rows of kDepth + kPad floats.
  __device__ __forceinline__ void keep(float* to) const {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        float4* const at =
            reinterpret_cast<float4*>(to + (8 * e + tile_edge()) * (kDepth + kPad) + 16 * c) + tile_place();
        *at = {value_of(of[e][c][0]), value_of(of[e][c][1]), value_of(of[e][c][2]), value_of(of[e][c][3])};
      }
    }
  }
};

// Copies a matrix of kDepth features by kColumns columns into the order in which multiply_features() reads it.
template <int kColumns, int kDepth, class S>
__device__ inline void fill_by_features(const S* from, int column, int feature, float* to) {
  for (int i = threadIdx.x; i < kColumns * kDepth; i += kReduceThreads) {
    const int q = i % 4, lane = i / 4 % 32, j = i / 128 % (kColumns / 8), c = i / 128 / (kColumns / 8);
    const int of = j / 2 * 16 + lane / 8 * 4 + j % 2 * 2 + lane / 4 % 2;
    to[i] = static_cast<float>(value_of(from[of * column + (16 * c + lane % 4 * 4 + q) * feature]));
  }
}

// Writes features times the matrix to rows of kColumns + kPad floats.
template <bool kLeftRest, bool kRightRest, int kColumns, class S, int kDepth, int kRow>
__device__ __forceinline__ void multiply_features(const TileFeatures<S, kDepth, kRow>& features, const float* matrix,
                                                  float* to) {
  constexpr int kChunks = kDepth / 16;
  SplitNumbers<4> left[kChunks][2];
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
#pragma unroll
    for (int i = 0; i < 8; ++i) left[c][i / 4].set(i % 4, value_of(features.of[i % 2][c][i / 4 * 2 + i / 2 % 2]));
  }
  const float4* const at = reinterpret_cast<const float4*>(matrix) + threadIdx.x % 32;
  float4* const first = reinterpret_cast<float4*>(to + tile_edge() * (kColumns + kPad)) + tile_place();
  float4* const second = first + 8 * (kColumns + kPad) / 4;
#pragma unroll
  for (int m = 0; m < kColumns / 16; ++m) {
    float d[2][4] = {};
#pragma unroll
    for (int side = 0; side < 2; ++side) {
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        const float4 x = at[(c * (kColumns / 8) + 2 * m + side) * 32];
        SplitNumbers<2> low, high;
        low.set(0, x.x), low.set(1, x.y), high.set(0, x.z), high.set(1, x.w);
        multiply_split<kLeftRest, kRightRest>(d[side], left[c][0], low);
        multiply_split<kLeftRest, kRightRest>(d[side], left[c][1], high);
      }
    }
    first[4 * m] = {d[0][0], d[0][1], d[1][0], d[1][1]};
    second[4 * m] = {d[0][2], d[0][3], d[1][2], d[1][3]};
  }
}

// Copies a matrix of kDepth features by kColumns columns into the order in which multiply_columns() reads it.
template <int kColumns, int kDepth, class S>
__device__ inline void fill_by_columns(const S* from, int column, int feature, float* to) {
  for (int i = threadIdx.x; i < kColumns * kDepth; i += kReduceThreads) {
    const int q = i % 4, lane = i / 4 % 32, half = i / 128 % 2, m = i / 256 % (kColumns / 16), f = i / 16 / kColumns;
    const int of = 16 * m + lane % 4 * 4 + 2 * half + q / 2;
    to[i] = static_cast<float>(value_of(from[of * column + (16 * f + lane / 4 * 2 + q % 2) * feature]));
  }
}

// Gradients of features: rows of kColumns + kPad floats (`from`) times a matrix, summed over the columns.
template <int kDepth>
struct TileGradients {
  // Three sums, since products that are added to the same register wait for each other.
  float sum[kDepth / 16][2][4] = {}, left_rest[kDepth / 16][2][4] = {}, right_rest[kDepth / 16][2][4] = {};

  template <bool kLeftRest, bool kRightRest, int kColumns>
  __device__ __forceinline__ void multiply_columns(const float* from, const float* matrix) {
    const float4* const at = reinterpret_cast<const float4*>(matrix) + threadIdx.x % 32;
    const float4* const row = reinterpret_cast<const float4*>(from + tile_edge() * (kColumns + kPad)) + tile_place();
#pragma unroll
    for (int m = 0; m < kColumns / 16; ++m) {
      SplitNumbers<2> right[2][2];  // eight edges, half
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float4 x = row[8 * e * (kColumns + kPad) / 4 + 4 * m];
        right[e][0].set(0, x.x), right[e][0].set(1, x.y), right[e][1].set(0, x.z), right[e][1].set(1, x.w);
      }
#pragma unroll
      for (int f = 0; f < kDepth / 16; ++f) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float4 x = at[((f * (kColumns / 16) + m) * 2 + half) * 32];
          SplitNumbers<4> left;
          left.set(0, x.x), left.set(1, x.y), left.set(2, x.z), left.set(3, x.w);
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            if constexpr (kLeftRest) multiply_add(left_rest[f][e], left.rest, right[e][half].nearest, false);
            if constexpr (kRightRest) multiply_add(right_rest[f][e], left.nearest, right[e][half].rest, false);
            multiply_add(sum[f][e], left.nearest, right[e][half].nearest, false);
          }
        }
      }
    }
  }

  __device__ __forceinline__ float of(int f, int e, int k) const {
    return sum[f][e][k] + (left_rest[f][e][k] + right_rest[f][e][k]);
  }

  // Stores the gradients to rows of kDepth values, indexed by edge id.
  template <class S, class Tile>
  __device__ __forceinline__ void store(S* to, const Tile& tile, unsigned existing) const {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const int edge = 8 * e + 4 * k + tile_place();
        S* const row = to + tile.id_of(edge) * int64_t(kDepth) + 2 * tile_group();
        if (!(existing >> edge & 1)) continue;
#pragma unroll
        for (int f = 0; f < kDepth / 16; ++f) {
          const S x[2] = {stored<S>(of(f, e, k)), stored<S>(of(f, e, k + 2))};
          store_values(row + 16 * f, x);
        }
      }
    }
  }
};

// Sums over all edges of values times features: [kColumns, kDepth], spread over the lanes of a warp.
template <int kColumns, int kDepth>
struct TileTotals {
  static constexpr int kFeatures = kDepth / 8, kCount = kColumns * kDepth / 32;
  float sum[kColumns / 16][kFeatures][4] = {};

  // from, features: rows of kColumns + kPad and kDepth + kPad floats.
  template <bool kLeftRest, bool kRightRest>
  __device__ __forceinline__ void add(const float* from, const float* features) {
    SplitNumbers<2> right[2][kFeatures];  // eight edges
#pragma unroll
    for (int e = 0; e < 2; ++e) {
#pragma unroll
      for (int i = 0; i < 2 * kFeatures; ++i) {
        const int edge = 8 * e + 2 * tile_place() + i % 2;
        right[e][i / 2].set(i % 2, features[edge * (kDepth + kPad) + i / 2 * 8 + tile_group()]);
      }
    }
#pragma unroll
    for (int h = 0; h < kColumns / 32; ++h) {
      SplitNumbers<4> left[2][2];  // side, eight edges
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int edge = 8 * (i / 2) + 2 * tile_place() + i % 2;
        const float4 x = reinterpret_cast<const float4*>(from + edge * (kColumns + kPad) + 32 * h)[tile_group()];
        left[0][i / 2].set(i % 2 * 2, x.x), left[0][i / 2].set(i % 2 * 2 + 1, x.y);
        left[1][i / 2].set(i % 2 * 2, x.z), left[1][i / 2].set(i % 2 * 2 + 1, x.w);
      }
#pragma unroll
      for (int side = 0; side < 2; ++side) {
#pragma unroll
        for (int f = 0; f < kFeatures; ++f) {
          float d[4] = {};  // tensor cores truncate when they add
          multiply_split<kLeftRest, kRightRest>(d, left[side][0], right[0][f]);
          multiply_split<kLeftRest, kRightRest>(d, left[side][1], right[1][f]);
#pragma unroll
          for (int k = 0; k < 4; ++k) sum[2 * h + side][f][k] += d[k];
        }
      }
    }
  }

  // Adds up the sums of a block's warps in order and writes them. Value k of a lane has the index (k / 4 * 32 + lane) *
  // 4 + k % 4 in the block's part (shared/programs/cuda_tiles.py).
  __device__ inline void finish(float* parts) const {
    __shared__ float4 shared[kReduceThreads];
    float4* const part = reinterpret_cast<float4*>(parts + static_cast<int64_t>(blockIdx.x) * (kColumns * kDepth));
#pragma unroll
    for (int i = 0; i < kCount / 4; ++i) {
      const float (&x)[4] = sum[i / kFeatures][i % kFeatures];
      __syncthreads();
      shared[threadIdx.x] = {x[0], x[1], x[2], x[3]};
      __syncthreads();
      if (threadIdx.x >= 32) continue;
      float4 all = shared[threadIdx.x];
      for (int warp = 1; warp < kReduceThreads / 32; ++warp) {
        const float4 more = shared[32 * warp + threadIdx.x];
        all = {all.x + more.x, all.y + more.y, all.z + more.z, all.w + more.w};
      }
      part[i * 32 + threadIdx.x] = all;
    }
  }
};

// Zeroes the lane's values in the rows of tile entries for which its sub-warp has no edge.
template <int kCount, int kColumns, class Tile>
__device__ __forceinline__ void clear_missing(float* rows, int place, bool inside, const Tile& tile) {
  for (int i = tile.count; i < Tile::kOfSubWarp; ++i) {
    float* const row = rows + tile.place(tile.begin + i) * (kColumns + kPad) + place;
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      if (inside) row[k] = 0;
    }
  }
}

}  // namespace edgeless::cuda::programs
