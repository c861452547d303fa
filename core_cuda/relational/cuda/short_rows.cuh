// The kernel that computes the output of a relational layer (row_sums.cuh), A y + x W + bias, for rows of up to 64
// elements, if the CSR graph has many rows with few neighbours each. (row_sums.cuh is faster for all others.)
//
// A warp processes sixteen rows at a time and, in its loop, waits for no other warp. It loads the nodes' own rows into
// the registers from which tensor cores read them and multiplies them by the root matrix; the products stay in
// registers, and so do the sums of the neighbours (short_sums.cuh), which are added before the store.
//
// The grid has as many blocks as the device holds at a time. Its warps walk all rows, sixteen rows per warp and round.
// The begins and ends of the rows' neighbours are prefetched two rounds ahead, and the neighbours' ids one round ahead.
#pragma once

#include <cstdint>
#include <type_traits>

#include "short_sums.cuh"

namespace edgeless::cuda::relational {

template <class S>
using OwnVectors = LaneVectors<S, kMostShortWidth>[2];

// Loads the lane's vectors of the own rows of the sixteen rows from `first` on, and zeros for rows that have none.
template <class S>
__device__ __forceinline__ void load_own(const RowSumsArgs& args, int first, OwnVectors<S>& x) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int64_t row = first + lane / 4 + 8 * i;
    const bool has = row < args.own_rows;
    const S* const at = static_cast<const S*>(args.own.numbers) + (has ? row * args.own.row_numbers : 0);
#pragma unroll
    for (int m = 0; m < std::extent_v<LaneVectors<S, kMostShortWidth>>; ++m) {
      const int column = (m * 4 + lane % 4) * kOfVector<S>;
      const bool inside = has && column < args.own_width;
      x[i][m] = load_shared_words(inside ? reinterpret_cast<const Words<4>*>(at + column) : zeros);
    }
  }
}

// The root matrix for 16-bit rows in shared memory: a vector for every lane for 16 depths and 16 columns. As in
// WeightParts, depths and columns are those of the elements that a lane has of a row.
template <class S>
struct OwnMatrix {
  static constexpr int kSteps = kMostShortWidth / 16;
  uint4 parts[kSteps * kSteps * 32];

  template <bool kTransposed>
  __device__ __forceinline__ void put(const RowSumsArgs& args) {
    const auto* const numbers = static_cast<const uint16_t*>(args.root.numbers);
    for (int i = threadIdx.x; i < kSteps * kSteps * 32; i += ShortRows::kThreads) {
      const int lane = i % 32, pair = i / 32 % kSteps, step = i / 32 / kSteps;
      uint32_t words[4];
#pragma unroll
      for (int h = 0; h < 4; ++h) {
        const int tile = 2 * pair + h / 2, depth = step / 2 * 32 + lane % 4 * 8 + step % 2 * 4 + h % 2 * 2;
        const int column = tile / 4 * 32 + lane / 8 * 8 + tile % 4 * 2 + lane / 4 % 2;
        words[h] = 0;
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          if (depth + k >= args.own_width || column >= args.width) continue;
          const int64_t row = args.root.row_numbers;
          const int64_t at = kTransposed ? column * row + depth + k : (depth + k) * row + column;
          words[h] |= static_cast<uint32_t>(__ldg(numbers + at)) << 16 * k;
        }
      }
      parts[i] = make_uint4(words[0], words[1], words[2], words[3]);
    }
  }

  __device__ __forceinline__ void multiply(const OwnVectors<S>& rows, WarpRows<kMostShortWidth>& product) const {
    float sum[kMostShortWidth / 8][4] = {};
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const int m = step / 2, w = step % 2 * 2;
      const uint32_t left[4] = {rows[0][m].w[w], rows[1][m].w[w], rows[0][m].w[w + 1], rows[1][m].w[w + 1]};
#pragma unroll
      for (int pair = 0; pair < kSteps; ++pair) {
        const uint4 right = parts[(step * kSteps + pair) * 32 + threadIdx.x % 32];
        projection::half::multiply_add<S>(sum[2 * pair], left, right.x, right.y);
        projection::half::multiply_add<S>(sum[2 * pair + 1], left, right.z, right.w);
      }
    }
#pragma unroll
    for (int k = 0; k < kMostShortWidth / 2; ++k) product[k / 2 % 2][k / 4 * 2 + k % 2] = sum[k / 4][k % 4];
  }

  static __device__ __forceinline__ void make_finite(const RowSumsArgs&, bool, int, WarpRows<kMostShortWidth>&) {}
};

// Recomputes products that are not finite: split() turns an infinity into NaN.
static __device__ __noinline__ void make_own_again(const RowSumsArgs& args, const TypeMatrix& root, int first,
                                                   WarpRows<kMostShortWidth>& product) {
  const int lane = threadIdx.x % 32;
  for (int i = 0; i < 2; ++i) {
    const int64_t row = first + lane / 4 + 8 * i;
    if (row >= args.own_rows) continue;
    const float* const own = static_cast<const float*>(args.own.numbers) + row * args.own.row_numbers;
    for (int j = 0; j < kMostShortWidth / 4; ++j) {
      const int column = j / 4 * 16 + lane % 4 * 4 + j % 4;
      if (isfinite(product[i][j]) || column >= root.columns) continue;
      product[i][j] = 0;
      for (int k = 0; k < root.depth; ++k) product[i][j] = fmaf(own[k], root.at(k, column), product[i][j]);
    }
  }
}

template <>
struct OwnMatrix<float> {
  uint4 parts[WeightParts<kMostShortWidth>::kVectors];

  template <bool kTransposed>
  __device__ __forceinline__ void put(const RowSumsArgs& args) {
    put_parts<kMostShortWidth, kTransposed>(parts, static_cast<const float*>(args.root.numbers), args.root.row_numbers,
                                            args.own_width, args.width);
  }

  __device__ __forceinline__ void multiply(const OwnVectors<float>& rows, WarpRows<kMostShortWidth>& product) const {
    WarpRows<kMostShortWidth> own;
    memcpy(own, rows, sizeof(own));
    multiply_rows<kMostShortWidth>(own, parts, product);
  }

  static __device__ __forceinline__ void make_finite(const RowSumsArgs& args, bool transposed, int first,
                                                     WarpRows<kMostShortWidth>& product) {
    if (all_finite(product)) return;
    const auto* const numbers = static_cast<const float*>(args.root.numbers);
    WarpRows<kMostShortWidth> again;  // a copy in local memory, so that `product` stays in registers
    memcpy(again, product, sizeof(again));
    make_own_again(args, {numbers, args.root.row_numbers, transposed, args.own_width, args.width}, first, again);
    memcpy(product, again, sizeof(again));
  }
};

template <class S, bool kTransposed, bool kFull>
__global__ void __launch_bounds__(ShortRows::kThreads, ShortRows::kBlocks)
    short_rows_kernel(const __grid_constant__ RowSumsArgs args) {
  constexpr int kPer = kOfVector<S>;
  __shared__ OwnMatrix<S> root;
  __shared__ alignas(16) float bias[kMostShortWidth];  // aligned for vector loads
  const Neighbors& of = args.neighbors;
  const int width = args.width, rows = static_cast<int>(args.num_rows), lane = threadIdx.x % 32;
  const int step = static_cast<int>(gridDim.x) * ShortRows::kWarps * kWarpSegments;
  int first = (static_cast<int>(blockIdx.x) * ShortRows::kWarps + static_cast<int>(threadIdx.x) / 32) * kWarpSegments;
  Edges edges = first_edges<Weights::none>(of, load_ends(args.ptr, first, rows));
  Ends ends = load_ends(args.ptr, first + step, rows);
  if (args.own.numbers) root.template put<kTransposed>(args);
  if (threadIdx.x < kMostShortWidth) {
    const bool has = args.bias && static_cast<int>(threadIdx.x) < width;
    bias[threadIdx.x] = has ? to_arithmetic(static_cast<const S*>(args.bias)[threadIdx.x]) : 0;
  }
  __syncthreads();
#pragma unroll 1
  for (; first < rows; first += step) {
    const Edges next = first_edges<Weights::none>(of, ends);
    ends = load_ends(args.ptr, first + 2 * step, rows);
    WarpRows<kMostShortWidth> sum, product = {};
    if (args.own.numbers) {
      OwnVectors<S> own;
      load_own<S>(args, first, own);
      root.multiply(own, product);
      root.make_finite(args, kTransposed, first, product);
    }
    sum_segments<kMostShortWidth, Weights::none, kFull, S, ShortRows::kFew>(of, edges, sum);
#pragma unroll
    for (int m = 0; m < std::extent_v<LaneVectors<S, kMostShortWidth>>; ++m) {
      const int column = (m * 4 + lane % 4) * kPer;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int64_t row = first + lane / 4 + 8 * i;
        if (row >= rows || column >= width) continue;
        float numbers[kPer];
#pragma unroll
        for (int k = 0; k < kPer; ++k) {
          numbers[k] = sum[i][kPer * m + k] + product[i][kPer * m + k] + bias[column + k];
        }
        if (args.wide) {
          auto* const to = reinterpret_cast<float4*>(static_cast<float*>(args.out) + row * width + column);
#pragma unroll
          for (int k = 0; k < kPer; k += 4) {
            to[k / 4] = make_float4(numbers[k], numbers[k + 1], numbers[k + 2], numbers[k + 3]);
          }
        } else {
          *reinterpret_cast<Words<4>*>(static_cast<S*>(args.out) + row * width + column) = pack_words<S, 4>(numbers);
        }
      }
    }
    edges = next;
    await_later<Weights::none>(edges, sum[0][0]);
  }
}

}  // namespace edgeless::cuda::relational
