// Sums and blends of rows by their entry's type, which run at the speed of memory (TypedRowsArgs in typed_rows.h has
// the shapes). blend_kernel computes out_y = alpha y + (1 - alpha) x with the alpha of the type. partial_sums_kernel
// sums every chunk of entries of one type into partial [chunks, width]: the rows of grad or, with an alpha, those of
// grad (y - x); with an alpha it also computes the gradients of y and x. add_partials_kernel adds the chunks of a type
// in an order that depends on the offsets alone.
//
// A thread block has one chunk. blockDim.x threads, at most 32, process a row with one vector each, and blockDim.y
// entries are processed at a time.
#pragma once

#include "../../common/vec.cuh"
#include "../../projection/cuda/columns.cuh"
#include "entries.cuh"
#include "geometry.h"
#include "typed_rows.h"

namespace edgeless::cuda::relational::typed_rows {

static_assert(kLanes == projection::kLanes && kSides == projection::kSides);

// Loads kSize adjacent elements in the opmath dtype: one, or a 16-byte vector.
template <class S, int kSize>
__device__ __forceinline__ void read(const void* from, int64_t at, Arithmetic<S> (&to)[kSize]) {
  const S* numbers = static_cast<const S*>(from) + at;
  if constexpr (kSize == 1) {
    to[0] = to_arithmetic(*numbers);
  } else {
    unpack(load_once(reinterpret_cast<const char*>(numbers)), to, S{});
  }
}

template <class S, int kSize>
__device__ __forceinline__ void write(void* to, int64_t at, const Arithmetic<S> (&from)[kSize]) {
  S* numbers = static_cast<S*>(to) + at;
  if constexpr (kSize == 1) {
    *numbers = to_storage<S>(from[0]);
  } else {
    *reinterpret_cast<uint4*>(numbers) = pack(from, S{});
  }
}

template <class S, int kSize>
__global__ void __launch_bounds__(kThreads) blend_kernel(const __grid_constant__ TypedRowsArgs args) {
  check_offsets(args.entries);
  using A = Arithmetic<S>;
  const Range range = range_of_tile(args.entries, blockIdx.x, args.chunk);
  const int column = (blockIdx.y * blockDim.x + threadIdx.x) * kSize;
  if (range.begin >= range.end || column >= args.width) return;
  const EntryRows ids{nullptr, 0, args.rows};
  const A alpha = to_arithmetic(static_cast<const S*>(args.alpha)[range.type]), rest = A(1) - alpha;
#pragma unroll 4
  for (int64_t entry = range.begin + threadIdx.y; entry < range.end; entry += blockDim.y) {
    const int64_t at = row_of(ids, args.entries, entry) * args.width + column;
    A y[kSize], x[kSize];
    read<S>(args.y, at, y), read<S>(args.x, at, x);
#pragma unroll
    for (int i = 0; i < kSize; ++i) y[i] = alpha * y[i] + rest * x[i];
    write<S>(args.out_y, at, y);
  }
}

template <class S, int kSize, bool kBlend>
__global__ void __launch_bounds__(kThreads) partial_sums_kernel(const __grid_constant__ TypedRowsArgs args) {
  check_offsets(args.entries);
  using A = Arithmetic<S>;
  __shared__ A shared[kSize][kThreads];
  const Range range = range_of_tile(args.entries, blockIdx.x, args.chunk);
  if (range.begin >= range.end) return;
  const int column = (blockIdx.y * blockDim.x + threadIdx.x) * kSize;
  const EntryRows ids{nullptr, 0, args.rows};
  A sum[kSize] = {}, alpha = 0, rest = 0;
  if constexpr (kBlend) alpha = to_arithmetic(static_cast<const S*>(args.alpha)[range.type]), rest = A(1) - alpha;
  if (column < args.width) {
#pragma unroll 4
    for (int64_t entry = range.begin + threadIdx.y; entry < range.end; entry += blockDim.y) {
      const int64_t at = row_of(ids, args.entries, entry) * args.width + column;
      A grad[kSize];
      read<S>(args.grad, at, grad);
      if constexpr (kBlend) {
        A made[kSize];
        if (args.partial) {
          A x[kSize];
          read<S>(args.y, at, made), read<S>(args.x, at, x);
#pragma unroll
          for (int i = 0; i < kSize; ++i) sum[i] += grad[i] * (made[i] - x[i]);
        }
        if (args.out_y) {
#pragma unroll
          for (int i = 0; i < kSize; ++i) made[i] = alpha * grad[i];
          write<S>(args.out_y, at, made);
        }
        if (args.out_x) {
#pragma unroll
          for (int i = 0; i < kSize; ++i) made[i] = rest * grad[i];
          write<S>(args.out_x, at, made);
        }
      } else {
#pragma unroll
        for (int i = 0; i < kSize; ++i) sum[i] += grad[i];
      }
    }
  }
  if (!args.partial) return;
  const int thread = threadIdx.y * blockDim.x + threadIdx.x;
#pragma unroll
  for (int i = 0; i < kSize; ++i) shared[i][thread] = sum[i];
  for (int sides = blockDim.y / 2; sides > 0; sides /= 2) {  // blockDim.y is a power of two
    __syncthreads();
    if (threadIdx.y < sides) {
#pragma unroll
      for (int i = 0; i < kSize; ++i) shared[i][thread] += shared[i][thread + sides * blockDim.x];
    }
  }
  if (threadIdx.y > 0 || column >= args.width) return;
  A* partial = static_cast<A*>(args.partial) + static_cast<int64_t>(blockIdx.x) * args.width + column;
#pragma unroll
  for (int i = 0; i < kSize; ++i) partial[i] = shared[i][thread];
}

// A block sums 32 columns of a type or, if `total`, all columns.
template <class S>
__global__ void __launch_bounds__(kLanes* kSides) add_partials_kernel(const __grid_constant__ TypedRowsArgs args) {
  using A = Arithmetic<S>;
  __shared__ A shared[kSides][kLanes];
  const Entries& entries = args.entries;
  const int first = blockIdx.x * kLanes, last = args.total ? args.width : min(first + kLanes, args.width);
  for (int64_t type = blockIdx.y; type < entries.types; type += gridDim.y) {
    const int64_t begin = id_at(entries.offsets, entries.wide, type);
    const int64_t end = min(id_at(entries.offsets, entries.wide, type + 1), entries.count);
    const int64_t chunks = (end - begin + args.chunk - 1) / args.chunk;
    const A* partial = static_cast<const A*>(args.partial) + (begin / args.chunk + type) * args.width;
    A sum = 0;
    for (int column = first + threadIdx.x; column < last; column += kLanes) {
#pragma unroll 4
      for (int64_t chunk = threadIdx.y; chunk < chunks; chunk += kSides) sum += partial[chunk * args.width + column];
    }
    A all = projection::over_sides(sum, shared);
    if (threadIdx.y > 0) continue;
    const int column = first + threadIdx.x;
    if (!args.total) {
      if (column < last) static_cast<S*>(args.sums)[type * args.width + column] = to_storage<S>(all);
      continue;
    }
    for (int step = kLanes / 2; step > 0; step /= 2) all += __shfl_xor_sync(0xffffffffu, all, step);
    if (threadIdx.x == 0) static_cast<S*>(args.sums)[type] = to_storage<S>(all);
  }
}

}  // namespace edgeless::cuda::relational::typed_rows
