// GATv2's edge term W_h e, which is added to the rows that a pass gathers.
#pragma once

#include <type_traits>

#include "edge_data.cuh"
#include "edge_tiles.cuh"

namespace edgeless::cuda {

// make() is called once the ids of a batch are available, add() in each of the batch's rounds, both by whole warps.
// add() unpacks the lane's part of the rows `raw` of a round of `count` edges to x and adds the term. ids: those of the
// edges that the lane owns.
//
// In TermsByLane, a lane computes the term of its own columns, for all rows of a round at once.
template <class S, class I, class SubWarp, int kVecs>
struct TermsByLane {
  using A = Arithmetic<S>;

  static __device__ __forceinline__ void make(const Args<A>& /*args*/, const I (& /*ids*/)[SubWarp::kRounds]) {}

  template <class P>
  static __device__ __forceinline__ void add(const Args<A>& args, const P& place, const I (&ids)[SubWarp::kRounds],
                                             int round, int count, const Raw<S> (&raw)[SubWarp::kRows][kVecs],
                                             A (&x)[SubWarp::kRows][kVecs * kVec<S>]) {
    const I id = ids[round];
#pragma unroll
    for (int u = 0; u < SubWarp::kRows; ++u) unpack_all<S, kVecs>(raw[u], x[u]);
    if (!args.proj || args.graph.num_edges == 0) return;
    if (SubWarp::kEdges == 1 && count == 0) return;  // short rows leave rounds empty; no lane needs another's edge
    const S* attr = reinterpret_cast<const S*>(args.edge_attr.base + static_cast<int64_t>(id) * args.edge_attr.row);
    const int width = args.key_vectors * kVec<S>;
    const A* proj = args.proj + static_cast<int64_t>(place.head) * args.edge_dim * width;
    for (int d = 0; d < args.edge_dim; ++d, proj += width) {
      const A mine = to_arithmetic(attr[d]);
      A w[kVecs * kVec<S>];
#pragma unroll
      for (int v = 0; v < kVecs; ++v) {
        const int at = max(min(v * place.row_width() + place.row_lane(), args.key_vectors - 1), 0) * kVec<S>;
#pragma unroll
        for (int k = 0; k < kVec<S>; k += kVec<A>) {
          A some[kVec<A>];
          unpack(__ldg(reinterpret_cast<const uint4*>(proj + at + k)), some, A{});
#pragma unroll
          for (int i = 0; i < kVec<A>; ++i) w[v * kVec<S> + k + i] = some[i];
        }
      }
#pragma unroll
      for (int u = 0; u < SubWarp::kRows; ++u) {
        const A e = SubWarp::from_owner(place, mine, u);
#pragma unroll
        for (int k = 0; k < kVecs * kVec<S>; ++k) x[u][k] = fma(e, w[k], x[u][k]);
      }
    }
  }
};

// The sub-warps of a warp compute the terms of all edges of their batches together on the tensor cores (edge_tiles.cuh)
// and exchange them through shared memory, where an edge's row has the columns of all lanes of the warp that process
// the edge: four of each lane, then the next four of each. So W is read once for sixteen edges, and lanes exchange
// nothing per feature. The lanes that process an edge are a power of two and at least four (terms_in_tiles()): either
// they are all in one warp, or all lanes of the warp process the same edges. Not for float32 rows, which need three
// products in place of one: tiles are not faster for them.
template <class S, class I, class SubWarp>
struct TermsInTiles {
  static constexpr int kV = kVec<S>, kBatch = SubWarp::kBatch;
  static constexpr int kSides = 2;   // edge tiles per load of W
  static constexpr int kChunks = 2;  // chunks of kTileDepth features in registers at once

  // Per warp: lanes that process one edge, edges, and the pitch of an edge in floats (free of bank conflicts).
  struct Shape {
    int lanes_log2, lanes, edges, pitch;
    template <class L>
    __device__ explicit Shape(const L& layout)
        : lanes_log2(min(31 - __clz(layout.heads_per_slice) + layout.sub_warp_log2, 5)),
          lanes(1 << lanes_log2),
          edges(32 * kBatch >> lanes_log2),
          pitch(lanes * kV + 4) {}
  };

  static __device__ __forceinline__ float* room() {
    __shared__ __align__(16) float rooms[kBlockThreads / 32][kBatch * (32 * kV + 32)];
    return rooms[threadIdx.x / 32];
  }

  // Elements `at` and at + 1 of `dim` features or weights, zero beyond them. kPairs: dim is even, and pairs are
  // aligned.
  template <bool kPairs>
  static __device__ __forceinline__ float2 pair(const S* from, int at, int dim) {
    float x[kV] = {};
    if constexpr (kPairs) {
      Raw<S> raw{};
      if (at < dim) raw.x = __ldg(reinterpret_cast<const uint32_t*>(from + at));
      unpack(raw, x, S{});
    } else {
      if (at < dim) x[0] = to_arithmetic(from[at]);
      if (at + 1 < dim) x[1] = to_arithmetic(from[at + 1]);
    }
    return {x[0], x[1]};
  }
  template <bool kPairs>
  static __device__ __forceinline__ float2 pair(const float* from, int at, int dim) {
    float2 x = {};
    if constexpr (kPairs) {
      if (at < dim) x = __ldg(reinterpret_cast<const float2*>(from + at));
    } else {
      if (at < dim) x.x = __ldg(from + at);
      if (at + 1 < dim) x.y = __ldg(from + at + 1);
    }
    return x;
  }

  static __device__ __forceinline__ void make(const Args<float>& args, const I (&ids)[SubWarp::kRounds]) {
    __syncwarp();  // the previous terms have been read
    if (args.edge_in_pairs) {
      make<true>(args, ids);
    } else {
      make<false>(args, ids);
    }
    __syncwarp();
  }

  template <bool kPairs>
  static __device__ __forceinline__ void make(const Args<float>& args, const I (&ids)[SubWarp::kRounds]) {
    const Shape shape(args.layout);
    const int sub_warp_log2 = args.layout.sub_warp_log2, dim = args.edge_dim,
              of_node = args.layout.heads_per_slice << sub_warp_log2;
    const int first_head = blockIdx.y * args.layout.heads_per_slice, heads = args.heads - first_head;
    const float* proj = args.given_proj + first_head * args.dim * dim;
    const int column = 2 * tile_group();  // column in a tile, which has four columns of each of four lanes
    const int first_lane = (threadIdx.x & (of_node - 1) & ~31) + column / 4;
    for (int first = 0; first < dim; first += kChunks * kTileDepth) {
      for (int some = 0; some < shape.edges; some += kSides * kTileEdges) {
        TileRight<false> right[kSides][kChunks];
#pragma unroll
        for (int side = 0; side < kSides; ++side) {
          if (some + side * kTileEdges >= shape.edges) break;
          const int edge = min(some + side * kTileEdges + tile_group(), shape.edges - 1), in_batch = edge % kBatch;
          I id = 0;
#pragma unroll
          for (int t = 0; t < SubWarp::kRounds; ++t) {
            const int owner = (edge / kBatch << shape.lanes_log2) + in_batch % SubWarp::kEdges;
            const I one = __shfl_sync(kFullWarp, ids[t], owner);
            if (t == in_batch / SubWarp::kEdges) id = one;
          }
          const auto* attr =
              reinterpret_cast<const S*>(args.edge_attr.base + static_cast<int64_t>(id) * args.edge_attr.row) + first;
#pragma unroll
          for (int i = 0; i < kChunks; ++i) {
            const float2 x = pair<kPairs>(attr, i * kTileDepth + tile_pair(), dim - first);
            right[side][i].set(x.x, x.y);
          }
        }
        float* to = room() + (some + tile_pair()) * shape.pitch + column;
#pragma unroll
        for (int four = 0; four < kV; four += 4) {
#pragma unroll 1
          for (int tile = 0; tile < shape.lanes; tile += 4, to += kTileColumns) {
            const int lane = first_lane + tile, head = min(lane >> sub_warp_log2, heads - 1);
            const int number = (lane & ((1 << sub_warp_log2) - 1)) * kV + four + column % 4, last = args.dim - 1;
            const float* w[2];
#pragma unroll
            for (int c = 0; c < 2; ++c) w[c] = proj + (head * args.dim + min(number + c, last)) * dim + first;
            float d[kSides][4];
#pragma unroll
            for (int i = 0; i < kChunks; ++i) {
              if (i > 0 && first + i * kTileDepth >= dim) break;
              const int at = i * kTileDepth + tile_pair();
              const float2 one = pair<kPairs>(w[0], at, dim - first), two = pair<kPairs>(w[1], at, dim - first);
              TileLeft<false> left;
              left.set(one.x, one.y, two.x, two.y);
#pragma unroll
              for (int side = 0; side < kSides; ++side) {
                if (some + side * kTileEdges >= shape.edges) break;
                multiply_tile(d[side], left, right[side][i], i == 0);
              }
            }
#pragma unroll
            for (int side = 0; side < kSides; ++side) {
              const bool there = some + side * kTileEdges + tile_pair() < shape.edges;
              if (!there) continue;
              float2* here = reinterpret_cast<float2*>(to + side * kTileEdges * shape.pitch);
              float2* next = reinterpret_cast<float2*>(to + (side * kTileEdges + 1) * shape.pitch);
              if (first > 0) {
                d[side][0] += here->x, d[side][2] += here->y;
                d[side][1] += next->x, d[side][3] += next->y;
              }
              *here = {d[side][0], d[side][2]}, *next = {d[side][1], d[side][3]};
            }
          }
        }
      }
    }
  }

  template <class P>
  static __device__ __forceinline__ void add(const Args<float>& args, const P& /*place*/,
                                             const I (& /*ids*/)[SubWarp::kRounds], int round, int /*count*/,
                                             const Raw<S> (&raw)[SubWarp::kRows][1], float (&x)[SubWarp::kRows][kV]) {
    const Shape shape(args.layout);
    const int lane = threadIdx.x % 32;
    const float* from = room() + ((lane >> shape.lanes_log2) * kBatch + round * SubWarp::kEdges) * shape.pitch +
                        4 * (lane & (shape.lanes - 1));
#pragma unroll
    for (int u = 0; u < SubWarp::kRows; ++u) {
      unpack_all<S, 1>(raw[u], x[u]);
#pragma unroll
      for (int k = 0; k < kV; k += 4) {
        const float4 term = *reinterpret_cast<const float4*>(from + u * shape.pitch + k * shape.lanes);
        x[u][k] += term.x, x[u][k + 1] += term.y, x[u][k + 2] += term.z, x[u][k + 3] += term.w;
      }
    }
  }
};

template <class S, class I, class SubWarp, int kVecs, int kMode>
using EdgeTerms =
    std::conditional_t<kMode == kEdgeTiles, TermsInTiles<S, I, SubWarp>, TermsByLane<S, I, SubWarp, kVecs>>;

}  // namespace edgeless::cuda
