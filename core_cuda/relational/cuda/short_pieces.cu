// Products of pieces that have few edges each, of rows of up to 64 floats: a warp sums the edges of sixteen pieces
// (short_sums.cuh) and multiplies the sums. Warps of a block meet once a chunk of tiles. (piece_products.cu: where
// pieces have more edges, or are few.)
//
// As many blocks as are on the device at once take chunks of tiles of one type in turn: neither pieces nor edges say
// well how long a tile takes. Where a chunk's pieces begin is known two chunks before, its weight one chunk before;
// ends of pieces two sums before, ids one sum before.
#include <atomic>
#include <climits>

#include "../../common/search.h"
#include "../../projection/cuda/shared_memory.cuh"
#include "entries.cuh"
#include "short_sums.cuh"

namespace edgeless::cuda::relational {
namespace {

constexpr int kWarps = 4, kThreads = 32 * kWarps;
constexpr int kBlocks = 4;  // that a multiprocessor has registers for
constexpr int kStep = kWarps * kWarpPieces;

// Pieces [begin, end) of a type; type -1: there is no such chunk.
struct alignas(16) Chunk {
  int type, begin, end, unused;
};

// What the kernel finds in its scratch memory.
template <int kWidth>
struct Scratch {
  uint4* parts;   // [types, kVectors]
  Chunk* chunks;  // [num_chunks + 1]
  int* taken;     // chunks that blocks took beside those that they begin with

  Scratch(void* memory, int64_t types, int64_t num_chunks)
      : parts(static_cast<uint4*>(memory)),
        chunks(reinterpret_cast<Chunk*>(parts + types * WeightParts<kWidth>::kVectors)),
        taken(reinterpret_cast<int*>(chunks + num_chunks + 1)) {}
};

// Behind all pieces, where a chunk has none left: that it has no edges must not be taken for what is known of a piece
// of a later chunk.
constexpr int kNoPiece = INT_MAX / 2;

constexpr int kBegun = 3;  // chunks that a block begins with

template <int kWidth>
__global__ void __launch_bounds__(kPartThreads)
    prepare_kernel(const __grid_constant__ PieceProductsArgs args, const Scratch<kWidth> scratch, int num_chunks) {
  const int types = args.pieces.types;
  if (static_cast<int>(blockIdx.x) < types) {
    put_parts<kWidth, false>(scratch.parts + static_cast<int64_t>(blockIdx.x) * WeightParts<kWidth>::kVectors,
                             static_cast<const float*>(args.weight.numbers) + blockIdx.x * args.weight_type,
                             args.weight.row_numbers, args.in_width, args.out_width);
    return;
  }
  const int i = (blockIdx.x - types) * kPartThreads + threadIdx.x, share = args.share;
  if (i == 0) *scratch.taken = 0;
  if (i == num_chunks) scratch.chunks[i] = {-1, 0, 0, 0};
  if (i >= num_chunks) return;
  const int32_t *const ends = args.pieces.type_tiles, *const tiles = args.pieces.tiles;
  const auto behind = [=](int64_t t) { return ends[t] / share + t > i; };
  const int type = static_cast<int>(first_behind(1, types, behind)) - 1;  // as range_of_tile's
  const int first = ends[type], begin = first + (i - first / share - type) * share;
  const int end = min(begin + share, ends[type + 1]);
  scratch.chunks[i] = begin < end ? Chunk{type, tiles[begin], tiles[end], 0} : Chunk{type, 0, 0, 0};
}

template <int kWidth, Weights kWeights, bool kFull>
__global__ void __launch_bounds__(kThreads, kBlocks)
    short_products_kernel(const __grid_constant__ PieceProductsArgs args, const Scratch<kWidth> scratch,
                          int num_chunks) {
  using Parts = WeightParts<kWidth>;
  extern __shared__ uint4 memory[];  // parts of two weights
  __shared__ Chunk known[kBegun];    // this turn's chunk, and those of the two turns after it
  const Neighbors& of = args.neighbors;
  const int begin_of_warp = threadIdx.x / 32 * kWarpPieces;
  const bool leads = threadIdx.x == 0;
  const auto ask_for_parts = [&](int type, int slot) {
    const uint4* const from = scratch.parts + static_cast<int64_t>(type) * Parts::kVectors;
    const uint32_t to = projection::shared_address(memory + slot * Parts::kVectors);
    for (int i = threadIdx.x; i < Parts::kVectors; i += kThreads) copy_shared(to + i * 16, from + i);
  };
  const auto ask_for_chunk = [&](int turn, int i) {
    copy_shared(projection::shared_address(known + turn), scratch.chunks + min(i, num_chunks));
  };
  if (leads) ask_for_chunk(0, blockIdx.x), ask_for_chunk(1, blockIdx.x + gridDim.x);
  ask_for_parts(scratch.chunks[blockIdx.x].type, 0);
  int third = blockIdx.x + 2 * gridDim.x;  // the chunk of the turn after the next
  Edges edges;
  Ends ends;
  int edges_at = -1, ends_at = -1;  // the first pieces of those they are of
  for (int slot = 0, turn = 0;; turn = turn == 2 ? 0 : turn + 1) {
    await_all();
    __syncthreads();
    const Chunk& now = known[turn];
    const Chunk& then = known[turn == 2 ? 0 : turn + 1];
    if (now.type < 0) return;
    if (leads) {
      ask_for_chunk(turn == 0 ? 2 : turn - 1, third);
      third = kBegun * gridDim.x + atomicAdd(scratch.taken, 1);
    }
    const bool other = then.type != now.type && then.type >= 0;
    if (other) ask_for_parts(then.type, slot ^ 1);
    const uint4* const parts = memory + slot * Parts::kVectors;
    const int last = now.end;
    const auto edges_of = [&](int first, int last) {
      if (ends_at != first) ends = load_ends(args.pieces.ptr, first, last);
      Edges edges = first_edges<kWeights>(of, ends);
      if constexpr (kWeights == Weights::of_pieces) load_weights(of, first, last, edges);
      return edges;
    };
    int first = now.begin + begin_of_warp;
    if (first < last && edges_at != first) edges = edges_of(first, last);
#pragma unroll 1
    for (; first < last; first += kStep) {
      int at = first + kStep, until = last;
      const bool here = at < last;
      if (!here) at = then.begin + begin_of_warp, until = then.end;
      if (at >= until) at = kNoPiece;
      const Edges next = edges_of(at, until);
      edges_at = at;
      at += kStep;
      if (here && at >= last) at = then.begin + begin_of_warp, until = then.end;
      if (at >= until) at = kNoPiece;
      ends = load_ends(args.pieces.ptr, at, until);
      ends_at = at;
      WarpRows<kWidth> sum, product;
      sum_pieces<kWidth, kWeights, kFull>(of, edges, sum);
      multiply_rows<kWidth>(sum, parts, product);
      const auto* const weight = static_cast<const float*>(args.weight.numbers) + now.type * args.weight_type;
      make_finite<kWidth>(args.pieces, of, {weight, args.weight.row_numbers, false, args.in_width, args.out_width},
                          first, last, product);
      store_products<kWidth>(static_cast<float*>(args.out), args.out_width, first, last, product);
      edges = next;
      await_later<kWeights>(edges, product[0][0]);
    }
    if (other) slot ^= 1;
  }
}

template <int kWidth, Weights kWeights, bool kFull>
cudaError_t launch(const PieceProductsArgs& args, void* memory, int processors, cudaStream_t stream) {
  static std::atomic<uint64_t> done{0};
  constexpr int kBytes = 2 * WeightParts<kWidth>::kVectors * 16;
  static_assert(kBytes + sizeof(Chunk[kBegun]) <= ProductsLayout<float, 64>::kBytes,
                "the plan knows the memory of that kernel alone");
  const auto kernel = short_products_kernel<kWidth, kWeights, kFull>;
  const cudaError_t error = projection::allow_shared_memory(kernel, kBytes, done);
  if (error != cudaSuccess) return error;
  const auto num_chunks = static_cast<int>(num_tiles(args.pieces.count, args.pieces.types, args.share));
  const Scratch<kWidth> scratch(memory, args.pieces.types, num_chunks);
  prepare_kernel<kWidth>
      <<<args.pieces.types + num_chunks / kPartThreads + 1, kPartThreads, 0, stream>>>(args, scratch, num_chunks);
  kernel<<<std::min(kBlocks * processors, num_chunks), kThreads, kBytes, stream>>>(args, scratch, num_chunks);
  return cudaGetLastError();
}

}  // namespace

int64_t short_products_scratch(const PieceProductsArgs& args) {
  const int64_t chunks = num_tiles(args.pieces.count, args.pieces.types, args.share) + 2;  // one for `taken`
  return args.pieces.types * int64_t{WeightParts<kMostShortWidth>::kVectors} * 16 + chunks * 16;
}

cudaError_t run_short_products(const PieceProductsArgs& args, void* scratch, int processors, cudaStream_t stream) {
  const int in = args.in_width;
  const bool narrow = in <= 32 && args.out_width <= 32;
  return of_weights<Weights::of_pieces>(args.neighbors, [&](auto weights) {
    if (narrow) {
      return in == 32 ? launch<32, weights(), true>(args, scratch, processors, stream)
                      : launch<32, weights(), false>(args, scratch, processors, stream);
    }
    return in == 64 ? launch<64, weights(), true>(args, scratch, processors, stream)
                    : launch<64, weights(), false>(args, scratch, processors, stream);
  });
}

}  // namespace edgeless::cuda::relational
