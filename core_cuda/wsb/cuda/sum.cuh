// SpMM over blocks on tensor cores.
//
// SpMM is bound by reading rows of x. Here each row of x is read once for all rows of a window that gather it, and the
// mma that adds it costs less than the read. Four warps share a window and a feature tile of 64 elements: each
// processes every fourth block, and their sums are added in the order of the warps, so every run gives the same bits.
//
// Eight lanes copy 128 bytes of a row to shared memory, one cache line. ldmatrix then reads the B operand with columns
// 4q to 4q + 3 of the block in place of the mma's depth indices 2q, 2q + 1, 2q + 8 and 2q + 9, so that the bits of lane
// (g, q) = (lane / 4, lane % 4) are adjacent. A set bit becomes the number 2, whose representation has a single bit
// set.
#pragma once

#include "../../common/vec.cuh"
#include "../../projection/cuda/half_tiles.cuh"
#include "sum.h"

namespace edgeless::cuda::wsb {

constexpr float kOne = 0.5;  // undoes the factor 2 of a set bit

// A swizzle: neither eight lanes that write one row nor the eight rows of an ldmatrix have bank conflicts.
__device__ __forceinline__ int place_of(int row, int vector) {
  return row * kVectors + (vector ^ (row / 4 * 2 + row % 2));
}

// A warp's ring of shared memory stages, filled by cp.async with every kSplit-th block of its window.
template <int kSplit>
struct SumRing {
  const SumArgs& args;
  const char* x;  // base of the lane's vector of a row
  uint4* rows;    // [stage][place_of(row, vector)]
  uint4* bits;    // [stage][q]
  int next, end, lane;
  bool inside;
  int4 columns;  // the four columns of the next block that the lane copies

  __device__ __forceinline__ SumRing(const SumArgs& args, uint4* shared, int begin, int end, int first_vector)
      : args(args), next(begin), end(end), lane(threadIdx.x % 32) {
    const int warp = threadIdx.x / 32, vector = first_vector + lane % kVectors;
    rows = shared + warp * kSumStages * kStageRows;
    bits = shared + kSumWarps * kSumStages * kStageRows + warp * kSumStages * kStageBits;
    inside = vector < args.vectors;
    x = args.x + (inside ? vector * 16 : 0);
    find_columns();
  }

  __device__ __forceinline__ void find_columns() {
    if (next < end) {
      columns = __ldg(reinterpret_cast<const int4*>(args.blocks.columns) + int64_t{next} * 4 + lane / kVectors);
    }
  }

  __device__ __forceinline__ void load(int stage) {
    const int column[kRowsOfLane] = {columns.x, columns.y, columns.z, columns.w};
#pragma unroll
    for (int i = 0; i < kRowsOfLane; ++i) {
      uint4* to = rows + stage * kStageRows + place_of(lane / kVectors * kRowsOfLane + i, lane % kVectors);
      projection::copy_vector(to, x + column[i] * args.x_row, inside);
    }
    if (lane < kStageBits) {
      const uint4* from = reinterpret_cast<const uint4*>(args.blocks.bits) + int64_t{next} * kStageBits + lane;
      projection::copy_vector(bits + stage * kStageBits + lane, from, true);
    }
    next += kSplit;
    find_columns();
  }

  // B operands of the two mma for vectors 2 pair and 2 pair + 1.
  __device__ __forceinline__ void get(int stage, int pair, uint32_t (&to)[4]) const {
    const int depth = lane % 8, row = depth / 2 * 4 + depth % 2 + lane / 8 % 2 * 2;
    projection::load_matrices<true>(rows + stage * kStageRows + place_of(row, 2 * pair + lane / 16), to);
  }
};

// sum[m][v] accumulates vector v of the window's rows 16 m to 16 m + 15.
template <class S, class SumRing>
__device__ __forceinline__ void add_block(const SumRing& ring, int stage,
                                          float (&sum)[kTiles][kVectors][kNumbersOfMma]) {
  const int g = ring.lane / 4, q = ring.lane % 4;
  uint32_t a[kTiles][4];
#pragma unroll
  for (int m = 0; m < kTiles; m += 2) {
    const uint4 bits = ring.bits[stage * kStageBits + q * (kTiles / 2) + m / 2];
    const uint32_t words[4] = {bits.x >> g, bits.y >> g, bits.z >> g, bits.w >> g};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      a[m + i / 2][i % 2 * 2] = (words[i] & 0x00010001) * 0x4000;
      a[m + i / 2][i % 2 * 2 + 1] = (words[i] & 0x01000100) * 0x40;
    }
  }
#pragma unroll
  for (int pair = 0; pair < kVectors / 2; ++pair) {
    uint32_t b[4];
    ring.get(stage, pair, b);
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
      projection::half::multiply_add<S>(sum[m][2 * pair], a[m], b[0], b[1]);
      projection::half::multiply_add<S>(sum[m][2 * pair + 1], a[m], b[2], b[3]);
    }
  }
}

// Index in shared memory of a lane's i-th accumulator. Lanes that read different vectors of a row use different banks.
__device__ __forceinline__ int sum_place(int i, int lane) { return i * 32 + (lane ^ i / 4 % 4); }

// Recomputes one element from the CSR edges. This is necessary if the mma result is not finite: absent edges multiply x
// by zero, and zero times infinity or NaN is NaN.
template <class S>
__device__ float sum_of_edges(const SumArgs& args, int64_t row, int place) {
  float sum = 0;
  const auto at = [&](const void* array, int64_t i) {
    return args.wide_index ? static_cast<const int64_t*>(array)[i] : static_cast<const int32_t*>(array)[i];
  };
  for (int64_t i = at(args.graph.indptr, row); i < at(args.graph.indptr, row + 1); ++i) {
    sum += to_arithmetic(reinterpret_cast<const S*>(args.x + at(args.graph.indices, i) * args.x_row)[place]);
  }
  return sum;
}

template <class S, int kSplit>
__global__ void __launch_bounds__(kSumWarps * 32, 4) sum_kernel(const __grid_constant__ SumArgs args) {
  extern __shared__ uint4 shared[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, parts = num_parts(args, kSplit);
  const int place = args.by_window ? blockIdx.x / parts : blockIdx.x % args.blocks.windows;
  const int part = args.by_window ? blockIdx.x % parts : blockIdx.x / args.blocks.windows;
  const int window = args.blocks.order[place], first_vector = (part * (kSumWarps / kSplit) + warp / kSplit) * kVectors;
  const int begin = args.blocks.first[window] + warp % kSplit;
  const int end = first_vector < args.vectors ? args.blocks.first[window + 1] : begin;
  float sum[kTiles][kVectors][kNumbersOfMma] = {};
  {
    SumRing<kSplit> ring(args, shared, begin, end, first_vector);
    const int steps = begin < end ? (end - begin + kSplit - 1) / kSplit : 0;
    projection::walk_depth<kSumStages, projection::StagesOf::warp>(
        steps, [&](int stage) { ring.load(stage); }, [&](int stage) { add_block<S>(ring, stage, sum); });
  }
  __syncthreads();
  float* const shared_sums = reinterpret_cast<float*>(shared);
#pragma unroll
  for (int i = 0; i < kSums; ++i) {
    shared_sums[sum_place(warp * kSums + i, lane)] = sum[i / 32][i / 4 % 8][i % 4];
  }
  __syncthreads();
  // A warp writes eight rows at a time; each lane writes two vectors of one row.
  const float* const sums = shared_sums + warp / kSplit * kSplit * kSums * 32;
  for (int eight = warp % kSplit; eight < kHeight / 8; eight += kSplit) {
    const int64_t row = int64_t{window} * kHeight + eight * 8 + lane / 4;
    if (row >= args.graph.num_rows) continue;
    const float scale = args.row_scale ? __ldg(args.row_scale + row) : 1;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const int v = lane % 4 + 4 * n;
      if (first_vector + v >= args.vectors) continue;
      float numbers[8];
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        float total = 0;
        const int i = eight / 2 * 32 + v * 4 + eight % 2 * 2 + k % 2;
#pragma unroll
        for (int w = 0; w < kSplit; ++w) total += sums[sum_place(w * kSums + i, lane / 4 * 4 + k / 2)];
        total *= kOne;
        if (!isfinite(total)) total = sum_of_edges<S>(args, row, (first_vector + v) * 8 + k);
        numbers[k] = total * scale;
      }
      const int64_t at = row * args.vectors + first_vector + v;
      if (args.wide) {
        float4* out = static_cast<float4*>(args.out) + 2 * at;
        __stcs(out, make_float4(numbers[0], numbers[1], numbers[2], numbers[3]));
        __stcs(out + 1, make_float4(numbers[4], numbers[5], numbers[6], numbers[7]));
      } else {
        store_once(static_cast<char*>(args.out) + 16 * at, pack(numbers, S{}));
      }
    }
  }
}

}  // namespace edgeless::cuda::wsb
