// Edges in the order of their rows, for kernels whose threads have an edge each. No torch.
#pragma once

#include "../../common/threads.cuh"
#include "../../common/words.cuh"
#include "edge_terms.h"

namespace edgeless::cuda {

__device__ __forceinline__ int64_t index_at(const void* indices, int64_t at, bool wide) {
  return wide ? __ldg(static_cast<const int64_t*>(indices) + at)
              : static_cast<int64_t>(__ldg(static_cast<const int32_t*>(indices) + at));
}

// The row of an edge, one of low .. high.
__device__ inline int64_t row_of_edge(const EdgeFeatures& edges, int64_t position, int64_t low, int64_t high) {
  while (low < high) {
    const int64_t middle = (low + high + 1) / 2;
    if (index_at(edges.graph.indptr, middle, edges.wide_index) <= position) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

__device__ __forceinline__ int64_t id_of_edge(const EdgeFeatures& edges, int64_t position) {
  return edges.graph.edge_ids ? index_at(edges.graph.edge_ids, position, edges.wide_index) : position;
}

// The first and the last row of the edges begin .. end, at least one. Whole block.
struct RowBounds {
  int64_t low, high;

  __device__ RowBounds(const EdgeFeatures& edges, int64_t begin, int64_t end) {
    __shared__ int64_t bounds[2];
    if (threadIdx.x < 2) {
      bounds[threadIdx.x] = row_of_edge(edges, threadIdx.x ? end - 1 : begin, 0, edges.graph.num_rows - 1);
    }
    __syncthreads();
    low = bounds[0], high = bounds[1];
  }
};

// kDim numbers that lie side by side, in whole vectors of up to 16 bytes.
template <class S, int kDim>
struct Numbers {
  static constexpr int kBytes = kDim * static_cast<int>(sizeof(S)), kWords = kBytes < 16 ? kBytes / 4 : 4;
  static constexpr int kPer = kNumbers<S, kWords>;

  static __device__ __forceinline__ void load(const S* from, Arithmetic<S> (&x)[kDim]) {
#pragma unroll
    for (int k = 0; k < kDim; k += kPer) {
      Arithmetic<S> part[kPer];
      unpack_words<S, kWords>(load_shared_words(reinterpret_cast<const Words<kWords>*>(from + k)), part);
#pragma unroll
      for (int i = 0; i < kPer; ++i) x[k + i] = part[i];
    }
  }
  static __device__ __forceinline__ void store(S* to, const Arithmetic<S> (&x)[kDim]) {
#pragma unroll
    for (int k = 0; k < kDim; k += kPer) {
      Arithmetic<S> part[kPer];
#pragma unroll
      for (int i = 0; i < kPer; ++i) part[i] = x[k + i];
      store_words_once(to + k, pack_words<S, kWords>(part));
    }
  }
};

template <class A, class F>
cudaError_t with_features(Storage storage, F&& f) {
  if constexpr (std::is_same_v<A, double>) {
    f(double{});
  } else {
    switch (storage) {
      case Storage::f16: f(__half{}); break;
      case Storage::bf16: f(__nv_bfloat16{}); break;
      default: f(float{}); break;
    }
  }
  return cudaGetLastError();
}

template <int kDim>
struct Dim {
  static constexpr int value = kDim;
};

}  // namespace edgeless::cuda
