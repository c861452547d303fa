// The building blocks of generated walks. A walk is a Reducer of common/segment_reduce.cuh, which describes how rows
// are split and merged. Its text is generated from a program (shared/programs/cuda_code.py).
//
// A row of `frame` values is spread over the lanes of a sub-warp, kV contiguous values in each. The Reducer derives
// from Lane, computes the values of an edge in registers, and reduces them into its Segment. Sums over all edges stay
// in registers until the block ends (add_totals); the host adds up the blocks' partial sums in order.
#pragma once

#include "../common/dropout.h"
#include "../common/segment_reduce.cuh"
#include "../common/warp.cuh"
#include "edge_products.cuh"
#include "loaded.cuh"
#include "tiles.cuh"

namespace edgeless::cuda::programs {

// shared/programs/cuda_walks.py packs the same bytes.
template <int kReads, int kWrites>
struct WalkArgs {
  CompressedGraph graph;
  ReducePlan plan;
  int64_t vectors = 0;    // lanes that a row fills
  char* carry = nullptr;  // fix-up workspace for hubs: [2, slots, vectors] of Segment
  int64_t sizes[3] = {};  // numbers of sources, destinations and edges
  const char* read[kReads] = {};
  char* write[kWrites] = {};
};

// A lane of a sub-warp. A lane outside of the row computes with the row's first vector, and writes nothing.
template <class Args>
struct Lane {
  const Args& args;
  const int vector;  // the lane's vector of the row
  const bool inside;
  const int some;  // `vector`, or 0 outside of the row

  __device__ Lane(const Args& args, int vector)
      : args(args), vector(vector), inside(vector < args.vectors), some(inside ? vector : 0) {}

  // The mask of the sub-warp's lanes, which exchange values while other sub-warps of the warp may have diverged.
  // kWhole: the mask of the whole warp, for calls by whole warps.
  template <bool kWhole>
  __device__ __forceinline__ unsigned sub_warp() const {
    if constexpr (kWhole) return kFullWarp;
    const int width = 1 << args.plan.sub_warp_log2, first = threadIdx.x % 32 / width * width;
    return (width == 32 ? 0xffffffffu : (1u << width) - 1) << first;
  }
  template <class S>
  __device__ __forceinline__ const S* read(int i) const {
    return reinterpret_cast<const S*>(args.read[i]);
  }
  template <class S>
  __device__ __forceinline__ S* write(int i) const {
    return reinterpret_cast<S*>(args.write[i]);
  }
  template <class I>
  __device__ __forceinline__ int64_t id(I position) const {
    const I* ids = static_cast<const I*>(args.graph.edge_ids);
    return ids ? static_cast<int64_t>(__ldcs(ids + position)) : static_cast<int64_t>(position);
  }
  // The position of this lane's edge in the next window.
  template <class I>
  __device__ __forceinline__ I after(I position) const {
    const I last = static_cast<I>(args.graph.num_edges - 1), by = static_cast<I>(1) << args.plan.sub_warp_log2;
    return last - position < by ? last : position + by;
  }
  template <class Segment>
  __device__ __forceinline__ Segment* place(int64_t slot) const {
    return reinterpret_cast<Segment*>(args.carry) + slot * args.vectors + vector;
  }
};

// Combines x over groups of kLanes neighbouring lanes of a sub-warp; every lane of a group gets the result. sub_warp:
// the sub-warp's mask.
template <int kLanes, class A, class Both>
__device__ __forceinline__ A over_lanes(A x, unsigned sub_warp, Both&& both) {
#pragma unroll
  for (int step = 1; step < kLanes; step *= 2) x = both(x, __shfl_xor_sync(sub_warp, x, step));
  return x;
}
template <int kLanes, class A>
__device__ __forceinline__ A lanes_add(A x, unsigned sub_warp) {
  return over_lanes<kLanes>(x, sub_warp, [](A a, A b) { return a + b; });
}
template <int kLanes, class A>
__device__ __forceinline__ A lanes_mul(A x, unsigned sub_warp) {
  return over_lanes<kLanes>(x, sub_warp, [](A a, A b) { return a * b; });
}
template <int kLanes, class A>
__device__ __forceinline__ A lanes_max(A x, unsigned sub_warp) {
  return over_lanes<kLanes>(x, sub_warp, [](A a, A b) { return a > b || a != a ? a : b; });
}
template <int kLanes, class A>
__device__ __forceinline__ A lanes_min(A x, unsigned sub_warp) {
  return over_lanes<kLanes>(x, sub_warp, [](A a, A b) { return a < b || a != a ? a : b; });
}

// Sums x[i] over the lanes of a sub-warp of kLanes; lane l gets the kCount / kLanes sums from index l * kCount / kLanes
// on, in the first elements of x.
template <int kLanes, int kCount, class A>
__device__ __forceinline__ void shares_add(A (&x)[kCount], unsigned sub_warp) {
#pragma unroll
  for (int step = kLanes / 2, half = kCount / 2; step > 0; step /= 2, half /= 2) {
    const bool upper = threadIdx.x & step;
#pragma unroll
    for (int i = 0; i < half; ++i) {
      const A keep = upper ? x[half + i] : x[i], give = upper ? x[i] : x[half + i];
      x[i] = keep + __shfl_xor_sync(sub_warp, give, step);
    }
  }
}

// Returns whether x counts as equal to an extremum (tolerance() of shared/programs/ops.py).
template <bool kNear, class A>
__device__ __forceinline__ bool is_near(A x, A best) {
  constexpr A kTolerance = sizeof(A) == 8 ? A(0x1p-46) : A(0x1p-17);
  return kNear && fabs(x - best) < kTolerance * fabs(best);
}
// Returns whether x is worse than an extremum and not near it. False for NaN.
template <bool kMax, bool kNear, class A>
__device__ __forceinline__ bool is_worse(A x, A best) {
  if constexpr (!kNear) return kMax ? x < best : x > best;
  const A margin = (sizeof(A) == 8 ? A(0x1p-45) : A(0x1p-16)) * fabs(best);
  return kMax ? x < best - margin : x > best + margin;
}
// Updates the extremum of a row by x: its value, its edge, and a count, which is twice the number of edges that count
// as equal to the extremum, plus 1 if several are exactly equal; 0 before the first edge and where the extremum is NaN.
template <bool kMax, bool kNear, class A, class At>
__device__ __forceinline__ void take_best(A x, int64_t id, A& best, At& at, int& count) {
  const bool better = kMax ? x > best : x < best;
  if (better || x != x || (count == 0 && best == best)) {
    count = x != x ? 0 : is_near<kNear>(x, best) ? 2 + (count & ~1) : 2;
    best = x, at = static_cast<At>(id);
  } else if (x == best) {
    count = (count + 2) | 1;
  } else if (is_near<kNear>(x, best)) {
    count += 2;
  }
}
template <bool kMax, bool kNear, class A, class At>
__device__ __forceinline__ void merge_best(A x, At id, int n, A& best, At& at, int& count) {
  const bool better = kMax ? x > best : x < best;
  if (better || x != x) {
    count = is_near<kNear>(x, best) ? n + (count & ~1) : n;
    best = x, at = id;
  } else if (x == best) {
    count = ((count & ~1) + n) | 1;
  } else if (is_near<kNear>(x, best)) {
    count += n & ~1;
  }
}
__device__ __forceinline__ int64_t argument(int64_t at, int count) {
  return count & 1 ? -static_cast<int64_t>(count >> 1) : count ? at : 0;
}

// Adds x to exponentials relative to their maximum, `top`: the caller multiplies earlier sums by `less`, and the
// exponential of x is `now`.
template <class A>
__device__ __forceinline__ void add_exponential(A x, A& top, A& less, A& now) {
  less = 1;
  if (x > top || x != x) {
    less = power_of_two((top - x) * A(kLog2e));
    top = x;
  }
  now = power_of_two((x - top) * A(kLog2e));
}
// The factors that rescale two such sums, with maxima a and b, to the maximum of both.
template <class A>
__device__ __forceinline__ void both_exponentials(A a, A b, A& of_a, A& of_b) {
  const A top = a > b || a != a ? a : b;
  of_a = a == top ? A(1) : power_of_two((a - top) * A(kLog2e));
  of_b = b == top ? A(1) : power_of_two((b - top) * A(kLog2e));
}

// Copies to shared memory the part of a parameter that each of kLanes lanes reads: kCount contiguous values from
// place(lane) on. Loaded::spread() reads the copy.
template <class S, int kCount, int kLanes, class Place>
__device__ inline void copy_spread(const S* from, char* to, Place&& place) {
  for (int lane = threadIdx.x; lane < kLanes; lane += kReduceThreads) {
    Loaded<S, kCount> x;
    x.gather(from + place(lane));
#pragma unroll
    for (int i = 0; i < x.kChunks; ++i) {
      reinterpret_cast<typename Loaded<S, kCount>::Chunk*>(to)[i * kLanes + lane] = x.chunk[i];
    }
  }
}

// Hides from the compiler that a number is the same for every edge, for the same reason as below.
__device__ __forceinline__ int afresh(int number) {
  asm volatile("" : "+r"(number));
  return number;
}
// Hides from the compiler that a pointer is the same for every edge, so that no values read through it are kept in
// registers.
template <class S>
__device__ __forceinline__ const S* afresh(const S* at) {
  asm volatile("" : "+l"(at));
  return at;
}

// Returns an index of a table. An index out of bounds traps, as in torch's kernels.
__device__ __forceinline__ int64_t within(int64_t index, int64_t extent) {
  if (static_cast<uint64_t>(index) >= static_cast<uint64_t>(extent)) __trap();
  return index;
}

// Functions that generated text calls (shared/programs/scalar_ops.py).
__device__ __forceinline__ float el_expf(float x) { return power_of_two(x * float(kLog2e)); }
__device__ __forceinline__ double el_exp(double x) { return exp(x); }
__device__ __forceinline__ float el_logf(float x) { return logf(x); }
__device__ __forceinline__ double el_log(double x) { return log(x); }
__device__ __forceinline__ float el_log1pf(float x) { return log1pf(x); }
__device__ __forceinline__ double el_log1p(double x) { return log1p(x); }
__device__ __forceinline__ float el_tanhf(float x) { return tanhf(x); }
__device__ __forceinline__ double el_tanh(double x) { return tanh(x); }

// Adds up the kCount sums over all edges that each lane of a block holds, over the block's sub-warps in order. Lanes of
// the row write the results to part[block][k * vectors + vector].
template <int kCount, class A, class Args>
__device__ inline void add_totals(const Lane<Args>& lane, const A (&sums)[kCount], A* parts) {
  __shared__ A shared[kReduceThreads];
  const int width = 1 << lane.args.plan.sub_warp_log2, at = threadIdx.x & (width - 1);
  A* const part = parts + static_cast<int64_t>(blockIdx.x) * kCount * lane.args.vectors;
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    A x = sums[k];
    for (int step = width; step < 32; step *= 2) x += __shfl_xor_sync(kFullWarp, x, step);
    __syncthreads();
    shared[threadIdx.x] = x;
    __syncthreads();
    if (threadIdx.x < width && lane.inside) {
      A sum = shared[at];
      for (int warp = 1; warp < kReduceThreads / 32; ++warp) sum += shared[32 * warp + at];
      part[static_cast<int64_t>(k) * lane.args.vectors + lane.vector] = sum;
    }
  }
}

// kBlocks: target occupancy in blocks per SM.
template <class Walk, class I, class Args, int kBlocks>
__global__ void __launch_bounds__(kReduceThreads, kBlocks) walk_kernel(const __grid_constant__ Args args) {
  const int lane = threadIdx.x & ((1 << args.plan.sub_warp_log2) - 1);
  const int first = static_cast<int>(blockIdx.y) * args.plan.slice_vectors;
  const int vector = lane < args.plan.slice_vectors ? first + lane : static_cast<int>(args.vectors);
  extern __shared__ uint4 dynamic[];  // kShared bytes
  Walk walk(args, vector, reinterpret_cast<char*>(dynamic));
  if constexpr (Walk::kShared > 0) {
    walk.fill();
    __syncthreads();
  }
  reduce_segments<Walk::kBatch, I>(args.graph, args.plan, walk);
  if constexpr (Walk::kTotals > 0) walk.finish();
}

}  // namespace edgeless::cuda::programs
