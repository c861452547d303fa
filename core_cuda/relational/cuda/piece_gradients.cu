// The gradients of a typed product of sums: of what was summed, and of the weight. A block sums the gradients of a
// tile's edges into shared memory, g, while the rows x of its pieces are on their way there, and makes both products of
// them: g W^T, a row for each piece, and x^T g, which stays in registers for all tiles of the block. Shared memory: x,
// of floats of two tiles, and g [64][width], the weight [width][width] as it lies in memory, what making the sums
// takes.
#include <atomic>

#include "../../projection/cuda/shared_memory.cuh"
#include "of_storage.cuh"
#include "tensor_sums.cuh"

namespace edgeless::cuda::relational {
namespace {

template <class S, int kWidth, int kColumns = kWarpColumns<S, kWidth>>
struct Shape {
  static constexpr int kStride = kTileStride<S, kWidth>;
  static constexpr int kTile = kTilePieces * kStride;
  static constexpr int kOwn = (TileSums<S, kWidth, kColumns>::kOthersAhead ? 2 : 1) * kTile;
  static constexpr int kBytes =
      (kOwn + kTile + kWidth * kStride) * static_cast<int>(sizeof(S)) + TileSums<S, kWidth, kColumns>::kBytes;
  // That a multiprocessor has registers for.
  static constexpr int kBlocks = kWidth > 64 ? (sizeof(S) == 4 ? 1 : 2) : sizeof(S) == 4 || kColumns < 64 ? 2 : 4;
};

// Which rows of x the thread asks for in a tile, known a tile ahead; where there is none, one of an earlier tile, or
// the first.
template <class S, int kWidth, int kThreads>
struct OwnRows {
  static constexpr int kInLine = kWidth / kVec<S>, kLines = kThreads / kInLine, kCopies = kTilePieces / kLines;
  int rows[kCopies] = {};
  int line = threadIdx.x / kInLine, in_line = threadIdx.x % kInLine * kVec<S>;

  __device__ __forceinline__ void find(const int32_t* rows_of, int first, int end) {
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const int piece = first + line + i * kLines;
      if (piece < end) rows[i] = __ldcs(rows_of + piece);
    }
  }

  __device__ __forceinline__ void load(TileNumber<S>* tile, const Rows& x, int count, int width) const {
    const bool inside = in_line < width;
    const char* numbers = static_cast<const char*>(x.numbers) + (inside ? in_line * sizeof(S) : 0);
    const uint32_t row_bytes = static_cast<uint32_t>(x.row_numbers * sizeof(S));
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const int at = line + i * kLines;
      projection::copy_vector(tile + at * kTileStride<S, kWidth> + in_line, row_address(numbers, rows[i], row_bytes),
                              inside && at < count);
    }
  }
};

template <class S, int kWidth, int kColumns>
__global__ void __launch_bounds__(TileSums<S, kWidth, kColumns>::kThreads, Shape<S, kWidth, kColumns>::kBlocks)
    piece_gradients_kernel(const __grid_constant__ PieceGradientsArgs args) {
  using T = TileNumber<S>;
  using Of = Shape<S, kWidth, kColumns>;
  constexpr int kStride = Of::kStride;
  constexpr int kThreads = TileSums<S, kWidth, kColumns>::kThreads;
  extern __shared__ float4 memory[];
  __shared__ TileWalk::Begins begins;
  T* x = reinterpret_cast<T*>(memory);
  T* g = x + Of::kOwn;
  T* weight = g + Of::kTile;
  const Range range = range_of_block(args.pieces.by_type(), args.share);
  if (range.begin >= range.end) return;
  const int in = args.in_width, out = args.out_width;
  TileWalk walk(args.pieces.tiles, args.pieces.ptr, static_cast<int>(range.begin), static_cast<int>(range.end), begins);
  OwnRows<S, kWidth, kThreads> own;
  own.find(args.pieces.rows, walk.bounds[0], walk.bounds[1]);
  if (args.out) {
    ask_for_matrix<kWidth, kWidth, kStride, kThreads>(
        weight, static_cast<const T*>(args.weight.numbers) + range.type * args.weight_type, args.weight.row_numbers, in,
        out);
  }
  if constexpr (std::is_same_v<S, float>) {  // columns outside stay zero
    for (int i = threadIdx.x; i < Of::kTile / 4; i += kThreads) {
      reinterpret_cast<float4*>(g)[i] = make_float4(0, 0, 0, 0);
    }
  }
  const FusedPlace<kWidth, kColumns> place;
  TileSums<S, kWidth, kColumns> sums(args.neighbors, walk, weight + kWidth * kStride);
  constexpr int kDown = kWidth / 64;
  WarpSum<kDown, place.kSides> outer;
  constexpr bool kAhead = TileSums<S, kWidth, kColumns>::kOthersAhead;
  T* next_x = kAhead ? x + Of::kTile : x;
  if (kAhead && args.partial) {
    own.load(x, args.x, walk.count(), in);
    own.find(args.pieces.rows, walk.bounds[1], walk.bounds[2]);
  }
  sums.start();
  while (true) {
    const int count = walk.count(), depth = round_up(count, kMmaDepth<S>);
    const auto ask_own = [&] {
      if (!args.partial) return;
      own.load(next_x, args.x, walk.bounds[kAhead + 1] - walk.bounds[kAhead], in);
      own.find(args.pieces.rows, walk.bounds[kAhead + 1], walk.bounds[kAhead + 2]);
    };
    const bool there = args.out && place.down < count && place.side < in;
    const int out_depth = round_up(out, kMmaDepth<S>);
    const auto store = [&](const auto& product) {
      store_sums<true>(static_cast<S*>(args.out) + static_cast<int64_t>(walk.first()) * in, in, count, in, place.down,
                       place.side, product.of[0]);
    };
    if constexpr (place.kBeside == 1) {  // a warp has whole rows of g
      const auto sum = sums.sum(ask_own);
      sums.template put<kStride>(g, sum);
      if (there) {
        WarpSum<1, place.kSides> product;
        add_product<S, false, kStride>(as_rows<S>(sum), weight, place.side, out_depth, product);
        store(product);
      }
      sums.await_others();
      __syncthreads();
    } else {
      sums.template to_tile<kStride, false>(g, ask_own);
      if (there) {
        WarpSum<1, place.kSides> product;
        add_product<S, false, false, kStride, 0>(g, weight, place.down, place.side, out_depth, product);
        make_again<S>(product.of[0], place.down, place.side, count, in, {g, kStride, 1}, {weight, kStride, 1}, out);
        store(product);
      }
    }
    if (args.partial && place.down < in && place.side < out) {
      if constexpr (std::is_same_v<S, float>) {
#pragma unroll
        for (int i = 0; i < kDown; ++i) {
          WarpSum<1, place.kSides> product;
          const int down = place.down + 64 * i;
          add_product<S, true, true, kStride, 0>(x, g, down, place.side, depth, product);
          make_again<S>(product.of[0], down, place.side, in, out, {x, 1, kStride}, {g, 1, kStride}, count);
#pragma unroll
          for (int j = 0; j < place.kSides * 4; ++j) outer.of[i][j / 4][j % 4] += product.of[0][j / 4][j % 4];
        }
      } else {
        add_product<S, true, true, kStride, 64>(x, g, place.down, place.side, depth, outer);
      }
    }
    if (!walk.more()) break;
    sums.advance();
    T* const this_x = x;
    x = next_x, next_x = this_x;
  }
  if (!args.partial) return;
  float* partial = args.partial + static_cast<int64_t>(blockIdx.x) * in * out;
#pragma unroll
  for (int i = 0; i < kDown; ++i) {
    store_sums<false>(partial, out, in, out, place.down + 64 * i, place.side, outer.of[i]);
  }
}

template <class S, int kWidth, int kColumns = kWarpColumns<S, kWidth>>
cudaError_t launch(const PieceGradientsArgs& args, cudaStream_t stream) {
  static std::atomic<uint64_t> done{0};
  using Of = Shape<S, kWidth, kColumns>;
  const cudaError_t error =
      projection::allow_shared_memory(piece_gradients_kernel<S, kWidth, kColumns>, Of::kBytes, done);
  if (error != cudaSuccess) return error;
  const auto blocks = static_cast<unsigned>(num_tiles(args.pieces.count, args.pieces.types, args.share));
  piece_gradients_kernel<S, kWidth, kColumns>
      <<<blocks, TileSums<S, kWidth, kColumns>::kThreads, Of::kBytes, stream>>>(args);
  return cudaGetLastError();
}

template <class S, int kWidth>
using UsualShape = Shape<S, kWidth>;

}  // namespace

int piece_gradients_memory(Storage storage, int widest) {
  return shared_memory_of<UsualShape>(storage, widest) + static_cast<int>(sizeof(TileWalk::Begins));
}

cudaError_t run_piece_gradients(Storage storage, const PieceGradientsArgs& args, cudaStream_t stream) {
  return of_storage<true>(storage, [&](auto zero) {
    using S = decltype(zero);
    const bool narrow = args.in_width <= 64 && args.out_width <= 64;
    if constexpr (sizeof(S) == 2) {
      if (narrow && args.few) return launch<S, 64, kFewColumns>(args, stream);
    }
    return narrow ? launch<S, 64>(args, stream) : launch<S, 128>(args, stream);
  });
}

}  // namespace edgeless::cuda::relational
