// The gradients of gatv2's edge term (EdgeProducts in edge_terms.h) on the tensor cores, in float arithmetic and for an
// even number of channels.
//
// A block processes tiles of edges as in edge_products.cuh. A warp has 16 columns and processes eight edges of a tile
// at a time. The first product is W e, the hidden values without the rows of both ends. The second is g times the
// features, with g in the result registers of the first. The features' gradient is a third product, of g from shared
// memory.
#pragma once

#include "edge_products.h"
#include "edge_terms.h"
#include "edge_tiles.cuh"
#include "edge_walk.cuh"

namespace edgeless::cuda {

// Target occupancy in blocks per SM; kBlocksOfProducts is a whole number of waves of it.
template <int kDim>
constexpr int kBlocksOfTiles = kDim > 16 ? 2 : 4;

// Index of the last entry of `begins` that is not beyond `position`; the first entry never is.
__device__ __forceinline__ int last_not_beyond(const int64_t (&begins)[kThreads], int64_t position) {
  int found = 0;
#pragma unroll
  for (int step = kThreads / 2; step > 0; step /= 2) {
    if (begins[found + step] <= position) found += step;
  }
  return found;
}

// Loads a tile's features as floats, zero beyond its `count` edges and their features. A thread issues all its loads at
// once.
template <class S, int kDim, int kTile, int kPitch>
__device__ __forceinline__ void load_features(const EdgeFeatures& edges, const int64_t (&ids)[kTile], int count,
                                              float (&to)[kTile][kPitch]) {
  constexpr int kPer = kVec<S>, kVectors = kDim / kPer, kOfThread = kTile * kVectors / kThreads;
  const S* attr = static_cast<const S*>(edges.attr);
  if (edges.dim % kPer == 0 && reinterpret_cast<uintptr_t>(attr) % 16 == 0 && kOfThread > 0) {
    uint4 raw[kOfThread > 0 ? kOfThread : 1];
#pragma unroll
    for (int i = 0; i < kOfThread; ++i) {
      const int at = i * kThreads + threadIdx.x, e = at / kVectors, k = at % kVectors * kPer;
      raw[i] = {};
      if (e < count && k < edges.dim) raw[i] = load_once(reinterpret_cast<const char*>(attr + ids[e] * edges.dim + k));
    }
#pragma unroll
    for (int i = 0; i < kOfThread; ++i) {
      const int at = i * kThreads + threadIdx.x, e = at / kVectors, k = at % kVectors * kPer;
      float x[kPer];
      unpack(raw[i], x, S{});
#pragma unroll
      for (int j = 0; j < kPer; j += 4) {
        *reinterpret_cast<float4*>(&to[e][k + j]) = {x[j], x[j + 1], x[j + 2], x[j + 3]};
      }
    }
    return;
  }
  for (int at = threadIdx.x; at < kTile * kDim; at += kThreads) {
    const int e = at / kDim, k = at % kDim;
    to[e][k] = e < count && k < edges.dim ? to_arithmetic(__ldg(attr + ids[e] * edges.dim + k)) : 0.0f;
  }
}

// Stores the features' gradient of a tile: eight edges per warp, sixteen features at a time.
template <class S, int kDim, int kTile>
__device__ __forceinline__ void store_attr_grad(const EdgeProducts<float>& args, const int64_t (&ids)[kTile], int count,
                                                const float* tile_of_g, const float* weighted, int in_block) {
  static_assert(kTile == kThreads / 32 * kTileEdges);
  constexpr int kOnCores = 4;  // chunks of columns that the tensor cores accumulate before a float addition
  const int row = tile_group(), pair = tile_pair(), first = threadIdx.x / 32 * kTileEdges, dim = args.edges.dim;
#pragma unroll
  for (int some = 0; some < kDim; some += kTileColumns) {
    const int feature = some + 2 * row;  // the lane has this feature and the next
    float sum[4] = {}, part[4];
    for (int column = 0; column < in_block; column += kTileDepth) {
      const float2 g =
          *reinterpret_cast<const float2*>(tile_of_g + (first + row) * pitch_of_g(in_block) + column + pair);
      TileRight<true> right;
      right.set(g.x, g.y);
      float2 low = {}, high = {};
      if (feature < kDim) {
        const float* w = weighted + (column + pair) * pitch_of_weighted(kDim) + feature;
        low = *reinterpret_cast<const float2*>(w);
        high = *reinterpret_cast<const float2*>(w + pitch_of_weighted(kDim));
      }
      TileLeft<true> left;
      left.set(low.x, high.x, low.y, high.y);
      const int chunk = column / kTileDepth;
      multiply_tile(part, left, right, chunk % kOnCores == 0);
      if (chunk % kOnCores == kOnCores - 1 || column + kTileDepth == in_block) {
#pragma unroll
        for (int k = 0; k < 4; ++k) sum[k] += part[k];
      }
    }
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      const int e = first + pair + u;
      if (e >= count) continue;
      S* to = static_cast<S*>(args.attr_grad) + ids[e] * dim + feature;
      if (feature < dim) to[0] = to_storage<S>(sum[u]);
      if (feature + 1 < dim) to[1] = to_storage<S>(sum[2 + u]);
    }
  }
}

template <class S, int kDim, bool kAttrGrad>
__global__ void __launch_bounds__(kThreads, kBlocksOfTiles<kDim>)
    edge_tiles_kernel(const __grid_constant__ EdgeProducts<float> args, int width) {
  constexpr bool kRest = std::is_same_v<S, float>;
  constexpr int kTile = edges_of_tiles(kDim, kAttrGrad), kChunks = kDim / kTileDepth;
  constexpr int kPitch = kDim % 16 ? kDim : kDim + 8;  // free of bank conflicts
  __shared__ __align__(16) float attr[kTile][kPitch];
  __shared__ float sums[kThreads];
  __shared__ int64_t ids[kTile], place[kTile];      // place: index in ds of the edge's first head
  __shared__ int64_t of_dst[kTile], of_src[kTile];  // bytes from row 0
  __shared__ int64_t begins[kThreads], next_low;    // first edges of rows `low` and up; row of the tile's last edge
  extern __shared__ __align__(16) char dynamic[];
  const EdgeFeatures& edges = args.edges;
  const int columns = edges.heads * args.channels, in_block = width * kTileColumns;
  float* tile_of_g = reinterpret_cast<float*>(dynamic);
  float* weighted = tile_of_g + kTile * pitch_of_g(in_block);
  const int warp = threadIdx.x / 32, group = warp / width, groups = kThreads / 32 / width;
  const int row = tile_group(), pair = tile_pair(), in_part = warp % width * kTileColumns + 2 * row;
  const int column = static_cast<int>(blockIdx.y) * in_block + in_part;
  const bool inside = column < columns;
  const int some = inside ? column : 0, head = some / args.channels, number = some % args.channels;

  TileLeft<kRest> w[kChunks];
  float sum[kChunks][4] = {};
  const auto of_proj = [&](int c, int k) { return k < edges.dim ? args.proj[(some + c) * edges.dim + k] : 0.0f; };
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    const int k = i * kTileDepth + pair;
    w[i].set(of_proj(0, k), of_proj(0, k + 1), of_proj(1, k), of_proj(1, k + 1));
  }
  if constexpr (kAttrGrad) {
    for (int at = threadIdx.x; at < in_block * kDim; at += kThreads) {
      const int c = at / kDim, k = at % kDim;
      weighted[c * pitch_of_weighted(kDim) + k] =
          c < columns && k < edges.dim ? args.weighted[c * edges.dim + k] : 0.0f;
    }
  }
  const char* dst = args.dst.base + head * args.dst.head + number * sizeof(S);
  const char* src = args.src.base + head * args.src.head + number * sizeof(S);

  const int64_t num_edges = edges_in_rows(edges.graph, edges.wide_index),
                units = (num_edges + kEdgesOfUnit - 1) / kEdgesOfUnit;
  const int64_t begin = units * blockIdx.x / gridDim.x * kEdgesOfUnit;
  const int64_t end = min(units * (blockIdx.x + 1) / gridDim.x * kEdgesOfUnit, num_edges);
  int64_t low = 0, high = 0;
  if (begin < end) {
    const RowBounds bounds(edges.graph, edges.wide_index, begin, end);
    low = bounds.low, high = bounds.high;
  }
  for (int64_t first = begin; first < end; first += kTile) {
    const int count = static_cast<int>(min(static_cast<int64_t>(kTile), end - first));
    __syncthreads();  // the previous tile has been read
    for (int e = threadIdx.x; e < kTile; e += kThreads) {
      const int64_t position = first + min(e, count - 1), id = id_of_edge(edges, position);
      ids[e] = id;
      place[e] = (edges.by_position ? position : id) * edges.heads;
      of_src[e] = index_at(edges.graph.indices, position, edges.wide_index) * args.src.row;
    }
    begins[threadIdx.x] = index_at(edges.graph.indptr, min(low + threadIdx.x, high), edges.wide_index);
    __syncthreads();
    for (int e = threadIdx.x; e < kTile; e += kThreads) {
      const int64_t position = first + min(e, count - 1);
      const int found = last_not_beyond(begins, position);
      const int64_t least = min(low + found, high);
      const int64_t row = found < kThreads - 1 ? least : row_of_edge(edges, position, least, high);
      of_dst[e] = row * args.dst.row;
      if (e == count - 1) next_low = row;
    }
    load_features<S, kDim>(edges, ids, count, attr);
    __syncthreads();
    low = next_low;
#pragma unroll 1
    for (int some_edges = group * kTileEdges; some_edges < count; some_edges += groups * kTileEdges) {
      const int own = some_edges + pair;  // the lane has this edge and the next
      float g[2], x[2][2], y[2][2];
#pragma unroll
      for (int u = 0; u < 2; ++u) {
        g[u] = inside && own + u < count ? __ldg(args.ds + place[own + u] + head) : 0.0f;
        load_columns<S>(src + of_src[own + u], x[u]);
        load_columns<S>(dst + of_dst[own + u], y[u]);
      }
      float hidden[4];
#pragma unroll
      for (int i = 0; i < kChunks; ++i) {
        const float* features = &attr[some_edges + row][i * kTileDepth + pair];
        TileRight<kRest> e;
        e.set(features[0], features[1]);
        multiply_tile(hidden, w[i], e, i == 0);
      }
      float of_column[2][2];  // column, edge
#pragma unroll
      for (int c = 0; c < 2; ++c) {
#pragma unroll
        for (int u = 0; u < 2; ++u) {
          of_column[c][u] = hidden[2 * c + u] + x[u][c] + y[u][c] > 0 ? g[u] : g[u] * args.slope;
          if constexpr (kAttrGrad) tile_of_g[(own + u) * pitch_of_g(in_block) + in_part + c] = of_column[c][u];
        }
      }
      TileLeft<true> of_columns;
      of_columns.set(of_column[0][0], of_column[0][1], of_column[1][0], of_column[1][1]);
#pragma unroll
      for (int i = 0; i < kChunks; ++i) {
        TileRight<kRest> feature;
        feature.set(attr[own][i * kTileDepth + row], attr[own + 1][i * kTileDepth + row]);
        float part[4];
        multiply_tile(part, of_columns, feature, true);
#pragma unroll
        for (int k = 0; k < 4; ++k) sum[i][k] += part[k];
      }
    }
    if constexpr (kAttrGrad) {
      __syncthreads();
      store_attr_grad<S, kDim>(args, ids, count, tile_of_g, weighted, in_block);
    }
  }

  // Adds up the sums of the groups of warps in the order of the groups.
  float* partial = args.partial + (static_cast<int64_t>(blockIdx.x) * columns + some) * edges.dim;
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const int feature = i * kTileDepth + pair + k % 2;
      __syncthreads();
      sums[threadIdx.x] = sum[i][k];
      __syncthreads();
      if (group > 0 || !inside || feature >= edges.dim) continue;
      float total = 0;
      for (int g = 0; g < groups; ++g) total += sums[g * width * 32 + threadIdx.x];
      partial[k / 2 * edges.dim + feature] = total;
    }
  }
}

}  // namespace edgeless::cuda
