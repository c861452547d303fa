// SpMM: out[r] = row_scale[r] * sum over the edges of r of weight[e] column_scale[c] x[c]. common/segment_reduce.cuh
// describes how work is divided. The transposed product is the same kernel on the other direction of the graph with the
// scales exchanged. Storage: float, half and bfloat16 with sums in float; double.
#pragma once

#include "../../common/segment_reduce.cuh"
#include "args.h"
#include "weight.cuh"

namespace edgeless::cuda::spmm {

template <class S, class I, int kWords, Weighing kWeighing, int kBatch>
struct SumReducer {
  using A = Arithmetic<S>;
  static constexpr int kPer = kNumbers<S, kWords>;
  static constexpr bool kCheapEnd = true;
  using Segment = Sums<A, kPer>;

  const SpmmArgs<A>& args;
  const char* base;
  int vector, head, at;  // at: index of the lane's first element in its head
  bool inside;
  Words<kWords> raw[kBatch];
  static constexpr bool kByEdge = kWeighing == Weighing::by_edge || kWeighing == Weighing::by_edge_ahead;
  A weight[kBatch], own_weight;
  WeightsAhead<A, I> weights;
  Segment total;
  A scale;

  __device__ SumReducer(const SpmmArgs<A>& args, int vector) : args(args), vector(vector), weights(args) {
    inside = vector < args.vectors;
    const int some = inside ? vector : 0;
    head = some / args.head_vectors;
    const int in_head = some - head * args.head_vectors;
    at = in_head * kPer;
    base = args.x.base + head * args.x.head + in_head * sizeof(raw[0]);
  }

  __device__ __forceinline__ void begin_walk(I position, I end) {
    if constexpr (kWeighing == Weighing::by_edge_ahead) weights.begin(position, end);
  }

  __device__ __forceinline__ void own(I index, I position) {
    if constexpr (kWeighing == Weighing::by_edge) {
      own_weight = args.values ? __ldcs(args.values + position) : edge_weight(args, index, position, 0);
    }
    if constexpr (kWeighing == Weighing::by_edge_ahead) own_weight = weights.take(index, position);
  }

  __device__ __forceinline__ void load(int u, I index, I position) {
    raw[u] = load_shared_words(reinterpret_cast<const Words<kWords>*>(row_address(base, index, args.x.row)));
    if constexpr (kWeighing == Weighing::by_head) weight[u] = edge_weight(args, index, position, head);
  }

  __device__ __forceinline__ void choose(int b) {
    if constexpr (kByEdge) {
#pragma unroll
      for (int u = 0; u < kBatch; ++u)
        weight[u] = __shfl_sync(0xffffffffu, own_weight, b + u, 1 << args.plan.sub_warp_log2);
    }
    if constexpr (kWeighing == Weighing::by_edge_ahead) {
      if (b == 0) weights.advance();
    }
  }

  __device__ __forceinline__ void take(int u, I) {
    A x[kPer];
    unpack_words<S, kWords>(raw[u], x);
#pragma unroll
    for (int k = 0; k < kPer; ++k) {
      total.sum[k] = kWeighing == Weighing::none ? total.sum[k] + x[k] : fma(weight[u], x[k], total.sum[k]);
    }
  }

  __device__ __forceinline__ void begin(I row, I) {
    scale = args.row_scale && row < args.graph.num_rows ? __ldg(args.row_scale + row) : A(1);
    total.clear();
  }

  __device__ __forceinline__ Segment segment(I, I) const { return total; }
  __device__ __forceinline__ void merge(Segment& segment, const Segment& later) const { segment.add(later); }

  __device__ __forceinline__ void write(int64_t row, const A (&x)[kPer]) const {
    if (!inside) return;
    const int64_t first = row * args.out_row + static_cast<int64_t>(head) * args.dim;
    if constexpr (sizeof(S) < sizeof(A)) {
      if (args.wide) {
        A* to = reinterpret_cast<A*>(args.out) + first;
        if (args.whole) {
#pragma unroll
          for (int k = 0; k < kPer; k += 2) {
            const A pair[2] = {x[k], x[k + 1]};
            store_words_once(to + at + k, pack_words<A, 2>(pair));
          }
        } else {
#pragma unroll
          for (int k = 0; k < kPer; ++k) {
            if (at + k < args.dim) to[at + k] = x[k];
          }
        }
        return;
      }
    }
    store_numbers<S, kWords>(reinterpret_cast<S*>(args.out) + first, at, args.dim, args.whole, x);
  }

  __device__ __forceinline__ void store(int64_t row, const Segment& segment) const {
    A x[kPer];
#pragma unroll
    for (int k = 0; k < kPer; ++k) x[k] = segment.sum[k] * scale;
    write(row, x);
  }

  __device__ __forceinline__ void store_empty(int64_t row) const {
    const A zero[kPer] = {};
    write(row, zero);
  }

  __device__ __forceinline__ Segment* place(int64_t slot) const {
    return reinterpret_cast<Segment*>(args.carry) + slot * args.vectors + vector;
  }
  __device__ __forceinline__ void keep(int64_t slot, const Segment& segment) const {
    if (inside) *place(slot) = segment;
  }
  __device__ __forceinline__ Segment kept(int64_t slot) const { return *place(slot); }
};

template <class S, class I, int kWords, Weighing kWeighing, int kBatch>
__global__ void __launch_bounds__(kReduceThreads, sum_blocks(kWeighing, 4 * kWords, sizeof(S), sizeof(I) > 4, kBatch))
    spmm_kernel(const __grid_constant__ SpmmArgs<Arithmetic<S>> args) {
  const int lane = threadIdx.x & ((1 << args.plan.sub_warp_log2) - 1);
  const int first = static_cast<int>(blockIdx.y) * args.plan.slice_vectors;
  SumReducer<S, I, kWords, kWeighing, kBatch> reducer(args,
                                                      lane < args.plan.slice_vectors ? first + lane : args.vectors);
  reduce_segments<kBatch, I>(args.graph, args.plan, reducer);
}

}  // namespace edgeless::cuda::spmm
