// The gradient of a minimum or maximum, dealt out and gathered: of every element one number goes to one edge, so what
// an edge reads is a small part of a row. First every row sorts its gradients by the edge that takes them, and notes
// for each edge where its hand begins and how many it holds; then the nodes gather the hands of their out-edges, over
// the graph's other direction as in common/fold.cuh. Each gradient is read twice and written once, whatever the degree.
//
// deal: a warp for each row, in slices of kDealt features. A histogram of the positions in shared memory, a window of
// kWindow edges at a time, gives each element its rank and, summed up, each edge its hand. The order within a hand is
// whatever the atomics make it; no sum depends on it, since a hand holds a feature once.
// take: a team of eight lanes for each share of the edges; the sums of a row, one for each feature of the slice, lie in
// shared memory, and every lane adds one number of a hand to where it belongs.
// Storage: float, half, bfloat16, sums in float.
#pragma once

#include "../../common/fold.cuh"
#include "instance.h"

namespace edgeless::cuda::extrema {

constexpr int kDealWarps = 8, kWindow = 256;

template <class S>
__global__ void __launch_bounds__(32 * kDealWarps) deal_kernel(const __grid_constant__ DealArgs args) {
  constexpr int kEach = kDealt / 32;
  __shared__ uint32_t histograms[kDealWarps][kWindow];
  __shared__ alignas(16) S dealt_values[kDealWarps][kDealt];
  __shared__ alignas(16) uint8_t dealt_features[kDealWarps][kDealt];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kDealWarps + warp;
  if (row >= args.graph.num_rows) return;
  uint32_t code[kEach], place[kEach];
  S x[kEach];
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    const int column = lane + 32 * j;
    code[j] = 0xffffffffu, place[j] = 0;
    if (column >= args.columns) continue;
    const int64_t feature = args.first + column, at = row * args.width + feature;
    code[j] = args.arg_size == 1   ? __ldcs(static_cast<const uint8_t*>(args.arg) + at)
              : args.arg_size == 2 ? __ldcs(static_cast<const uint16_t*>(args.arg) + at)
                                   : __ldcs(static_cast<const uint32_t*>(args.arg) + at);
    x[j] = __ldcs(static_cast<const S*>(args.grad) + row * args.grad_row + feature * args.grad_column);
  }
  const int32_t* indptr = static_cast<const int32_t*>(args.graph.indptr);
  const int32_t begin = __ldg(indptr + row), degree = __ldg(indptr + row + 1) - begin;
  if (degree == 0) return;
  uint32_t* histogram = histograms[warp];
  uint32_t before = 0;  // elements of the edges so far
  for (int32_t window = 0; window < degree; window += kWindow) {
    const int size = min(kWindow, degree - window);
    bool any = false;
#pragma unroll
    for (int j = 0; j < kEach; ++j) any |= code[j] - window < static_cast<uint32_t>(size);
    if (!__any_sync(0xffffffffu, any)) {  // most of a hub
      for (int at = lane; at < size; at += 32) args.hands[begin + window + at] = 0;
      continue;
    }
    for (int at = lane; at < size; at += 32) histogram[at] = 0;
    __syncwarp();
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const uint32_t at = code[j] - window;
      if (at < static_cast<uint32_t>(size)) place[j] = atomicAdd(histogram + at, 1u);
    }
    __syncwarp();
    for (int first = 0; first < size; first += 32) {
      const int at = first + lane;
      const uint32_t count = at < size ? histogram[at] : 0;
      uint32_t upto = count;
#pragma unroll
      for (int by = 1; by < 32; by *= 2) {
        const uint32_t other = __shfl_up_sync(0xffffffffu, upto, by);
        if (lane >= by) upto += other;
      }
      const uint32_t hand = before + upto - count;
      if (at < size) {
        histogram[at] = hand;
        args.hands[begin + window + at] = static_cast<uint16_t>(hand | count << 8);
      }
      before += __shfl_sync(0xffffffffu, upto, 31);
    }
    __syncwarp();
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const uint32_t at = code[j] - window;
      if (at < static_cast<uint32_t>(size)) place[j] += histogram[at];
    }
    __syncwarp();
  }
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    if (lane + 32 * j >= args.columns) continue;
    dealt_values[warp][place[j]] = x[j];
    dealt_features[warp][place[j]] = static_cast<uint8_t>(lane + 32 * j);
  }
  __syncwarp();
  constexpr int kWords = static_cast<int>(sizeof(S));  // of four numbers
  const Words<kWords> numbers = reinterpret_cast<const Words<kWords>*>(dealt_values[warp])[lane];
  reinterpret_cast<Words<kWords>*>(static_cast<S*>(args.values) + row * kDealt)[lane] = numbers;
  reinterpret_cast<uint32_t*>(args.features + row * kDealt)[lane] =
      reinterpret_cast<const uint32_t*>(dealt_features[warp])[lane];
}

// kAhead: numbers of a hand that a lane asks for in time; those after them are waited for.
template <class S, int kAhead>
struct HandFold {
  using I = int32_t;
  static constexpr int kBatch = 4, kLanes = 8;
  static constexpr int kQuads = kDealt / 4 / kLanes;
  static constexpr bool kCheapEnd = false;
  struct Piece {
    float4 sum[kQuads];  // features (kLanes * q + lane) * 4 and following
  };

  const DealArgs& args;
  float* sums;  // [kDealt] of the team
  int lane;
  unsigned team;
  I row[kBatch];
  uint32_t hand[kBatch];
  float x[kBatch][kAhead];
  uint32_t feature[kBatch][kAhead];
  uint32_t own_hand;

  __device__ HandFold(const DealArgs& args, int lane, float* sums = nullptr) : args(args), sums(sums), lane(lane) {
    team = 0xffu << (threadIdx.x & 31 & ~(kLanes - 1));
  }

  __device__ __forceinline__ void own(I, I position) { own_hand = __ldg(args.hands + __ldcs(args.places + position)); }
  __device__ __forceinline__ void load(int u, I other, I) { row[u] = other; }

  __device__ __forceinline__ float value(int u, int k) const {
    const char* values = row_address(static_cast<const char*>(args.values), row[u], kDealt * sizeof(S));
    return to_arithmetic(__ldg(reinterpret_cast<const S*>(values) + (hand[u] & 0xff) + lane + k));
  }
  __device__ __forceinline__ uint32_t feature_of(int u, int k) const {
    const char* features = row_address(reinterpret_cast<const char*>(args.features), row[u], kDealt);
    return __ldg(reinterpret_cast<const uint8_t*>(features) + (hand[u] & 0xff) + lane + k);
  }
  __device__ __forceinline__ bool holds(int u, int k) const { return static_cast<int>(hand[u] >> 8) > lane + k; }

  __device__ __forceinline__ void choose(int b) {
#pragma unroll
    for (int u = 0; u < kBatch; ++u) {
      hand[u] = __shfl_sync(0xffffffffu, own_hand, b + u, kLanes);
#pragma unroll
      for (int k = 0; k < kAhead; ++k) {
        if (!holds(u, k * kLanes)) continue;
        x[u][k] = value(u, k * kLanes);
        feature[u][k] = feature_of(u, k * kLanes);
      }
    }
  }

  __device__ __forceinline__ void take(int u, I) {
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      if (holds(u, k * kLanes)) sums[feature[u][k]] += x[u][k];
    }
    for (int k = kAhead * kLanes; holds(u, k); k += kLanes) sums[feature_of(u, k)] += value(u, k);
    __syncwarp(team);
  }

  __device__ __forceinline__ void begin(I, I) {
    if (sums == nullptr) return;
#pragma unroll
    for (int q = 0; q < kQuads; ++q) reinterpret_cast<float4*>(sums)[q * kLanes + lane] = make_float4(0, 0, 0, 0);
    __syncwarp(team);
  }

  __device__ __forceinline__ Piece piece(I, I) const {
    Piece p;
#pragma unroll
    for (int q = 0; q < kQuads; ++q) p.sum[q] = reinterpret_cast<const float4*>(sums)[q * kLanes + lane];
    return p;
  }

  __device__ __forceinline__ void merge(Piece& piece, const Piece& later) const {
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
      piece.sum[q].x += later.sum[q].x, piece.sum[q].y += later.sum[q].y;
      piece.sum[q].z += later.sum[q].z, piece.sum[q].w += later.sum[q].w;
    }
  }

  __device__ __forceinline__ void store(int64_t row, const Piece& piece) const {
    S* to = static_cast<S*>(args.grad_x) + row * args.width + args.first;
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
      const float numbers[4] = {piece.sum[q].x, piece.sum[q].y, piece.sum[q].z, piece.sum[q].w};
      const int first = (q * kLanes + lane) * 4;
      if (first < args.columns) {
        store_numbers<S, static_cast<int>(sizeof(S))>(to, first, args.columns, args.width % 4 == 0, numbers);
      }
    }
  }

  __device__ __forceinline__ void store_empty(int64_t row) const { store(row, Piece{}); }

  __device__ __forceinline__ Piece* place(int64_t slot) const {
    return reinterpret_cast<Piece*>(args.carry) + slot * kLanes + lane;
  }
  __device__ __forceinline__ void keep(int64_t slot, const Piece& piece) const { *place(slot) = piece; }
  __device__ __forceinline__ Piece kept(int64_t slot) const { return *place(slot); }
};

template <class S, int kAhead>
__global__ void __launch_bounds__(kFoldThreads, kAhead > 1 ? 6 : 7)
    take_dealt_kernel(const __grid_constant__ DealArgs args) {
  using Fold = HandFold<S, kAhead>;
  __shared__ alignas(16) float sums[kFoldThreads / Fold::kLanes][kDealt];
  Fold fold(args, threadIdx.x % Fold::kLanes, sums[threadIdx.x / Fold::kLanes]);
  fold_rows<Fold::kBatch, int32_t>(args.graph, args.plan, fold);
}

template <class S>
cudaError_t deal_instance(const DealArgs& args, cudaStream_t stream) {
  const unsigned blocks = static_cast<unsigned>((args.graph.num_rows + kDealWarps - 1) / kDealWarps);
  deal_kernel<S><<<blocks, 32 * kDealWarps, 0, stream>>>(args);
  return cudaGetLastError();
}

template <class S, int kAhead>
cudaError_t launch_take(const DealArgs& args, cudaStream_t stream) {
  take_dealt_kernel<S, kAhead><<<static_cast<unsigned>(args.plan.part.num_ranges), kFoldThreads, 0, stream>>>(args);
  if (args.plan.hubs) {
    const unsigned slots = static_cast<unsigned>(args.plan.slots);
    merge_fold_kernel<HandFold<S, kAhead>, int32_t><<<slots, kFoldThreads, 0, stream>>>(args);
  }
  return cudaGetLastError();
}

template <class S>
cudaError_t take_dealt_instance(const DealArgs& args, cudaStream_t stream) {
  const bool large = args.columns * args.graph.num_rows > 4 * args.graph.num_edges;  // hands, on average
  return large ? launch_take<S, 2>(args, stream) : launch_take<S, 1>(args, stream);
}

}  // namespace edgeless::cuda::extrema
