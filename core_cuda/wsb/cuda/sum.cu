// Sums over blocks on tensor cores.
//
// What a sum costs is reading rows of x. Here a row is read once for all rows of a window that have it, and the mma
// that adds it to them costs less than the reading. Four warps share a window and 64 columns of x: each takes every
// fourth block, and their sums are added in the order of the warps, so every run gives the same bits.
//
// Eight lanes bring 128 bytes of a row to shared memory, so that they ask for one line together. From there a lane
// (g, q) = (lane / 4, lane % 4) takes, of the four columns 4q to 4q + 3 of a block, the eight numbers from 8g on. An
// mma wants from it two pairs of numbers of its four rows at one place, so the k-th numbers of all lanes make the mma
// of the places 8g + k: numbers need not change lanes, and after all of them a lane has eight numbers in a row again.
#include <algorithm>
#include <atomic>

#include "../../projection/cuda/half_tiles.cuh"
#include "../../projection/cuda/shared_memory.cuh"
#include "blocks.h"

namespace edgeless::cuda::wsb {
namespace {

constexpr int kWarps = 4, kStages = 4;
constexpr int kVectors = 8;       // of 16 bytes that a warp reads of a row
constexpr int kRowsOfLane = 4;    // of x that a lane takes of a block
constexpr int kNumbersOfMma = 4;  // of the sum that a lane has

template <int kHeight>
constexpr int kSums = kHeight / 16 * 8 * kNumbersOfMma;  // of a lane
template <int kHeight>
constexpr int kRingVectors = kWarps * kStages * (kRowsOfLane * 32 + kHeight / 32 * kBlockColumns / 4);
template <int kHeight>
constexpr int kSharedBytes = 16 * std::max(kRingVectors<kHeight>, kWarps* kSums<kHeight> * 32 / 4);

template <class S>
constexpr uint32_t kOne = std::is_same_v<S, __half> ? 0x3c00 : 0x3f80;

// Where a vector of one of a block's rows of x is: eight lanes that write a row or read vectors g of rows 4q + i meet
// different banks.
__device__ __forceinline__ int place_of(int row, int vector) { return row * kVectors + (vector ^ row / 4 * 2); }

// The blocks of a window that a warp takes, on their way to shared memory.
template <int kHeight>
struct Ring {
  static constexpr int kWords = kHeight / 32, kStageRows = kBlockColumns * kVectors;
  const SumArgs& args;
  const char* x;  // of the lane's vector
  uint4* rows;    // [stage][place_of(row, vector)]
  uint4* bits;    // [stage][word][4]
  int next, end, lane;
  bool inside;
  int4 columns;  // of the block that is asked for next, four of which the lane brings

  __device__ __forceinline__ Ring(const SumArgs& args, uint4* shared, int begin, int end, int first_vector)
      : args(args), next(begin), end(end), lane(threadIdx.x % 32) {
    const int warp = threadIdx.x / 32, vector = first_vector + lane % kVectors;
    rows = shared + warp * kStages * kStageRows;
    bits = shared + kWarps * kStages * kStageRows + warp * kStages * kWords * 4;
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
    if (lane < kWords * 4) {
      const uint4* from = reinterpret_cast<const uint4*>(args.blocks.bits) + int64_t{next} * kWords * 4 + lane;
      projection::copy_vector(bits + stage * kWords * 4 + lane, from, true);
    }
    next += kWarps;
    find_columns();
  }

  __device__ __forceinline__ uint4 row(int stage, int i) const {
    return rows[stage * kStageRows + place_of(lane % 4 * kRowsOfLane + i, lane / 4)];
  }
};

// sum[m][k]: of the window's rows 16 m to 16 m + 15, at the places 8g + k.
template <class S, int kHeight>
__device__ __forceinline__ void add_block(const Ring<kHeight>& ring, int stage,
                                          float (&sum)[kHeight / 16][8][kNumbersOfMma]) {
  const int g = ring.lane / 4, q = ring.lane % 4;
  uint32_t a[kHeight / 16][4];
#pragma unroll
  for (int m = 0; m < kHeight / 16; ++m) {
    const uint4 bits = ring.bits[(stage * Ring<kHeight>::kWords + m / 2) * 4 + q];
    // Sixteen rows' bits of two columns each.
    const uint32_t half = m % 2 ? 0x7632 : 0x5410;
    const uint32_t first = __byte_perm(bits.x, bits.y, half), second = __byte_perm(bits.z, bits.w, half);
    a[m][0] = (first >> g & 0x10001) * kOne<S>, a[m][1] = (first >> (g + 8) & 0x10001) * kOne<S>;
    a[m][2] = (second >> g & 0x10001) * kOne<S>, a[m][3] = (second >> (g + 8) & 0x10001) * kOne<S>;
  }
  uint32_t words[kRowsOfLane][4];
#pragma unroll
  for (int i = 0; i < kRowsOfLane; ++i) {
    const uint4 row = ring.row(stage, i);
    words[i][0] = row.x, words[i][1] = row.y, words[i][2] = row.z, words[i][3] = row.w;
  }
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    const uint32_t half = k % 2 ? 0x7632 : 0x5410;
    const uint32_t b0 = __byte_perm(words[0][k / 2], words[1][k / 2], half);
    const uint32_t b1 = __byte_perm(words[2][k / 2], words[3][k / 2], half);
#pragma unroll
    for (int m = 0; m < kHeight / 16; ++m) projection::half::multiply_add<S>(sum[m][k], a[m], b0, b1);
  }
}

// Bits multiply what a row does not have by zero, and zero times what is not finite is not zero.
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

template <class S, int kHeight>
__global__ void __launch_bounds__(kWarps * 32, kHeight == 32 ? 4 : 2) sum_kernel(const __grid_constant__ SumArgs args) {
  extern __shared__ uint4 shared[];
  const int window = args.blocks.order[blockIdx.x], warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int begin = args.blocks.first[window] + warp, end = args.blocks.first[window + 1];
  const int first_vector = blockIdx.y * kVectors, g = lane / 4, q = lane % 4;
  float sum[kHeight / 16][8][kNumbersOfMma] = {};
  {
    Ring<kHeight> ring(args, shared, begin, end, first_vector);
    const int steps = begin < end ? (end - begin + kWarps - 1) / kWarps : 0;
#pragma unroll
    for (int stage = 0; stage < kStages - 1; ++stage) {
      if (stage < steps) ring.load(stage);
      projection::commit_stage();
    }
    for (int step = 0; step < steps; ++step) {
#if __CUDA_ARCH__ >= 800
      asm volatile("cp.async.wait_group %0;" ::"n"(kStages - 2));
#endif
      __syncwarp();
      if (step + kStages - 1 < steps) ring.load((step + kStages - 1) % kStages);
      projection::commit_stage();
      add_block<S, kHeight>(ring, step % kStages, sum);
    }
  }
  __syncthreads();
  float* const sums = reinterpret_cast<float*>(shared) + lane;
#pragma unroll
  for (int i = 0; i < kSums<kHeight>; ++i) {
    sums[(warp * kSums<kHeight> + i) * 32] = sum[i / 32][i / 4 % 8][i % 4];
  }
  __syncthreads();
  // Warp by warp: eight rows of each sixteen, of which a lane has one, at places 16 q to 16 q + 15.
  for (int part = warp; part < kHeight / 8; part += kWarps) {
    const int64_t row = int64_t{window} * kHeight + part * 8 + g;
    if (row >= args.graph.num_rows) continue;
    const float scale = args.row_scale ? __ldg(args.row_scale + row) : 1;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const int vector = first_vector + 2 * q + n;
      if (vector >= args.vectors) continue;
      float numbers[8];
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        float total = 0;
        const int i = part / 2 * 32 + k * 4 + part % 2 * 2 + n;
#pragma unroll
        for (int w = 0; w < kWarps; ++w) total += sums[(w * kSums<kHeight> + i) * 32];
        if (!isfinite(total)) total = sum_of_edges<S>(args, row, vector * 8 + k);
        numbers[k] = total * scale;
      }
      const int64_t at = row * args.vectors + vector;
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

template <class S, int kHeight>
cudaError_t launch(const SumArgs& args, cudaStream_t stream) {
  static std::atomic<uint64_t> done{0};
  const cudaError_t error = projection::allow_shared_memory(sum_kernel<S, kHeight>, kSharedBytes<kHeight>, done);
  if (error != cudaSuccess) return error;
  // 64 columns of x after the other, so that as much of it as can be stays in L2.
  const dim3 grid(args.blocks.windows, (args.vectors + kVectors - 1) / kVectors);
  sum_kernel<S, kHeight><<<grid, kWarps * 32, kSharedBytes<kHeight>, stream>>>(args);
  return cudaGetLastError();
}

template <class S>
cudaError_t of_height(const SumArgs& args, cudaStream_t stream) {
  switch (args.blocks.height) {
    case 32: return launch<S, 32>(args, stream);
    case 64: return launch<S, 64>(args, stream);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace

cudaError_t run_sum(Storage storage, const SumArgs& args, cudaStream_t stream) {
  switch (storage) {
    case Storage::bf16: return of_height<__nv_bfloat16>(args, stream);
    case Storage::f16: return of_height<__half>(args, stream);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace edgeless::cuda::wsb
