// The gradient of a minimum or maximum whose elements belong to one edge each (ties "first"): sorted by that edge, then
// gathered.
//
// First, sort_kernel sorts the elements of a feature tile of each row by receiving edge, as items (value, column), and
// records for every edge where its items are. Then grad_x[j] is a sum over the out-edges (j, i): sorted_grad_kernel is
// a segment reduction over the CSC (common/fold.cuh) that reads only the items of each edge. So the traffic is a few
// times the elements of the output, not edges times features, and sums are added edge by edge, without atomics. The
// order of an edge's items varies from run to run, but their columns differ, so results do not. Storage: half,
// bfloat16, with sums in float; float items would be twice as large, more memory than other kernels need.
#pragma once

#include "../../common/fold.cuh"
#include "../../common/warp.cuh"
#include "args.h"

namespace edgeless::cuda::reduction {

constexpr int kBins = 1024;
constexpr int kChunk = 128;  // bins that a warp scans at once, four per lane

// The bits of a value in the lower half, its column in the feature tile in the upper half.
using Item = Words<1>;
static_assert(sizeof(Item) == kSortItemBytes);

template <class S>
__device__ __forceinline__ float item_value(const Item& item) {
  if constexpr (std::is_same_v<S, __nv_bfloat16>) return __uint_as_float(item.w[0] << 16);
  if constexpr (std::is_same_v<S, __half>) return __half2float(__ushort_as_half(static_cast<uint16_t>(item.w[0])));
}

__device__ __forceinline__ uint32_t item_column(const Item& item) { return item.w[0] >> 16; }

// A lane's elements of a row's feature tile, in vectors of up to 16 bytes: element k of vector v is column
// first_of(v) + k.
template <class S, class Arg, int kColumns>
struct SortedElements {
  static constexpr int kLane = kColumns / 32, kPer = kLane < kNumbers<S, 4> ? kLane : kNumbers<S, 4>;
  static constexpr int kVectors = kLane / kPer, kWords = kPer * sizeof(S) / 4;
  static constexpr int kArgWords = kPer * sizeof(Arg) / 4, kStep = kArgWords < 4 ? kArgWords : 4;

  Words<kWords> grad[kVectors];
  uint32_t code_words[kVectors][kArgWords];

  static __device__ __forceinline__ int first_of(int v, int lane) { return (v * 32 + lane) * kPer; }

  __device__ __forceinline__ void load(const SortArgs& args, int32_t row, int lane) {
    const char* grads = row_address(args.grad.base, row, args.grad.row);
    const char* codes =
        row_address(static_cast<const char*>(args.arg), row, static_cast<uint32_t>(args.width * sizeof(Arg)));
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (first_of(v, lane) >= args.columns) continue;
      const int column = args.first + first_of(v, lane);
      grad[v] = load_words_once(reinterpret_cast<const Words<kWords>*>(grads + column * sizeof(S)));
#pragma unroll
      for (int part = 0; part < kArgWords / kStep; ++part) {
        const auto words = load_words_once(reinterpret_cast<const Words<kStep>*>(codes + column * sizeof(Arg)) + part);
#pragma unroll
        for (int i = 0; i < kStep; ++i) code_words[v][part * kStep + i] = words.w[i];
      }
    }
  }

  __device__ __forceinline__ uint32_t code(int v, int k) const {
    if constexpr (sizeof(Arg) == 4) return code_words[v][k];
    if constexpr (sizeof(Arg) == 2) return code_words[v][k / 2] >> (k % 2 * 16) & 0xffff;
    if constexpr (sizeof(Arg) == 1) return code_words[v][k / 4] >> (k % 4 * 8) & 0xff;
  }

  __device__ __forceinline__ Item item(int v, int k, int lane) const {
    const uint32_t column = first_of(v, lane) + k;
    return {{(grad[v].w[k / 2] >> (k % 2 * 16) & 0xffff) | column << 16}};
  }
};

// Exclusive scan of one chunk of counts, starting at `total`; returns the new total. Called by whole warps.
__device__ __forceinline__ uint32_t scan_chunk(uint4* bins, uint32_t total, int lane) {
  const uint4 count = bins[lane];
  const uint32_t sum = count.x + count.y + count.z + count.w;
  uint32_t through = sum;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const uint32_t before = __shfl_up_sync(kFullWarp, through, step);
    if (lane >= step) through += before;
  }
  const uint32_t begin = total + through - sum;
  bins[lane] = {begin, begin + count.x, begin + count.x + count.y, begin + count.x + count.y + count.z};
  return total + __shfl_sync(kFullWarp, through, 31);
}

// A warp's shared memory: bins, later overwritten by items, and a dummy bin per lane for elements outside.
struct SortRoom {
  uint4 fours[kBins / 4];
  uint32_t spare[32];
};

// Counting sort of a row's elements by edge. Sets `at` to the sorted index of each element, writes args.places of all
// edges, and returns the number of elements. Atomics of several lanes on one bin serialize, so short rows have several
// bins per edge: bin (edge << copies) + copy. kLong: the row has more edges than there are bins and is processed in
// windows.
template <bool kLong, class Elements>
__device__ __forceinline__ uint32_t sort_row(const SortArgs& args, const Elements& elements, SortRoom& room,
                                             int32_t begin, int degree, int lane,
                                             uint32_t (&at)[Elements::kVectors][Elements::kPer]) {
  const int32_t* ids = static_cast<const int32_t*>(args.csr.edge_ids);
  const auto id_of = [&](int edge) { return ids ? __ldg(ids + begin + edge) : begin + edge; };
  const int32_t early = !kLong && lane < degree ? id_of(lane) : 0;  // in flight during the count
  const uint32_t* bins = reinterpret_cast<uint32_t*>(room.fours);
  const int copies = kLong ? 0 : max(0, min(5, 7 - (32 - __clz(degree - 1))));  // as many as fit in one chunk
  const uint32_t spare = sizeof(room.fours) + lane * 4;
  uint32_t total = 0;
#pragma unroll 1
  for (int window = 0; window < degree; window += kBins) {
    const int edges = kLong ? min(kBins, degree - window) : degree;
    const int chunks = ((edges << copies) + kChunk - 1) / kChunk;
#pragma unroll 1
    for (int c = 0; c < chunks; ++c) room.fours[c * 32 + lane] = {0, 0, 0, 0};
    __syncwarp();
    const auto in_window = [&](int v, int k) {
      const bool inside = Elements::first_of(v, lane) < args.columns;
      return kLong ? inside && elements.code(v, k) - window < static_cast<uint32_t>(edges) : inside;
    };
    const auto bin_of = [&](int v, int k) {
      const bool is = kLong ? in_window(v, k) : in_window(v, 0);
      const uint32_t first = is ? (lane & ((1 << copies) - 1)) * 4 : spare, step = is ? 4u << copies : 0;
      return reinterpret_cast<uint32_t*>(reinterpret_cast<char*>(&room) + first +
                                         (elements.code(v, k) - (kLong ? window : 0)) * step);
    };
#pragma unroll
    for (int v = 0; v < Elements::kVectors; ++v) {
#pragma unroll
      for (int k = 0; k < Elements::kPer; ++k) {
        const uint32_t rank = atomicAdd(bin_of(v, k), 1);
        if (!kLong || in_window(v, k)) at[v][k] = rank;
      }
    }
    __syncwarp();
#pragma unroll 1
    for (int c = 0; c < chunks; ++c) total = scan_chunk(room.fours + c * 32, total, lane);
    __syncwarp();
#pragma unroll
    for (int v = 0; v < Elements::kVectors; ++v) {
#pragma unroll
      for (int k = 0; k < Elements::kPer; ++k) {
        const uint32_t first = *bin_of(v, k);
        if (!kLong || in_window(v, k)) at[v][k] += first;
      }
    }
    const auto note = [&](int edge, int32_t id) {
      const uint32_t from = bins[edge << copies], to = edge + 1 < edges ? bins[(edge + 1) << copies] : total;
      args.places[id] = from | (to - from) << 16;
    };
    if (!kLong && degree <= 32) {
      if (lane < degree) note(lane, early);
    } else {
      constexpr int kNotes = kLong ? 8 : 4;
#pragma unroll 1
      for (int edge = lane; edge < edges; edge += 32 * kNotes) {
        int32_t id[kNotes];
#pragma unroll
        for (int u = 0; u < kNotes; ++u) id[u] = edge + 32 * u < edges ? id_of(window + edge + 32 * u) : 0;
#pragma unroll
        for (int u = 0; u < kNotes; ++u) {
          if (edge + 32 * u < edges) note(edge + 32 * u, id[u]);
        }
      }
    }
    __syncwarp();
    if (!kLong) break;
  }
  return total;
}

// Target occupancy in blocks per SM, for __launch_bounds__.
template <class Arg>
constexpr int sort_blocks(int columns) {
  if (columns == 512) return sizeof(Arg) == 4 ? 5 : 6;
  return columns == 256 ? (sizeof(Arg) == 4 ? 8 : 9) : 10;
}
constexpr int sorted_grad_blocks(int ahead) { return ahead == 1 ? 8 : 7; }

// One warp per row.
template <class S, class Arg, int kColumns>
__global__ void __launch_bounds__(kSortThreads, sort_blocks<Arg>(kColumns))
    sort_kernel(const __grid_constant__ SortArgs args) {
  using Elements = SortedElements<S, Arg, kColumns>;
  constexpr int kItemVectors = kColumns * static_cast<int>(sizeof(Item)) / 16;
  static_assert(kItemVectors <= kBins / 4);
  __shared__ SortRoom rooms[kSortThreads / 32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t own_row = static_cast<int64_t>(blockIdx.x) * (kSortThreads / 32) + warp;
  if (own_row >= args.csr.num_rows) return;
  const int32_t row = static_cast<int32_t>(own_row);
  const int32_t* indptr = static_cast<const int32_t*>(args.csr.indptr);
  const int32_t begin = __ldg(indptr + row), degree = __ldg(indptr + row + 1) - begin;
  Elements elements;
  elements.load(args, row, lane);
  if (degree == 0) return;

  SortRoom& room = rooms[warp];
  uint32_t at[Elements::kVectors][Elements::kPer];
  const uint32_t total = degree <= kBins ? sort_row<false>(args, elements, room, begin, degree, lane, at)
                                         : sort_row<true>(args, elements, room, begin, degree, lane, at);
  Item* staged = reinterpret_cast<Item*>(room.fours);
#pragma unroll
  for (int v = 0; v < Elements::kVectors; ++v) {
    if (Elements::first_of(v, lane) >= args.columns) continue;
#pragma unroll
    for (int k = 0; k < Elements::kPer; ++k) staged[at[v][k]] = elements.item(v, k, lane);
  }
  __syncwarp();
  char* to = static_cast<char*>(args.items) + own_row * args.item_row * static_cast<int64_t>(sizeof(Item));
  const int vectors = (static_cast<int>(total * sizeof(Item)) + 15) / 16;
#pragma unroll
  for (int i = 0; i < kItemVectors / 32; ++i) {
    const int vector = i * 32 + lane;
    if (vector < vectors) reinterpret_cast<uint4*>(to)[vector] = room.fours[vector];
  }
}

// The sums of a row's feature tile, in the registers of a sub-warp of kLanes lanes. A lane has groups of four columns,
// number lane, lane + kLanes and so on, so that accesses have no bank conflicts in shared memory and are coalesced in
// global memory.
template <class S, int kLanes>
struct TakenSums {
  using I = int32_t;
  static constexpr int kFours = kSortPer / 4;
  struct Piece {
    float4 sum[kFours];
  };
  static_assert(sizeof(Piece) == kSortPieceBytes);

  const SortArgs& args;
  const int lane;

  __device__ TakenSums(const SortArgs& args, int lane) : args(args), lane(lane) {}

  __device__ __forceinline__ void begin(I, I) {}

  __device__ __forceinline__ void merge(Piece& piece, const Piece& later) const {
#pragma unroll
    for (int k = 0; k < kFours; ++k) {
      piece.sum[k].x += later.sum[k].x, piece.sum[k].y += later.sum[k].y;
      piece.sum[k].z += later.sum[k].z, piece.sum[k].w += later.sum[k].w;
    }
  }

  __device__ __forceinline__ void store(int64_t row, const Piece& piece) const {
    S* to = static_cast<S*>(args.grad_x) + row * args.width + args.first;
#pragma unroll
    for (int k = 0; k < kFours; ++k) {
      const int column = 4 * (lane + k * kLanes);
      const float x[4] = {piece.sum[k].x, piece.sum[k].y, piece.sum[k].z, piece.sum[k].w};
      if (column < args.columns) store_words_once(to + column, pack_words<S, sizeof(S)>(x));
    }
  }

  __device__ __forceinline__ void store_empty(int64_t row) const { store(row, Piece{}); }

  __device__ __forceinline__ Piece* place(int64_t slot) const {
    return reinterpret_cast<Piece*>(args.carry) + slot * args.vectors + lane;
  }
  __device__ __forceinline__ void keep(int64_t slot, const Piece& piece) const { *place(slot) = piece; }
  __device__ __forceinline__ Piece kept(int64_t slot) const { return *place(slot); }
};

// TakenSums with the sums of the current row in shared memory, because a lane reads items of any column. kAhead: items
// of an edge that a lane has in flight.
template <class S, int kLanes, int kAhead>
struct SortedGradFold : TakenSums<S, kLanes> {
  using Base = TakenSums<S, kLanes>;
  using Base::args;
  using Base::kFours;
  using Base::lane;
  using typename Base::I;
  using typename Base::Piece;
  static constexpr int kBatch = 4;
  static constexpr bool kCheapEnd = false;

  float* sums;                     // sums of the sub-warp
  uint32_t own_place, next_place;  // `places` entries of the lane's edge in this window and in the next one
  I next_id;                       // id of the lane's edge in the window after that
  bool begun = false;
  int batch = 0;
  uint32_t edge_place[kBatch];
  I index[kBatch];
  Item item[kBatch][kAhead];

  __device__ SortedGradFold(const SortArgs& args, int lane, float* sums) : Base(args, lane), sums(sums) {}

  __device__ __forceinline__ I id_of(I position, int further) const {
    const I last = static_cast<I>(args.graph.num_edges - 1);
    const I* ids = static_cast<const I*>(args.graph.edge_ids);
    position = last - position < further ? last : position + further;
    return ids ? __ldcs(ids + position) : position;
  }

  // The edge id, the `places` entry and the items are three dependent loads. The first is prefetched two windows ahead,
  // the second one window ahead.
  __device__ __forceinline__ void own(I, I position) {
    if (!begun) next_place = __ldg(args.places + id_of(position, 0)), next_id = id_of(position, kLanes);
    begun = true;
    own_place = next_place;
    next_place = __ldg(args.places + next_id);
    next_id = id_of(position, 2 * kLanes);
    batch = 0;
  }

  __device__ __forceinline__ void load(int u, I row, I) {
    edge_place[u] = __shfl_sync(kFullWarp, own_place, batch + u, kLanes);
    index[u] = row;
    fetch(u, lane);
  }

  // load() is not told the batch. This is called after the loads of each batch, so it sets the next one.
  __device__ __forceinline__ void choose(int b) { batch = b + kBatch; }

  __device__ __forceinline__ int count(int u) const { return static_cast<int>(edge_place[u] >> 16); }

  __device__ __forceinline__ void fetch(int u, int from) {
    const char* row = row_address(static_cast<const char*>(args.items), index[u],
                                  static_cast<uint32_t>(args.item_row * sizeof(Item)));
    const Item* at = reinterpret_cast<const Item*>(row) + ((edge_place[u] & 0xffff) + from);
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      if (from + j * kLanes < count(u)) item[u][j] = load_words_once(at + j * kLanes);
    }
  }

  __device__ __forceinline__ void add(int u, int from) {
    float sum[kAhead];  // no two items of an edge have the same column, so all loads may precede the stores
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      if (from + j * kLanes < count(u)) sum[j] = sums[item_column(item[u][j])] + item_value<S>(item[u][j]);
    }
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      if (from + j * kLanes < count(u)) sums[item_column(item[u][j])] = sum[j];
    }
  }

  __device__ __forceinline__ void take(int u, I) {
    add(u, lane);
    for (int from = kAhead * kLanes; from < count(u); from += kAhead * kLanes) {
      fetch(u, from + lane);
      add(u, from + lane);
    }
  }

  // The next edge may add to the same columns in other lanes.
  __device__ __forceinline__ void together() const { __syncwarp(); }

  __device__ __forceinline__ float4* own_sums(int k) const {
    return reinterpret_cast<float4*>(sums) + lane + k * kLanes;
  }

  __device__ __forceinline__ void begin(I, I) {
#pragma unroll
    for (int k = 0; k < kFours; ++k) *own_sums(k) = {0, 0, 0, 0};
  }

  __device__ __forceinline__ Piece piece(I, I) const {
    Piece p;
#pragma unroll
    for (int k = 0; k < kFours; ++k) p.sum[k] = *own_sums(k);
    return p;
  }
};

template <class S, int kLanes, int kAhead>
__global__ void __launch_bounds__(kFoldThreads, sorted_grad_blocks(kAhead))
    sorted_grad_kernel(const __grid_constant__ SortArgs args) {
  __shared__ float4 sums[kFoldThreads * kSortPer / 4];
  const int lane = threadIdx.x % kLanes, team_begin = threadIdx.x - lane;
  SortedGradFold<S, kLanes, kAhead> fold(args, lane, reinterpret_cast<float*>(sums) + team_begin * kSortPer);
  fold_rows<4, int32_t>(args.graph, args.plan, fold);
}

}  // namespace edgeless::cuda::reduction
