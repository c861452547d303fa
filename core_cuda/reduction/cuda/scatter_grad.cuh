// The gradient of a minimum or maximum, scattered: each element of the output adds its gradient to the node it came
// from.
//
// There is one such element per output element, many fewer than edges times features, so the gradient is scattered and
// not gathered. Sums are in fixed point, so that the order of atomics does not matter: a feature's gradients are scaled
// by the power of two with which the sum of all of them just fits 63 bits (with 2^20 rows, 42 bits below the largest
// one), rounded, added by integer atomics into a feature tile that stays in L2, and converted back. A double takes two
// such integers. Gradients that are not finite are skipped and added at the end in floating point: the result is
// infinity or NaN in any order.
#pragma once

#include "../../common/segment_reduce.cuh"
#include "args.h"

namespace edgeless::cuda::reduction {

// The fixed-point scale of a feature. kSums: 64-bit words per sum.
template <class A>
struct Scale;

template <>
struct Scale<float> {
  using Bits = unsigned int;
  static constexpr int kSums = 1;
  static constexpr Bits kInfinity = 0x7f800000u;
  double up, down;

  static __device__ __forceinline__ Bits bits(float x) { return __float_as_uint(x) & 0x7fffffffu; }
  static __device__ __forceinline__ double power(int e) { return __hiloint2double((1023 + e) << 20, 0); }
  __device__ __forceinline__ Scale(Bits largest, int headroom) {
    const int k = 62 - headroom - (static_cast<int>(largest >> 23) - 126);
    up = power(k), down = power(-k);
  }
  __device__ __forceinline__ void add(long long* sums, float x) const {
    atomicAdd(reinterpret_cast<unsigned long long*>(sums),
              static_cast<unsigned long long>(__double2ll_rn(static_cast<double>(x) * up)));
  }
  __device__ __forceinline__ float total(const long long* sums) const {
    return static_cast<float>(static_cast<double>(sums[0]) * down);
  }
};

template <>
struct Scale<double> {
  using Bits = unsigned long long;
  static constexpr int kSums = 2;
  static constexpr Bits kInfinity = 0x7ff0000000000000ull;
  int k, more;

  static __device__ __forceinline__ Bits bits(double x) {
    return static_cast<Bits>(__double_as_longlong(x)) & 0x7fffffffffffffffull;
  }
  __device__ __forceinline__ Scale(Bits largest, int headroom)
      : k(62 - headroom - (static_cast<int>(largest >> 52) - 1022)), more(61 - headroom) {}
  __device__ __forceinline__ void add(long long* sums, double x) const {
    const double scaled = scalbn(x, k), whole = rint(scaled);
    auto to = reinterpret_cast<unsigned long long*>(sums);
    atomicAdd(to, static_cast<unsigned long long>(__double2ll_rn(whole)));
    atomicAdd(to + 1, static_cast<unsigned long long>(__double2ll_rn(scalbn(scaled - whole, more))));
  }
  __device__ __forceinline__ double total(const long long* sums) const {
    return scalbn(static_cast<double>(sums[0]), -k) + scalbn(static_cast<double>(sums[1]), -k - more);
  }
};

template <class S>
__global__ void measure_kernel(const __grid_constant__ ScatterArgs args) {
  using A = Arithmetic<S>;
  using Bits = typename Scale<A>::Bits;
  __shared__ Bits found[8][32];
  const int column = blockIdx.x * 32 + threadIdx.x;
  Bits largest = 0;
  bool other = false;
  if (args.shares && column == 0) {
    for (int64_t row = blockIdx.y * 8 + threadIdx.y; row < args.graph.num_rows; row += gridDim.y * 8) {
      if (args.tied[row]) atomicMax(static_cast<Bits*>(args.largest) + args.width + 1, Bits(1));
    }
  }
  if (column < args.width) {
    const S* grad = static_cast<const S*>(args.grad) + column * args.grad_column;
#pragma unroll 4
    for (int64_t row = blockIdx.y * 8 + threadIdx.y; row < args.graph.num_rows; row += gridDim.y * 8) {
      const Bits bits = Scale<A>::bits(to_arithmetic(grad[row * args.grad_row]));
      if (bits < Scale<A>::kInfinity) {
        largest = max(largest, bits);
      } else {
        other = true;
      }
    }
  }
  found[threadIdx.y][threadIdx.x] = largest;
  Bits* to = static_cast<Bits*>(args.largest);
  if (other) atomicMax(to + args.width, Bits(1));
  __syncthreads();
  if (threadIdx.y > 0 || column >= args.width) return;
#pragma unroll
  for (int i = 1; i < 8; ++i) largest = max(largest, found[i][threadIdx.x]);
  if (largest > 0) atomicMax(to + column, largest);
}

// Adds one gradient to the sums of a node. kRest: instead adds gradients that are not finite to grad_x.
template <class S, bool kRest>
__device__ __forceinline__ void send(const ScatterArgs& args, const Scale<Arithmetic<S>>& scale, int64_t node,
                                     int column, Arithmetic<S> x) {
  using A = Arithmetic<S>;
  const bool finite = Scale<A>::bits(x) < Scale<A>::kInfinity;
  if constexpr (kRest) {
    if (!finite) atomicAdd(static_cast<S*>(args.grad_x) + node * args.width + args.first + column, to_storage<S>(x));
  } else {
    if (finite) scale.add(args.sums + ((node << args.columns_log2) + column) * Scale<A>::kSums, x);
  }
}

template <class S>
__device__ __forceinline__ Scale<Arithmetic<S>> scale_of(const ScatterArgs& args, int column) {
  using A = Arithmetic<S>;
  const auto* largest = static_cast<const typename Scale<A>::Bits*>(args.largest);
  return Scale<A>(__ldg(largest + min(args.first + column, args.width - 1)), args.headroom);
}

template <class S>
__device__ __forceinline__ bool nothing_left(const ScatterArgs& args) {
  return static_cast<const typename Scale<Arithmetic<S>>::Bits*>(args.largest)[args.width] == 0;
}

template <class S>
__device__ __forceinline__ bool nothing_shared(const ScatterArgs& args) {
  return static_cast<const typename Scale<Arithmetic<S>>::Bits*>(args.largest)[args.width + 1] == 0;
}

__device__ __forceinline__ uint32_t load_arg(const ScatterArgs& args, int64_t at) {
  if (args.arg_size == 1) return __ldcs(static_cast<const uint8_t*>(args.arg) + at);
  if (args.arg_size == 2) return __ldcs(static_cast<const uint16_t*>(args.arg) + at);
  return __ldcs(static_cast<const uint32_t*>(args.arg) + at);
}

// Scatters elements without ties. One thread per element of the feature tile.
template <class S, class I, bool kRest>
__global__ void __launch_bounds__(kScatterThreads) send_kernel(const __grid_constant__ ScatterArgs args) {
  using A = Arithmetic<S>;
  if (kRest && nothing_left<S>(args)) return;
  const I* indptr = static_cast<const I*>(args.graph.indptr);
  const I* indices = static_cast<const I*>(args.graph.indices);
  const uint32_t shared = args.shares ? 1u << (8 * args.arg_size - 1) : 0;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kScatterThreads;
  const int64_t end = args.graph.num_rows << args.columns_log2;
  for (int64_t t = static_cast<int64_t>(blockIdx.x) * kScatterThreads + threadIdx.x; t < end; t += step) {
    const int64_t row = t >> args.columns_log2;
    const int column = static_cast<int>(t) & ((1 << args.columns_log2) - 1), at = args.first + column;
    if (column >= args.columns) continue;
    const I begin = indptr[row];
    if (indptr[row + 1] == begin) continue;
    const uint32_t code = load_arg(args, row * args.width + at);
    const S x = __ldcs(static_cast<const S*>(args.grad) + row * args.grad_row + at * args.grad_column);
    if (code & shared) continue;
    send<S, kRest>(args, scale_of<S>(args, column), indices[begin + static_cast<I>(code)], column, to_arithmetic(x));
  }
}

// Scatters tied elements, whose rows are read again. Sub-warps have equal quotas of the edges.
template <class S, class I, bool kRest>
__global__ void __launch_bounds__(kReduceThreads) share_kernel(const __grid_constant__ ScatterArgs args) {
  using A = Arithmetic<S>;
  constexpr int kPer = kNumbers<S, 4>, kBatch = 4;
  if ((kRest && nothing_left<S>(args)) || nothing_shared<S>(args)) return;
  __shared__ ReduceShares<I> s;
  __shared__ A parts[kPer][kReduceThreads];
  const I* indptr = static_cast<const I*>(args.graph.indptr);
  const I* indices = static_cast<const I*>(args.graph.indices);
  const int width = 1 << args.plan.sub_warp_log2, lane = threadIdx.x & (width - 1),
            sub_warp = threadIdx.x >> args.plan.sub_warp_log2;
  const unsigned mask = width == 32 ? 0xffffffffu : ((1u << width) - 1) << (threadIdx.x & 31 & ~(width - 1));
  divide_range(args.graph, args.plan.part, Workers{kReduceThreads >> args.plan.sub_warp_log2}, s);
  const Cut<I> from = s.cuts[sub_warp], to = s.cuts[sub_warp + 1];
  const int column =
      (static_cast<int>(blockIdx.y) * width + lane) * kPer;  // the lane's first column of the feature tile
  const bool inside = column < args.columns;
  const char* base = args.x.base + (inside ? args.first + column : 0) * static_cast<int64_t>(sizeof(S));
  const uint32_t shared = 1u << (8 * args.arg_size - 1);

  I row = from.row;
  for (I at = from.edge; at < to.edge; ++row) {
    const I row_end = min(indptr[row + 1], to.edge);
    if (row_end <= at) continue;
    const I begin = at;
    at = row_end;
    if (!args.tied[row]) continue;
    A best[kPer];
    bool any = false;
#pragma unroll
    for (int k = 0; k < kPer; ++k) {
      best[k] = NAN;
      if (column + k >= args.columns) continue;
      const int feature = args.first + column + k;
      const uint32_t code = load_arg(args, row * static_cast<int64_t>(args.width) + feature);
      if (!(code & shared)) continue;
      any = true;
      best[k] = to_arithmetic(static_cast<const S*>(args.out)[row * static_cast<int64_t>(args.width) + feature]);
      parts[k][threadIdx.x] =
          to_arithmetic(static_cast<const S*>(args.grad)[row * args.grad_row + feature * args.grad_column]) /
          static_cast<A>((code & ~shared) + 1);
    }
    if (!__any_sync(mask, any)) continue;
    I ahead[kBatch];
    const auto prefetch = [&](I edge) {
#pragma unroll
      for (int u = 0; u < kBatch; ++u) {
        ahead[u] = __ldg(indices + min(static_cast<I>(edge + u), static_cast<I>(row_end - 1)));
      }
    };
    prefetch(begin);
    for (I edge = begin; edge < row_end; edge += kBatch) {
      Words<4> raw[kBatch];
#pragma unroll
      for (int u = 0; u < kBatch; ++u) {
        raw[u] = load_shared_words(reinterpret_cast<const Words<4>*>(row_address(base, ahead[u], args.x.row)));
      }
      prefetch(min(static_cast<I>(row_end - edge), static_cast<I>(kBatch)) + edge);
      uint32_t found = 0;  // bit u * kPer + k
#pragma unroll
      for (int u = 0; u < kBatch; ++u) {
        A x[kPer];
        unpack_words<S, 4>(raw[u], x);
#pragma unroll
        for (int k = 0; k < kPer; ++k) {
          if (u < row_end - edge && x[k] == best[k]) found |= 1u << (u * kPer + k);
        }
      }
      for (; found; found &= found - 1) {  // few iterations, in which all lanes take part
        const int bit = __ffs(found) - 1, k = bit % kPer;
        send<S, kRest>(args, scale_of<S>(args, column + k), __ldg(indices + edge + bit / kPer), column + k,
                       parts[k][threadIdx.x]);
      }
    }
  }
}

// Converts the sums of a feature tile into the gradient, and zeroes them if another tile follows. A thread has four
// columns (a tile has eight or more), with all loads in flight together.
template <class S>
__global__ void __launch_bounds__(kScatterThreads) finish_kernel(const __grid_constant__ ScatterArgs args) {
  using A = Arithmetic<S>;
  constexpr int kWords = kFinished * Scale<A>::kSums / 2;
  const int64_t t = (static_cast<int64_t>(blockIdx.x) * kScatterThreads + threadIdx.x) * kFinished;
  if (t >= args.num_columns << args.columns_log2) return;
  const int column = static_cast<int>(t) & ((1 << args.columns_log2) - 1);
  if (column >= args.columns) return;
  auto at = reinterpret_cast<longlong2*>(args.sums + t * Scale<A>::kSums);
  longlong2 sums[kWords];
#pragma unroll
  for (int i = 0; i < kWords; ++i) sums[i] = at[i];
  if (args.first + args.columns < args.width) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) at[i] = {0, 0};
  }
  A x[kFinished];
#pragma unroll
  for (int i = 0; i < kFinished; ++i) {
    x[i] = scale_of<S>(args, column + i).total(reinterpret_cast<const long long*>(sums) + i * Scale<A>::kSums);
  }
  S* to = static_cast<S*>(args.grad_x) + (t >> args.columns_log2) * args.width + args.first + column;
  const int numbers = min(kFinished, args.columns - column);
  if (numbers == kFinished && args.width % kFinished == 0) {
    using Four = Words<kFinished * sizeof(S) / 4>;
    *reinterpret_cast<Four*>(to) = pack_words<S, kFinished * sizeof(S) / 4>(x);
    return;
  }
#pragma unroll
  for (int i = 0; i < kFinished; ++i) {
    if (i < numbers) to[i] = to_storage<S>(x[i]);
  }
}

}  // namespace edgeless::cuda::reduction
