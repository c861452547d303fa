// The kernel that normalizes the attention weights that a call returns.
//
// 2^(s - logsumexp) does not sum to one where logits are large: the logsumexp of logits near 4e3 has an error of 2e-4,
// near 3e5 of 0.02. So the destination pass writes weights without dropout, [E, H] by original id. This kernel divides
// the weights of every row by their sum, which removes the factor that they share, and then applies dropout.
#pragma once

#include "args.h"
#include "edge_data.cuh"
#include "kernels.h"

namespace edgeless::cuda {

constexpr int kHub = 4096;  // edges of the longest row that a warp processes

// A warp processes one row and head, a block a row and head of more than kHub edges.
template <class A, class I>
__global__ void normalize_weights_kernel(const __grid_constant__ Args<A> args) {
  __shared__ A sums[kWeightWarps];
  const I* indptr = static_cast<const I*>(args.graph.indptr);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const uint64_t seed = args.has_dropout ? static_cast<uint64_t>(*args.seed) : 0;
  const int64_t items = args.graph.num_rows * args.heads, first = static_cast<int64_t>(blockIdx.x) * kWeightWarps;

  const auto is_hub = [&](int64_t item) {
    const int64_t row = item / args.heads;
    return static_cast<int64_t>(indptr[row + 1]) - static_cast<int64_t>(indptr[row]) > kHub;
  };
  const auto for_edges = [&](int64_t item, int thread, int threads, auto&& use) {
    const int64_t row = item / args.heads;
    const int head = static_cast<int>(item % args.heads);
    const int64_t last = indptr[row + 1];
    for (int64_t position = indptr[row] + thread; position < last; position += threads) {
      const int64_t id = edge_id(args.graph, static_cast<I>(position));
      use(args.weights_out[id * args.heads + head], id, head);
    }
  };
  const auto sum = [&](int64_t item, int thread, int threads) {
    A total = 0;
    for_edges(item, thread, threads, [&](A weight, int64_t, int) { total += weight; });
    return sub_warp_sum(total, 32, kFullWarp);
  };
  const auto divide = [&](int64_t item, int thread, int threads, A total) {
    for_edges(item, thread, threads, [&](A& weight, int64_t id, int head) {
      weight = weight / total * (args.has_dropout ? dropout_factor(args, seed, id, head) : A(1));
    });
  };

  if (const int64_t item = first + warp; item < items && !is_hub(item)) divide(item, lane, 32, sum(item, lane, 32));
  for (int64_t item = first; item < min(first + kWeightWarps, items); ++item) {
    if (!is_hub(item)) continue;
    const A part = sum(item, threadIdx.x, kWeightThreads);
    __syncthreads();  // the sums of the last hub have been read
    if (lane == 0) sums[warp] = part;
    __syncthreads();
    A total = 0;
    for (const A of_warp : sums) total += of_warp;
    divide(item, threadIdx.x, kWeightThreads, total);
  }
}

}  // namespace edgeless::cuda
