// Helpers of the kernels for edge features. No torch.
#pragma once

#include "../../common/row_of_edge.cuh"
#include "../../common/words.cuh"
#include "edge_terms.h"

namespace edgeless::cuda {

__device__ __forceinline__ int64_t id_of_edge(const EdgeFeatures& edges, int64_t position) {
  return id_of_edge(edges.graph, edges.wide_index, position);
}
__device__ __forceinline__ int64_t row_of_edge(const EdgeFeatures& edges, int64_t position, int64_t low, int64_t high) {
  return row_of_edge(edges.graph, edges.wide_index, position, low, high);
}

// Loads and stores kDim contiguous values in whole vectors of up to 16 bytes.
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

// Loads a thread's columns of a row.
template <class S, int kColumns>
__device__ __forceinline__ void load_columns(const char* from, Arithmetic<S> (&x)[kColumns]) {
  if constexpr (kColumns == 1) {
    x[0] = to_arithmetic(__ldg(reinterpret_cast<const S*>(from)));
  } else {
    Numbers<S, kColumns>::load(reinterpret_cast<const S*>(from), x);
  }
}

}  // namespace edgeless::cuda
