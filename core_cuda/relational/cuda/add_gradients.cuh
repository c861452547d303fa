// Computes the gradients of typed weights, of a root weight and of a bias from the partial sums that the thread blocks
// of segment_gradients and own_gradients stored: weights [types, size] from partial [chunks, size], where a type has
// one chunk for every args.share of its tiles, and root [own_width] and bias [own_size - own_width] from own_partial
// [own_chunks, own_size].
//
// A thread sums four adjacent elements of a weight. Where threads would otherwise be idle, several threads divide the
// chunks of these elements among themselves and add their sums in shared memory. Both orders of summation depend on
// offsets and sizes alone, so every run gives the same bits.
#pragma once

#include "../../common/vec.cuh"
#include "entries.cuh"
#include "geometry.h"
#include "segment_tiles.h"

namespace edgeless::cuda::relational::add_gradients {

constexpr int kBatch = 4;  // chunks that a thread loads before it adds them

template <class S>
__device__ __forceinline__ void store(void* to, int64_t at, bool wide, float x) {
  if (wide) {
    static_cast<float*>(to)[at] = x;
  } else {
    static_cast<S*>(to)[at] = to_storage<S>(x);
  }
}

// A thread block computes 4 kThreads / sides elements of one type's weight. The blocks behind those of the types
// compute root and bias.
template <class S>
__global__ void __launch_bounds__(kThreads)
    add_gradients_kernel(const __grid_constant__ AddGradientsArgs args, int of_type, int64_t of_types, int type_sides) {
  __shared__ float4 shared[kThreads];
  const bool own = blockIdx.x >= of_types;
  const int sides = own ? kOwnSides : type_sides, lanes = kThreads / sides;
  const int lane = threadIdx.x % lanes, side = threadIdx.x / lanes;
  const int type = own ? 0 : blockIdx.x / of_type;
  const int block = static_cast<int>(own ? blockIdx.x - of_types : blockIdx.x % of_type);
  const int at = (block * lanes + lane) * 4, size = own ? args.own_size : args.size;
  const float* partial = own ? args.own_partial : args.partial;
  int64_t chunks = args.own_chunks;
  if (!own) {
    const int64_t begin = id_at(args.tiles.offsets, false, type), end = id_at(args.tiles.offsets, false, type + 1);
    chunks = (end - begin + args.share - 1) / args.share;
    partial += (begin / args.share + type) * size;
  }
  float sum[4] = {};
  for (int64_t first = side; at < size && first < chunks; first += kBatch * sides) {
    float4 four[kBatch];
#pragma unroll
    for (int u = 0; u < kBatch; ++u) {
      const int64_t chunk = first + u * sides;
      if (chunk < chunks) four[u] = __ldcs(reinterpret_cast<const float4*>(partial + chunk * size + at));
    }
#pragma unroll
    for (int u = 0; u < kBatch; ++u) {
      if (first + u * sides >= chunks) break;
      sum[0] += four[u].x, sum[1] += four[u].y, sum[2] += four[u].z, sum[3] += four[u].w;
    }
  }
  if (sides > 1) {
    shared[threadIdx.x] = make_float4(sum[0], sum[1], sum[2], sum[3]);
    __syncthreads();
    for (int other = 1; side == 0 && other < sides; ++other) {
      const float4 four = shared[other * lanes + lane];
      sum[0] += four.x, sum[1] += four.y, sum[2] += four.z, sum[3] += four.w;
    }
  }
  if (side > 0 || at >= size) return;
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    if (!own) {
      store<S>(args.weights, int64_t{type} * size + at + k, args.wide, sum[k]);
    } else if (at + k < args.own_width) {
      if (args.root) store<S>(args.root, at + k, false, sum[k]);
    } else if (args.bias) {
      store<S>(args.bias, at + k - args.own_width, false, sum[k]);
    }
  }
}

}  // namespace edgeless::cuda::relational::add_gradients
