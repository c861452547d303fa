// How the edges of a tile's pieces are summed. So too the neighbours of rows: a row is then what is called a piece
// here, and its neighbours the edges. Numbers of 16 bits are summed in tensor_sums.cuh, floats here, into rows of
// shared memory.
//
// A team of lanes has one row of a neighbour, 16 bytes a lane. The edges of a tile lie side by side and every team
// takes as many of them, whatever pieces they belong to: a hub's piece falls to many teams and short ones to one. Of a
// piece that several teams share, all but the first leave their sum in shared memory, and the first adds them in their
// order.
//
// A tile has few edges for a team, so what counts is that something is always on its way: while a tile is multiplied,
// the first rows of the next one are, while it is summed, the ids of the next one's edges and where the pieces of the
// one after that begin.
#pragma once

#include "../../common/words.cuh"
#include "../../projection/cuda/tiles.cuh"
#include "entries.cuh"
#include "piece_tiles.h"

namespace edgeless::cuda::relational {

constexpr int kFusedLog2 = 8, kFusedThreads = 1 << kFusedLog2;
constexpr unsigned kAllLanes = 0xffffffffu;

// Numbers in shared memory: floats, or 16 bits of whatever kind.
template <class S>
using TileNumber = std::conditional_t<std::is_same_v<S, float>, float, uint16_t>;

// The tiles of a block's share, one after the other.
struct TileWalk {
  using Begins = int[3][kTilePieces + 1];

  const int32_t *tiles, *ptr;
  Begins& begins;  // of the pieces of this tile and of the two after it, and the ends of the last
  int tile, last, slot = 0;
  int bounds[5];      // first pieces of this tile and of those after it; behind the share's last tile there are none
  int ahead = 0;      // the thread's piece of the tile after the next begins there
  int ahead_end = 0;  // and that tile's edges end there

  // To be followed by a barrier.
  __device__ __forceinline__ TileWalk(const int32_t* tiles, const int32_t* ptr, int first, int last, Begins& begins)
      : tiles(tiles), ptr(ptr), begins(begins), tile(first), last(last) {
#pragma unroll
    for (int i = 0; i < 5; ++i) bounds[i] = tiles[min(first + i, last)];
    if (threadIdx.x <= kTilePieces) {
      const int i = threadIdx.x;
      const int now = ptr[min(bounds[0] + i, bounds[1])], next = ptr[min(bounds[1] + i, bounds[2])];
      begins[0][i] = now, begins[1][i] = next;
    }
  }

  __device__ __forceinline__ int first() const { return bounds[0]; }
  __device__ __forceinline__ int count() const { return bounds[1] - bounds[0]; }
  __device__ __forceinline__ int next_count() const { return bounds[2] - bounds[1]; }
  __device__ __forceinline__ bool more() const { return tile + 1 < last; }
  __device__ __forceinline__ const int* now() const { return begins[slot]; }
  __device__ __forceinline__ const int* next() const { return begins[slot == 2 ? 0 : slot + 1]; }

  __device__ __forceinline__ void ask_ahead() {
    ahead_end = ptr[bounds[3]];
    if (threadIdx.x <= kTilePieces) ahead = ptr[min(bounds[2] + static_cast<int>(threadIdx.x), bounds[3])];
  }
  // When nobody needs the tile before this one.
  __device__ __forceinline__ void put_ahead() {
    if (threadIdx.x <= kTilePieces) begins[slot == 0 ? 2 : slot - 1][threadIdx.x] = ahead;
  }
  __device__ __forceinline__ void advance() {
    ++tile, slot = slot == 2 ? 0 : slot + 1;
#pragma unroll
    for (int i = 0; i < 4; ++i) bounds[i] = bounds[i + 1];
    bounds[4] = tiles[min(tile + 4, last)];
  }
};

// Waits for all that this thread asked for.
__device__ __forceinline__ void await_all() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_all;");
#endif
}

// But for its last stage.
__device__ __forceinline__ void await_all_but_one() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group 1;");
#endif
}

// An edge's weight.
__device__ __forceinline__ float weight_of(const Neighbors& of, int edge) {
  if (!of.weights) return 1;
  return of.ids ? __ldg(of.weights + __ldcs(of.ids + edge)) : __ldcs(of.weights + edge);
}

// Columns of a warp's part of a tile.
template <class S, int kWidth>
constexpr int kWarpColumns = std::is_same_v<S, float> ? kWidth / 2 : 64;
// The same of 16-bit numbers where there are few blocks: twice as many warps then take half as long for a tile.
constexpr int kFewColumns = 32;

// The sums of tile after tile; of 16-bit numbers in tensor_sums.cuh.
template <class S, int kWidth, int kColumns = kWarpColumns<S, kWidth>>
struct TileSums;

constexpr int kSumBatch = 4;  // rows of a team that are on their way

template <int kWidth, int kColumns>
struct TileSums<float, kWidth, kColumns> {
  static constexpr int kPer = kVec<float>;
  static constexpr int kThreads = kFusedThreads;  // of a block
  static constexpr bool kOthersAhead = true;
  static constexpr int kBytes = kFusedThreads * kPer * static_cast<int>(sizeof(float));  // of shared memory
  struct Ids {
    int index;
    float weight;
  };
  const Neighbors& of;
  TileWalk& walk;
  float* leads;                       // kBytes
  int begin = 0, end = 0, share = 0;  // edges [begin, end) of `share` at most, which is the same in the whole block
  Ids ids, later;                     // of the first edges, one a lane, and of those after them
  Words<4> raw[kSumBatch];

  __device__ __forceinline__ TileSums(const Neighbors& of, TileWalk& walk, void* memory)
      : of(of), walk(walk), leads(static_cast<float*>(memory)) {}

  // To be called first: asks for the first tile's rows. Whole block; meets once within.
  __device__ __forceinline__ void start() {
    __syncthreads();
    ask(walk.now(), walk.count(), first_ids(walk.now(), walk.count()));
  }

  // The sums of a tile as rows of `tile`, zeros behind the last and, where kEmpty, where a piece has no edges. When it
  // returns all are there, and rows of the next tile are on their way. Columns that no row has are not written.
  // ask_others() asks for other rows: of the next tile where kOthersAhead, which are there when that is summed, else of
  // this one, which are there when it returns. Whole block.
  template <int kStride, bool kEmpty, class AskOthers>
  __device__ __forceinline__ void to_tile(float* tile, AskOthers&& ask_others) {
    const int count = walk.count();
    const int* now = walk.now();
    walk.ask_ahead();
    const Ids next_ids = first_ids(walk.next(), walk.next_count());
    constexpr int kInLine = kWidth / 4, kLines = kFusedThreads / kInLine;
    for (int row = threadIdx.x / kInLine + (kEmpty ? 0 : count); row < min(count + 8, kTilePieces); row += kLines) {
      if (row < count && now[row] < now[row + 1]) continue;
      *reinterpret_cast<float4*>(tile + row * kStride + threadIdx.x % kInLine * 4) = make_float4(0, 0, 0, 0);
    }
    sum(now, count, [&](int piece, const float (&sums)[kPer]) {
      if (lane() >= of.vectors) return;
      *reinterpret_cast<float4*>(tile + piece * kStride + lane() * kPer) =
          make_float4(sums[0], sums[1], sums[2], sums[3]);
    });
    await_all();
    __syncthreads();
    walk.put_ahead();
    ask(walk.next(), walk.next_count(), next_ids);
    ask_others();
  }

  // To the next tile, when this one's sums are done with. Whole block.
  __device__ __forceinline__ void advance() {
    walk.advance();
    __syncthreads();
  }

  __device__ __forceinline__ int width() const { return 1 << of.team_log2; }
  __device__ __forceinline__ int lane() const { return threadIdx.x & (width() - 1); }
  __device__ __forceinline__ int team() const { return threadIdx.x >> of.team_log2; }
  __device__ __forceinline__ Ids ids_at(int edge, int end) const {
    if (edge >= end) return {0, 1};
    const int index = __ldcs(of.indices + edge);
    return {index, weight_of(of, edge)};
  }
  __device__ __forceinline__ int share_of(const int* begins, int count) const {
    const int teams = kFusedThreads >> of.team_log2;
    return (begins[count] - begins[0] + teams - 1) >> (kFusedLog2 - of.team_log2);
  }
  __device__ __forceinline__ const Words<4>* row_at(int row) const {
    return reinterpret_cast<const Words<4>*>(
        row_address(of.rows + min(lane(), of.vectors - 1) * 16, row, of.row_bytes));
  }

  // Of the first edges of a tile.
  __device__ __forceinline__ Ids first_ids(const int* begins, int count) const {
    const int of_team = share_of(begins, count), at = begins[0] + of_team * team();
    return ids_at(at + lane(), min(at + of_team, begins[count]));
  }

  // Asks for a tile's first rows.
  __device__ __forceinline__ void ask(const int* begins, int count, Ids first) {
    share = share_of(begins, count), ids = first;
    begin = min(begins[0] + share * team(), begins[count]), end = min(begin + share, begins[count]);
#pragma unroll
    for (int u = 0; u < kSumBatch; ++u) {
      const int row = __shfl_sync(kAllLanes, ids.index, u, width());
      if (begin + u < end) raw[u] = load_shared_words(row_at(row));
    }
    if (share > kSumBatch) later = ids_at(begin + width() + lane(), end);
  }

  // store(piece, sum) for every piece of the tile that has edges, by the lanes of one team; `begins` are those of
  // `count` pieces and the end of the last. Whole block; meets once within.
  template <class Store>
  __device__ __forceinline__ void sum(const int* begins, int count, Store&& store) {
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
    for (int done = 0; done < share; done += kSumBatch) {
      const int in_window = done & (width() - 1);
      const bool wraps = in_window + kSumBatch == width();
      const int from = wraps ? later.index : ids.index;
#pragma unroll
      for (int u = 0; u < kSumBatch; ++u) {
        const float by = __shfl_sync(kAllLanes, ids.weight, in_window + u, width());
        const int row = __shfl_sync(kAllLanes, from, in_window + kSumBatch + u, width());
        const int at = begin + done + u;
        if (at >= end) continue;
        float x[kPer];
        unpack_words<float, 4>(raw[u], x);
        if (at + kSumBatch < end) raw[u] = load_shared_words(row_at(row));
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
      if (wraps) {
        ids = later;
        later = ids_at(begin + done + kSumBatch + width() + lane(), end);
      }
    }
    const bool goes_on = piece < count && begin < end && end > begins[piece];
    if (goes_on && leads_on) keep();
    __syncthreads();
    if (!goes_on || leads_on) return;
    for (int other = team() + 1; begins[0] + other * share < piece_end; ++other) {
#pragma unroll
      for (int k = 0; k < kPer; ++k) sum[k] += leads[((other << of.team_log2) + lane()) * kPer + k];
    }
    store(piece, sum);
  }
};

}  // namespace edgeless::cuda::relational
