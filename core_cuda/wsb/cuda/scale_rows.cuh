// The kernel that multiplies each row of 16-bit elements by its scale, rounded to 16 bits. One thread per vector of 16
// bytes; the kernel is bound by memory bandwidth.
#pragma once

#include "../../common/threads.cuh"
#include "../../common/vec.cuh"
#include "sum.h"

namespace edgeless::cuda::wsb {

template <class S>
__global__ void scale_kernel(const __grid_constant__ ScaleArgs args) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= args.rows * args.vectors) return;
  const int64_t row = i / args.vectors;
  float x[8];
  unpack(load_once(args.x + row * args.x_row + i % args.vectors * 16), x, S{});
  const float scale = __ldg(args.scale + row);
#pragma unroll
  for (float& number : x) number *= scale;
  reinterpret_cast<uint4*>(args.out)[i] = pack(x, S{});
}

}  // namespace edgeless::cuda::wsb
