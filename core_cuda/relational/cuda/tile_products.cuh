// Products of tiles in shared memory, with the arithmetic of linear maps (projection/cuda).
#pragma once

#include "../../common/words.cuh"
#include "../../projection/cuda/float_tiles.cuh"
#include "../../projection/cuda/half_tiles.cuh"
#include "tile_sums.cuh"

namespace edgeless::cuda::relational {

using projection::load_fragment;

template <class S>
constexpr int kMmaDepth = 32 / static_cast<int>(sizeof(S));

// A warp's accumulators for a product of two tiles: kDown mma of 16 rows, kStep rows apart, by kSides of eight columns.
template <int kDown, int kSides>
struct WarpSum {
  float of[kDown][kSides][4] = {};
};

// sum += rows [down, ...) of a times columns [side, ...) of b, over `depth`, a multiple of kMmaDepth.
template <class S, bool kTransposedA, bool kTransposedB, int kStride, int kStep, int kDown, int kSides>
__device__ __forceinline__ void add_product(const TileNumber<S>* a, const TileNumber<S>* b, int down, int side,
                                            int depth, WarpSum<kDown, kSides>& sum) {
  if constexpr (std::is_same_v<S, float>) {
    constexpr int kOnCores = 32;  // depth that is summed on the tensor cores, which round towards zero
    for (int chunk = 0; chunk < depth; chunk += kOnCores) {
      WarpSum<kDown, kSides> part;
#pragma unroll 1
      for (int inner = chunk; inner < min(chunk + kOnCores, depth); inner += kMmaDepth<S>) {
        uint32_t rows[2][kDown][4];  // TF32 parts: nearest, remainder
#pragma unroll
        for (int i = 0; i < kDown; ++i) {
          uint32_t x[4];
          load_fragment<kTransposedA, kStride>(a, down + i * kStep, inner, false, x);
#pragma unroll
          for (int h = 0; h < 4; ++h) split(__uint_as_float(x[h]), rows[0][i][h], rows[1][i][h]);
        }
#pragma unroll
        for (int j = 0; j < kSides; j += 2) {
          uint32_t x[4], columns[2][2][2];
          load_fragment<kTransposedB, kStride>(b, side + j * 8, inner, true, x);
#pragma unroll
          for (int h = 0; h < 4; ++h) {
            split(__uint_as_float(x[h]), columns[0][h / 2][h % 2], columns[1][h / 2][h % 2]);
          }
          // The small products come first. Consecutive mma are independent.
#pragma unroll
          for (int product = 0; product < 3; ++product) {
#pragma unroll
            for (int i = 0; i < kDown; ++i) {
#pragma unroll
              for (int h = 0; h < 2; ++h) {
                cuda::multiply_add(part.of[i][j + h], rows[product == 0][i], columns[product == 1][h], false);
              }
            }
          }
        }
      }
#pragma unroll
      for (int i = 0; i < kDown; ++i) {
#pragma unroll
        for (int j = 0; j < kSides; ++j) {
#pragma unroll
          for (int h = 0; h < 4; ++h) sum.of[i][j][h] += part.of[i][j][h];
        }
      }
    }
  } else {
#pragma unroll 2
    for (int inner = 0; inner < depth; inner += kMmaDepth<S>) {
      uint32_t rows[kDown][4];
#pragma unroll
      for (int i = 0; i < kDown; ++i) load_fragment<kTransposedA, kStride>(a, down + i * kStep, inner, false, rows[i]);
#pragma unroll
      for (int j = 0; j < kSides; j += 2) {
        uint32_t columns[4];
        load_fragment<kTransposedB, kStride>(b, side + j * 8, inner, true, columns);
#pragma unroll
        for (int i = 0; i < kDown; ++i) {
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            projection::half::multiply_add<S>(sum.of[i][j + h], rows[i], columns[2 * h], columns[2 * h + 1]);
          }
        }
      }
    }
  }
}

// Stores a matrix [depth, columns] of floats in fragment order (kFragmentVectors); elements outside are zero.
// kTransposed: it is stored as [columns, depth]. To be called by the whole block.
template <int kWidth, bool kTransposed, bool kTwice, int kThreads>
__device__ __forceinline__ void put_fragments(uint4* to, const float* from, int64_t row_numbers, int depth,
                                              int columns) {
#pragma unroll 4
  for (int i = threadIdx.x; i < kFragmentVectors<kWidth>; i += kThreads) {
    const int lane = i % 32, pair = i / 32 % (kWidth / 16), step = i / 32 / (kWidth / 16);
    uint32_t nearest[4], rest[4];
#pragma unroll
    for (int h = 0; h < 4; ++h) {
      const int row = step * 8 + h % 2 * 4 + lane % 4, column = pair * 16 + h / 2 * 8 + lane / 4;
      float number = 0;
      if (row < depth && column < columns) {
        number = __ldg(kTransposed ? from + column * row_numbers + row : from + row * row_numbers + column);
      }
      nearest[h] = __float_as_uint(number);
      if constexpr (kTwice) split(number, nearest[h], rest[h]);
    }
    to[i] = make_uint4(nearest[0], nearest[1], nearest[2], nearest[3]);
    if constexpr (kTwice) to[kFragmentVectors<kWidth> + i] = make_uint4(rest[0], rest[1], rest[2], rest[3]);
  }
}

// sum = rows [down, down + 16) of a times columns [side, ...) of a matrix in fragment order, over `depth`, a multiple
// of 8. Tensor cores round towards zero, so sums of 32 products are moved out.
template <int kWidth, bool kTwice, int kStride, int kSides>
__device__ __forceinline__ void multiply_fragments(const float* a, const uint4* b, int down, int side, int depth,
                                                   WarpSum<1, kSides>& sum) {
  constexpr int kOnCores = 32, kTogether = 4;  // depth that tensor cores sum; independent column fragments
  const uint4* columns_at = b + side / 16 * 32 + threadIdx.x % 32;
#pragma unroll
  for (int chunk = 0; chunk < kWidth; chunk += kOnCores) {
    if (chunk >= depth) break;
    float part[kSides / kTogether][1][kTogether][4];
#pragma unroll
    for (int step = 0; step < kOnCores / 8; ++step) {
      const int inner = chunk + step * 8;
      if (inner >= depth) break;
      uint32_t x[4], rows[2][1][4];
      load_fragment<false, kStride>(a, down, inner, false, x);
#pragma unroll
      for (int h = 0; h < 4; ++h) split(__uint_as_float(x[h]), rows[0][0][h], rows[1][0][h]);
      const uint4* at = columns_at + inner / 8 * (kWidth / 16) * 32;
#pragma unroll
      for (int j = 0; j < kSides; j += kTogether) {
        uint32_t columns[2][kTogether][2];
#pragma unroll
        for (int h = 0; h < kTogether; h += 2) {
          const uint4 two = at[(j + h) / 2 * 32];
          columns[0][h][0] = two.x, columns[0][h][1] = two.y;
          columns[0][h + 1][0] = two.z, columns[0][h + 1][1] = two.w;
          if constexpr (kTwice) {
            const uint4 rest = at[kFragmentVectors<kWidth> + (j + h) / 2 * 32];
            columns[1][h][0] = rest.x, columns[1][h][1] = rest.y;
            columns[1][h + 1][0] = rest.z, columns[1][h + 1][1] = rest.w;
          } else {
#pragma unroll
            for (int k = 0; k < 4; ++k) {
              const float number = __uint_as_float(columns[0][h + k / 2][k % 2]);
              split(number, columns[0][h + k / 2][k % 2], columns[1][h + k / 2][k % 2]);
            }
          }
        }
        multiply_parts(part[j / kTogether], rows, columns, step == 0);
      }
    }
#pragma unroll
    for (int i = 0; i < kSides * 4; ++i) {
      const float more = part[i / 4 / kTogether][0][i / 4 % kTogether][i % 4];
      sum.of[0][i / 4][i % 4] = chunk == 0 ? more : sum.of[0][i / 4][i % 4] + more;
    }
  }
}

// An operand of a product: elements from one row of a, or one column of b, to the next, and from one depth to the next.
template <class T>
struct Lines {
  const T* numbers;
  int line, depth;
};

// Sixteen rows of 8 kSides sums of a warp, converted to the left operand of a 16-bit product.
template <int kSides>
struct SummedRows {
  uint32_t of[kSides / 2][4];
};

template <class S, int kSides>
__device__ __forceinline__ SummedRows<kSides> as_rows(const WarpSum<1, kSides>& sum) {
  SummedRows<kSides> rows;
#pragma unroll
  for (int i = 0; i < kSides * 2; ++i) {
    const float pair[2] = {sum.of[0][i / 2][i % 2 * 2], sum.of[0][i / 2][i % 2 * 2 + 1]};
    rows.of[i / 4][i % 4] = pack_words<S, 1>(pair).w[0];
  }
  return rows;
}

// sum += the rows of a times columns [side, ...) of b, over `depth`, a multiple of kMmaDepth.
template <class S, bool kTransposedB, int kStride, int kDepths, int kSides>
__device__ __forceinline__ void add_product(const SummedRows<kDepths>& a, const uint16_t* b, int side, int depth,
                                            WarpSum<1, kSides>& sum) {
#pragma unroll
  for (int i = 0; i < kDepths / 2; ++i) {
    if (i * kMmaDepth<S> >= depth) break;
#pragma unroll
    for (int j = 0; j < kSides; j += 2) {
      uint32_t columns[4];
      load_fragment<kTransposedB, kStride>(b, side + j * 8, i * kMmaDepth<S>, true, columns);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        projection::half::multiply_add<S>(sum.of[0][j + h], a.of[i], columns[2 * h], columns[2 * h + 1]);
      }
    }
  }
}

// Recomputes elements of a b, over `depth`, that are not finite, below `rows` and `columns`: split() turns an infinity
// into NaN.
template <class S, int kSides>
__device__ __forceinline__ void make_again(float (&sum)[kSides][4], int down, int side, int rows, int columns,
                                           const Lines<TileNumber<S>>& a, const Lines<TileNumber<S>>& b, int depth) {
  if constexpr (std::is_same_v<S, float>) {
    if (all_finite(sum)) return;
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kSides * 4; ++i) {
      const int row = down + i % 4 / 2 * 8 + lane / 4, column = side + i / 4 * 8 + lane % 4 * 2 + i % 2;
      if (isfinite(sum[i / 4][i % 4]) || row >= rows || column >= columns) continue;
      float made = 0;
#pragma unroll 1
      for (int k = 0; k < depth; ++k) {
        made = fmaf(a.numbers[row * a.line + k * a.depth], b.numbers[column * b.line + k * b.depth], made);
      }
      sum[i / 4][i % 4] = made;
    }
  }
}

// Transposes the words of four adjacent lanes: lane i gets word i of each.
__device__ __forceinline__ void exchange_fours(uint32_t* words) {
#pragma unroll
  for (int bit = 1; bit < 4; bit *= 2) {
    const bool upper = threadIdx.x & bit;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & bit) continue;
      const uint32_t got = __shfl_xor_sync(kAllLanes, upper ? words[i] : words[i ^ bit], bit);
      (upper ? words[i] : words[i ^ bit]) = got;
    }
  }
}

// Stores a warp's sums below `rows` and `columns` as rows of `to`, which points to the first row of the tile. Rows must
// be whole vectors. To be called by the whole warp. kOnce: the rows are read once, so they should not evict rows that
// are read more often.
template <bool kOnce, class S, int kSides>
__device__ __forceinline__ void store_sums(S* to, int64_t row_numbers, int rows, int columns, int down, int side,
                                           const float (&sum)[kSides][4]) {
  const int lane = threadIdx.x % 32, group = lane / 4, in_group = lane % 4;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = down + group + 8 * h;
    S* at = to + row * row_numbers;
    if constexpr (std::is_same_v<S, float>) {
      if (row >= rows) continue;
      const int first = side + 2 * in_group, left = columns - first;
      float2* const pairs = reinterpret_cast<float2*>(at + first);
#pragma unroll
      for (int j = 0; j < kSides; ++j) {
        if (8 * j >= left) continue;
        const float2 pair = make_float2(sum[j][2 * h], sum[j][2 * h + 1]);
        kOnce ? __stcs(pairs + 4 * j, pair) : void(pairs[4 * j] = pair);
      }
    } else {
#pragma unroll
      for (int j = 0; j < kSides; j += 4) {
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float pair[2] = {sum[j + i][2 * h], sum[j + i][2 * h + 1]};
          words[i] = pack_words<S, 1>(pair).w[0];
        }
        exchange_fours(words);
        const int column = side + 8 * (j + in_group);
        if (row < rows && column < columns) {
          const uint4 vector = make_uint4(words[0], words[1], words[2], words[3]);
          uint4* const to_vector = reinterpret_cast<uint4*>(at + column);
          kOnce ? __stcs(to_vector, vector) : void(*to_vector = vector);
        }
      }
    }
  }
}

// Prefetches a matrix [rows, columns] into the first rows of a tile of kRows by kWidth; elements outside are zero. To
// be called by the whole block.
template <int kRows, int kWidth, int kStride, int kThreads = kFusedThreads, class T>
__device__ __forceinline__ void prefetch_matrix(T* tile, const void* from, int64_t row_numbers, int rows, int columns) {
  constexpr int kVector = 16 / sizeof(T), kInLine = kWidth / kVector;
  const T* numbers = static_cast<const T*>(from);
#pragma unroll 4
  for (int i = threadIdx.x; i < kRows * kInLine; i += kThreads) {
    const int row = i / kInLine, column = i % kInLine * kVector;
    const bool there = row < rows && column < columns;
    projection::copy_vector(tile + row * kStride + column, there ? numbers + row * row_numbers + column : numbers,
                            there);
  }
}

__host__ __device__ constexpr int round_up(int x, int to) { return (x + to - 1) / to * to; }

// The part of a tile of 64 rows by kWidth columns that a warp computes: 16 rows and kColumns columns.
template <int kWidth, int kColumns = kWidth / 2>
struct FusedPlace {
  static constexpr int kSides = kColumns / 8, kBeside = kWidth / kColumns;
  int down = threadIdx.x / (32 * kBeside) * 16, side = threadIdx.x / 32 % kBeside * kColumns;
};

}  // namespace edgeless::cuda::relational
