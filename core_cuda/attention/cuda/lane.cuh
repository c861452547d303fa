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
  return pass == Pass::forward ? 5 : 4;
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

// Numbers beyond the row's end are zero.
template <class S, int kVecs, class P>
__device__ inline void load_vector(const Arithmetic<S>* vector, const P& place, int vectors,
                                   Arithmetic<S> (&to)[kVecs * kVec<S>]) {
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

// Stores the lane's part of a row of a contiguous [rows, heads, dim] tensor.
template <class S, int kVecs, class P>
__device__ inline void store_row(const OutRows& out, int64_t row, int heads, const P& place,
                                 const Arithmetic<S> (&x)[kVecs * kVec<S>]) {
  using A = Arithmetic<S>;
  const int64_t first = (row * heads + place.head) * out.dim;
#pragma unroll
  for (int v = 0; v < kVecs; ++v) {
    const int at = (v * place.width() + place.lane) * kVec<S>;
    if (at >= out.dim) continue;
    A part[kVec<S>];
#pragma unroll
    for (int k = 0; k < kVec<S>; ++k) part[k] = x[v * kVec<S> + k];
    if (out.aligned && at + kVec<S> <= out.dim && !out.wide) {
      store_once(out.base + (first + at) * sizeof(S), pack(part, S{}));
    } else if (out.aligned && at + kVec<S> <= out.dim) {
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

// The dropout factor of one edge and head: 0 or 1 / (1 - p).
template <class A>
__device__ __forceinline__ A dropout_factor(const Args<A>& args, uint64_t seed, int64_t edge_id, int head) {
  const Philox4 draw = philox(seed, static_cast<uint64_t>(edge_id), static_cast<uint32_t>(head) >> 2);
  const int lane = head & 3;
  const uint32_t r = lane < 2 ? (lane == 0 ? draw.lane[0] : draw.lane[1]) : (lane == 2 ? draw.lane[2] : draw.lane[3]);
  return r < args.threshold ? A(0) : args.keep_scale;
}

// What the options say about the edge that this lane owns.
template <class A>
struct EdgeFactors {
  int64_t at;  // of [E, H] arrays
  A keep = 1, scale = 1;

  template <class I>
  __device__ __forceinline__ EdgeFactors(const Args<A>& args, uint64_t seed, I position, int head, bool valid) {
    const I* ids = static_cast<const I*>(args.graph.edge_ids);
    const int64_t id = !valid ? 0 : ids ? static_cast<int64_t>(ids[position]) : static_cast<int64_t>(position);
    at = id * args.heads + head;
    if (args.has_dropout) keep = dropout_factor(args, seed, id, head);
    if (args.scale && valid) scale = args.scale[id * args.scale_edge + head * args.scale_head];
  }
};

// gatv2's edge term of edge `id`, taken off `n`: W_h e, for the lane's part of the head. `n` is -(x_l + x_r).
template <class S, int kVecs, class P>
__device__ inline void subtract_edge_term(const Args<Arithmetic<S>>& args, const P& place, int64_t id,
                                          Arithmetic<S> (&n)[kVecs * kVec<S>]) {
  using A = Arithmetic<S>;
  const S* attr = reinterpret_cast<const S*>(args.edge_attr.base + id * args.edge_attr.row);
  const int width = args.key_vectors * kVec<S>;
  const A* proj = args.proj + static_cast<int64_t>(place.head) * args.edge_dim * width;
  for (int d = 0; d < args.edge_dim; ++d, proj += width) {
    const A x = to_arithmetic(attr[d]);
#pragma unroll
    for (int v = 0; v < kVecs; ++v) {
      const int at = v * place.width() + place.lane;
      if (at >= args.key_vectors) continue;
#pragma unroll
      for (int k = 0; k < kVec<S>; ++k) n[v * kVec<S> + k] = fma(-x, proj[at * kVec<S> + k], n[v * kVec<S> + k]);
    }
  }
}

}  // namespace edgeless::cuda
