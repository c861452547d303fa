// Kernels that sum the columns of several matrices with equal numbers of rows, in an order that depends on the shapes
// alone.
//
// For many rows, a thread block sums 128 columns over a chunk of the rows of one matrix (columns.cuh), and a second
// kernel adds the chunks. Almost nothing is written, so the kernels run at memory bandwidth; torch's sum of a tall
// matrix of 128 columns reaches 0.5 TB/s on an H200. For few rows, a thread block sums 32 columns over all rows, which
// takes one launch instead of two.
#pragma once

#include <cstdint>

#include "columns.cuh"
#include "kernels.h"

namespace edgeless::cuda::projection {

template <class S, class A>
__device__ __forceinline__ void store_sum(const ColumnSumsArgs& args, void* out, int column, A sum) {
  if (args.wide) {
    static_cast<A*>(out)[column] = sum;
  } else {
    static_cast<S*>(out)[column] = to_storage<S>(sum);
  }
}

template <class S>
__global__ void __launch_bounds__(kLanes* kManySides) few_rows_kernel(const __grid_constant__ ColumnSumsArgs args) {
  using A = Arithmetic<S>;
  __shared__ A shared[kManySides][kLanes];
  const Columns& c = args.columns[blockIdx.z];
  const int column = blockIdx.y * kLanes + threadIdx.x;
  if (blockIdx.y * kLanes >= c.width) return;
  const S* rows = static_cast<const S*>(c.rows) + column;
  A sum = 0;
  if (column < c.width) {
#pragma unroll 8
    for (int64_t row = threadIdx.y; row < args.num_rows; row += kManySides) {
      sum += to_arithmetic(rows[row * c.row_stride]);
    }
  }
  const A all = over_sides(sum, shared);
  if (threadIdx.y == 0 && column < c.width) store_sum<S>(args, c.out, column, all);
}

template <class S>
__global__ void __launch_bounds__(kLanes* kSides) partial_sums_kernel(const __grid_constant__ ColumnSumsArgs args) {
  using A = Arithmetic<S>;
  __shared__ A shared[kSides][kLanes];
  const Columns& c = args.columns[blockIdx.z];
  const int column = blockIdx.y * kLanes * kPer + threadIdx.x;
  if (blockIdx.y * kLanes * kPer >= c.width) return;
  const int64_t begin = args.num_rows * blockIdx.x / args.chunks, end = args.num_rows * (blockIdx.x + 1) / args.chunks;
  const S* rows = static_cast<const S*>(c.rows);
  A sum[kPer] = {};
#pragma unroll 4
  for (int64_t row = begin + threadIdx.y; row < end; row += kSides) {
#pragma unroll
    for (int k = 0; k < kPer; ++k) {
      const int at = column + k * kLanes;
      if (at < c.width) sum[k] += to_arithmetic(rows[row * c.row_stride + at]);
    }
  }
  A* partial = static_cast<A*>(args.partial) + static_cast<int64_t>(blockIdx.x) * args.total + c.first;
#pragma unroll
  for (int k = 0; k < kPer; ++k) {
    const A all = over_sides(sum[k], shared);
    const int at = column + k * kLanes;
    if (threadIdx.y == 0 && at < c.width) partial[at] = all;
  }
}

template <class S>
__global__ void __launch_bounds__(kLanes* kSides) add_chunks_kernel(const __grid_constant__ ColumnSumsArgs args) {
  using A = Arithmetic<S>;
  __shared__ A shared[kSides][kLanes];
  const Columns& c = args.columns[blockIdx.z];
  const int column = blockIdx.y * kLanes + threadIdx.x;
  if (blockIdx.y * kLanes >= c.width) return;
  const A* partial = static_cast<const A*>(args.partial) + c.first + column;
  A sum = 0;
  if (column < c.width) {
#pragma unroll 4
    for (int chunk = threadIdx.y; chunk < args.chunks; chunk += kSides) sum += partial[int64_t(chunk) * args.total];
  }
  const A all = over_sides(sum, shared);
  if (threadIdx.y == 0 && column < c.width) store_sum<S>(args, c.out, column, all);
}

}  // namespace edgeless::cuda::projection
