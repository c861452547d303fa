// Products of edge features on the tensor cores: a warp holds tiles of 16 columns by 8 edges. No torch.
//
// mma.m16n8k8 has a depth of 8. Which columns, edges and depths a lane holds may be permuted, as long as both factors
// agree: lane 4 g + t holds two neighbours of each, so that the result registers of one product are the input registers
// of the next.
//
//   Left    columns 2 g and 2 g + 1, at depths 2 t and 2 t + 1
//   Right   depths 2 t and 2 t + 1, of edge (or feature) g
//   result  columns 2 g and 2 g + 1, of edges (or features) 2 t and 2 t + 1
//
// Values are split as in common/tf32.cuh.
#pragma once

#include "../../common/tf32.cuh"
#include "edge_products.h"

namespace edgeless::cuda {

__device__ __forceinline__ int tile_group() { return threadIdx.x % 32 / 4; }  // g
__device__ __forceinline__ int tile_pair() { return threadIdx.x % 4 * 2; }    // 2 t

// kRest: also holds the residual of each value after rounding.
template <int kSize, bool kRest>
struct TileNumbers {
  uint32_t nearest[kSize], rest[kRest ? kSize : 1];

  __device__ __forceinline__ void set(int at, float x) {
    if constexpr (kRest) {
      split(x, nearest[at], rest[at]);
    } else {
      nearest[at] = __float_as_uint(x);
    }
  }
};

template <bool kRest>
struct TileLeft : TileNumbers<4, kRest> {
  // Sets the first and the second column, each at the lower and at the higher depth.
  __device__ __forceinline__ void set(float first_low, float first_high, float second_low, float second_high) {
    const float x[4] = {first_low, second_low, first_high, second_high};
#pragma unroll
    for (int i = 0; i < 4; ++i) TileNumbers<4, kRest>::set(i, x[i]);
  }
};

template <bool kRest>
struct TileRight : TileNumbers<2, kRest> {
  __device__ __forceinline__ void set(float low, float high) {
    TileNumbers<2, kRest>::set(0, low), TileNumbers<2, kRest>::set(1, high);
  }
};

// d = left * right if `fresh`, else d += left * right. Tensor cores truncate when they add, so callers accumulate few
// products in one d.
template <bool kLeftRest, bool kRightRest>
__device__ __forceinline__ void multiply_tile(float (&d)[4], const TileLeft<kLeftRest>& left,
                                              const TileRight<kRightRest>& right, bool fresh) {
  if constexpr (kLeftRest) multiply_add(d, left.rest, right.nearest, fresh);
  if constexpr (kRightRest) multiply_add(d, left.nearest, right.rest, fresh && !kLeftRest);
  multiply_add(d, left.nearest, right.nearest, fresh && !kLeftRest && !kRightRest);
}

}  // namespace edgeless::cuda
