// 16-bit rows on the tensor cores: a sub-warp is one or two quads of lanes, and the eight quads of a warp multiply
// their rows in one instruction.
//
// mma.m16n8k16 reads rows of A from the lanes (quad g holds parts of rows g and g + 8) and columns of B from the same
// lanes (quad g holds column g); the depth, here features, runs over the quad's lanes and their registers. A dot
// product does not depend on the order of its features, as long as both factors have the same order. So the 16 bytes of
// a row that a lane has loaded are the four registers of A, with nothing unpacked or moved: words 0 and 2 are in row g,
// words 1 and 3 in row g + 8. B holds the words of the second factor that match one of these two rows. Products of two
// 16-bit values are exact, sums are float.

#pragma once

#include "edge_data.cuh"
#include "scores.cuh"

namespace edgeless::cuda {

constexpr int kQuad = 4;  // lanes

template <class S>
__device__ __forceinline__ void multiply_step(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                              uint32_t b0, uint32_t b1) {
  if constexpr (std::is_same_v<S, __nv_bfloat16>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  }
}

// d += the row's words times the columns of all quads. Called by whole warps.
template <class S>
__device__ __forceinline__ void multiply(float (&d)[4], const uint4& row, uint32_t b0, uint32_t b1) {
  multiply_step<S>(d, row.x, row.y, row.z, row.w, b0, b1);
}

// Reorders the words of the own row for B: 0 and 2, then 1 and 3.
__device__ __forceinline__ uint4 paired(const uint4& x) { return {x.x, x.z, x.y, x.w}; }

// Returns <row, own row>, with `own` paired. The columns of B are the own rows of the quads: for `upper` the words that
// match rows g of A, for `lower` those that match rows g + 8. The products of quad g are in column g.
template <class S, int kSubWarp, int kVecs>
__device__ __forceinline__ float times_own(const uint4 (&row)[kVecs], const uint4 (&own)[kVecs], int quad) {
  float upper[4] = {}, lower[4] = {};
#pragma unroll
  for (int v = 0; v < kVecs; ++v) {
    multiply<S>(upper, row[v], own[v].x, own[v].y);
    multiply<S>(lower, row[v], own[v].z, own[v].w);
  }
  float sum = quad & 1 ? upper[1] + lower[3] : upper[0] + lower[2];
  sum = __shfl_sync(kFullWarp, sum, quad >> 1, kQuad);
  if (kSubWarp > kQuad) sum += __shfl_xor_sync(kFullWarp, sum, kQuad);
  return sum;
}

// A float vector as the eight columns of B. Even columns hold its rounding to 16 bits, odd columns the residual;
// columns 0, 1, 4 and 5 are for words 0 and 2, the others for words 1 and 3; columns 0 to 3 are for the first quad of a
// sub-warp, the others for the second.
template <class S, int kSubWarp, int kVecs>
struct SharedColumns {
  uint2 words[kVecs];

  // load(at, vector) loads vector `at` of the row.
  template <class Load>
  __device__ void load(float factor, int vectors, Load&& load) {
    const int quad = threadIdx.x / kQuad % 8;
    const bool rest = quad & 1, odd_words = quad & 2;
    const int lane = threadIdx.x % kQuad + (kSubWarp > kQuad ? quad / 4 * kQuad : 0);
#pragma unroll
    for (int v = 0; v < kVecs; ++v) {
      const int at = v * kSubWarp + lane;
      float vector[8] = {}, part[8];
      if (at < vectors) load(at, vector);
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        const float whole = vector[k] * factor, high = to_arithmetic(to_storage<S>(whole));
        part[k] = rest ? whole - high : high;
      }
      const uint4 all = pack(part, S{});
      words[v] = odd_words ? uint2{all.y, all.w} : uint2{all.x, all.z};
    }
  }

  // Returns <row, vector>.
  __device__ __forceinline__ float times(const uint4 (&row)[kVecs]) const {
    float d[4] = {};
#pragma unroll
    for (int v = 0; v < kVecs; ++v) multiply<S>(d, row[v], words[v].x, words[v].y);
    // Lane t of a quad holds columns 2 t and 2 t + 1.
    float sum = threadIdx.x & 1 ? d[2] + d[3] : d[0] + d[1];
    if constexpr (kSubWarp > kQuad) {
      if ((threadIdx.x / 2 ^ threadIdx.x / kQuad) & 1) sum = 0;  // the other quad's columns
      sum += __shfl_xor_sync(kFullWarp, sum, 2);
      sum += __shfl_xor_sync(kFullWarp, sum, 4);
    }
    return sum + __shfl_xor_sync(kFullWarp, sum, 1);
  }
};

__device__ __forceinline__ uint32_t packed_max(uint32_t a, uint32_t b, __nv_bfloat16) {
  uint32_t c;
  asm("max.bf16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
  return c;
}
__device__ __forceinline__ uint32_t packed_max(uint32_t a, uint32_t b, __half) {
  uint32_t c;
  asm("max.f16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
  return c;
}

// low += amount where the low half of a is greater than the low half of b; likewise for high.
template <class S>
__device__ __forceinline__ void add_where_greater(float& low, float& high, uint32_t a, uint32_t b, float amount) {
  if constexpr (std::is_same_v<S, __half>) {
    asm("{.reg .pred p, q; setp.gt.f16x2 p|q, %2, %3; @p add.f32 %0, %0, %4; @q add.f32 %1, %1, %4;}"
        : "+f"(low), "+f"(high)
        : "r"(a), "r"(b), "f"(amount));
  } else {
#if __CUDA_ARCH__ >= 900
    asm("{.reg .pred p, q; setp.gt.bf16x2 p|q, %2, %3; @p add.f32 %0, %0, %4; @q add.f32 %1, %1, %4;}"
        : "+f"(low), "+f"(high)
        : "r"(a), "r"(b), "f"(amount));
#else
    if (__uint_as_float(a << 16) > __uint_as_float(b << 16)) low += amount;
    if (__uint_as_float(a & 0xffff0000u) > __uint_as_float(b & 0xffff0000u)) high += amount;
#endif
  }
}

__device__ __forceinline__ uint4 negated(const uint4& x) {
  return {x.x ^ 0x80008000u, x.y ^ 0x80008000u, x.z ^ 0x80008000u, x.w ^ 0x80008000u};
}

// The scores of scores.cuh on the tensor cores. `own` holds the paired words of the own row, negated for gatv2.
//
//   logits   of kEdges edges in base 2, without gatv2's <att, own row>. kLinear: see scores.cuh
//   grad     adds ds * d logit / d own, up to Fn::finish(), for one vector of one edge
template <class Fn, class S, int kSubWarp, int kVecs, int kEdges>
struct MmaScore;

template <class S, int kSubWarp, int kVecs, int kEdges>
struct MmaScore<DotScore, S, kSubWarp, kVecs, kEdges> {
  __device__ void load(const Args<float>&, int /*head*/) {}

  template <bool kLinear>
  __device__ __forceinline__ void logits(const uint4 (&rows)[kEdges][kVecs], const uint4 (&own)[kVecs], int quad,
                                         float scale, float (&to)[kEdges]) const {
#pragma unroll
    for (int e = 0; e < kEdges; ++e) to[e] = times_own<S, kSubWarp>(rows[e], own, quad) * (scale * float(kLog2e));
  }

  static __device__ __forceinline__ void grad(float (&sum)[8], const uint4& row, const uint4& /*own*/, float ds) {
    float x[8];
    unpack(row, x, S{});
#pragma unroll
    for (int k = 0; k < 8; ++k) sum[k] = fma(ds, x[k], sum[k]);
  }
};

// The dot product only: InverseNorms::logit() applies norms and factor.
template <class S, int kSubWarp, int kVecs, int kEdges>
struct MmaScore<CosineScore, S, kSubWarp, kVecs, kEdges> : MmaScore<DotScore, S, kSubWarp, kVecs, kEdges> {
  template <bool kLinear>
  __device__ __forceinline__ void logits(const uint4 (&rows)[kEdges][kVecs], const uint4 (&own)[kVecs], int quad,
                                         float /*least*/, float (&to)[kEdges]) const {
#pragma unroll
    for (int e = 0; e < kEdges; ++e) to[e] = times_own<S, kSubWarp>(rows[e], own, quad);
  }
};

template <class S, int kSubWarp, int kVecs, int kEdges>
struct MmaScore<Gatv2Score, S, kSubWarp, kVecs, kEdges> {
  SharedColumns<S, kSubWarp, kVecs> att;  // times log2 e

  __device__ void load(const Args<float>& args, int head) {
    att.load(float(kLog2e), args.key_vectors,
             [&](int at, float (&vector)[8]) { load_att<S>(args, head * args.key_vectors + at, vector); });
  }

  template <bool kLinear>
  __device__ __forceinline__ void logits(const uint4 (&rows)[kEdges][kVecs], const uint4 (&own)[kVecs], int /*quad*/,
                                         float slope, float (&to)[kEdges]) const {
#pragma unroll
    for (int e = 0; e < kEdges; ++e) {
      uint4 bent[kVecs];
#pragma unroll
      for (int v = 0; v < kVecs; ++v) {
        bent[v] = {packed_max(rows[e][v].x, own[v].x, S{}), packed_max(rows[e][v].y, own[v].z, S{}),
                   packed_max(rows[e][v].z, own[v].y, S{}), packed_max(rows[e][v].w, own[v].w, S{})};
      }
      const float sum = att.times(bent);
      to[e] = kLinear ? fma(slope, att.times(rows[e]) - sum, sum) : (1 - slope) * sum;
    }
  }

  // Returns <att, own row>.
  __device__ __forceinline__ float of_row(const uint4 (&own)[kVecs]) const {
    uint4 row[kVecs];
#pragma unroll
    for (int v = 0; v < kVecs; ++v) row[v] = paired(own[v]);
    return -att.times(row);
  }

  static __device__ __forceinline__ void grad(float (&sum)[8], const uint4& row, const uint4& own, float ds) {
    add_where_greater<S>(sum[0], sum[1], row.x, own.x, ds);
    add_where_greater<S>(sum[2], sum[3], row.y, own.z, ds);
    add_where_greater<S>(sum[4], sum[5], row.z, own.y, ds);
    add_where_greater<S>(sum[6], sum[7], row.w, own.w, ds);
  }
};

// The current batch of up to kEdges edges of one row; every lane of a quad holds all indices. Entries beyond the
// batch's end repeat its first edge.
template <class I, int kEdges>
struct MmaWindow {
  const I* indices;
  I next[kEdges];   // indices of the next batch
  I index[kEdges];  // indices of the current batch
  int count;

  __device__ MmaWindow(const CompressedGraph& graph, const Walk<I>& walk)
      : indices(held(static_cast<const I*>(graph.indices))) {
    const int64_t last = graph.num_edges - 1;
#pragma unroll
    for (int u = 0; u < kEdges; ++u) {
      next[u] = last < 0 ? 0 : __ldg(indices + min(static_cast<int64_t>(walk.edge) + u, last));
    }
  }

  // Waits for the first indices, see walk_rows().
  __device__ __forceinline__ void settle() {
#pragma unroll
    for (int u = 0; u < kEdges; ++u) next[u] = max(next[u], I(0));
  }

  // Moves to the next batch, of 0 edges for a sub-warp that is done, and prefetches the indices of the batch after it.
  __device__ __forceinline__ void take(Walk<I>& walk) {
    count = walk.batch(kEdges);
    index[0] = next[0];
#pragma unroll
    for (int u = 1; u < kEdges; ++u) index[u] = u < count ? next[u] : next[0];
    walk.edge += count;
    const I left = walk.last_edge - walk.edge;
#pragma unroll
    for (int u = 0; u < kEdges; ++u) {
      if (u < left) next[u] = __ldg(indices + (walk.edge + u));
    }
  }

  template <class Pointers, int kVecs>
  __device__ __forceinline__ void load(const Pointers& rows, uint4 (&raw)[kEdges][kVecs]) const {
#pragma unroll
    for (int u = 0; u < kEdges; ++u) rows.load(index[u], raw[u]);
  }
};

// A lane's pointers into a [rows, heads, dim] tensor: the lane's vectors are kSubWarp vectors apart. With kWhole, all
// of them are inside the row; else vectors beyond the row's end repeat its last vector (see Offsets).
template <int kSubWarp, int kVecs, bool kWhole>
struct MmaPointers {
  const char* base;
  uint32_t stride;
  int inside;  // number of the lane's vectors inside the row
  int beyond;  // bytes from the lane's first vector to the row's last, which is read in place of vectors outside

  template <class P>
  __device__ MmaPointers(const Rows& rows, const P& place, int vectors)
      : base(rows.base + place.head * rows.head + min(place.lane, vectors - 1) * 16),
        stride(rows.row),
        inside((vectors - place.lane + kSubWarp - 1) / kSubWarp),
        beyond(max(vectors - 1 - place.lane, 0) * 16) {}

  __device__ void hold() { base = held(base), stride = held(stride); }

  template <class I>
  __device__ __forceinline__ void load(I index, uint4 (&raw)[kVecs]) const {
    const char* at = row_address(base, index, stride);
#pragma unroll
    for (int v = 0; v < kVecs; ++v) {
      const char* vector = at + (kWhole || v < inside ? v * kSubWarp * 16 : beyond);
      raw[v] = kSubWarp * 16 < 128 ? load_shared_line(vector) : load_shared_row(vector);
    }
  }

  // Prefetches the row to L2. Called by one lane.
  template <class I>
  __device__ void prefetch(I index) const {
    const char* at = row_address(base, index, stride);
#pragma unroll
    for (int v = 0; v < kVecs; v += 8 / kSubWarp) prefetch_l2(at + (kWhole || v < inside ? v * kSubWarp * 16 : beyond));
  }

  // Loads the own row; values beyond its end are zero.
  template <class I>
  __device__ __forceinline__ void load_own(I index, uint4 (&raw)[kVecs]) const {
    const char* at = row_address(base, index, stride);
#pragma unroll
    for (int v = 0; v < kVecs; ++v) {
      raw[v] = kWhole || v < inside ? load_once(at + v * kSubWarp * 16) : uint4{0, 0, 0, 0};
    }
  }
};

// Edge options: lane t of a quad owns edge t % kEdges. mine() selects the value of the owned edge, all() broadcasts the
// values of all edges in the quad.
template <int kEdges>
struct MmaShare {
  int edge = threadIdx.x % kEdges;

  __device__ __forceinline__ float mine(const float (&x)[kEdges]) const {
    float y = x[0];
#pragma unroll
    for (int e = 1; e < kEdges; ++e) y = edge == e ? x[e] : y;
    return y;
  }

  static __device__ __forceinline__ void all(float x, float (&to)[kEdges]) {
#pragma unroll
    for (int e = 0; e < kEdges; ++e) to[e] = __shfl_sync(kFullWarp, x, e, kQuad);
  }
};

// The options of the edge of a batch that a lane owns, see EdgeOptions.
template <class Fn, class I, int kEdges, bool kForward, int kMode>
struct MmaEdge {
  using Arrays = EdgeArrays<Fn, float, kMode>;
  IdAhead<I> ahead;
  I id = 0;
  Arrays arrays;
  float keep = 1;

  __device__ MmaEdge(const CompressedGraph& graph, const Walk<I>& walk) {
    ahead.begin(graph, walk, threadIdx.x % kEdges);
  }

  // Called once the loads of the rows of a batch of `count` edges are issued. walk is at the beginning of the next
  // batch.
  __device__ __forceinline__ void take(const Args<float>& args, uint64_t seed, const Walk<I>& walk, int head,
                                       int count) {
    const int slot = threadIdx.x % kEdges;
    id = ahead.next;
    arrays = Arrays(args, static_cast<int64_t>(id), head, slot < count);
    ahead.advance(args.graph, walk, slot);
    if (kForward) __syncwarp();  // as in EdgeOptions
    if (draws<kMode>(args)) keep = dropout_factor(args, seed, static_cast<int64_t>(id), head);
  }

  __device__ __forceinline__ EdgeFactors<Fn, float, kMode> factors(const Args<float>& args, int head) const {
    return {arrays, args, static_cast<int64_t>(id), head, keep};
  }
};

}  // namespace edgeless::cuda
