// Logits of nodes: the dot products of every head of a row with a few vectors, and their gradients.
//
// Forward, a team of lanes takes one head of one row. Backward, a block takes 128 columns of a chunk of rows: it writes
// the rows' gradient and sums what the vectors get of it; a second kernel adds up the chunks (columns.cuh). Rows are
// read once for all vectors.
#include "columns.cuh"
#include "kernels.h"

namespace edgeless::cuda::maps {
namespace {

constexpr int kThreads = 256;

template <class S>
__global__ void __launch_bounds__(kThreads) logits_kernel(const __grid_constant__ LogitsArgs args) {
  using A = Arithmetic<S>;
  const int width = 1 << args.team_log2, lane = threadIdx.x & (width - 1);
  const int64_t head_of_row = (int64_t(blockIdx.x) * kThreads + threadIdx.x) >> args.team_log2;
  const int64_t row = head_of_row / args.heads;
  const int head = static_cast<int>(head_of_row - row * args.heads);
  const bool inside = row < args.num_rows;
  A dot[kMostVectors] = {};
  if (inside) {
    const S* x = static_cast<const S*>(args.rows) + row * args.row_stride + head * args.head_stride;
    for (int c = lane; c < args.channels; c += width) {
      const A number = to_arithmetic(x[c]);
#pragma unroll
      for (int v = 0; v < kMostVectors; ++v) {
        if (v < args.vectors) {
          dot[v] = fma(number, static_cast<const A*>(args.vector[v])[head * args.channels + c], dot[v]);
        }
      }
    }
  }
#pragma unroll
  for (int v = 0; v < kMostVectors; ++v) {
    for (int step = width / 2; step > 0; step /= 2) dot[v] += __shfl_xor_sync(0xffffffffu, dot[v], step);
    if (inside && lane == 0 && v < args.vectors) static_cast<A*>(args.logits[v])[head_of_row] = dot[v];
  }
}

template <class S>
__global__ void __launch_bounds__(kLanes* kSides) gradients_kernel(const __grid_constant__ LogitsArgs args) {
  using A = Arithmetic<S>;
  __shared__ A shared[kSides][kLanes];
  const int width = args.heads * args.channels, first = static_cast<int>(blockIdx.y) * kLanes * kPer + threadIdx.x;
  int head[kPer], channel[kPer];
  A vector[kMostVectors][kPer] = {}, sum[kMostVectors][kPer] = {};
#pragma unroll
  for (int k = 0; k < kPer; ++k) {
    const int at = min(first + k * kLanes, width - 1);
    head[k] = at / args.channels, channel[k] = at - head[k] * args.channels;
#pragma unroll
    for (int v = 0; v < kMostVectors; ++v) {
      if (v < args.vectors && args.grad[v]) vector[v][k] = static_cast<const A*>(args.vector[v])[at];
    }
  }
  const int64_t begin = args.num_rows * blockIdx.x / args.chunks, end = args.num_rows * (blockIdx.x + 1) / args.chunks;
  const S* rows = static_cast<const S*>(args.rows);
  S* grad_rows = static_cast<S*>(args.grad_rows);
#pragma unroll 2
  for (int64_t row = begin + threadIdx.y; row < end; row += kSides) {
#pragma unroll
    for (int k = 0; k < kPer; ++k) {
      const int at = first + k * kLanes;
      if (at >= width) continue;
      const A number =
          args.partial ? to_arithmetic(rows[row * args.row_stride + head[k] * args.head_stride + channel[k]]) : A(0);
      A grad = 0;
#pragma unroll
      for (int v = 0; v < kMostVectors; ++v) {
        if (v >= args.vectors || !args.grad[v]) continue;
        const A g = static_cast<const A*>(args.grad[v])[row * args.heads + head[k]];
        grad = fma(g, vector[v][k], grad);
        sum[v][k] = fma(g, number, sum[v][k]);
      }
      if (grad_rows) grad_rows[row * width + at] = to_storage<S>(grad);
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
      const int at = first + k * kLanes;
      if (threadIdx.y == 0 && at < width) partial[v * width + at] = all;
    }
  }
}

template <class S>
cudaError_t launch_logits(const LogitsArgs& args, cudaStream_t stream) {
  const int64_t threads = (args.num_rows * args.heads) << args.team_log2;
  logits_kernel<S><<<static_cast<unsigned>((threads + kThreads - 1) / kThreads), kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

template <class S>
cudaError_t launch_gradients(const LogitsArgs& args, cudaStream_t stream) {
  const int width = args.heads * args.channels, columns = kLanes * kPer;
  const dim3 grid(static_cast<unsigned>(args.chunks), static_cast<unsigned>((width + columns - 1) / columns));
  gradients_kernel<S><<<grid, dim3(kLanes, kSides), 0, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace

cudaError_t run_logits(Dtype dtype, const LogitsArgs& args, cudaStream_t stream) {
  switch (dtype) {
    case Dtype::f32: return launch_logits<float>(args, stream);
    case Dtype::f16: return launch_logits<__half>(args, stream);
    case Dtype::bf16: return launch_logits<__nv_bfloat16>(args, stream);
    default: return launch_logits<double>(args, stream);
  }
}

cudaError_t run_logit_gradients(Dtype dtype, const LogitsArgs& args, cudaStream_t stream) {
  switch (dtype) {
    case Dtype::f32: return launch_gradients<float>(args, stream);
    case Dtype::f16: return launch_gradients<__half>(args, stream);
    case Dtype::bf16: return launch_gradients<__nv_bfloat16>(args, stream);
    default: return launch_gradients<double>(args, stream);
  }
}

}  // namespace edgeless::cuda::maps
