// Dot product attention over blocks on tensor cores, forward and backward.
//
// Two warps process one head of a window of 32 rows, 16 rows each. They share the gathered vectors in shared memory:
// two blocks of sixteen columns per step, with the next steps in flight. Most columns have edges to rows of one warp
// only. Such columns are grouped into blocks per warp, and the other warp skips these blocks. The accumulator layout of
// the first mma (logits) is the operand layout of the second (weights times values). Weights of absent edges are
// exactly 0.
//
// The three passes differ in the operands (DotPass). The backward recomputes weights from the logsumexp, so the forward
// does not save them.
#pragma once

#include <cmath>
#include <type_traits>

#include "dot_ring.cuh"

namespace edgeless::cuda::wsb {

// A warp's sixteen rows -----------------------------------------------------------------------------------------------

// Lane (g, q) = (lane / 4, lane % 4) reads elements of rows g and g + 8: the A operand of an mma.
template <class S, int kDim>
__device__ __forceinline__ void read_rows(const HeadRows& from, int64_t first_row, int64_t num_rows, int head,
                                          uint32_t (&to)[kDim / 16][4]) {
  const int g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int64_t row = first_row + g + 8 * half;
    const char* at = from.base + row * from.row + head * from.head + q * 4;
#pragma unroll
    for (int k = 0; k < kDim / 16; ++k) {
      to[k][half] = row < num_rows ? __ldg(reinterpret_cast<const uint32_t*>(at + k * 32)) : 0;
      to[k][2 + half] = row < num_rows ? __ldg(reinterpret_cast<const uint32_t*>(at + k * 32 + 16)) : 0;
    }
  }
}

template <DotPass kPass, class S, int kDim>
struct DotRows {
  using Of = DotShape<kPass, kDim>;
  static constexpr bool kForward = kPass == DotPass::forward, kBySrc = kPass == DotPass::by_src;
  static constexpr bool kSumsValues = kPass != DotPass::by_dst, kSumsLogits = !kForward;
  static constexpr int kTiles = kDim / 8;

  uint32_t logit[kDim / 16][4];
  uint32_t value[kForward ? 1 : kDim / 16][4];
  float value_sum[kSumsValues ? kTiles : 1][4] = {};
  float logit_sum[kSumsLogits ? kTiles : 1][4] = {};
  // Softmax state of the lane's two rows, in base 2 logarithms. `total` covers the lane's own columns only.
  float top[2] = {-INFINITY, -INFINITY}, total[2] = {};  // forward
  float shift[2] = {}, delta[2] = {};                    // by_dst

  __device__ __forceinline__ void read(const DotArgs& args, int64_t first_row, int head) {
    read_rows<S, kDim>(args.row_logit, first_row, args.graph.num_rows, head, logit);
    if constexpr (!kForward) read_rows<S, kDim>(args.row_value, first_row, args.graph.num_rows, head, value);
    if constexpr (kPass == DotPass::by_dst) read_stats(args, first_row, head);
  }

  __device__ __forceinline__ void read_stats(const DotArgs& args, int64_t first_row, int head) {
    const int g = threadIdx.x % 32 / 4;
    if (!args.delta_given) {
      uint32_t out[kDim / 16][4];
      read_rows<S, kDim>(args.saved_out, first_row, args.graph.num_rows, head, out);
      delta[0] = delta[1] = 0;
#pragma unroll
      for (int k = 0; k < kDim / 16; ++k) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float2 a = unpack_pair<S>(out[k][i]), b = unpack_pair<S>(value[k][i]);
          delta[i % 2] = fmaf(a.x, b.x, fmaf(a.y, b.y, delta[i % 2]));
        }
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t row = first_row + g + 8 * half, at = row * args.heads + head;
      const bool inside = row < args.graph.num_rows;
      shift[half] = inside ? __ldg(args.logsumexp + at) * kBinary : 0;
      delta[half] = !args.delta_given ? quad_sum(delta[half]) : inside ? __ldg(args.delta_given + at) : 0;
      if (inside && threadIdx.x % 4 == 0) args.delta[at] = delta[half];
    }
  }

  // products[t][c] belongs to row g + c / 2 * 8 and column 4 q + 2 t + c % 2.
  static __device__ __forceinline__ void multiply(const uint32_t (&rows)[kDim / 16][4], const uint4* tile,
                                                  float (&products)[2][4]) {
    const int lane = threadIdx.x % 32, row = column_of(lane % 8 + lane / 16 * 8);
#pragma unroll
    for (int k = 0; k < kDim / 16; ++k) {
      uint32_t columns[4];
      projection::load_matrices<false>(tile + Of::place(row, 2 * k + lane / 8 % 2), columns);
      projection::half::multiply_add<S>(products[0], rows[k], columns[0], columns[1]);
      projection::half::multiply_add<S>(products[1], rows[k], columns[2], columns[3]);
    }
  }

  // Adds the columns' vectors times `factors`, which have the layout of `products` above.
  static __device__ __forceinline__ void add(const float (&factors)[2][4], const uint4* tile, float (&sum)[kTiles][4]) {
    const int lane = threadIdx.x % 32, row = column_of(lane % 16);
    const uint32_t packed[4] = {pack_pair<S>(factors[0][0], factors[0][1]), pack_pair<S>(factors[0][2], factors[0][3]),
                                pack_pair<S>(factors[1][0], factors[1][1]), pack_pair<S>(factors[1][2], factors[1][3])};
#pragma unroll
    for (int v = 0; v < kTiles / 2; ++v) {
      uint32_t columns[4];
      projection::load_matrices<true>(tile + Of::place(row, 2 * v + lane / 16), columns);
      projection::half::multiply_add<S>(sum[2 * v], packed, columns[0], columns[1]);
      projection::half::multiply_add<S>(sum[2 * v + 1], packed, columns[2], columns[3]);
    }
  }

  // Online softmax: turns logits into weights relative to the maximum so far and rescales earlier sums.
  __device__ __forceinline__ void weigh(float (&logits)[2][4]) {
    float best[2] = {-INFINITY, -INFINITY}, factor[2], base[2];
#pragma unroll
    for (int i = 0; i < 8; ++i) best[i / 2 % 2] = fmaxf(best[i / 2 % 2], logits[i / 4][i % 4]);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float now = fmaxf(top[half], quad_max(best[half]));
      base[half] = now == -INFINITY ? 0 : now;  // no edge as yet
      factor[half] = power_of_two(top[half] - base[half]);
      top[half] = now;
      total[half] *= factor[half];
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float& weight = logits[i / 4][i % 4];
      weight = power_of_two(weight - base[i / 2 % 2]);
      total[i / 2 % 2] += weight;
    }
    if (__any_sync(0xffffffff, factor[0] != 1 || factor[1] != 1)) {
#pragma unroll
      for (int v = 0; v < kTiles; ++v) {
#pragma unroll
        for (int c = 0; c < 4; ++c) value_sum[v][c] *= factor[c / 2];
      }
    }
  }

  // words: the bits of the warp's rows for columns 4 q and 4 q + 1 (x), 4 q + 2 and 4 q + 3 (y).
  __device__ __forceinline__ void add_block(const uint4* stage, const uint2& words, float scale) {
    if (!__any_sync(0xffffffff, (words.x | words.y) != 0)) return;
    const int g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
    float weights[2][4] = {}, grads[2][4] = {};
    multiply(logit, stage, weights);
    if constexpr (!kForward) multiply(value, stage + Of::kTile, grads);
    float shifts[4], deltas[4];  // of the lane's columns
    if constexpr (kBySrc) {
      const float4* const stats = reinterpret_cast<const float4*>(stage + 2 * Of::kTile + kBits);
      const float4 first = stats[q], second = stats[kBlockColumns / 4 + q];
      shifts[0] = first.x * kBinary, shifts[1] = first.y * kBinary, shifts[2] = first.z * kBinary;
      shifts[3] = first.w * kBinary, deltas[0] = second.x, deltas[1] = second.y, deltas[2] = second.z;
      deltas[3] = second.w;
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int t = i / 4, c = i % 4, half = c / 2, column = 2 * t + c % 2;
      const bool there = ((t ? words.y : words.x) >> g) >> (half * 8 + c % 2 * 16) & 1;
      float& weight = weights[t][c];
      if constexpr (kForward) {
        weight = there ? weight * scale : -INFINITY;
      } else {
        weight = there ? power_of_two(weight * scale - (kBySrc ? shifts[column] : shift[half])) : 0;
        grads[t][c] = there ? weight * (grads[t][c] - (kBySrc ? deltas[column] : delta[half])) : 0;
      }
    }
    if constexpr (kForward) weigh(weights);
    if constexpr (kSumsValues) add(weights, stage + Of::kTile, value_sum);
    if constexpr (kSumsLogits) add(grads, stage, logit_sum);
  }
};

// Results -------------------------------------------------------------------------------------------------------------

template <class S>
__device__ __forceinline__ void write_pair(const HeadSums& to, int64_t row, int place, float x, float y) {
  const int64_t at = (row * to.row + place) / 2;
  if (to.wide) {
    reinterpret_cast<float2*>(to.base)[at] = make_float2(x, y);
  } else {
    reinterpret_cast<uint32_t*>(to.base)[at] = pack_pair<S>(x, y);
  }
}

// Recomputes one row from its CSR edges, by a whole warp. This is necessary if an mma result is not finite: an mma
// multiplies absent edges by zero, and zero times infinity or NaN is NaN. shift, delta: those of DotRows, for the
// finished softmax.
template <DotPass kPass, class S, int kDim>
__device__ __noinline__ void write_by_edges(const DotArgs& args, int64_t row, int head, float shift, float delta) {
  using Of = DotRows<kPass, S, kDim>;
  constexpr int kPairs = kDim / 64 > 0 ? kDim / 64 : 1;
  const int lane = threadIdx.x % 32;
  const bool inside = lane * 2 < kDim;
  const auto at = [&](const void* array, int64_t i) {
    return args.wide_index ? static_cast<const int64_t*>(array)[i] : static_cast<const int32_t*>(array)[i];
  };
  const auto read = [&](const HeadRows& from, int64_t i, float2(&to)[kPairs]) {
    const char* base = from.base + i * from.row + head * from.head;
#pragma unroll
    for (int p = 0; p < kPairs; ++p) {
      to[p] = inside ? unpack_pair<S>(reinterpret_cast<const uint32_t*>(base)[p * 32 + lane]) : float2{};
    }
  };
  const auto product = [](const float2(&a)[kPairs], const float2(&b)[kPairs]) {
    float sum = 0;
#pragma unroll
    for (int p = 0; p < kPairs; ++p) sum = fmaf(a[p].x, b[p].x, fmaf(a[p].y, b[p].y, sum));
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(0xffffffff, sum, lanes);
    return sum;
  };
  float2 logit[kPairs], value[kPairs], other_logit[kPairs], other_value[kPairs];
  float2 value_sum[kPairs] = {}, logit_sum[kPairs] = {};
  read(args.row_logit, row, logit);
  if constexpr (!Of::kForward) read(args.row_value, row, value);
  for (int64_t i = at(args.graph.indptr, row); i < at(args.graph.indptr, row + 1); ++i) {
    const int64_t column = at(args.graph.indices, i);
    read(args.column_logit, column, other_logit), read(args.column_value, column, other_value);
    if constexpr (Of::kBySrc) {
      shift = args.logsumexp[column * args.heads + head] * kBinary, delta = args.delta[column * args.heads + head];
    }
    const float weight = power_of_two(product(logit, other_logit) * args.scale * kBinary - shift);
    const float grad = Of::kForward ? 0 : weight * (product(value, other_value) - delta);
#pragma unroll
    for (int p = 0; p < kPairs; ++p) {
      value_sum[p].x += weight * other_value[p].x, value_sum[p].y += weight * other_value[p].y;
      logit_sum[p].x += grad * other_logit[p].x, logit_sum[p].y += grad * other_logit[p].y;
    }
  }
  if (!inside) return;
#pragma unroll
  for (int p = 0; p < kPairs; ++p) {
    const int place = head * kDim + (p * 32 + lane) * 2;
    if (args.value_sum.base) write_pair<S>(args.value_sum, row, place, value_sum[p].x, value_sum[p].y);
    if (args.logit_sum.base) {
      write_pair<S>(args.logit_sum, row, place, logit_sum[p].x * args.scale, logit_sum[p].y * args.scale);
    }
  }
}

// Results may overwrite the operand rows in place, so rows that write_by_edges() recomputes are not written before it.
template <DotPass kPass, class S, int kDim>
__device__ __forceinline__ void write(const DotArgs& args, const DotRows<kPass, S, kDim>& of, int64_t first_row,
                                      int head) {
  using Of = DotRows<kPass, S, kDim>;
  const int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int64_t row = first_row + g + 8 * half;
    const bool inside = row < args.graph.num_rows;
    float shift = of.shift[half], factor = 1;
    if constexpr (Of::kForward) {
      const float total = quad_sum(of.total[half]);
      factor = total != 0 ? 1 / total : 0, shift = of.top[half] + log_base_two(total);
      if (inside && q == 0 && args.logsumexp) args.logsumexp[row * args.heads + head] = shift * float(kLn2);
    }
    const auto value = [&](int v, int k) { return of.value_sum[v][2 * half + k] * factor; };
    const auto logit = [&](int v, int k) { return of.logit_sum[v][2 * half + k] * args.scale; };
    bool is_finite = true;
#pragma unroll
    for (int v = 0; v < Of::kTiles; ++v) {
      if constexpr (Of::kSumsValues) is_finite &= isfinite(value(v, 0)) && isfinite(value(v, 1));
      if constexpr (Of::kSumsLogits) is_finite &= isfinite(logit(v, 0)) && isfinite(logit(v, 1));
    }
    unsigned broken = __ballot_sync(0xffffffff, inside && !is_finite);
    if (inside && !(broken >> 4 * g & 15)) {
#pragma unroll
      for (int v = 0; v < Of::kTiles; ++v) {
        const int place = head * kDim + v * 8 + 2 * q;
        if constexpr (Of::kSumsValues) {
          if (args.value_sum.base) write_pair<S>(args.value_sum, row, place, value(v, 0), value(v, 1));
        }
        if constexpr (Of::kSumsLogits) {
          if (args.logit_sum.base) write_pair<S>(args.logit_sum, row, place, logit(v, 0), logit(v, 1));
        }
      }
    }
    while (broken != 0) {
      const int first = (__ffs(broken) - 1) / 4 * 4;
      broken &= ~(15u << first);
      const float of_row[2] = {__shfl_sync(0xffffffff, shift, first), __shfl_sync(0xffffffff, of.delta[half], first)};
      write_by_edges<kPass, S, kDim>(args, first_row + first / 4 + 8 * half, head, of_row[0], of_row[1]);
    }
  }
}

// Kernels -------------------------------------------------------------------------------------------------------------

// Target occupancy in thread blocks per SM, which registers limit.
constexpr int blocks_at_a_time(DotPass pass, int dim) {
  if (dim < 64) return 8;
  if (dim == 64) return pass == DotPass::by_src ? 6 : 8;
  return pass == DotPass::by_src ? 4 : 6;
}

template <DotPass kPass, class S, int kDim>
__global__ void __launch_bounds__(kDotThreads, blocks_at_a_time(kPass, kDim))
    dot_kernel(const __grid_constant__ DotArgs args) {
  extern __shared__ uint4 shared[];
  using Of = DotShape<kPass, kDim>;
  const int window = args.blocks.order[blockIdx.x % args.blocks.windows], head = blockIdx.x / args.blocks.windows;
  const int warp = threadIdx.x / 32, q = threadIdx.x % 4;
  const int begin = args.blocks.first[window], end = args.blocks.first[window + 1];
  const int64_t first_row = int64_t{window} * kHeight + warp * 16;
  const float scale = args.scale * kBinary;
  DotRing<kPass, kDim> ring(args, shared, begin, end, head);
  const int steps = (end - begin + kDotBlocks - 1) / kDotBlocks;
  const auto load = [&](int stage) { ring.load(stage); };
  projection::begin_depth<Of::kStages>(steps, load);
  DotRows<kPass, S, kDim> of;
  of.read(args, first_row, head);
  int left = end - begin;
  projection::finish_depth<Of::kStages, projection::StagesOf::block>(steps, load, [&](int stage) {
#pragma unroll 1
    for (int b = 0; b < min(kDotBlocks, left); ++b) {
      const uint4* const block = shared + (stage * kDotBlocks + b) * Of::kBlock;
      const uint2* const bits = reinterpret_cast<const uint2*>(block + 2 * Of::kTile);
      of.add_block(block, bits[q * (kHeight / 16) + warp], scale);
    }
    left -= kDotBlocks;
  });
  write<kPass, S, kDim>(args, of, first_row, head);
}

}  // namespace edgeless::cuda::wsb
