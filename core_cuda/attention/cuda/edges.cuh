// Small kernels around the passes of attention: sums of rows, the dot products of rows that the backward needs, and
// norms. All sums have a fixed order.
#pragma once

#include "../../common/threads.cuh"
#include "../../common/vec.cuh"
#include "args.h"

namespace edgeless::cuda {

// Block (x, y) sums part y of the rows for 32 columns: kTall rows at a time, with four sums per thread. Rows from index
// `rows_of_in` on are read from `more`.
template <class A, class S>
__global__ void sum_rows_kernel(const A* in, int64_t rows_of_in, const A* more, int64_t rows, int64_t cols, S* out) {
  constexpr int kTall = kThreads / 32;
  __shared__ A parts[kTall][32];
  const int lane = threadIdx.x % 32, tall = threadIdx.x / 32;
  const int64_t col = static_cast<int64_t>(blockIdx.x) * 32 + lane;
  const int64_t share = (rows + gridDim.y - 1) / gridDim.y, first = share * blockIdx.y;
  const int64_t last = min(rows, first + share);
  const auto at = [&](int64_t row) {
    return row < rows_of_in ? in[row * cols + col] : more[(row - rows_of_in) * cols + col];
  };
  A sums[4] = {};
  if (col < cols) {
    int64_t row = first + tall;
    for (; row + 3 * kTall < last; row += 4 * kTall) {
#pragma unroll
      for (int u = 0; u < 4; ++u) sums[u] += at(row + u * kTall);
    }
    for (; row < last; row += kTall) sums[0] += at(row);
  }
  parts[tall][lane] = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  __syncthreads();
  if (tall > 0 || col >= cols) return;
  A sum = 0;
#pragma unroll
  for (int t = 0; t < kTall; ++t) sum += parts[t][lane];
  out[blockIdx.y * cols + col] = to_storage<S>(sum);
}

template <int kSize>
__device__ __forceinline__ void load_floats(const char* at, float (&x)[kSize]) {
#pragma unroll
  for (int k = 0; k < kSize; k += 4) {
    float four[4];
    unpack(load_once(at + k * sizeof(float)), four, float{});
#pragma unroll
    for (int i = 0; i < 4; ++i) x[k + i] = four[i];
  }
}

// Four lanes per row and head. kRounds: grad is float32; it is rounded to S before use, and the rounded values are
// stored to `rounded`, [rows, heads, vectors].
template <class S, bool kRounds>
__global__ void row_delta_kernel(Rows grad, Rows out, int64_t rows, int heads, int vectors, Raw<S>* rounded,
                                 float* delta) {
  const int64_t at = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / 4;
  const bool inside = at < rows * heads;
  const int64_t row = inside ? at / heads : 0, head = inside ? at % heads : 0;
  const char* g = grad.base + row * grad.row + head * grad.head;
  const char* o = out.base + row * out.row + head * out.head;
  float sum = 0;
  for (int v = threadIdx.x % 4; v < vectors; v += 4) {
    float x[kVec<S>], y[kVec<S>];
    Raw<S> raw;
    if constexpr (kRounds) {
      load_floats(g + v * sizeof(x), x);
      raw = pack(x, S{});
      if (inside) rounded[at * vectors + v] = raw;
    } else {
      raw = load_once<Raw<S>>(g + v * sizeof(Raw<S>));
    }
    unpack(raw, x, S{});
    load_floats(o + v * sizeof(y), y);
#pragma unroll
    for (int k = 0; k < kVec<S>; ++k) sum = fma(x[k], y[k], sum);
  }
  sum += __shfl_xor_sync(0xffffffffu, sum, 1);
  sum += __shfl_xor_sync(0xffffffffu, sum, 2);
  if (inside && threadIdx.x % 4 == 0) delta[at] = sum;
}

// Four lanes per row and head. The next pass gathers these rows, so their loads let L2 keep them.
template <class A, class S>
__global__ void inverse_norms_kernel(Rows rows, int64_t num_rows, int heads, int vectors, A least, A* over) {
  const int64_t at = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / 4;
  const bool inside = at < num_rows * heads;
  const int64_t row = inside ? at / heads : 0, head = inside ? at % heads : 0;
  const char* from = rows.base + row * rows.row + head * rows.head;
  A sum = 0;
  for (int v = threadIdx.x % 4; v < vectors; v += 4) {
    A x[kVec<S>];
    unpack(load_shared_row<Raw<S>>(from + v * sizeof(Raw<S>)), x, S{});
#pragma unroll
    for (int k = 0; k < kVec<S>; ++k) sum = fma(x[k], x[k], sum);
  }
  sum += __shfl_xor_sync(0xffffffffu, sum, 1);
  sum += __shfl_xor_sync(0xffffffffu, sum, 2);
  const A norm = sqrt(sum);
  if (inside && threadIdx.x % 4 == 0) over[at] = norm < least ? -1 / least : 1 / norm;
}

// One block per row and head.
template <class A, class I>
__global__ void row_dot_kernel(CompressedGraph graph, const A* a, const A* b, int heads, A* out) {
  __shared__ A sums[kThreads];
  const I *indptr = static_cast<const I*>(graph.indptr), *ids = static_cast<const I*>(graph.edge_ids);
  const int64_t row = blockIdx.x, head = blockIdx.y;
  A sum = 0;
  for (int64_t p = indptr[row] + threadIdx.x; p < indptr[row + 1]; p += kThreads) {
    const int64_t at = (ids ? static_cast<int64_t>(ids[p]) : p) * heads + head;
    sum = fma(a[at], b[at], sum);
  }
  sums[threadIdx.x] = sum;
  for (int half = kThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
  }
  if (threadIdx.x == 0) out[row * heads + head] = sums[0];
}

}  // namespace edgeless::cuda
