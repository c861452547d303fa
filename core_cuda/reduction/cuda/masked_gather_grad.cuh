// The gradient of a minimum or maximum whose elements belong to one edge each (ties "first"), gathered as in
// gather_grad.cuh but with fewer bytes: an edge reads its destination's arguments as bytes, and the gradient only where
// one matches its position.
//
// A byte is the argument, clamped to 255. An edge at position 255 or later in its row reads the arguments themselves. A
// lane has several vectors of a row and issues the gradient loads of all edges of a batch together, so that the
// dependent loads add one latency per batch. Storage: float.
#pragma once

#include "../../common/fold.cuh"
#include "args.h"

namespace edgeless::cuda::reduction {

constexpr uint32_t kBeyond = 255;  // the byte for this position and all later ones

template <class Arg, int kBatch>
struct MaskedGatherGradFold {
  using I = int32_t;
  using Four = Words<static_cast<int>(sizeof(Arg))>;  // the arguments of a vector
  static constexpr int kVectors = kMaskedPer / 4;
  static constexpr bool kCheapEnd = false;
  using Piece = Sums<float, kMaskedPer>;

  const GatherArgs& args;
  int unit, first;  // lane of a row, and its first vector; its further vectors are slice_vectors apart
  bool inside[kVectors];
  uint32_t fits[kBatch][kVectors];  // argument bytes; after choose(), 0xff where one matches
  Words<4> grad[kBatch][kVectors];
  I index[kBatch];
  I own_position;
  Piece total;

  __device__ MaskedGatherGradFold(const GatherArgs& args, int unit) : args(args), unit(unit) {
    const int lanes = args.plan.slice_vectors, slice = unit / lanes;
    first = slice * lanes * kVectors + (unit - slice * lanes);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) inside[v] = unit < args.vectors && vector(v) * 4 < args.width;
  }

  __device__ __forceinline__ int vector(int v) const { return first + v * args.plan.slice_vectors; }

  __device__ __forceinline__ void own(I, I position) {
    const I* ids = static_cast<const I*>(args.graph.edge_ids);
    own_position = __ldg(args.positions + (ids ? __ldcs(ids + position) : position));
  }

  __device__ __forceinline__ void load(int u, I row, I) {
    index[u] = row;
    const char* at = row_address(reinterpret_cast<const char*>(args.bytes), row, static_cast<uint32_t>(args.width));
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (inside[v]) fits[u][v] = __ldg(reinterpret_cast<const uint32_t*>(at) + vector(v));
    }
  }

  __device__ __forceinline__ void read_arguments(int u, uint32_t position) {
    const char* at =
        row_address(static_cast<const char*>(args.arg), index[u], static_cast<uint32_t>(args.width * sizeof(Arg)));
    Four fours[kVectors];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (inside[v]) fours[v] = load_shared_words(reinterpret_cast<const Four*>(at) + vector(v));
    }
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const Arg* arguments = reinterpret_cast<const Arg*>(&fours[v]);
      uint32_t mask = 0;
#pragma unroll
      for (int k = 0; k < 4; ++k) mask |= arguments[k] == position ? 0xffu << (8 * k) : 0;
      fits[u][v] = inside[v] ? mask : 0;
    }
  }

  __device__ __forceinline__ void choose(int b) {
    uint32_t position[kBatch];
    bool beyond = false;
#pragma unroll
    for (int u = 0; u < kBatch; ++u) {
      position[u] = static_cast<uint32_t>(__shfl_sync(0xffffffffu, own_position, b + u, 1 << args.plan.team_log2));
      beyond |= position[u] >= kBeyond;
    }
#pragma unroll
    for (int u = 0; u < kBatch; ++u) {
      const uint32_t wanted = min(position[u], kBeyond) * 0x01010101u;
#pragma unroll
      for (int v = 0; v < kVectors; ++v) fits[u][v] = inside[v] ? __vcmpeq4(fits[u][v], wanted) : 0;
    }
    if (sizeof(Arg) > 1 && beyond) {
#pragma unroll
      for (int u = 0; u < kBatch; ++u) {
        if (position[u] >= kBeyond) read_arguments(u, position[u]);
      }
    }
#pragma unroll
    for (int u = 0; u < kBatch; ++u) {
      const char* at = row_address(args.grad.base, index[u], args.grad.row);
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        if (fits[u][v]) grad[u][v] = load_shared_words(reinterpret_cast<const Words<4>*>(at) + vector(v));
      }
    }
  }

  __device__ __forceinline__ void take(int u, I) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        if (fits[u][v] >> (8 * k) & 1) total.sum[4 * v + k] += __uint_as_float(grad[u][v].w[k]);
      }
    }
  }

  __device__ __forceinline__ void begin(I, I) { total.clear(); }

  __device__ __forceinline__ Piece piece(I, I) const { return total; }
  __device__ __forceinline__ void merge(Piece& piece, const Piece& later) const { piece.add(later); }

  __device__ __forceinline__ void store(int64_t row, const Piece& piece) const {
    float* to = static_cast<float*>(args.grad_x) + row * args.width;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      float four[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) four[k] = piece.sum[4 * v + k];
      if (inside[v]) store_words_once(to + vector(v) * 4, pack_words<float, 4>(four));
    }
  }

  __device__ __forceinline__ void store_empty(int64_t row) const { store(row, Piece{}); }

  __device__ __forceinline__ Piece* place(int64_t slot) const {
    return reinterpret_cast<Piece*>(args.carry) + slot * args.vectors + unit;
  }
  __device__ __forceinline__ void keep(int64_t slot, const Piece& piece) const {
    if (unit < args.vectors) *place(slot) = piece;
  }
  __device__ __forceinline__ Piece kept(int64_t slot) const { return *place(slot); }
};

constexpr int kPickBlocks = 3;  // target occupancy in blocks per SM

template <class Arg>
__global__ void __launch_bounds__(kFoldThreads, kPickBlocks)
    masked_gather_grad_kernel(const __grid_constant__ GatherArgs args) {
  const int lane = threadIdx.x & ((1 << args.plan.team_log2) - 1);
  const int first = static_cast<int>(blockIdx.y) * args.plan.slice_vectors;
  MaskedGatherGradFold<Arg, kPickBatch> fold(args, lane < args.plan.slice_vectors ? first + lane : args.vectors);
  fold_rows<kPickBatch, int32_t>(args.graph, args.plan, fold);
}

// One thread per four arguments.
template <class Arg>
__global__ void __launch_bounds__(kByteThreads) bytes_kernel(const Arg* arg, int64_t fours, uint32_t* bytes) {
  using Four = Words<static_cast<int>(sizeof(Arg))>;
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kByteThreads + threadIdx.x;
  if (at >= fours) return;
  const Four four = load_words_once(reinterpret_cast<const Four*>(arg) + at);
  const Arg* arguments = reinterpret_cast<const Arg*>(&four);
  uint32_t word = 0;
#pragma unroll
  for (int k = 0; k < 4; ++k) word |= min(static_cast<uint32_t>(arguments[k]), kBeyond) << (8 * k);
  bytes[at] = word;
}

}  // namespace edgeless::cuda::reduction
