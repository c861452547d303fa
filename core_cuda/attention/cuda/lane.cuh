// What a lane holds of a row, and what it does for the edge of a batch that it owns.
#pragma once

#include "../../common/dropout.h"
#include "../../common/vec.cuh"
#include "walk.cuh"

namespace edgeless::cuda {

// Which parts of the options a kernel carries: none; all but the edge term of gatv2; that as well.
enum Mode : int { kPlain = 0, kOptions = 1, kEdgeTerm = 2 };

// Blocks that must fit on a multiprocessor: what bounds the registers. Chosen by measurement (docs/performance.md).
template <class S>
constexpr int min_blocks(Pass pass, int vectors) {
  const int numbers = vectors * kVec<S> * static_cast<int>(sizeof(Arithmetic<S>) / 4);
  if (numbers > 16) return 2;
  if (numbers > 8) return 3;
  return 4;
}

constexpr int quad_blocks(Pass pass, int vectors) {
  if (vectors <= 1) return 5;
  if (vectors == 2) return pass == Pass::by_src ? 3 : 4;
  return pass == Pass::forward ? 4 : pass == Pass::by_dst ? 3 : 2;
}

// Vector v of a lane is vector v * width + lane of the row. Lanes that stand beyond the row's end read its first
// vector; whatever they make of it is multiplied by zero or never stored.
template <int kVecs>
struct Offsets {
  uint32_t at[kVecs];
  template <class P>
  __device__ Offsets(const P& place, int vectors) {
#pragma unroll
    for (int v = 0; v < kVecs; ++v) {
      const int vector = v * place.width() + place.lane;
      at[v] = vector < vectors ? vector * 16 : 0;
    }
  }
};

// A lane's pointers into a [rows, heads, dim] tensor.
template <int kVecs>
struct RowPointers {
  const char* at[kVecs];
  uint32_t stride;

  __device__ RowPointers(const Rows& rows, int head, const Offsets<kVecs>& offsets) : stride(rows.row) {
#pragma unroll
    for (int v = 0; v < kVecs; ++v) at[v] = rows.base + head * rows.head + offsets.at[v];
  }

  // For the rows that the loop reads.
  __device__ void hold() {
#pragma unroll
    for (int v = 0; v < kVecs; ++v) at[v] = held(at[v]);
    stride = held(stride);
  }

  __device__ __forceinline__ const char* row(int v, int32_t index) const {
    const char* address;
    asm("mad.wide.u32 %0, %1, %2, %3;" : "=l"(address) : "r"(index), "r"(stride), "l"(at[v]));
    return address;
  }
  __device__ __forceinline__ const char* row(int v, int64_t index) const {
    return at[v] + static_cast<uint64_t>(index) * stride;
  }
};

// The head's part of a vector [heads, vectors]. Numbers beyond the row's end are zero.
template <class S, int kVecs, class P>
__device__ inline void load_vector(const Arithmetic<S>* vector, const P& place, int vectors,
                                   Arithmetic<S> (&to)[kVecs * kVec<S>]) {
  vector += place.head * vectors * kVec<S>;
#pragma unroll
  for (int v = 0; v < kVecs; ++v) {
    const int at = v * place.width() + place.lane;
#pragma unroll
    for (int k = 0; k < kVec<S>; ++k) to[v * kVec<S> + k] = at < vectors ? vector[at * kVec<S> + k] : Arithmetic<S>(0);
  }
}

// The lane's part of a row, times a factor each, as floats.
template <class S, int kVecs, class P, class F>
__device__ __forceinline__ void unpack_row(const uint4 (&raw)[kVecs], const P& place, int vectors,
                                           Arithmetic<S> (&to)[kVecs * kVec<S>], F&& f) {
#pragma unroll
  for (int v = 0; v < kVecs; ++v) {
    Arithmetic<S> x[kVec<S>];
    unpack(raw[v], x, S{});
    const bool inside = v * place.width() + place.lane < vectors;
#pragma unroll
    for (int k = 0; k < kVec<S>; ++k) to[v * kVec<S> + k] = inside ? f(x[k]) : Arithmetic<S>(0);
  }
}

template <class S, int kVecs>
__device__ __forceinline__ void unpack_all(const uint4 (&raw)[kVecs], Arithmetic<S> (&to)[kVecs * kVec<S>]) {
#pragma unroll
  for (int v = 0; v < kVecs; ++v) {
    Arithmetic<S> x[kVec<S>];
    unpack(raw[v], x, S{});
#pragma unroll
    for (int k = 0; k < kVec<S>; ++k) to[v * kVec<S> + k] = x[k];
  }
}

// gat's number of a node and head.
template <class S, class I>
__device__ __forceinline__ Arithmetic<S> load_scalar(const Rows& rows, I index, int head) {
  return to_arithmetic(
      *reinterpret_cast<const S*>(rows.base + head * rows.head + static_cast<uint64_t>(index) * rows.row));
}

// The batch of edges at hand: up to four of one row. It is chosen one batch ahead, so that its rows can be loaded
// before the batch before it is done. Places beyond its end repeat an edge of the row, so that no row gets to see
// what belongs to another.
template <class I>
struct EdgeWindow {
  const I* indices;
  int slot;
  I index, next;  // other end of the edge that this lane owns, of this batch and of the next
  int count;      // edges that are loaded

  template <class P>
  __device__ EdgeWindow(const Graph& graph, const P& place, const Walk<I>& walk)
      : indices(held(static_cast<const I*>(graph.indices))), slot(place.slot) {
    const int64_t last = graph.num_edges - 1;
    index = next = last < 0 ? 0 : __ldg(indices + min(static_cast<int64_t>(walk.edge) + slot, last));
    choose(walk);
  }

  // How many edges the batch that begins at walk.edge may have.
  __device__ __forceinline__ void choose(const Walk<I>& walk) {
    const I end = walk.edge < walk.row_end ? walk.row_end : walk.next_end;
    count = max(1, static_cast<int>(min(static_cast<I>(kBatch), static_cast<I>(end - walk.edge))));
  }

  // Takes the batch: returns its number of edges, 0 for an idle team, and asks for the indices of the next.
  __device__ __forceinline__ int take(Walk<I>& walk) {
    const int n = min(count, walk.batch(kBatch));
    walk.edge += n;
    if (slot < walk.last_edge - walk.edge) next = __ldg(indices + (walk.edge + slot));
    return n;
  }

  __device__ __forceinline__ void advance(const Walk<I>& walk) {
    index = next;
    choose(walk);
  }

  template <int kVecs>
  __device__ __forceinline__ void load(const RowPointers<kVecs>& rows, uint4 (&raw)[kBatch][kVecs]) const {
#pragma unroll
    for (int u = 0; u < kBatch; ++u) {
      const I j = from_owner(index, min(u, count - 1));
#pragma unroll
      for (int v = 0; v < kVecs; ++v) raw[u][v] = load_shared_row(rows.row(v, j));
    }
  }
};

// Stores the lane's part of a row of a contiguous [rows, heads, dim] tensor.
template <class S, int kVecs, class P>
__device__ inline void store_row(const OutRows& out, int64_t row, int heads, const P& place,
                                 const Arithmetic<S> (&x)[kVecs * kVec<S>]) {
  using A = Arithmetic<S>;
  const int64_t first = (row * heads + place.head) * out.dim;
  if (out.whole) {
    char* to = out.base + first * sizeof(S);
#pragma unroll
    for (int v = 0; v < kVecs; ++v) {
      const int at = v * place.width() + place.lane;
      A part[kVec<S>];
#pragma unroll
      for (int k = 0; k < kVec<S>; ++k) part[k] = x[v * kVec<S> + k];
      if (at * kVec<S> < out.dim) store_once(to + at * 16, pack(part, S{}));
    }
    return;
  }
#pragma unroll
  for (int v = 0; v < kVecs; ++v) {
    const int at = (v * place.width() + place.lane) * kVec<S>;
    if (at >= out.dim) continue;
    A part[kVec<S>];
#pragma unroll
    for (int k = 0; k < kVec<S>; ++k) part[k] = x[v * kVec<S> + k];
    if (out.wide && out.aligned && at + kVec<S> <= out.dim) {
      A* to = reinterpret_cast<A*>(out.base) + first + at;
#pragma unroll
      for (int k = 0; k < kVec<S>; k += kVec<A>) {
        A four[kVec<A>];
#pragma unroll
        for (int i = 0; i < kVec<A>; ++i) four[i] = part[k + i];
        store_once(reinterpret_cast<char*>(to + k), pack(four, A{}));
      }
    } else {
#pragma unroll
      for (int k = 0; k < kVec<S>; ++k) {
        if (at + k >= out.dim) break;
        if (out.wide) {
          reinterpret_cast<A*>(out.base)[first + at + k] = part[k];
        } else {
          reinterpret_cast<S*>(out.base)[first + at + k] = to_storage<S>(part[k]);
        }
      }
    }
  }
}

// A piece of a hub: the lane's part of a vector of numbers.
template <class S, int kVecs, class P>
__device__ inline void store_piece(Arithmetic<S>* to, const P& place, int vectors,
                                   const Arithmetic<S> (&x)[kVecs * kVec<S>]) {
#pragma unroll
  for (int v = 0; v < kVecs; ++v) {
    const int at = v * place.width() + place.lane;
    if (at >= vectors) continue;
#pragma unroll
    for (int k = 0; k < kVec<S>; ++k) to[at * kVec<S> + k] = x[v * kVec<S> + k];
  }
}

// Stat of a destination, see Args::stats.
template <class A>
struct Stat {
  A shift, delta;

  static __device__ __forceinline__ Stat load(const Args<A>& args, int64_t at) {
    if (args.stats) {
      using Pair = std::conditional_t<sizeof(A) == 8, double2, float2>;
      const Pair pair = __ldg(reinterpret_cast<const Pair*>(args.stats) + at);
      return {pair.x, pair.y};
    }
    return {__ldg(args.logsumexp + at) * A(kLog2e), __ldg(args.delta + at)};
  }

  __device__ __forceinline__ void store(const Args<A>& args, int64_t at) const {
    if (args.stats) {
      args.stats[2 * at] = shift, args.stats[2 * at + 1] = delta;
    } else if (args.delta) {
      args.delta[at] = delta;
    }
  }
};

// The dropout factor of one edge and head: 0 or 1 / (1 - p).
template <class A>
__device__ __forceinline__ A dropout_factor(const Args<A>& args, uint64_t seed, int64_t edge_id, int head) {
  const Philox4 draw = philox(seed, static_cast<uint64_t>(edge_id), static_cast<uint32_t>(head) >> 2);
  const int lane = head & 3;
  const uint32_t r = lane < 2 ? (lane == 0 ? draw.lane[0] : draw.lane[1]) : (lane == 2 ? draw.lane[2] : draw.lane[3]);
  return r < args.threshold ? A(0) : args.keep_scale;
}

template <class I>
__device__ __forceinline__ int64_t edge_id(const Graph& graph, I position) {
  const I* ids = static_cast<const I*>(graph.edge_ids);
  return ids ? static_cast<int64_t>(ids[position]) : static_cast<int64_t>(position);
}

// What the options say about the edge that this lane owns.
template <class A>
struct EdgeFactors {
  int64_t at;  // of [E, H] arrays
  A keep = 1, scale = 1;

  template <class I>
  __device__ __forceinline__ EdgeFactors(const Args<A>& args, uint64_t seed, I position, int head, bool valid) {
    const int64_t id = valid ? edge_id(args.graph, position) : 0;
    at = id * args.heads + head;
    if (args.has_dropout) keep = dropout_factor(args, seed, id, head);
    if (args.scale && valid) scale = args.scale[id * args.scale_edge + head * args.scale_head];
  }
};

// Adds gatv2's edge term of edge `id`, W_h e, to the lane's part of a row.
template <class S, int kVecs, class P>
__device__ inline void add_edge_term(const Args<Arithmetic<S>>& args, const P& place, int64_t id,
                                     Arithmetic<S> (&x)[kVecs * kVec<S>]) {
  using A = Arithmetic<S>;
  const S* attr = reinterpret_cast<const S*>(args.edge_attr.base + id * args.edge_attr.row);
  const int width = args.key_vectors * kVec<S>;
  const A* proj = args.proj + static_cast<int64_t>(place.head) * args.edge_dim * width;
  for (int d = 0; d < args.edge_dim; ++d, proj += width) {
    const A e = to_arithmetic(attr[d]);
#pragma unroll
    for (int v = 0; v < kVecs; ++v) {
      const int at = v * place.width() + place.lane;
      if (at >= args.key_vectors) continue;
#pragma unroll
      for (int k = 0; k < kVec<S>; ++k) x[v * kVec<S> + k] = fma(e, proj[at * kVec<S> + k], x[v * kVec<S> + k]);
    }
  }
}

}  // namespace edgeless::cuda
