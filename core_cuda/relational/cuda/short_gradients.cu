// The gradients of products of pieces, of rows of up to 64 floats: a warp sums the gradients g of sixteen pieces
// (short_sums.cuh) and multiplies the sums, g W^T. Then they go to shared memory, where the rows x of the pieces are by
// then, and four warps have a square each of x^T g over 64 pieces (squares.cuh), which stays in registers for all
// pieces of the block. (piece_gradients.cu: of other widths.)
#include <atomic>

#include "../../projection/cuda/shared_memory.cuh"
#include "entries.cuh"
#include "short_sums.cuh"
#include "squares.cuh"

namespace edgeless::cuda::relational {
namespace {

constexpr int kWidth = kMostShortWidth, kWarps = 4, kThreads = 32 * kWarps;
constexpr int kBlocks = 3;  // that a multiprocessor has registers for
constexpr int kStep = kWarps * kWarpPieces;
static_assert(kWidth == 2 * kSquare && kStep == kTilePieces);

// What a block has in shared memory: of 64 pieces x and g, and the parts of the weight.
struct Memory {
  float4 x[kStep * kSquareVectors], g[kStep * kSquareVectors];
  uint4 parts[WeightParts<kWidth>::kVectors];
};
static_assert(sizeof(Memory) <= GradientsLayout<float, kWidth>::kBytes,
              "the plan knows the memory of that kernel alone");

// The warp's rows of x and of g in shared memory.
__device__ __forceinline__ void ask_for_own(Memory& tile, const Rows& x, int width, int row_of_lane) {
  const int lane = threadIdx.x % 32, first = threadIdx.x / 32 * kWarpPieces, vector = lane % kSquareVectors;
#pragma unroll
  for (int i = 0; i < kWarpPieces; i += 2) {
    const int piece = i + lane / kSquareVectors, row = __shfl_sync(kAllLanes, row_of_lane, piece);
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
  const int down = warp / 2 * kSquare, side = warp % 2 * kSquare;
  const int begin = pieces.tiles[range.begin], last = pieces.tiles[range.end];
  const auto row_of = [&](int first) {
    const int piece = first + lane % kWarpPieces;
    return piece < last ? __ldcs(pieces.rows + piece) : -1;
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
  Edges edges = first_edges<kWeights>(of, ends);
  ends = load_ends(pieces.ptr, first_of_warp + kStep, last);
  Square outer = {};
#pragma unroll 1
  for (int at = begin; at < last; at += kStep) {
    const int first = at + warp * kWarpPieces;
    if (args.partial) ask_for_own(tile, args.x, in, row);
    row = row_of(first + kStep);
    Edges next = first_edges<kWeights>(of, ends);
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
    if (down < in && side < out)
      add_square(tile.x, tile.g, down, side, min(last - at, kStep), outer, [](const float4&) {});
    __syncthreads();
  }
  if (!args.partial) return;
  store_square(args.partial + static_cast<int64_t>(blockIdx.x) * in * out, in, out, down, side, outer);
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
  return of_weights<Weights::in_order>(args.neighbors, [&](auto weights) {
    return args.out_width == kWidth ? launch<weights(), true>(args, parts, stream)
                                    : launch<weights(), false>(args, parts, stream);
  });
}

}  // namespace edgeless::cuda::relational
