// Products of edge features on the tensor cores: a warp's lanes hold tiles of 16 columns by 8 edges. No torch.
//
// mma.m16n8k8 multiplies 8 numbers of depth. Which of them a lane holds is up to us, as long as both factors agree: so
// lane 4 g + t has two neighbours of each kind, and what a product leaves in its registers is what the next one takes.
//
//   Left    columns 2 g and 2 g + 1, at depths 2 t and 2 t + 1
//   Right   depths 2 t and 2 t + 1, of edge (or feature) g
//   result  columns 2 g and 2 g + 1, of edges (or features) 2 t and 2 t + 1
//
// Numbers are those of common/tf32.cuh.
#pragma once

#include "../../common/tf32.cuh"

namespace edgeless::cuda {

constexpr int kTileColumns = 16, kTileEdges = 8, kTileDepth = 8;

__device__ __forceinline__ int tile_group() { return threadIdx.x % 32 / 4; }  // g
__device__ __forceinline__ int tile_pair() { return threadIdx.x % 4 * 2; }    // 2 t

// kRest: what is left of each number as well.
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
  // Of the first column and the second, at the lower depth and the higher.
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

// d = left right, to which d is added where it is not `fresh`. Tensor cores cut off what a sum does not hold, so few
// products go into one d.
template <bool kLeftRest, bool kRightRest>
__device__ __forceinline__ void multiply_tile(float (&d)[4], const TileLeft<kLeftRest>& left,
                                              const TileRight<kRightRest>& right, bool fresh) {
  if constexpr (kLeftRest) multiply_add(d, left.rest, right.nearest, fresh);
  if constexpr (kRightRest) multiply_add(d, left.nearest, right.rest, fresh && !kLeftRest);
  multiply_add(d, left.nearest, right.nearest, fresh && !kLeftRest && !kRightRest);
}

}  // namespace edgeless::cuda
