// Typed products without tensor cores, for every dtype, width and alignment. product_kernel multiplies each row of x by
// the weight matrices of its entry's type and adds a bias; outer_kernel computes one partial outer product x^T y for
// each chunk of entries of one type; add_chunks_kernel adds the partial products of a type. ProductArgs and OuterArgs
// (kernels.h) have the shapes.
//
// A thread block of 32 by 8 threads computes a tile of 32 by 32 elements and stages both operands in shared memory, 32
// indices of their common dimension at a time.
#pragma once

#include "../../common/vec.cuh"
#include "entries.cuh"
#include "geometry.h"

namespace edgeless::cuda::relational::any_product {

constexpr int kPer = kTile / kDown;  // rows of the tile that a thread computes

// sum[i] += the product of row threadIdx.y + 8 i and column threadIdx.x of a tile. left(row, k) and right(k, column)
// return 0 outside the matrices. To be called by the whole block.
template <class A, class Left, class Right>
__device__ __forceinline__ void multiply(int64_t depth, Left&& left, Right&& right, A (&sum)[kPer]) {
  __shared__ A lefts[kTile][kTile + 1], rights[kTile][kTile + 1];
  for (int64_t done = 0; done < depth; done += kTile) {
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      const int line = threadIdx.y + kDown * i;
      lefts[line][threadIdx.x] = done + threadIdx.x < depth ? left(line, done + threadIdx.x) : A(0);
      rights[line][threadIdx.x] = done + line < depth ? right(done + line, static_cast<int>(threadIdx.x)) : A(0);
    }
    __syncthreads();
#pragma unroll 8
    for (int k = 0; k < kTile; ++k) {
#pragma unroll
      for (int i = 0; i < kPer; ++i) sum[i] += lefts[threadIdx.y + kDown * i][k] * rights[k][threadIdx.x];
    }
    __syncthreads();
  }
}

template <class S>
__global__ void __launch_bounds__(kTile* kDown) product_kernel(const __grid_constant__ ProductArgs args) {
  check_offsets(args.entries);
  using A = Arithmetic<S>;
  const int across = (args.columns + kTile - 1) / kTile, block = blockIdx.y;
  const int first_column = static_cast<int>(blockIdx.x % across) * kTile;
  const Range range = range_of_tile(args.entries, blockIdx.x / across, kTile);
  if (range.begin >= range.end) return;
  const S* x = static_cast<const S*>(args.x.numbers) + begin_of_block(args.x, block, args.blocks, args.depth);
  const S* weight = static_cast<const S*>(args.weight) + range.type * args.weight_type + block * args.weight_block;
  A sum[kPer] = {};
  multiply(
      args.depth,
      [&](int line, int64_t k) {
        const int64_t entry = range.begin + line;
        return entry < range.end ? to_arithmetic(x[row_of(args.x, args.entries, entry) * args.x.stride + k]) : A(0);
      },
      [&](int64_t k, int in_line) {
        const int64_t column = first_column + in_line;
        if (column >= args.columns) return A(0);
        return to_arithmetic(weight[args.transposed ? column * args.weight_row + k : k * args.weight_row + column]);
      },
      sum);
  const int column = first_column + threadIdx.x;
  if (column >= args.columns) return;
  S* out = const_cast<S*>(static_cast<const S*>(args.out.numbers)) +
           begin_of_block(args.out, block, args.blocks, args.columns);
  const int64_t bias_at = (static_cast<int64_t>(range.type) * args.blocks + block) * args.columns + column;
  const A bias = args.bias ? to_arithmetic(static_cast<const S*>(args.bias)[bias_at]) : A(0);
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    const int64_t entry = range.begin + threadIdx.y + kDown * i;
    if (entry < range.end) {
      out[row_of(args.out, args.entries, entry) * args.out.stride + column] = to_storage<S>(sum[i] + bias);
    }
  }
}

template <class S>
__global__ void __launch_bounds__(kTile* kDown) outer_kernel(const __grid_constant__ OuterArgs args) {
  check_offsets(args.entries);
  using A = Arithmetic<S>;
  const int across = (args.columns + kTile - 1) / kTile, block = blockIdx.z;
  const int first_column = static_cast<int>(blockIdx.y % across) * kTile;
  const int first_row = static_cast<int>(blockIdx.y / across) * kTile;
  const Range range = range_of_tile(args.entries, blockIdx.x, args.chunk);
  if (range.begin >= range.end) return;
  const S* x = static_cast<const S*>(args.x.numbers) + begin_of_block(args.x, block, args.blocks, args.rows);
  const S* y = static_cast<const S*>(args.y.numbers) + begin_of_block(args.y, block, args.blocks, args.columns);
  A sum[kPer] = {};
  multiply(
      range.end - range.begin,
      [&](int line, int64_t k) {
        const int row = first_row + line;
        if (row >= args.rows) return A(0);
        return to_arithmetic(x[row_of(args.x, args.entries, range.begin + k) * args.x.stride + row]);
      },
      [&](int64_t k, int in_line) {
        const int column = first_column + in_line;
        if (column >= args.columns) return A(0);
        return to_arithmetic(y[row_of(args.y, args.entries, range.begin + k) * args.y.stride + column]);
      },
      sum);
  const int column = first_column + threadIdx.x;
  if (column >= args.columns) return;
  const int64_t size = static_cast<int64_t>(args.rows) * args.columns;
  A* partial = static_cast<A*>(args.partial) + (static_cast<int64_t>(blockIdx.x) * args.blocks + block) * size;
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    const int64_t row = first_row + threadIdx.y + kDown * i;
    if (row < args.rows) partial[row * args.columns + column] = sum[i];
  }
}

// Adds the chunks of every type's outer products in ascending order.
template <class S>
__global__ void __launch_bounds__(kAddThreads) add_chunks_kernel(const __grid_constant__ OuterArgs args) {
  using A = Arithmetic<S>;
  const int64_t size = static_cast<int64_t>(args.blocks) * args.rows * args.columns;
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kAddThreads + threadIdx.x;
  if (at >= size) return;
  const Entries& entries = args.entries;
  for (int64_t type = blockIdx.y; type < entries.types; type += gridDim.y) {
    const int64_t begin = id_at(entries.offsets, entries.wide, type);
    const int64_t end = min(id_at(entries.offsets, entries.wide, type + 1), entries.count);
    const int64_t first = begin / args.chunk + type, chunks = (end - begin + args.chunk - 1) / args.chunk;
    const A* partial = static_cast<const A*>(args.partial) + first * size + at;
    A sum = 0;
#pragma unroll 4
    for (int64_t chunk = 0; chunk < chunks; ++chunk) sum += partial[chunk * size];
    if (args.wide) {
      static_cast<A*>(args.sums)[type * size + at] = sum;
    } else {
      static_cast<S*>(args.sums)[type * size + at] = to_storage<S>(sum);
    }
  }
}

}  // namespace edgeless::cuda::relational::any_product
