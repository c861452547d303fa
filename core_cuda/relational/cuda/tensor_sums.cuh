// The sums of a tile's segments on tensor cores, for 16-bit rows, as a product of two matrices: the first has the
// edges' weights at their segments and zeros elsewhere, the second the neighbours' rows.
//
// CUDA cores would take a dozen instructions for every 16 bytes of a row, and branches at the ends of segments, of
// which a tile has one for every other edge. Here rows are copied to shared memory unconverted, and 16 segments are
// multiplied only with their own edges, which are contiguous. A weight is the sum of two 16-bit values, which has as
// many digits as the sum needs; a weight of 1 needs one value. Zero times infinity is NaN, so sums that are not finite
// are recomputed edge by edge.
#pragma once

#include "tile_products.cuh"

namespace edgeless::cuda::relational {

// Factor of weights before they are split: in float16 the remainder of a weight such as 1e-5 would have few digits.
template <class S>
constexpr float kWeightScale = std::is_same_v<S, __half> ? 64.0f : 1.0f;

template <class S>
constexpr uint32_t kTwoOnes = std::is_same_v<S, __half> ? 0x3c003c00u : 0x3f803f80u;

// A weight as two 16-bit values: the nearest one in the lower half, the remainder in the upper half.
template <class S>
__device__ __forceinline__ uint32_t cut_in_two(float weight) {
  const float scaled[2] = {weight * kWeightScale<S>, 0};
  float nearest[2];
  unpack_words<S, 1>(pack_words<S, 1>(scaled), nearest);
  const float two[2] = {scaled[0], scaled[0] - nearest[0]};
  return pack_words<S, 1>(two).w[0];
}

template <class S, int kWidth, int kColumns, int kToStride>
struct TileSums {
  using Layout = HalfSumsLayout<kWidth, kColumns>;
  static constexpr int kStride = Layout::kStride, kThreads = Layout::kThreads, kChunk = Layout::kChunk;
  static constexpr int kDepth = Layout::kDepth, kRows = Layout::kRows, kWeights = Layout::kWeights;
  static constexpr int kBytes = Layout::kBytes;
  static constexpr int kInLine = kWidth / 8, kLines = kThreads / kInLine, kCopies = kChunk / kLines;
  static_assert(kRows * 2 >= kTileSegments * kWidth / 2 * 4, "two slices of four fit where a chunk's rows were");
  using Place = FusedPlace<kWidth, kColumns>;
  static constexpr int kSides = Place::kSides;
  using Sums = WarpSum<1, kSides>;

  const Neighbors& of;
  TileWalk& walk;
  const Place place;
  uint16_t* tile;
  uint16_t* rows;     // two buffers, for this chunk and the next
  uint32_t* weights;  // weights of the edges in `rows`, split
  int at, end;        // the next edge to prefetch, and the end of its tile's edges
  int ids[kCopies];   // neighbours of the edges to prefetch next
  float weight = 0;   // of the thread's edge
  int buffer = 0;     // buffer of the next chunk

  __device__ __forceinline__ TileSums(const Neighbors& of, TileWalk& walk, uint16_t* tile, void* memory)
      : of(of),
        walk(walk),
        tile(tile),
        rows(static_cast<uint16_t*>(memory)),
        weights(reinterpret_cast<uint32_t*>(rows + 2 * kRows)) {}

  // The interface is described at the sums of floats (tile_sums.cuh).
  __device__ __forceinline__ void start() {
    __syncthreads();
    at = walk.now()[0], end = walk.now()[walk.count()];
    find();
    prefetch();
    at += kChunk;
    if (at >= end) at = walk.next()[0], end = walk.next()[walk.next_count()];
    find();
  }

  template <bool kEmpty, class PrefetchOthers>
  __device__ __forceinline__ void to_tile(PrefetchOthers&& prefetch_others) {
    put(sum(prefetch_others));
    await_others();
    __syncthreads();
  }

  __device__ __forceinline__ void advance() { walk.advance(); }

  // Returns the warp's part of a tile's sums, otherwise like to_tile. Synchronizes the block. The rows of
  // prefetch_others() have arrived on return with kOthers, else after await_others() and a barrier.
  template <bool kOthers = false, class PrefetchOthers>
  __device__ __forceinline__ Sums sum(PrefetchOthers&& prefetch_others) {
    Sums sums;
    const int* begins = walk.now();
    const int tile_begin = begins[0], tile_end = begins[walk.count()], slices = slices_of(walk.count());
    walk.prefetch_ahead();
    float by[2] = {0, 0};  // factors of the thread's two segments
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int segment = place.down + threadIdx.x % 32 / 4 + h * 8;
      if (of.of_segments && segment < walk.count()) by[h] = __ldg(of.of_segments + walk.first() + segment);
    }
    bool pending = false;
    for (int begin = tile_begin;; begin += kChunk) {
      await_all();
      __syncthreads();
      if (begin == tile_begin) {
        prefetch_others();
        projection::commit_stage();
      }
      const bool last = begin + kChunk >= tile_end;
      const int now = buffer ^ 1;
      prefetch();
      projection::commit_stage();
      at += kChunk;
      if (at >= end && !last) at = walk.next()[0], end = walk.next()[walk.next_count()];
      pending = at >= end && last;  // the next edges are those of the tile after the next
      if (!pending) find();
      const int count = min(kChunk, tile_end - begin);
      if (of.weights) {
        add<true>(begins, begin, count, now, slices, sums);
      } else {
        add<false>(begins, begin, count, now, slices, sums);
      }
      if (last) break;
    }
    walk.put_ahead();
    if (pending) {
      at = end, end = walk.ahead_end;
      find();
    }
    if (slices > 1) {
      __syncthreads();  // no warp reads the rows of the last chunk any more
      add_slices(slices, reinterpret_cast<float*>(rows + buffer * kRows), sums);
    }
    finish(begins, by, sums);
    if (kOthers && tile_end - tile_begin <= kChunk) {
      await_others();
      __syncthreads();
    }
    return sums;
  }

  // Waits for this thread's copies from prefetch_others().
  __device__ __forceinline__ static void await_others() { await_all_but<1>(); }

  // Stores the warp's part of a tile as 16-bit elements.
  __device__ __forceinline__ void put(const Sums& sums) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kSides * 2; ++i) {
      const int row = place.down + lane / 4 + i % 2 * 8, column = place.side + i / 2 * 8 + lane % 4 * 2;
      const float pair[2] = {sums.of[0][i / 2][i % 2 * 2], sums.of[0][i / 2][i % 2 * 2 + 1]};
      *reinterpret_cast<uint32_t*>(tile + row * kToStride + column) = pack_words<S, 1>(pair).w[0];
    }
  }

  // Tiles of few segments have many edges per segment: warps that would have no segments take every second or fourth
  // mma.
  __device__ __forceinline__ static int slices_of(int count) { return count <= 16 ? 4 : count <= 32 ? 2 : 1; }

  __device__ __forceinline__ static int line_of_warp() { return threadIdx.x / (32 * Place::kBeside); }

  // Adds the slices in a fixed order and leaves zeros in warps without segments. Synchronizes the block.
  __device__ __forceinline__ static void add_slices(int slices, float* memory, Sums& sums) {
    const int groups = 4 / slices, line = line_of_warp();
    for (int half = slices / 2; half > 0; half /= 2) {
      const int from = half * groups;  // lines of warps from here on pass their sums to the lines before
      float* mine = memory + ((line % from) * Place::kBeside + threadIdx.x / 32 % Place::kBeside) * kSides * 4 * 32 +
                    threadIdx.x % 32;
      if (line >= from && line < 2 * from) {
#pragma unroll
        for (int i = 0; i < kSides * 4; ++i) mine[i * 32] = sums.of[0][i / 4][i % 4], sums.of[0][i / 4][i % 4] = 0;
      }
      __syncthreads();
      if (line < from) {
#pragma unroll
        for (int i = 0; i < kSides * 4; ++i) sums.of[0][i / 4][i % 4] += mine[i * 32];
      }
      __syncthreads();
    }
  }

  __device__ __forceinline__ void find() {
    const int line = threadIdx.x / kInLine;
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const int edge = at + line + i * kLines;
      if (edge < end) ids[i] = __ldcs(of.indices + edge);
    }
    const int edge = at + static_cast<int>(threadIdx.x);
    if (of.weights && threadIdx.x < kChunk && edge < end) weight = weight_of(of, edge);
  }

  __device__ __forceinline__ void prefetch() {
    const int line = threadIdx.x / kInLine, in_line = threadIdx.x % kInLine;
    const bool there = in_line < of.vectors;
    const char* base = of.rows + (there ? in_line * 16 : 0);
    uint16_t* to = rows + buffer * kRows + line * kStride + in_line * 8;
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      if (at + line + i * kLines >= end) break;
      projection::copy_vector(to + i * kLines * kStride, row_address(base, ids[i], of.row_bytes), there);
    }
    if (of.weights && threadIdx.x < kChunk) weights[buffer * kWeights + threadIdx.x] = cut_in_two<S>(weight);
    buffer ^= 1;
  }

  // Adds the edges [begin, begin + count), which are in buffer `chunk`.
  template <bool kWeighted>
  __device__ __forceinline__ void add(const int* begins, int begin, int count, int chunk, int slices,
                                      Sums& sums) const {
    const int lane = threadIdx.x % 32, groups = 4 / slices;
    const int slice = line_of_warp() / groups, down = line_of_warp() % groups * 16, row = down + lane / 4;
    const int from = max(begins[down] - begin, 0), to = min(begins[down + 16] - begin, count);
    const int firsts[2] = {begins[row] - begin, begins[row + 8] - begin};
    const int ends[2] = {min(begins[row + 1] - begin, count), min(begins[row + 9] - begin, count)};
    const uint16_t* in_line = rows + chunk * kRows + place.side + lane / 16 * 8;
    const uint32_t* by = weights + chunk * kWeights + lane % 4 * 2;
#pragma unroll 1
    for (int depth = from + slice * kDepth; depth < to; depth += slices * kDepth) {
      uint32_t nearest[4], rest[4], inside[2];  // inside: bits of the edges of both segments
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int first = min(max(firsts[h] - depth, 0), kDepth), last = max(min(ends[h] - depth, kDepth), first);
        inside[h] = (1u << last) - (1u << first) >> lane % 4 * 2;
      }
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        uint32_t two = kTwoOnes<S>, two_rests = 0;
        if constexpr (kWeighted) {
          const uint32_t first = by[depth + k * 8], second = by[depth + k * 8 + 1];
          two = __byte_perm(first, second, 0x5410), two_rests = __byte_perm(first, second, 0x7632);
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const uint32_t bits = inside[h] >> k * 8, mask = (bits & 1) * 0xffffu + (bits & 2) * 0x7fff8000u;
          nearest[k * 2 + h] = two & mask, rest[k * 2 + h] = two_rests & mask;
        }
      }
      const uint16_t* line = in_line + min(depth + lane % 16, count - 1) * kStride;
#pragma unroll
      for (int j = 0; j < kSides; j += 2) {
        uint32_t columns[4];
        projection::load_matrices<true>(line + j * 8, columns);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          projection::half::multiply_add<S>(sums.of[0][j + h], nearest, columns[2 * h], columns[2 * h + 1]);
        }
        if constexpr (kWeighted) {
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            projection::half::multiply_add<S>(sums.of[0][j + h], rest, columns[2 * h], columns[2 * h + 1]);
          }
        }
      }
    }
  }

  __device__ __forceinline__ void finish(const int* begins, const float (&by)[2], Sums& sums) const {
    if (kWeightScale<S> != 1 && of.weights) {
#pragma unroll
      for (int i = 0; i < kSides * 4; ++i) sums.of[0][i / 4][i % 4] *= 1 / kWeightScale<S>;
    }
    if (!all_finite(sums.of[0])) make_again(begins, sums);
    if (!of.of_segments) return;
#pragma unroll
    for (int i = 0; i < kSides * 4; ++i) sums.of[0][i / 4][i % 4] *= by[i % 4 / 2];
  }

  // Recomputes sums that are not finite: an infinity times a weight or remainder of zero is NaN.
  __device__ __forceinline__ void make_again(const int* begins, Sums& sums) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kSides * 4; ++i) {
      const int row = place.down + i % 4 / 2 * 8 + lane / 4, column = place.side + i / 4 * 8 + lane % 4 * 2 + i % 2;
      if (isfinite(sums.of[0][i / 4][i % 4]) || column >= of.vectors * 8) continue;
      float made = 0;
#pragma unroll 1
      for (int edge = begins[row]; edge < begins[row + 1]; ++edge) {
        const char* at = row_address(of.rows, of.indices[edge], of.row_bytes);
        made = fmaf(weight_of(of, edge), to_arithmetic(reinterpret_cast<const S*>(at)[column]), made);
      }
      sums.of[0][i / 4][i % 4] = made;
    }
  }
};

}  // namespace edgeless::cuda::relational
