// Products of pieces that have few edges each, of rows of up to 64 floats: a warp sums the edges of sixteen pieces in
// the registers in which the tensor cores take them, and multiplies the sums. No row goes through shared memory, and
// warps of a block meet once a chunk of tiles. (piece_products.cu: where pieces have more edges, or are few.)
//
// Four lanes have two pieces. They ask for the rows of the first two edges of both at once, then for one after the
// other, until the longest piece has its sum: most have one or two. A piece of more than kFewEdges is summed by the
// whole warp, a batch of rows at a time.
//
// As many blocks as are on the device at once take chunks of tiles of one type in turn: neither pieces nor edges say
// well how long a tile takes. Where a chunk's pieces begin is known two chunks before, its weight one chunk before;
// ends of pieces two sums before, ids one sum before.
#include <atomic>
#include <climits>

#include "../../common/search.h"
#include "../../projection/cuda/shared_memory.cuh"
#include "entries.cuh"
#include "piece_tiles.h"
#include "scaled_halves.cuh"
#include "tile_sums.cuh"

namespace edgeless::cuda::relational {
namespace {

constexpr int kWarps = 4, kThreads = 32 * kWarps;
constexpr int kBlocks = 4;    // that a multiprocessor has registers for
constexpr int kFewEdges = 8;  // that four lanes sum
constexpr int kWarpPieces = 16, kStep = kWarps * kWarpPieces;
constexpr int kBatch = 8;  // vectors that a lane has on their way from the rows of a long piece

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
    put_parts<kWidth>(scratch.parts + static_cast<int64_t>(blockIdx.x) * WeightParts<kWidth>::kVectors,
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

// What edges are weighed by.
enum class Weights { none, in_order, by_id };

// weight_of() where it is known what it asks for.
template <Weights kWeights>
__device__ __forceinline__ float weight_at(const Neighbors& of, int edge) {
  if constexpr (kWeights == Weights::none) return 1;
  if constexpr (kWeights == Weights::by_id) return __ldg(of.weights + __ldcs(of.ids + edge));
  return __ldcs(of.weights + edge);
}

// The lane's two pieces: their edges, and of four of these, or of as many as there are, one in each of the four lanes.
struct Edges {
  int begin[2], count[2];
  int row[2];  // -1: none
  float weight[2];
};

// Those from number `from` on.
template <Weights kWeights>
__device__ __forceinline__ void load_edges(const Neighbors& of, Edges& edges, int from) {
  const int edge = from + static_cast<int>(threadIdx.x % 4);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    edges.row[i] = -1, edges.weight[i] = 1;
    if (edge >= edges.count[i]) continue;
    edges.row[i] = __ldcs(of.indices + edges.begin[i] + edge);
    edges.weight[i] = weight_at<kWeights>(of, edges.begin[i] + edge);
  }
}

struct Ends {
  int begin[2], end[2];
};

// Of the lane's pieces of the sixteen from `first` on; those from `last` on have no edges.
__device__ __forceinline__ Ends load_ends(const int32_t* ptr, int first, int last) {
  Ends ends;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int piece = first + static_cast<int>(threadIdx.x % 32 / 4) + 8 * i;
    ends.begin[i] = ptr[min(piece, last)], ends.end[i] = ptr[min(piece + 1, last)];
  }
  return ends;
}

__device__ float4 zeros[kMostShortWidth / 4];

__device__ __forceinline__ const float4* row_at(const Neighbors& of, int row) {
  return reinterpret_cast<const float4*>(of.rows + static_cast<uint64_t>(static_cast<uint32_t>(row)) * of.row_bytes);
}

// A row's vectors that the lane has; kFull: of kWidth numbers.
template <int kWidth, bool kFull>
__device__ __forceinline__ void load_row(const Neighbors& of, int row, float4 (&x)[kWidth / 16]) {
  const int in_group = threadIdx.x % 4;
  const float4* const none = zeros + in_group;
  const float4* const at = row < 0 ? none : row_at(of, row) + in_group;
#pragma unroll
  for (int m = 0; m < kWidth / 16; ++m) x[m] = __ldg(kFull || m * 4 + in_group < of.vectors ? at + m * 4 : none);
}

// A piece that the whole warp sums; of 32 of its edges, one in each lane.
struct LongPiece {
  int owner;  // the first of the four lanes that it belongs to, and 1 more where it is their second
  int begin, count, row;
  float weight;
};

template <Weights kWeights>
__device__ __forceinline__ void load_edges(const Neighbors& of, LongPiece& piece, int from) {
  const int edge = from + static_cast<int>(threadIdx.x % 32);
  piece.row = -1, piece.weight = 0;
  if (edge >= piece.count) return;
  piece.row = __ldcs(of.indices + piece.begin + edge);
  piece.weight = weight_at<kWeights>(of, piece.begin + edge);
}

// Takes the first of the pieces `many`: bit 4 i: the first of lanes 4 i and after it, the bit behind it: their second.
template <Weights kWeights>
__device__ __forceinline__ LongPiece take_long(const Neighbors& of, const Edges& edges, uint32_t& many) {
  LongPiece piece;
  piece.owner = __ffs(many) - 1, many &= many - 1;
  int begin[2], count[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    begin[i] = __shfl_sync(kAllLanes, edges.begin[i], piece.owner & ~3);
    count[i] = __shfl_sync(kAllLanes, edges.count[i], piece.owner & ~3);
  }
  const bool second = piece.owner & 1;
  piece.begin = second ? begin[1] : begin[0], piece.count = second ? count[1] : count[0];
  load_edges<kWeights>(of, piece, 0);
  return piece;
}

// Puts the sums of the pieces `many` where those belong.
template <int kWidth, Weights kWeights>
__device__ __forceinline__ void sum_long(const Neighbors& of, const Edges& edges, uint32_t many,
                                         WarpRows<kWidth>& sum) {
  constexpr int kLanes = kWidth / 4, kRows = 32 / kLanes;  // of a row, and rows that are asked for at once
  const int lane = threadIdx.x % 32, in_row = lane % kLanes;
  LongPiece next = take_long<kWeights>(of, edges, many);
#pragma unroll 1
  while (true) {
    LongPiece piece = next;
    const bool more = many != 0;
    if (more) next = take_long<kWeights>(of, edges, many);
    float4 s = make_float4(0, 0, 0, 0);
#pragma unroll 1
    for (int i = 0; i < piece.count; i += 32) {
      const int row = piece.row;
      const float weight = piece.weight;
      if (i + 32 < piece.count) load_edges<kWeights>(of, piece, i + 32);
#pragma unroll
      for (int j = 0; j < kLanes; j += kBatch) {
        if (j > 0 && i + j * kRows >= piece.count) break;
        float4 x[kBatch];
#pragma unroll
        for (int u = 0; u < kBatch; ++u) {
          const int at = __shfl_sync(kAllLanes, row, (j + u) * kRows + lane / kLanes);
          x[u] = __ldg(at < 0 || in_row >= of.vectors ? zeros : row_at(of, at) + in_row);
        }
#pragma unroll
        for (int u = 0; u < kBatch; ++u) {
          float by = 1;
          if constexpr (kWeights != Weights::none) by = __shfl_sync(kAllLanes, weight, (j + u) * kRows + lane / kLanes);
          s.x = fmaf(by, x[u].x, s.x), s.y = fmaf(by, x[u].y, s.y);
          s.z = fmaf(by, x[u].z, s.z), s.w = fmaf(by, x[u].w, s.w);
        }
      }
    }
#pragma unroll
    for (int step = kLanes; step < 32; step *= 2) {
      s.x += __shfl_xor_sync(kAllLanes, s.x, step), s.y += __shfl_xor_sync(kAllLanes, s.y, step);
      s.z += __shfl_xor_sync(kAllLanes, s.z, step), s.w += __shfl_xor_sync(kAllLanes, s.w, step);
    }
    const bool own = lane / 4 == piece.owner / 4;
#pragma unroll
    for (int m = 0; m < kWidth / 16; ++m) {
      const int at = m * 4 + lane % 4;
      const float four[4] = {__shfl_sync(kAllLanes, s.x, at), __shfl_sync(kAllLanes, s.y, at),
                             __shfl_sync(kAllLanes, s.z, at), __shfl_sync(kAllLanes, s.w, at)};
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        if (own && piece.owner % 2 == 0) sum[0][4 * m + k] = four[k];
        if (own && piece.owner % 2 == 1) sum[1][4 * m + k] = four[k];
      }
    }
    if (!more) return;
  }
}

// The sums of the warp's pieces.
template <int kWidth, Weights kWeights, bool kFull>
__device__ __forceinline__ void sum_pieces(const Neighbors& of, Edges edges, WarpRows<kWidth>& sum) {
  using Rows = float4[2][kWidth / 16];
  const bool few[2] = {edges.count[0] <= kFewEdges, edges.count[1] <= kFewEdges};
  uint32_t many = 0;
#pragma unroll
  for (int i = 0; i < 2; ++i) many |= __ballot_sync(kAllLanes, threadIdx.x % 4 == 0 && !few[i]) << i;
  const int rounds = __reduce_max_sync(kAllLanes, max(few[0] ? edges.count[0] : 0, few[1] ? edges.count[1] : 0));
  const auto load = [&](int round, float (&by)[2], Rows& x) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      by[i] = 1;
      if constexpr (kWeights != Weights::none) by[i] = __shfl_sync(kAllLanes, edges.weight[i], round, 4);
      const int row = __shfl_sync(kAllLanes, edges.row[i], round, 4);
      load_row<kWidth, kFull>(of, few[i] ? row : -1, x[i]);
    }
  };
  float by[2], by_second[2];
  Rows x, second;
  load(0, by, x), load(1, by_second, second);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int m = 0; m < kWidth / 16; ++m) {
      float* const four = sum[i] + 4 * m;
      four[0] = fmaf(by_second[i], second[i][m].x, by[i] * x[i][m].x);
      four[1] = fmaf(by_second[i], second[i][m].y, by[i] * x[i][m].y);
      four[2] = fmaf(by_second[i], second[i][m].z, by[i] * x[i][m].z);
      four[3] = fmaf(by_second[i], second[i][m].w, by[i] * x[i][m].w);
    }
  }
#pragma unroll 1
  for (int round = 2; round < rounds; ++round) {
    if (round % 4 == 0) load_edges<kWeights>(of, edges, round);
    load(round, by, x);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int m = 0; m < kWidth / 16; ++m) {
        float* const four = sum[i] + 4 * m;
        four[0] = fmaf(by[i], x[i][m].x, four[0]), four[1] = fmaf(by[i], x[i][m].y, four[1]);
        four[2] = fmaf(by[i], x[i][m].z, four[2]), four[3] = fmaf(by[i], x[i][m].w, four[3]);
      }
    }
  }
  if (many) sum_long<kWidth, kWeights>(of, edges, many, sum);
}

template <int kWidth>
__device__ __forceinline__ bool all_finite(const WarpRows<kWidth>& rows) {
  float zero[4] = {};
#pragma unroll
  for (int i = 0; i < kWidth / 2; ++i) zero[i % 4] = fmaf(0, rows[i % 2][i / 2], zero[i % 4]);
  return (zero[0] + zero[1]) + (zero[2] + zero[3]) == 0;
}

// An infinity leaves no number behind when a float is split: such products of pieces [first, last) are made again.
template <int kWidth>
__device__ __noinline__ void make_again(const PieceProductsArgs& args, int type, int first, int last,
                                        WarpRows<kWidth>& product) {
  const int lane = threadIdx.x % 32;
  const float* const weight = static_cast<const float*>(args.weight.numbers) + type * args.weight_type;
  for (int i = 0; i < 2; ++i) {
    const int piece = first + lane / 4 + 8 * i;
    if (piece >= last) continue;
    WarpRows<kWidth> made = {};
    for (int k = 0; k < args.in_width; ++k) {
      float x = 0;
      for (int edge = args.pieces.ptr[piece]; edge < args.pieces.ptr[piece + 1]; ++edge) {
        const auto* const row = reinterpret_cast<const float*>(row_at(args.neighbors, args.neighbors.indices[edge]));
        x = fmaf(weight_of(args.neighbors, edge), row[k], x);
      }
      for (int j = 0; j < kWidth / 4; ++j) {
        const int column = j / 4 * 16 + lane % 4 * 4 + j % 4;
        if (column < args.out_width) made[i][j] = fmaf(x, weight[k * args.weight.row_numbers + column], made[i][j]);
      }
    }
    for (int j = 0; j < kWidth / 4; ++j) {
      if (!isfinite(product[i][j])) product[i][j] = made[i][j];
    }
  }
}

template <int kWidth, Weights kWeights, bool kFull>
__global__ void __launch_bounds__(kThreads, kBlocks)
    short_products_kernel(const __grid_constant__ PieceProductsArgs args, const Scratch<kWidth> scratch,
                          int num_chunks) {
  using Parts = WeightParts<kWidth>;
  extern __shared__ uint4 memory[];  // parts of two weights
  __shared__ Chunk known[kBegun];    // this turn's chunk, and those of the two turns after it
  const Neighbors& of = args.neighbors;
  const int lane = threadIdx.x % 32, begin_of_warp = threadIdx.x / 32 * kWarpPieces;
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
      Edges found;
#pragma unroll
      for (int i = 0; i < 2; ++i) found.begin[i] = ends.begin[i], found.count[i] = ends.end[i] - ends.begin[i];
      load_edges<kWeights>(of, found, 0);
      return found;
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
      if (!all_finite<kWidth>(product)) {
        WarpRows<kWidth> again;  // in memory: only here
        memcpy(again, product, sizeof(again));
        make_again<kWidth>(args, now.type, first, last, again);
        memcpy(product, again, sizeof(again));
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int piece = first + lane / 4 + 8 * i;
        if (piece >= last) continue;
        float* const to = static_cast<float*>(args.out) + static_cast<int64_t>(piece) * args.out_width + lane % 4 * 4;
#pragma unroll
        for (int m = 0; m < kWidth / 16; ++m) {
          const float* const four = product[i] + 4 * m;
          if (m * 16 + lane % 4 * 4 >= args.out_width) continue;
          __stcs(reinterpret_cast<float4*>(to + m * 16), make_float4(four[0], four[1], four[2], four[3]));
        }
      }
      // Added to ids so that they are waited for here, and not where they are asked for: 0, but only we know.
      const int late = static_cast<int>(__float_as_uint(product[0][0]) & threadIdx.y);
      edges = next;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        edges.row[i] += late;
        if constexpr (kWeights != Weights::none)
          edges.weight[i] = __int_as_float(__float_as_int(edges.weight[i]) + late);
      }
    }
    if (other) slot ^= 1;
  }
}

template <int kWidth, Weights kWeights, bool kFull>
cudaError_t launch(const PieceProductsArgs& args, void* memory, int processors, cudaStream_t stream) {
  static std::atomic<uint64_t> done{0};
  constexpr int kBytes = 2 * WeightParts<kWidth>::kVectors * 16;
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

template <int kWidth, bool kFull>
cudaError_t launch(const PieceProductsArgs& args, void* memory, int processors, cudaStream_t stream) {
  if (!args.neighbors.weights) return launch<kWidth, Weights::none, kFull>(args, memory, processors, stream);
  return args.neighbors.ids ? launch<kWidth, Weights::by_id, kFull>(args, memory, processors, stream)
                            : launch<kWidth, Weights::in_order, kFull>(args, memory, processors, stream);
}

}  // namespace

int64_t short_products_scratch(const PieceProductsArgs& args) {
  const int64_t chunks = num_tiles(args.pieces.count, args.pieces.types, args.share) + 2;  // one for `taken`
  return args.pieces.types * int64_t{WeightParts<kMostShortWidth>::kVectors} * 16 + chunks * 16;
}

cudaError_t run_short_products(const PieceProductsArgs& args, void* scratch, int processors, cudaStream_t stream) {
  const int in = args.in_width;
  if (in <= 32 && args.out_width <= 32) {
    return in == 32 ? launch<32, true>(args, scratch, processors, stream)
                    : launch<32, false>(args, scratch, processors, stream);
  }
  return in == 64 ? launch<64, true>(args, scratch, processors, stream)
                  : launch<64, false>(args, scratch, processors, stream);
}

}  // namespace edgeless::cuda::relational
