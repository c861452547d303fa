// The second half of piece_gradients.cu and own_gradients.cu: the sums of all blocks, added in an order that depends on
// the offsets and sizes alone. A thread has four numbers of a weight, and of its chunks one in so many as threads share
// them.
#include <algorithm>

#include "../../common/vec.cuh"
#include "entries.cuh"
#include "of_storage.cuh"
#include "piece_tiles.h"

namespace edgeless::cuda::relational {
namespace {

constexpr int kThreads = 256;
constexpr int kBatch = 4;  // chunks that a thread asks for at once

template <class S>
__device__ __forceinline__ void store(void* to, int64_t at, bool wide, float x) {
  if (wide) {
    static_cast<float*>(to)[at] = x;
  } else {
    static_cast<S*>(to)[at] = to_storage<S>(x);
  }
}

constexpr int kOwnSides = 32;          // that share the chunks of what is summed over all rows
constexpr int kManyThreads = 1 << 18;  // that a device has at once

// A thread block has 4 kThreads / sides numbers of one type: first those of all types, then what is summed over all
// rows.
template <class S>
__global__ void __launch_bounds__(kThreads)
    add_gradients_kernel(const __grid_constant__ AddGradientsArgs args, int of_type, int64_t of_types, int type_sides) {
  __shared__ float4 shared[kThreads];
  const bool own = blockIdx.x >= of_types;
  const int sides = own ? kOwnSides : type_sides, lanes = kThreads / sides;
  const int lane = threadIdx.x % lanes, side = threadIdx.x / lanes;
  const int type = own ? 0 : blockIdx.x / of_type;
  const int block = static_cast<int>(own ? blockIdx.x - of_types : blockIdx.x % of_type);
  const int at = (block * lanes + lane) * 4, size = own ? args.own_size : args.size;
  const float* partial = own ? args.own_partial : args.partial;
  int64_t chunks = args.own_chunks;
  if (!own) {
    const int64_t begin = id_at(args.tiles.offsets, false, type), end = id_at(args.tiles.offsets, false, type + 1);
    chunks = (end - begin + args.share - 1) / args.share;
    partial += (begin / args.share + type) * size;
  }
  float sum[4] = {};
  for (int64_t first = side; at < size && first < chunks; first += kBatch * sides) {
    float4 four[kBatch];
#pragma unroll
    for (int u = 0; u < kBatch; ++u) {
      const int64_t chunk = first + u * sides;
      if (chunk < chunks) four[u] = __ldcs(reinterpret_cast<const float4*>(partial + chunk * size + at));
    }
#pragma unroll
    for (int u = 0; u < kBatch; ++u) {
      if (first + u * sides >= chunks) break;
      sum[0] += four[u].x, sum[1] += four[u].y, sum[2] += four[u].z, sum[3] += four[u].w;
    }
  }
  if (sides > 1) {
    shared[threadIdx.x] = make_float4(sum[0], sum[1], sum[2], sum[3]);
    __syncthreads();
    for (int other = 1; side == 0 && other < sides; ++other) {
      const float4 four = shared[other * lanes + lane];
      sum[0] += four.x, sum[1] += four.y, sum[2] += four.z, sum[3] += four.w;
    }
  }
  if (side > 0 || at >= size) return;
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    if (!own) {
      store<S>(args.weights, int64_t{type} * size + at + k, args.wide, sum[k]);
    } else if (at + k < args.own_width) {
      if (args.root) store<S>(args.root, at + k, false, sum[k]);
    } else if (args.bias) {
      store<S>(args.bias, at + k - args.own_width, false, sum[k]);
    }
  }
}

template <class S>
cudaError_t launch(const AddGradientsArgs& args, cudaStream_t stream) {
  const auto blocks = [](int size, int sides) { return (size + 4 * kThreads / sides - 1) / (4 * kThreads / sides); };
  // Until the device is full, or each has a chunk.
  const int64_t types = std::max(args.tiles.types, 1), chunks = args.tiles.count / (args.share * types);
  int sides = 1;
  while (sides < std::min<int64_t>(chunks, kOwnSides) && types * args.size / 4 * sides < kManyThreads) sides *= 2;
  const int of_type = args.partial ? blocks(args.size, sides) : 0;
  const int64_t of_types = int64_t{of_type} * args.tiles.types;
  const int64_t all = of_types + (args.own_partial ? blocks(args.own_size, kOwnSides) : 0);
  if (all == 0) return cudaSuccess;
  add_gradients_kernel<S><<<static_cast<unsigned>(all), kThreads, 0, stream>>>(args, of_type, of_types, sides);
  return cudaGetLastError();
}

}  // namespace

cudaError_t run_add_gradients(Storage storage, const AddGradientsArgs& args, cudaStream_t stream) {
  return of_storage<true>(storage, [&](auto zero) { return launch<decltype(zero)>(args, stream); });
}

}  // namespace edgeless::cuda::relational
