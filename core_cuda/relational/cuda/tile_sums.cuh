// How the edges of a tile's pieces are summed into rows of shared memory.
//
// A team of lanes has one row of a neighbour, 16 bytes a lane. The edges of a tile lie side by side and every team
// takes as many of them, whatever pieces they belong to: a hub's piece falls to many teams and short ones to one. Of a
// piece that several teams share, all but the first leave their sum in shared memory, and the first adds them in their
// order.
#pragma once

#include "../../common/words.cuh"
#include "../../projection/cuda/tiles.cuh"
#include "entries.cuh"
#include "piece_tiles.h"

namespace edgeless::cuda::relational {

constexpr int kFusedThreads = 256, kFusedWarps = kFusedThreads / 32;
constexpr unsigned kAllLanes = 0xffffffffu;

// Numbers in shared memory: floats, or 16 bits of whatever kind.
template <class S>
using TileNumber = std::conditional_t<std::is_same_v<S, float>, float, uint16_t>;

template <class S>
constexpr int kLeadBytes = kFusedThreads * kVec<S> * static_cast<int>(sizeof(float));

// The tiles of a block's share, one after the other. Where the pieces of a tile begin is asked for a tile ahead.
struct TileWalk {
  const PieceTiles& pieces;
  int64_t tile, last;
  int all, first, end, next_end = 0;  // pieces: of all tiles; of the tile; where those of the next one end
  int ahead = 0;                      // the thread's piece begins there

  __device__ __forceinline__ TileWalk(const PieceTiles& pieces, const Range& range)
      : pieces(pieces), tile(range.begin), last(range.end) {
    all = pieces.tiles[pieces.count], first = pieces.tiles[tile], end = pieces.tiles[tile + 1];
    if (more()) next_end = pieces.tiles[tile + 2];
    ask(first);
  }

  __device__ __forceinline__ void ask(int from) {
    if (threadIdx.x <= kTilePieces && from + static_cast<int>(threadIdx.x) <= all) {
      ahead = pieces.ptr[from + threadIdx.x];
    }
  }

  __device__ __forceinline__ int count() const { return end - first; }
  __device__ __forceinline__ bool more() const { return tile + 1 < last; }
  __device__ __forceinline__ void put(int (&begins)[kTilePieces + 1]) const {
    if (static_cast<int>(threadIdx.x) <= count()) begins[threadIdx.x] = ahead;
  }
  __device__ __forceinline__ void ask_ahead() {
    if (more()) ask(end);
  }
  __device__ __forceinline__ void advance() {
    ++tile, first = end, end = next_end;
    if (more()) next_end = pieces.tiles[tile + 2];
  }
};

constexpr int kSumBatch = 4;  // rows of a team that are on their way

// store(piece, sum) for every piece of the tile that has edges, by the lanes of one team; `begins` are those of `count`
// pieces and the end of the last. leads: kLeadBytes of shared memory. Whole block; meets once within.
template <class S, class Store>
__device__ __forceinline__ void sum_pieces(const Neighbors& of, const int (&begins)[kTilePieces + 1], int count,
                                           float* leads, Store&& store) {
  constexpr int kPer = kVec<S>;
  const int width = 1 << of.team_log2, lane = threadIdx.x & (width - 1);
  const int team = threadIdx.x >> of.team_log2, teams = kFusedThreads >> of.team_log2;
  const int first = begins[0], last = begins[count], share = (last - first + teams - 1) / teams;
  const int begin = min(first + team * share, last), end = min(begin + share, last);
  const char* base = of.rows + min(lane, of.vectors - 1) * 16;
  int piece = 0;  // the last that begins at `begin` or before
#pragma unroll
  for (int step = kTilePieces / 2; step > 0; step /= 2) {
    if (piece + step < count && begins[piece + step] <= begin) piece += step;
  }
  bool leads_on = begin > begins[piece];  // the piece began in another team's share
  int piece_end = begins[piece + 1];
  float sum[kPer] = {};
  const auto keep = [&] {
#pragma unroll
    for (int k = 0; k < kPer; k += 4) {
      *reinterpret_cast<float4*>(leads + threadIdx.x * kPer + k) =
          make_float4(sum[k], sum[k + 1], sum[k + 2], sum[k + 3]);
    }
  };
  for (int window = begin; __any_sync(kAllLanes, window < end); window += width) {
    const int mine = window + lane;
    int index = 0;
    float weight = 1;
    if (mine < end) {
      index = __ldcs(of.indices + mine);
      if (of.weights) weight = of.ids ? __ldg(of.weights + __ldcs(of.ids + mine)) : __ldcs(of.weights + mine);
    }
    for (int b = 0; b < width && __any_sync(kAllLanes, window + b < end); b += kSumBatch) {
      Words<4> raw[kSumBatch];
#pragma unroll
      for (int u = 0; u < kSumBatch; ++u) {
        const int row = __shfl_sync(kAllLanes, index, b + u, width);
        if (window + b + u < end) {
          raw[u] = load_shared_words(reinterpret_cast<const Words<4>*>(row_address(base, row, of.row_bytes)));
        }
      }
#pragma unroll
      for (int u = 0; u < kSumBatch; ++u) {
        const float by = __shfl_sync(kAllLanes, weight, b + u, width);
        const int at = window + b + u;
        if (at >= end) continue;
        float x[kPer];
        unpack_words<S, 4>(raw[u], x);
#pragma unroll
        for (int k = 0; k < kPer; ++k) sum[k] = fmaf(by, x[k], sum[k]);
        if (at + 1 != piece_end) continue;
        leads_on ? keep() : store(piece, sum);
        leads_on = false;
#pragma unroll
        for (int k = 0; k < kPer; ++k) sum[k] = 0;
        do {
          ++piece;
        } while (piece < count && begins[piece + 1] == piece_end);  // which have no edges
        if (piece < count) piece_end = begins[piece + 1];
      }
      __syncwarp();
    }
  }
  const bool goes_on = piece < count && begin < end && end > begins[piece];
  if (goes_on && leads_on) keep();
  __syncthreads();
  if (!goes_on || leads_on) return;
  for (int other = team + 1; first + other * share < piece_end; ++other) {
#pragma unroll
    for (int k = 0; k < kPer; ++k) sum[k] += leads[((other << of.team_log2) + lane) * kPer + k];
  }
  store(piece, sum);
}

}  // namespace edgeless::cuda::relational
