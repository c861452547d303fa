// The gradients of products of pieces that have few edges each, of rows of up to 64 floats: a warp sums the gradients g
// of sixteen pieces (short_sums.cuh) and multiplies the sums, g W^T. Then they go to shared memory, where the rows x of
// the pieces are by then, and four warps have a quarter each of x^T g over 64 pieces, which stays in registers for all
// pieces of the block. (piece_gradients.cu: where pieces have more edges, or are few.)
//
// x^T g by TF32: pieces differ in their exponents (scaled_halves.cuh). Of x and g a lane reads four columns side by
// side at once; which of a fragment's rows or columns those are is as well. So the results of a lane lie four side by
// side.
#include <atomic>

#include "../../projection/cuda/shared_memory.cuh"
#include "entries.cuh"
#include "short_sums.cuh"

namespace edgeless::cuda::relational {
namespace {

constexpr int kWidth = kMostShortWidth, kWarps = 4, kThreads = 32 * kWarps;
constexpr int kBlocks = 3;  // that a multiprocessor has registers for
constexpr int kStep = kWarps * kWarpPieces, kRowVectors = kWidth / 4, kHalf = kWidth / 2;

// What a block has in shared memory: of 64 pieces x and g, and the parts of the weight.
struct Memory {
  float4 x[kStep * kRowVectors], g[kStep * kRowVectors];
  uint4 parts[WeightParts<kWidth>::kVectors];
};

// Where a vector of a piece lies: eight lanes find eight vectors in all banks, be they two of each of four pieces that
// follow each other, or four of two.
__device__ __forceinline__ int place_of(int piece, int vector) {
  return piece * kRowVectors + (vector ^ (piece % 2 * 4 + piece / 2 % 2 * 2));
}

// A warp's quarter of x^T g. Of fragment [i][j] number 2 h + c is that of x's column 4 q + 2 i + h and g's column
// 8 t + 4 c + j, counted from the quarter's first, in lane 4 q + t.
using Quarter = float[2][4][4];

// Numbers of `sum` that are none because an infinity has been split, made again over pieces [begin, end) of the tile.
__device__ __noinline__ void make_again(const Memory& tile, int down, int side, int begin, int end, Quarter& sum) {
  const int q = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  for (int i = 0; i < 32; ++i) {
    float& number = sum[i / 16][i / 4 % 4][i % 4];
    if (isfinite(number)) continue;
    const int row = down + 4 * q + i / 16 * 2 + i / 2 % 2, column = side + 8 * t + i % 2 * 4 + i / 4 % 4;
    number = 0;
    for (int piece = begin; piece < end; ++piece) {
      const auto* const x = reinterpret_cast<const float*>(tile.x + place_of(piece, row / 4));
      const auto* const g = reinterpret_cast<const float*>(tile.g + place_of(piece, column / 4));
      number = fmaf(x[row % 4], g[column % 4], number);
    }
  }
}

// sum += the quarter over `count` pieces of the tile, behind which there are zeros up to a multiple of eight.
__device__ __forceinline__ void add_outer(const Memory& tile, int down, int side, int count, Quarter& sum) {
  constexpr int kOnCores = 32;  // pieces that the tensor cores add up, who round towards zero
  const int q = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll 1
  for (int chunk = 0; chunk < count; chunk += kOnCores) {
    Quarter part = {};
#pragma unroll 1
    for (int piece = chunk; piece < min(chunk + kOnCores, count); piece += 8) {
      uint32_t left[2][2][4], right[2][4][2];  // the nearest numbers, and what is left
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float4 x = tile.x[place_of(piece + t + 4 * i, down / 4 + q)];
        const float4 g = tile.g[place_of(piece + t + 4 * i, side / 4 + q)];
        const float of_x[4] = {x.x, x.y, x.z, x.w}, of_g[4] = {g.x, g.y, g.z, g.w};
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          split(of_x[k], left[0][k / 2][2 * i + k % 2], left[1][k / 2][2 * i + k % 2]);
          split(of_g[k], right[0][k][i], right[1][k][i]);
        }
      }
      // The small products first; those that follow each other do not wait for each other.
#pragma unroll
      for (int product = 0; product < 3; ++product) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            cuda::multiply_add(part[i][j], left[product == 0][i], right[product == 1][j], false);
          }
        }
      }
    }
    if (!all_finite(part[0]) || !all_finite(part[1])) {
      Quarter again;  // in memory: only here
      memcpy(again, part, sizeof(again));
      make_again(tile, down, side, chunk, min(chunk + kOnCores, count), again);
      memcpy(part, again, sizeof(again));
    }
#pragma unroll
    for (int i = 0; i < 32; ++i) sum[i / 16][i / 4 % 4][i % 4] += part[i / 16][i / 4 % 4][i % 4];
  }
}

__device__ __forceinline__ void store_quarter(float* to, int rows, int columns, int down, int side,
                                              const Quarter& sum) {
  const int q = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const int row = down + 4 * q + 2 * i + k / 2, column = side + 8 * t + k % 2 * 4;
      if (row >= rows || column >= columns) continue;
      *reinterpret_cast<float4*>(to + row * columns + column) =
          make_float4(sum[i][0][k], sum[i][1][k], sum[i][2][k], sum[i][3][k]);
    }
  }
}

// The warp's rows of x and of g in shared memory.
__device__ __forceinline__ void ask_for_own(Memory& tile, const Rows& x, int width, int row_of_lane) {
  const int lane = threadIdx.x % 32, first = threadIdx.x / 32 * kWarpPieces, vector = lane % kRowVectors;
#pragma unroll
  for (int i = 0; i < kWarpPieces; i += 2) {
    const int piece = i + lane / kRowVectors, row = __shfl_sync(kAllLanes, row_of_lane, piece);
    const bool there = row >= 0 && vector * 4 < width;
    const float* const from = static_cast<const float*>(x.numbers) + (there ? row * x.row_numbers + vector * 4 : 0);
    copy_shared(projection::shared_address(tile.x + place_of(first + piece, vector)), from, there);
  }
}
__device__ __forceinline__ void put_sums(Memory& tile, const WarpRows<kWidth>& sum) {
  const int lane = threadIdx.x % 32, first = threadIdx.x / 32 * kWarpPieces;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int m = 0; m < kWidth / 16; ++m) {
      const float* const four = sum[i] + 4 * m;
      tile.g[place_of(first + lane / 4 + 8 * i, m * 4 + lane % 4)] = make_float4(four[0], four[1], four[2], four[3]);
    }
  }
}

__global__ void __launch_bounds__(kPartThreads)
    prepare_kernel(const __grid_constant__ PieceGradientsArgs args, uint4* parts) {
  put_parts<kWidth, true>(parts + static_cast<int64_t>(blockIdx.x) * WeightParts<kWidth>::kVectors,
                          static_cast<const float*>(args.weight.numbers) + blockIdx.x * args.weight_type,
                          args.weight.row_numbers, args.out_width, args.in_width);
}

template <Weights kWeights, bool kFull>
__global__ void __launch_bounds__(kThreads, kBlocks)
    short_gradients_kernel(const __grid_constant__ PieceGradientsArgs args, const uint4* parts) {
  extern __shared__ float4 memory[];
  Memory& tile = *reinterpret_cast<Memory*>(memory);
  const Neighbors& of = args.neighbors;
  const PieceTiles& pieces = args.pieces;
  const Range range = range_of_block(pieces.by_type(), args.share);
  if (range.begin >= range.end) return;
  const int in = args.in_width, out = args.out_width;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int down = warp / 2 * kHalf, side = warp % 2 * kHalf;
  const int begin = pieces.tiles[range.begin], last = pieces.tiles[range.end];
  const auto row_of = [&](int first) {
    const int piece = first + lane % kWarpPieces;
    return piece < last ? __ldcs(pieces.rows + piece) : -1;
  };
  const auto edges_of = [&](const Ends& ends) {
    Edges found;
#pragma unroll
    for (int i = 0; i < 2; ++i) found.begin[i] = ends.begin[i], found.count[i] = ends.end[i] - ends.begin[i];
    load_edges<kWeights>(of, found, 0);
    return found;
  };
  const int first_of_warp = begin + warp * kWarpPieces;
  if (args.out) {
    for (int i = threadIdx.x; i < WeightParts<kWidth>::kVectors; i += kThreads) {
      copy_shared(projection::shared_address(tile.parts + i),
                  parts + static_cast<int64_t>(range.type) * WeightParts<kWidth>::kVectors + i);
    }
  }
  Ends ends = load_ends(pieces.ptr, first_of_warp, last);
  int row = row_of(first_of_warp);
  Edges edges = edges_of(ends);
  ends = load_ends(pieces.ptr, first_of_warp + kStep, last);
  Quarter outer = {};
#pragma unroll 1
  for (int at = begin; at < last; at += kStep) {
    const int first = at + warp * kWarpPieces;
    if (args.partial) ask_for_own(tile, args.x, in, row);
    row = row_of(first + kStep);
    Edges next = edges_of(ends);
    ends = load_ends(pieces.ptr, first + 2 * kStep, last);
    WarpRows<kWidth> sum;
    sum_pieces<kWidth, kWeights, kFull>(of, edges, sum);
    if (args.partial) put_sums(tile, sum);
    if (at == begin) {  // for the parts of the weight
      await_all();
      __syncthreads();
    }
    if (args.out && first < last) {
      WarpRows<kWidth> product;
      multiply_rows<kWidth>(sum, tile.parts, product);
      const auto* const weight = static_cast<const float*>(args.weight.numbers) + range.type * args.weight_type;
      make_finite<kWidth>(pieces, of, {weight, args.weight.row_numbers, true, out, in}, first, last, product);
      store_products<kWidth>(static_cast<float*>(args.out), in, first, last, product);
    }
    edges = next;
    await_later<kWeights>(edges, sum[0][0]);
    if (!args.partial) continue;
    await_all();
    __syncthreads();
    if (down < in && side < out) add_outer(tile, down, side, min(last - at, kStep), outer);
    __syncthreads();
  }
  if (!args.partial) return;
  store_quarter(args.partial + static_cast<int64_t>(blockIdx.x) * in * out, in, out, down, side, outer);
}

template <Weights kWeights, bool kFull>
cudaError_t launch(const PieceGradientsArgs& args, uint4* parts, cudaStream_t stream) {
  static std::atomic<uint64_t> done{0};
  const auto kernel = short_gradients_kernel<kWeights, kFull>;
  const cudaError_t error = projection::allow_shared_memory(kernel, sizeof(Memory), done);
  if (error != cudaSuccess) return error;
  if (args.out) prepare_kernel<<<args.pieces.types, kPartThreads, 0, stream>>>(args, parts);
  const auto blocks = static_cast<unsigned>(num_tiles(args.pieces.count, args.pieces.types, args.share));
  kernel<<<blocks, kThreads, sizeof(Memory), stream>>>(args, parts);
  return cudaGetLastError();
}

}  // namespace

int64_t short_gradients_scratch(const PieceGradientsArgs& args) {
  return args.pieces.types * int64_t{WeightParts<kWidth>::kVectors} * 16;
}

cudaError_t run_short_gradients(const PieceGradientsArgs& args, void* scratch, cudaStream_t stream) {
  auto* const parts = static_cast<uint4*>(scratch);
  return of_weights(args.neighbors, [&](auto weights) {
    return args.out_width == kWidth ? launch<weights(), true>(args, parts, stream)
                                    : launch<weights(), false>(args, parts, stream);
  });
}

}  // namespace edgeless::cuda::relational
