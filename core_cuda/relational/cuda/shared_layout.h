// Layout of the shared memory of the kernels that sum the edges of segments and multiply the sums at once. The sizes
// are used by the kernels and by the plan (../plan.h), which compares them with the device's shared memory. S is the
// type of an element, of which only the size matters: 4 bytes are a float. No CUDA and no torch.
#pragma once

#include <type_traits>

namespace edgeless::cuda::relational {

constexpr int kTileSegments = 64;  // maximum number of segments in a tile

constexpr int kFusedLog2 = 8,
              kFusedThreads = 1 << kFusedLog2;  // threads of a block whose tiles have no TileShape
// Threads of a block that computes tiles [64, width] with warps of `columns` columns.
constexpr int tile_threads(int width, int columns) { return 128 * width / columns; }

// First edges of the segments of a tile and of the next two tiles; the last element is the end of the last segment.
using TileBegins = int[3][kTileSegments + 1];

// Columns of a tile that a warp computes.
template <int kWidth>
constexpr int kWarpColumns = kWidth < 64 ? kWidth : 64;
// The same if there are few blocks: twice as many warps take half as long for a tile.
constexpr int kFewColumns = 32;

// Elements from row to row of a tile. The padding spreads fragments of eight rows over all banks.
template <class S, int kWidth>
constexpr int kTileStride = kWidth + 16 / static_cast<int>(sizeof(S));

// 16-byte vectors of a matrix [depth, column] of floats in fragment order: a lane's elements of two fragments of eight
// columns are one vector. With kTwice there are two such matrices of TF32 values: the nearest values of all depths,
// then the remainders.
template <int kWidth>
constexpr int kFragmentVectors = kWidth * kWidth / 4;

// True if a matrix of weights is in fragment order in shared memory.
template <class S, int kWidth>
constexpr bool kInFragments = sizeof(S) == 4 && kWidth <= 64;

// Shared memory for sums of float rows (tile_sums.cuh).
template <int kWidth, int kColumns>
struct FloatSumsLayout {
  static constexpr int kThreads = tile_threads(kWidth, kColumns);  // per block
  static constexpr int kPer = kWidth / 32;                         // elements of a row per lane
  static constexpr int kAhead = kWidth > 64 ? 8 : 16;              // rows that a sub-warp has in flight
  static constexpr int kLeads = kThreads * kPer * 4;               // bytes
  // Each lane has its elements of kAhead rows, and three words of each of two edges.
  static constexpr int kBytes = kLeads + kThreads * (kAhead * kPer * 4 + 24);
};

// The same for 16-bit rows (tensor_sums.cuh).
template <int kWidth, int kColumns>
struct HalfSumsLayout {
  static constexpr int kStride = kWidth + 8;
  static constexpr int kThreads = tile_threads(kWidth, kColumns);  // per block
  static constexpr int kChunk = kWidth > 64 ? 64 : 96;             // edges whose rows are in shared memory together
  static constexpr int kDepth = 16;                                // depth of an mma
  static constexpr int kRows = kChunk * kStride, kWeights = kChunk + kDepth;
  static constexpr int kBytes = 2 * (kRows * 2 + kWeights * 4);
};

template <class S, int kWidth, int kColumns>
using SumsLayout =
    std::conditional_t<sizeof(S) == 4, FloatSumsLayout<kWidth, kColumns>, HalfSumsLayout<kWidth, kColumns>>;

// Shared memory of segment_products.cuh: the sums [64][width], unless a warp has whole rows of 16-bit elements; the
// weight [width][width] as [depth][column], floats of up to 64 columns in fragment order; and what the sums need.
template <class S, int kWidth, int kColumns = kWarpColumns<kWidth>>
struct ProductsLayout {
  static constexpr int kStride = kTileStride<S, kWidth>;
  static constexpr bool kWholeRows = sizeof(S) == 2 && kWidth == kColumns;
  static constexpr bool kFragments = kInFragments<S, kWidth>;
  static constexpr int kTile = kWholeRows ? 0 : kTileSegments * kStride;
  static constexpr int kWeight = kFragments ? 4 * kFragmentVectors<kWidth> : kWidth * kStride;
  static constexpr int kBytes =
      (kTile + kWeight) * static_cast<int>(sizeof(S)) + SumsLayout<S, kWidth, kColumns>::kBytes;
};

// Shared memory of segment_gradients.cuh: x and g [64][width]; the weight [width][width] as in global memory, floats of
// up to 64 columns in fragment order; and what the sums need.
template <class S, int kWidth, int kColumns = kWarpColumns<kWidth>>
struct GradientsLayout {
  static constexpr bool kFragments = kInFragments<S, kWidth>;
  // Float tiles are read down their columns more often than along their rows.
  static constexpr int kStride = kFragments ? kWidth + 8 : kTileStride<S, kWidth>;
  static constexpr int kTile = kTileSegments * kStride;
  static constexpr int kWeight = kFragments ? 4 * kFragmentVectors<kWidth> : kWidth * kStride;
  static constexpr int kBytes =
      (2 * kTile + kWeight) * static_cast<int>(sizeof(S)) + SumsLayout<S, kWidth, kColumns>::kBytes;
};

// Two blocks of float tiles of width 64 fill the shared memory of an SM, so they have twice as many warps.
template <class S, int kWidth>
constexpr int kRowColumns = sizeof(S) == 4 && kWidth == 64 ? kFewColumns : kWarpColumns<kWidth>;

// Shared memory of row_sums.cuh: own rows [64][width]; the matrix [width][width] as in global memory, floats of up to
// 64 columns in fragment order; the sums of float rows [64][width]; and what the sums need.
template <class S, int kWidth, int kColumns = kRowColumns<S, kWidth>, bool kTwice = true>
struct RowSumsLayout {
  static constexpr int kStride = kTileStride<S, kWidth>, kSumStride = kWidth + 8;
  static constexpr bool kFragments = kInFragments<S, kWidth>;
  static constexpr int kOwn = kTileSegments * kStride;
  static constexpr int kRoot = kFragments ? (kTwice ? 8 : 4) * kFragmentVectors<kWidth> : kWidth * kStride;
  static constexpr int kSums = sizeof(S) == 4 ? kTileSegments * kSumStride : 0;
  static constexpr int kBytes = (kOwn + kRoot) * static_cast<int>(sizeof(S)) + kSums * static_cast<int>(sizeof(float)) +
                                SumsLayout<S, kWidth, kColumns>::kBytes;
};

// Shared memory of own_gradients.cuh: own and grad [64][width], and for every thread the sums of a vector's columns.
template <class S, int kWidth>
struct OwnGradientsLayout {
  static constexpr int kStride = kTileStride<S, kWidth>, kTile = kTileSegments * kStride;
  static constexpr int kSums = kFusedThreads * (16 / static_cast<int>(sizeof(S))) * static_cast<int>(sizeof(float));
  static constexpr int kBytes = 2 * kTile * static_cast<int>(sizeof(S)) + kSums;
};

// Number of 16-byte vectors of a matrix [width, width] in float16 parts for tensor cores, and of the scales of its
// columns (scaled_halves.cuh).
constexpr int part_vectors(int width) { return width / 16 * (width / 16) * 2 * 32 + width / 4; }

// Shared memory of kernels for rows of up to 64 floats, in tiles without padding: own and grad of two tiles
// (own_gradients.cuh); x and g of one tile and the parts of a weight (short_gradients.cuh); the parts of two weights
// (short_segments.cuh).
constexpr int kFloatsBytes = kTileSegments * 64 * static_cast<int>(sizeof(float));
constexpr int kOwnSquaresBytes = 2 * 2 * kFloatsBytes;
constexpr int kShortGradientsBytes = 2 * kFloatsBytes + part_vectors(64) * 16;
constexpr int short_products_bytes(int width) { return 2 * part_vectors(width) * 16; }

// The plan checks the memory of segment_gradients.cuh only, so these kernels must need no more.
static_assert(OwnGradientsLayout<float, 64>::kBytes <= GradientsLayout<float, 64>::kBytes &&
              OwnGradientsLayout<float, 128>::kBytes <= GradientsLayout<float, 128>::kBytes &&
              OwnGradientsLayout<short, 64>::kBytes <= GradientsLayout<short, 64>::kBytes &&
              OwnGradientsLayout<short, 128>::kBytes <= GradientsLayout<short, 128>::kBytes &&
              kOwnSquaresBytes <= GradientsLayout<float, 64>::kBytes &&
              kShortGradientsBytes <= GradientsLayout<float, 64>::kBytes);

}  // namespace edgeless::cuda::relational
