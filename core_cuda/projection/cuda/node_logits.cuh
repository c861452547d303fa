// The kernels for node logits and their gradients. A logit is the dot product of one head of a node's row, [channels],
// with a vector of that head; there are one or two vectors per head.
//
// In the forward kernel, a sub-warp computes one head of one row. In the backward kernel, a thread block processes 128
// columns of a chunk of rows (columns.cuh): it writes the gradient of these rows and sums their contribution to the
// vectors' gradients; column_sums.cuh then adds the chunks. Both kernels read a row once for all vectors.
#pragma once

#include <cstdint>

#include "columns.cuh"
#include "fours.cuh"
#include "kernels.h"

namespace edgeless::cuda::projection {

// kFours: heads are read four elements at a time.
template <class S, bool kFours>
__global__ void __launch_bounds__(kLogitsThreads) logits_kernel(const __grid_constant__ LogitsArgs args) {
  using A = Arithmetic<S>;
  constexpr int kStep = kFours ? 4 : 1;
  const int width = 1 << args.sub_warp_log2, lane = threadIdx.x & (width - 1);
  const int64_t place = (int64_t(blockIdx.x) * kLogitsThreads + threadIdx.x) >> args.sub_warp_log2;
  const bool small = args.num_rows * args.heads < (int64_t(1) << 31);  // 64-bit division is slow
  const int64_t row = small ? static_cast<uint32_t>(place) / static_cast<uint32_t>(args.heads) : place / args.heads;
  const int head = static_cast<int>(place - row * args.heads);
  const bool inside = row < args.num_rows;
  A dot[kMostVectors] = {};
  if (inside) {
    const S* x = static_cast<const S*>(args.rows) + row * args.row_stride + head * args.head_stride;
    for (int c = lane * kStep; c < args.channels; c += width * kStep) {
      A number[kStep];
      load_numbers<S>(x + c, number);
#pragma unroll
      for (int v = 0; v < kMostVectors; ++v) {
        if (v >= args.vectors) continue;
        A weight[kStep];
        load_numbers<A>(static_cast<const A*>(args.vector[v]) + head * args.channels + c, weight);
#pragma unroll
        for (int k = 0; k < kStep; ++k) dot[v] = fma(number[k], weight[k], dot[v]);
      }
    }
  }
#pragma unroll
  for (int v = 0; v < kMostVectors; ++v) {
    for (int step = width / 2; step > 0; step /= 2) dot[v] += __shfl_xor_sync(0xffffffffu, dot[v], step);
    if (inside && lane == 0 && v < args.vectors) static_cast<A*>(args.logits[v])[place] = dot[v];
  }
}

template <class S, bool kFours>
__global__ void __launch_bounds__(kLanes* kSides) gradients_kernel(const __grid_constant__ LogitsArgs args) {
  using A = Arithmetic<S>;
  constexpr int kStep = kFours ? 4 : 1, kGroups = kPer / kStep;  // a group: consecutive columns of one head
  __shared__ A shared[kSides][kLanes];
  const int width = args.heads * args.channels;
  int first[kGroups], head[kGroups];
  int64_t offset[kGroups];
  A vector[kMostVectors][kPer] = {}, sum[kMostVectors][kPer] = {};
#pragma unroll
  for (int group = 0; group < kGroups; ++group) {
    first[group] = (static_cast<int>(blockIdx.y) * kPer + group * kStep) * kLanes + threadIdx.x * kStep;
    const int at = min(first[group], width - kStep);
    head[group] = at / args.channels;
    offset[group] = head[group] * args.head_stride + (at - head[group] * args.channels);
#pragma unroll
    for (int v = 0; v < kMostVectors; ++v) {
      if (v >= args.vectors || !args.grad[v]) continue;
#pragma unroll
      for (int k = 0; k < kStep; ++k) vector[v][group * kStep + k] = static_cast<const A*>(args.vector[v])[at + k];
    }
  }
  const int64_t begin = args.num_rows * blockIdx.x / args.chunks, end = args.num_rows * (blockIdx.x + 1) / args.chunks;
  const S* rows = static_cast<const S*>(args.rows);
  const S* more = static_cast<const S*>(args.more);
  S* grad_rows = static_cast<S*>(args.grad_rows);
#pragma unroll 4
  for (int64_t row = begin + threadIdx.y; row < end; row += kSides) {
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      if (first[group] >= width) continue;
      A number[kStep] = {}, grad[kStep] = {};
      if (args.partial) load_numbers<S>(rows + row * args.row_stride + offset[group], number);
      if (more) load_numbers<S>(more + row * width + first[group], grad);
#pragma unroll
      for (int v = 0; v < kMostVectors; ++v) {
        if (v >= args.vectors || !args.grad[v]) continue;
        const A g = static_cast<const A*>(args.grad[v])[row * args.heads + head[group]];
#pragma unroll
        for (int k = 0; k < kStep; ++k) {
          const int at = group * kStep + k;
          grad[k] = fma(g, vector[v][at], grad[k]);
          sum[v][at] = fma(g, number[k], sum[v][at]);
        }
      }
      if (grad_rows) store_numbers<S>(grad_rows + row * width + first[group], grad);
    }
  }
  if (!args.partial) return;
  A* partial = static_cast<A*>(args.partial) + static_cast<int64_t>(blockIdx.x) * args.vectors * width;
#pragma unroll
  for (int v = 0; v < kMostVectors; ++v) {
    if (v >= args.vectors) break;
#pragma unroll
    for (int k = 0; k < kPer; ++k) {
      const A all = over_sides(sum[v][k], shared);
      const int at = first[k / kStep] + k % kStep;
      if (threadIdx.y == 0 && at < width) partial[v * width + at] = all;
    }
  }
}

}  // namespace edgeless::cuda::projection
