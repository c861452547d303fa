// Sums of segments, for rows of up to 64 elements, in the registers from which tensor cores read them: a warp sums the
// edges of sixteen segments. No row goes through shared memory.
//
// A group of four lanes sums two segments. It loads the rows of the first two edges of both at once, because most
// segments have one or two edges, and then one edge of each at a time, up to the longest segment of the warp. A segment
// of more than kFewEdges edges is summed by the whole warp, a batch of rows at a time.
#pragma once

#include <climits>
#include <type_traits>

#include "../../common/tf32.cuh"
#include "../../common/thresholds.h"
#include "geometry.h"
#include "scaled_halves.cuh"
#include "segment_tiles.h"
#include "tile_sums.cuh"

namespace edgeless::cuda::relational {

constexpr int kFewEdges = 8;   // the most edges of a segment that four lanes sum
constexpr int kLongBatch = 8;  // vectors of a long segment's rows that a lane has in flight

template <Weights kWeights>
constexpr bool kByEdge = kWeights == Weights::in_order || kWeights == Weights::by_id;

// weight_of() for a kind of weights that is a template argument.
template <Weights kWeights>
__device__ __forceinline__ float weight_at(const Neighbors& of, int edge) {
  if constexpr (!kByEdge<kWeights>) return 1;
  if constexpr (kWeights == Weights::by_id) return __ldg(of.weights + __ldcs(of.ids + edge));
  return __ldcs(of.weights + edge);
}

// The lane's two segments. Each of the four lanes of a group holds the row and weight of one of up to four edges of
// either segment.
struct Edges {
  int begin[2], count[2];
  int row[2];       // -1: none
  float weight[2];  // of the edge, or of the segment
};

// Loads edges `from` to `from` + 3 of the group's segments, one per lane.
template <Weights kWeights>
__device__ __forceinline__ void load_edges(const Neighbors& of, Edges& edges, int from) {
  const int edge = from + static_cast<int>(threadIdx.x % 4);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    edges.row[i] = -1;
    if constexpr (kWeights != Weights::of_segments) edges.weight[i] = 1;
    if (edge >= edges.count[i]) continue;
    edges.row[i] = __ldcs(of.indices + edges.begin[i] + edge);
    if constexpr (kByEdge<kWeights>) edges.weight[i] = weight_at<kWeights>(of, edges.begin[i] + edge);
  }
}

struct Ends {
  int begin[2], end[2];
};

// Segment i of the lane, among the sixteen from `first` on.
__device__ __forceinline__ int segment_of_lane(int first, int i) {
  return first + static_cast<int>(threadIdx.x % 32 / 4) + 8 * i;
}

// Begins and ends of the lane's segments. Segments from `last` on have no edges.
__device__ __forceinline__ Ends load_ends(const int32_t* ptr, int first, int last) {
  Ends ends;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int segment = segment_of_lane(first, i);
    ends.begin[i] = ptr[min(segment, last)], ends.end[i] = ptr[min(segment + 1, last)];
  }
  return ends;
}

// The first edges of segments with these ends.
template <Weights kWeights>
__device__ __forceinline__ Edges first_edges(const Neighbors& of, const Ends& ends) {
  Edges edges;
#pragma unroll
  for (int i = 0; i < 2; ++i) edges.begin[i] = ends.begin[i], edges.count[i] = ends.end[i] - ends.begin[i];
  load_edges<kWeights>(of, edges, 0);
  return edges;
}

// Loads the weights of the lane's segments, among the sixteen from `first` on.
__device__ __forceinline__ void load_weights(const Neighbors& of, int first, int last, Edges& edges) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int segment = segment_of_lane(first, i);
    edges.weight[i] = segment < last ? __ldcs(of.of_segments + segment) : 1;
  }
}

static __device__ Words<4> zeros[kMostShortWidth / 4];

__device__ __forceinline__ const Words<4>* row_at(const Neighbors& of, int row) {
  return reinterpret_cast<const Words<4>*>(row_address(of.rows, row, of.row_bytes));
}

// The vectors that a lane has of a row of kWidth elements S, and the elements of a vector.
template <class S, int kWidth>
using LaneVectors = Words<4>[kWidth * sizeof(S) / 64];
template <class S>
constexpr int kOfVector = kNumbers<S, 4>;

// kFull: rows have kWidth elements.
template <class S, int kWidth, bool kFull>
__device__ __forceinline__ void load_row(const Neighbors& of, int row, LaneVectors<S, kWidth>& x) {
  const int in_group = threadIdx.x % 4;
  const Words<4>* const none = zeros + in_group;
  const Words<4>* const at = row < 0 ? none : row_at(of, row) + in_group;
#pragma unroll
  for (int m = 0; m < std::extent_v<LaneVectors<S, kWidth>>; ++m) {
    x[m] = load_shared_words(kFull || m * 4 + in_group < of.vectors ? at + m * 4 : none);
  }
}

// A segment that the whole warp sums. Each lane holds one of 32 of its edges.
struct LongSegment {
  int owner;  // first lane of the group that has the segment, plus 1 if it is the group's second segment
  int begin, count, row;
  float weight;
};

template <Weights kWeights>
__device__ __forceinline__ void load_edges(const Neighbors& of, LongSegment& segment, int from) {
  const int edge = from + static_cast<int>(threadIdx.x % 32);
  segment.row = -1, segment.weight = 0;
  if (edge >= segment.count) return;
  segment.row = __ldcs(of.indices + segment.begin + edge);
  segment.weight = weight_at<kWeights>(of, segment.begin + edge);
}

// Removes the first segment from `many` and loads its first 32 edges. Bit 4 i of `many` is the first segment of the
// group that begins at lane 4 i, and bit 4 i + 1 the second.
template <Weights kWeights>
__device__ __forceinline__ LongSegment take_long(const Neighbors& of, const Edges& edges, uint32_t& many) {
  LongSegment segment;
  segment.owner = __ffs(many) - 1, many &= many - 1;
  int begin[2], count[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    begin[i] = __shfl_sync(kAllLanes, edges.begin[i], segment.owner & ~3);
    count[i] = __shfl_sync(kAllLanes, edges.count[i], segment.owner & ~3);
  }
  const bool second = segment.owner & 1;
  segment.begin = second ? begin[1] : begin[0], segment.count = second ? count[1] : count[0];
  load_edges<kWeights>(of, segment, 0);
  return segment;
}

// Sums the segments in `many` and writes the sums to the registers of the groups that have these segments.
template <class S, int kWidth, Weights kWeights>
__device__ __forceinline__ void sum_long(const Neighbors& of, const Edges& edges, uint32_t many,
                                         WarpRows<kWidth>& sum) {
  constexpr int kPer = kOfVector<S>;
  constexpr int kLanes = kWidth / kPer, kRows = 32 / kLanes;  // lanes of a row, and rows of one load
  const int lane = threadIdx.x % 32, in_row = lane % kLanes;
  LongSegment next = take_long<kWeights>(of, edges, many);
#pragma unroll 1
  while (true) {
    LongSegment segment = next;
    const bool more = many != 0;
    if (more) next = take_long<kWeights>(of, edges, many);
    float s[kPer] = {};
#pragma unroll 1
    for (int i = 0; i < segment.count; i += 32) {
      const int row = segment.row;
      const float weight = segment.weight;
      if (i + 32 < segment.count) load_edges<kWeights>(of, segment, i + 32);
#pragma unroll
      for (int j = 0; j < kLanes; j += kLongBatch) {
        if (j > 0 && i + j * kRows >= segment.count) break;
        Words<4> raw[kLongBatch];
#pragma unroll
        for (int u = 0; u < kLongBatch; ++u) {
          const int at = __shfl_sync(kAllLanes, row, (j + u) * kRows + lane / kLanes);
          raw[u] = load_shared_words(at < 0 || in_row >= of.vectors ? zeros : row_at(of, at) + in_row);
        }
#pragma unroll
        for (int u = 0; u < kLongBatch; ++u) {
          float by = 1;
          if constexpr (kByEdge<kWeights>) by = __shfl_sync(kAllLanes, weight, (j + u) * kRows + lane / kLanes);
          float x[kPer];
          unpack_words<S>(raw[u], x);
#pragma unroll
          for (int k = 0; k < kPer; ++k) s[k] = fmaf(by, x[k], s[k]);
        }
      }
    }
#pragma unroll
    for (int step = kLanes; step < 32; step *= 2) {
#pragma unroll
      for (int k = 0; k < kPer; ++k) s[k] += __shfl_xor_sync(kAllLanes, s[k], step);
    }
    const bool own = lane / 4 == segment.owner / 4;
#pragma unroll
    for (int m = 0; m < kLanes / 4; ++m) {
#pragma unroll
      for (int k = 0; k < kPer; ++k) {
        const float number = __shfl_sync(kAllLanes, s[k], m * 4 + lane % 4);
        if (own && segment.owner % 2 == 0) sum[0][kPer * m + k] = number;
        if (own && segment.owner % 2 == 1) sum[1][kPer * m + k] = number;
      }
    }
    if (!more) return;
  }
}

// Sums the warp's segments. Each segment of more than kFew edges is summed by all lanes.
template <int kWidth, Weights kWeights, bool kFull, class S = float, int kFew = kFewEdges>
__device__ __forceinline__ void sum_segments(const Neighbors& of, Edges edges, WarpRows<kWidth>& sum) {
  constexpr int kVectors = std::extent_v<LaneVectors<S, kWidth>>, kPer = kOfVector<S>;
  using Rows = LaneVectors<S, kWidth>[2];
  const bool few[2] = {edges.count[0] <= kFew, edges.count[1] <= kFew};
  uint32_t many = 0;
#pragma unroll
  for (int i = 0; i < 2; ++i) many |= __ballot_sync(kAllLanes, threadIdx.x % 4 == 0 && !few[i]) << i;
  const int rounds = __reduce_max_sync(kAllLanes, max(few[0] ? edges.count[0] : 0, few[1] ? edges.count[1] : 0));
  const auto load = [&](int round, float (&by)[2], Rows& x) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      by[i] = 1;
      if constexpr (kByEdge<kWeights>) by[i] = __shfl_sync(kAllLanes, edges.weight[i], round, 4);
      const int row = __shfl_sync(kAllLanes, edges.row[i], round, 4);
      load_row<S, kWidth, kFull>(of, few[i] ? row : -1, x[i]);
    }
  };
  float by[2], by_second[2];
  Rows x, second;
  load(0, by, x), load(1, by_second, second);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int m = 0; m < kVectors; ++m) {
      float one[kPer], other[kPer];
      unpack_words<S>(x[i][m], one), unpack_words<S>(second[i][m], other);
#pragma unroll
      for (int k = 0; k < kPer; ++k) sum[i][kPer * m + k] = fmaf(by_second[i], other[k], by[i] * one[k]);
    }
  }
#pragma unroll 1
  for (int round = 2; round < rounds; ++round) {
    if (round % 4 == 0) load_edges<kWeights>(of, edges, round);
    load(round, by, x);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int m = 0; m < kVectors; ++m) {
        float more[kPer];
        unpack_words<S>(x[i][m], more);
#pragma unroll
        for (int k = 0; k < kPer; ++k) sum[i][kPer * m + k] = fmaf(by[i], more[k], sum[i][kPer * m + k]);
      }
    }
  }
  if (many) sum_long<S, kWidth, kWeights>(of, edges, many, sum);
  if constexpr (kWeights == Weights::of_segments) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int k = 0; k < kPer * kVectors; ++k) sum[i][k] *= edges.weight[i];
    }
  }
}

// The matrix [depth, columns] by which sums are multiplied, as stored in global memory.
struct TypeMatrix {
  const float* numbers;
  int64_t row_numbers;
  bool transposed;  // it is stored as [columns, depth]
  int depth, columns;

  __device__ __forceinline__ float at(int row, int column) const {
    return numbers[transposed ? column * row_numbers + row : row * row_numbers + column];
  }
};

// Recomputes products of segments [first, last) that are not finite: split() turns an infinity into NaN.
template <int kWidth>
__device__ __noinline__ void make_again(const SegmentTiles& segments, const Neighbors& of, const TypeMatrix& matrix,
                                        int first, int last, WarpRows<kWidth>& product) {
  const int lane = threadIdx.x % 32;
  for (int i = 0; i < 2; ++i) {
    const int segment = segment_of_lane(first, i);
    if (segment >= last) continue;
    WarpRows<kWidth> made = {};
    for (int k = 0; k < matrix.depth; ++k) {
      float x = 0;
      for (int edge = segments.ptr[segment]; edge < segments.ptr[segment + 1]; ++edge) {
        x = fmaf(weight_of(of, edge), reinterpret_cast<const float*>(row_at(of, of.indices[edge]))[k], x);
      }
      if (of.of_segments) x *= of.of_segments[segment];
      for (int j = 0; j < kWidth / 4; ++j) {
        const int column = j / 4 * 16 + lane % 4 * 4 + j % 4;
        if (column < matrix.columns) made[i][j] = fmaf(x, matrix.at(k, column), made[i][j]);
      }
    }
    for (int j = 0; j < kWidth / 4; ++j) {
      if (!isfinite(product[i][j])) product[i][j] = made[i][j];
    }
  }
}

// Recomputes those of a warp's products that are not finite.
template <int kWidth>
__device__ __forceinline__ void make_finite(const SegmentTiles& segments, const Neighbors& of, const TypeMatrix& matrix,
                                            int first, int last, WarpRows<kWidth>& product) {
  if (all_finite(product)) return;
  WarpRows<kWidth> again;  // a copy in local memory, so that `product` stays in registers
  memcpy(again, product, sizeof(again));
  make_again<kWidth>(segments, of, matrix, first, last, again);
  memcpy(product, again, sizeof(again));
}

// Stores the warp's products of segments below `last` with a streaming hint, since they are read once.
template <int kWidth>
__device__ __forceinline__ void store_products(float* out, int columns, int first, int last,
                                               const WarpRows<kWidth>& product) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int segment = segment_of_lane(first, i);
    if (segment >= last) continue;
    float* const to = out + static_cast<int64_t>(segment) * columns + lane % 4 * 4;
#pragma unroll
    for (int m = 0; m < kWidth / 16; ++m) {
      const float* const four = product[i] + 4 * m;
      if (m * 16 + lane % 4 * 4 >= columns) continue;
      __stcs(reinterpret_cast<float4*>(to + m * 16), make_float4(four[0], four[1], four[2], four[3]));
    }
  }
}

// Adds a zero that depends on `number` and that the compiler cannot see to ids in flight, so that the warp waits for
// them after `number` is computed and not where they are loaded.
template <Weights kWeights>
__device__ __forceinline__ void await_later(Edges& edges, float number) {
  const int late = static_cast<int>(__float_as_uint(number) & threadIdx.y);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    edges.row[i] += late;
    if constexpr (kWeights != Weights::none) {
      edges.weight[i] = __int_as_float(__float_as_int(edges.weight[i]) + late);
    }
  }
}

}  // namespace edgeless::cuda::relational
