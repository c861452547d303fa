// What lies in the shared memory of a block of the kernels that sum the edges of segments and multiply the sums at
// once. The kernels take their sizes from here, and so does the plan (../plan.h), which has to know whether a device
// has so much. S is the type of a number, of which only its size matters: 4 bytes are a float. No CUDA and no torch.
#pragma once

#include <type_traits>

namespace edgeless::cuda::relational {

constexpr int kTileSegments = 64;  // of a tile, at most

constexpr int kFusedLog2 = 8,
              kFusedThreads = 1 << kFusedLog2;  // of a block, where its tiles have no shape of their own
// Threads of a block that makes tiles [64, width] of which a warp has so many columns.
constexpr int tile_threads(int width, int columns) { return 128 * width / columns; }

// Where the segments of a tile and of the two after it begin, and the ends of the last.
using TileBegins = int[3][kTileSegments + 1];

// Columns of a warp's part of a tile.
template <int kWidth>
constexpr int kWarpColumns = kWidth < 64 ? kWidth : 64;
// The same where there are few blocks: twice as many warps then take half as long for a tile.
constexpr int kFewColumns = 32;

// Numbers from row to row of a tile: fragments of eight rows come from all banks.
template <class S, int kWidth>
constexpr int kTileStride = kWidth + 16 / static_cast<int>(sizeof(S));

// A matrix [depth, column] of floats, so that a lane's part of two fragments of eight columns is a vector; where
// kTwice as two of TF32: the nearest numbers of all depths, then what is left.
template <int kWidth>
constexpr int kFragmentVectors = kWidth * kWidth / 4;

// Whether a matrix of weights lies so in shared memory.
template <class S, int kWidth>
constexpr bool kInFragments = sizeof(S) == 4 && kWidth <= 64;

// What making the sums of floats takes (tile_sums.cuh).
template <int kWidth, int kColumns>
struct FloatSumsLayout {
  static constexpr int kThreads = tile_threads(kWidth, kColumns);  // of a block
  static constexpr int kPer = kWidth / 32;                         // numbers of a lane
  static constexpr int kAhead = kWidth > 64 ? 8 : 16;              // rows that a sub-warp has in flight
  static constexpr int kLeads = kThreads * kPer * 4;               // bytes
  // A lane has its part of kAhead rows, and three numbers of two edges.
  static constexpr int kBytes = kLeads + kThreads * (kAhead * kPer * 4 + 24);
};

// The same of numbers of 16 bits (tensor_sums.cuh).
template <int kWidth, int kColumns>
struct HalfSumsLayout {
  static constexpr int kStride = kWidth + 8;
  static constexpr int kThreads = tile_threads(kWidth, kColumns);  // of a block
  static constexpr int kChunk = kWidth > 64 ? 64 : 96;             // edges whose rows are in shared memory together
  static constexpr int kDepth = 16;                                // of an mma
  static constexpr int kRows = kChunk * kStride, kWeights = kChunk + kDepth;
  static constexpr int kBytes = 2 * (kRows * 2 + kWeights * 4);
};

template <class S, int kWidth, int kColumns>
using SumsLayout =
    std::conditional_t<sizeof(S) == 4, FloatSumsLayout<kWidth, kColumns>, HalfSumsLayout<kWidth, kColumns>>;

// Of segment_products.cuh: the sums [64][width], but for 16-bit rows that a warp has whole, the weight [width][width]
// as [depth][column], of up to 64 floats in fragments, what making the sums takes.
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

// Of segment_gradients.cuh: x and g [64][width], the weight [width][width] as it lies in memory, of up to 64 floats in
// fragments, what making the sums takes.
template <class S, int kWidth, int kColumns = kWarpColumns<kWidth>>
struct GradientsLayout {
  static constexpr bool kFragments = kInFragments<S, kWidth>;
  // Floats are read across rows more often than along them.
  static constexpr int kStride = kFragments ? kWidth + 8 : kTileStride<S, kWidth>;
  static constexpr int kTile = kTileSegments * kStride;
  static constexpr int kWeight = kFragments ? 4 * kFragmentVectors<kWidth> : kWidth * kStride;
  static constexpr int kBytes =
      (2 * kTile + kWeight) * static_cast<int>(sizeof(S)) + SumsLayout<S, kWidth, kColumns>::kBytes;
};

// Of 64 floats memory is for two blocks only: they have twice as many warps.
template <class S, int kWidth>
constexpr int kRowColumns = sizeof(S) == 4 && kWidth == 64 ? kFewColumns : kWarpColumns<kWidth>;

// Of row_sums.cuh: own rows [64][width], the matrix [width][width] as it lies in memory, of up to 64 floats in
// fragments, of floats the sums [64][width], what making them takes.
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

// Of own_gradients.cuh: own and grad [64][width], and of every thread the sums of a vector's columns.
template <class S, int kWidth>
struct OwnGradientsLayout {
  static constexpr int kStride = kTileStride<S, kWidth>, kTile = kTileSegments * kStride;
  static constexpr int kSums = kFusedThreads * (16 / static_cast<int>(sizeof(S))) * static_cast<int>(sizeof(float));
  static constexpr int kBytes = 2 * kTile * static_cast<int>(sizeof(S)) + kSums;
};

// A matrix [width, width] in the 16-bit parts that tensor cores take, and scales of its columns: so many vectors
// (scaled_halves.cuh).
constexpr int part_vectors(int width) { return width / 16 * (width / 16) * 2 * 32 + width / 4; }

// Rows of up to 64 floats in tiles without padding: own and grad of two tiles; x and g of one and the parts of a weight
// (short_gradients.cuh); the parts of two weights (short_segments.cuh).
constexpr int kFloatsBytes = kTileSegments * 64 * static_cast<int>(sizeof(float));
constexpr int kOwnSquaresBytes = 2 * 2 * kFloatsBytes;
constexpr int kShortGradientsBytes = 2 * kFloatsBytes + part_vectors(64) * 16;
constexpr int short_products_bytes(int width) { return 2 * part_vectors(width) * 16; }

// The plan knows the memory of the first kernels alone.
static_assert(OwnGradientsLayout<float, 64>::kBytes <= GradientsLayout<float, 64>::kBytes &&
              OwnGradientsLayout<float, 128>::kBytes <= GradientsLayout<float, 128>::kBytes &&
              OwnGradientsLayout<short, 64>::kBytes <= GradientsLayout<short, 64>::kBytes &&
              OwnGradientsLayout<short, 128>::kBytes <= GradientsLayout<short, 128>::kBytes &&
              kOwnSquaresBytes <= GradientsLayout<float, 64>::kBytes &&
              kShortGradientsBytes <= GradientsLayout<float, 64>::kBytes);

}  // namespace edgeless::cuda::relational
