// A lane's part of a row: its offsets, and the functions that load, unpack and store it.
#pragma once

#include "../../common/vec.cuh"
#include "walk.cuh"

namespace edgeless::cuda {

// Target occupancy of a kernel in blocks per SM.
template <class Fn, class S, class I, class SubWarp>
constexpr int min_blocks(Pass pass, int mode, int vectors) {
  constexpr int kNumbers = kVec<S> * static_cast<int>(sizeof(Arithmetic<S>) / 4);
  const int blocks = min_blocks(pass, Fn::kScore, mode == kPlain, vectors, vectors * kNumbers,
                                SubWarp::kRows * SubWarp::kRounds, SubWarp::kNarrow, has_edge_term(mode));
  const int most = most_long_blocks(pass, Fn::kScore);
  return sizeof(I) + sizeof(Arithmetic<S>) > 8 && blocks > most ? most : blocks;
}

// Byte offsets of a lane's vectors: its vector v is vector v * width + lane of the row. Lanes beyond the row's end read
// its last vector, which the same instruction loads for another lane or from the same sector, at no extra bytes. What
// they compute from it is multiplied by zero or never stored.
template <int kVecs>
struct Offsets {
  uint32_t at[kVecs];
  // bytes: size of a vector
  template <class P>
  __device__ Offsets(const P& place, int vectors, int bytes = 16) {
#pragma unroll
    for (int v = 0; v < kVecs; ++v) {
      at[v] = max(min(v * place.row_width() + place.row_lane(), vectors - 1), 0) * bytes;
    }
  }
};

__device__ __forceinline__ const char* row_address(const char* base, int32_t index, uint32_t stride) {
  const char* address;
  asm("mad.wide.u32 %0, %1, %2, %3;" : "=l"(address) : "r"(index), "r"(stride), "l"(base));
  return address;
}
__device__ __forceinline__ const char* row_address(const char* base, int64_t index, uint32_t stride) {
  return base + static_cast<uint64_t>(index) * stride;
}

__device__ __forceinline__ void prefetch_l2(const char* at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at)); }

// L2 prefetch distance in rows. A sub-warp reduces its rows in order.
constexpr int kRowsAhead = 2;

// A lane's pointers into a [rows, heads, dim] tensor.
template <int kVecs>
struct RowPointers {
  const char* at[kVecs];
  uint32_t stride;

  __device__ RowPointers(const Rows& rows, int head, const Offsets<kVecs>& offsets) : stride(rows.row) {
#pragma unroll
    for (int v = 0; v < kVecs; ++v) at[v] = rows.base + head * rows.head + offsets.at[v];
  }

  // Keeps the pointers in registers, for rows that are read in the tile loop.
  __device__ void hold() {
#pragma unroll
    for (int v = 0; v < kVecs; ++v) at[v] = held(at[v]);
    stride = held(stride);
  }

  template <class I>
  __device__ __forceinline__ const char* row(int v, I index) const {
    return row_address(at[v], index, stride);
  }

  // Prefetches the row to L2. Called by one lane in eight, since the vectors of eight lanes fill a line of 128 bytes.
  template <class I>
  __device__ void prefetch(I index) const {
#pragma unroll
    for (int v = 0; v < kVecs; ++v) prefetch_l2(row(v, index));
  }
};

// Loads vector `at` of Args::att, counted over all heads.
template <class S>
__device__ __forceinline__ void load_att(const Args<Arithmetic<S>>& args, int at, Arithmetic<S> (&to)[kVec<S>]) {
  if constexpr (!std::is_same_v<S, Arithmetic<S>>) {
    if (args.att_stored) return unpack(static_cast<const Raw<S>*>(args.att)[at], to, S{});
  }
#pragma unroll
  for (int k = 0; k < kVec<S>; ++k) to[k] = static_cast<const Arithmetic<S>*>(args.att)[at * kVec<S> + k];
}

// Loads vector v of the lane's part of the head's attention vector. Values beyond the row's end are zero.
template <class S, class P>
__device__ __forceinline__ void load_att_part(const Args<Arithmetic<S>>& args, const P& place, int v,
                                              Arithmetic<S> (&to)[kVec<S>]) {
  const int at = v * place.row_width() + place.row_lane();
  if (at < args.key_vectors) return load_att<S>(args, place.head * args.key_vectors + at, to);
#pragma unroll
  for (int k = 0; k < kVec<S>; ++k) to[k] = 0;
}

// Loads the lane's whole part. A loop over load_att_part() would change the kernels' registers by a few; not timed.
template <class S, int kVecs, class P>
__device__ inline void load_att(const Args<Arithmetic<S>>& args, const P& place, Arithmetic<S> (&to)[kVecs * kVec<S>]) {
  using A = Arithmetic<S>;
  const int vectors = args.key_vectors;
  const A* head = static_cast<const A*>(args.att) + place.head * vectors * kVec<S>;
#pragma unroll
  for (int v = 0; v < kVecs; ++v) {
    const int at = v * place.row_width() + place.row_lane();
    if constexpr (!std::is_same_v<S, A>) {
      if (args.att_stored) {
        A x[kVec<S>] = {};
        if (at < vectors) load_att<S>(args, place.head * vectors + at, x);
#pragma unroll
        for (int k = 0; k < kVec<S>; ++k) to[v * kVec<S> + k] = x[k];
        continue;
      }
    }
#pragma unroll
    for (int k = 0; k < kVec<S>; ++k) to[v * kVec<S> + k] = at < vectors ? head[at * kVec<S> + k] : A(0);
  }
}

// Unpacks the lane's part of a row and applies f to each value; values beyond the row's end are zero.
template <class S, int kVecs, class P, class F>
__device__ __forceinline__ void unpack_row(const Raw<S> (&raw)[kVecs], const P& place, int vectors,
                                           Arithmetic<S> (&to)[kVecs * kVec<S>], F&& f) {
#pragma unroll
  for (int v = 0; v < kVecs; ++v) {
    Arithmetic<S> x[kVec<S>];
    unpack(raw[v], x, S{});
    const bool inside = v * place.row_width() + place.row_lane() < vectors;
#pragma unroll
    for (int k = 0; k < kVec<S>; ++k) to[v * kVec<S> + k] = inside ? f(x[k]) : Arithmetic<S>(0);
  }
}

// True if registers are scarce in a backward: in sub-warps that are not narrow, and for the dot product, which holds
// two rows and two sums.
template <class Fn, class SubWarp>
constexpr bool kScarce = !SubWarp::kNarrow || (Fn::kOwnValue && !Fn::kScalar);

template <class S, int kVecs>
__device__ __forceinline__ void unpack_all(const Raw<S> (&raw)[kVecs], Arithmetic<S> (&to)[kVecs * kVec<S>]) {
#pragma unroll
  for (int v = 0; v < kVecs; ++v) {
    Arithmetic<S> x[kVec<S>];
    unpack(raw[v], x, S{});
#pragma unroll
    for (int k = 0; k < kVec<S>; ++k) to[v * kVec<S> + k] = x[k];
  }
}

// Stores the lane's part of a row of [rows, heads, dim]; `heads` is the row stride in heads.
template <class S, int kVecs, class P>
__device__ inline void store_row(const OutRows& out, int64_t row, int heads, const P& place,
                                 const Arithmetic<S> (&x)[kVecs * kVec<S>]) {
  using A = Arithmetic<S>;
  constexpr int kBytes = sizeof(Raw<S>);
  const int64_t first = (row * heads + place.head) * out.dim;
  if (out.whole) {
    char* to = out.base + first * sizeof(S);
#pragma unroll
    for (int v = 0; v < kVecs; ++v) {
      const int at = v * place.row_width() + place.row_lane();
      A part[kVec<S>];
#pragma unroll
      for (int k = 0; k < kVec<S>; ++k) part[k] = x[v * kVec<S> + k];
      if (at * kVec<S> < out.dim) store_once(to + at * kBytes, pack(part, S{}));
    }
    return;
  }
  // Only for one vector per lane: with more, this branch would make the forward of dot product attention 4 percent
  // slower, even for whole rows.
  if constexpr (kVecs == 1 && kBytes == 16) {
    if (out.halves) {
      const int at = place.row_lane(), left = out.dim - at * kVec<S>;
      char* to = out.base + first * sizeof(S) + at * 16;
      const uint4 packed = pack(x, S{});
      if (left > 0) store_once(to, uint2{packed.x, packed.y});
      if (left > kVec<S> / 2) store_once(to + 8, uint2{packed.z, packed.w});
      return;
    }
  }
#pragma unroll
  for (int v = 0; v < kVecs; ++v) {
    const int at = (v * place.row_width() + place.row_lane()) * kVec<S>;
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

// Stores the lane's part of a vector to a segment in the fix-up workspace.
template <class S, int kVecs, class P>
__device__ inline void store_segment(Arithmetic<S>* to, const P& place, int vectors,
                                     const Arithmetic<S> (&x)[kVecs * kVec<S>]) {
#pragma unroll
  for (int v = 0; v < kVecs; ++v) {
    const int at = v * place.row_width() + place.row_lane();
    if (at >= vectors) continue;
#pragma unroll
    for (int k = 0; k < kVec<S>; ++k) to[at * kVec<S> + k] = x[v * kVec<S> + k];
  }
}

}  // namespace edgeless::cuda
