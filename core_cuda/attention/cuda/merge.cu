// Merges the pieces of hubs: rows so long that several blocks walk them (common/partition.cuh), in their order.
#include "../../common/partition.cuh"
#include "../../common/vec.cuh"
#include "kernels.h"

namespace edgeless::cuda {
namespace {

// Piece number `piece` of a hub.
template <class A>
__device__ const A* piece_at(const Args<A>& args, const Hub& hub, int64_t piece, int head) {
  const int64_t slots = number_of_slots(args.graph.num_edges, args.part.piece);
  const int64_t at = piece == 0 ? hub.slot : slots + hub.slot + piece - 1;
  return args.carry + (at * args.heads + head) * args.carry_size;
}

template <class S>
__device__ void store_element(const OutRows& out, int64_t row, int head, int k, Arithmetic<S> x) {
  const int64_t at = (row * out.heads + head) * out.dim + k;
  if (out.wide) {
    reinterpret_cast<Arithmetic<S>*>(out.base)[at] = x;
  } else {
    reinterpret_cast<S*>(out.base)[at] = to_storage<S>(x);
  }
}

template <class S, class I>
__global__ void __launch_bounds__(kMergeThreads)
    merge_softmax_kernel(const __grid_constant__ Args<Arithmetic<S>> args) {
  using A = Arithmetic<S>;
  const int head = blockIdx.y, width = args.carry_size - 2;
  for_each_hub<I>(args.graph, args.part, [&](const Hub& hub) {
    A m = -INFINITY, l = 0;
    for (int64_t p = 0; p < hub.pieces; ++p) m = max(m, piece_at(args, hub, p, head)[width]);
    for (int64_t p = 0; p < hub.pieces; ++p) {
      const A* piece = piece_at(args, hub, p, head);
      l += piece[width + 1] * power_of_two(piece[width] - m);
    }
    if (args.given) l = 1;
    for (int k = threadIdx.x; k < args.out.dim; k += kMergeThreads) {
      A sum = 0;
      for (int64_t p = 0; p < hub.pieces; ++p) {
        const A* piece = piece_at(args, hub, p, head);
        sum = fma(piece[k], power_of_two(piece[width] - m), sum);
      }
      store_element<S>(args.out, hub.row, head, k, sum / l);
    }
    if (threadIdx.x == 0 && args.logsumexp) {
      args.logsumexp[hub.row * args.heads + head] = (m + log2(l)) * A(kLn2);
    }
  });
}

// Two vectors a piece: `second` begins at element `split`.
template <class S, class I>
__global__ void __launch_bounds__(kMergeThreads)
    merge_sum_kernel(const __grid_constant__ Args<Arithmetic<S>> args, OutRows first, OutRows second, int split) {
  using A = Arithmetic<S>;
  const int head = blockIdx.y;
  for_each_hub<I>(args.graph, args.part, [&](const Hub& hub) {
    for (int k = threadIdx.x; k < args.carry_size; k += kMergeThreads) {
      const bool in_second = k >= split;
      const OutRows& out = in_second ? second : first;
      const int at = in_second ? k - split : k;
      if (!out.base || at >= out.dim) continue;
      A sum = 0;
#pragma unroll 4
      for (int64_t p = 0; p < hub.pieces; ++p) sum += piece_at(args, hub, p, head)[k];
      store_element<S>(out, hub.row, head, at, sum);
    }
  });
}

template <class S, class I>
cudaError_t merge(const Problem& problem, const Plan& plan, const Args<Arithmetic<S>>& args, cudaStream_t stream) {
  const dim3 grid(merge_blocks(plan.slots), static_cast<unsigned>(args.heads));
  if (problem.pass == Pass::forward) {
    merge_softmax_kernel<S, I><<<grid, kMergeThreads, 0, stream>>>(args);
  } else {
    const int lanes = kVec<S>;
    const int split = problem.score == Score::gat ? 1 : args.key_vectors * lanes;
    const OutRows first = problem.pass == Pass::by_dst ? args.grad_dst : args.grad_src;
    const OutRows second = problem.pass == Pass::by_dst ? OutRows{} : args.grad_value;
    merge_sum_kernel<S, I><<<grid, kMergeThreads, 0, stream>>>(args, first, second, split);
  }
  return cudaGetLastError();
}

template <class S>
cudaError_t merge(const Problem& problem, const Plan& plan, const Args<Arithmetic<S>>& args, cudaStream_t stream) {
  return problem.wide_index ? merge<S, int64_t>(problem, plan, args, stream)
                            : merge<S, int32_t>(problem, plan, args, stream);
}

}  // namespace

template <>
cudaError_t merge_pieces(const Problem& problem, const Plan& plan, const Args<float>& args, cudaStream_t stream) {
  switch (problem.storage) {
    case Storage::f32: return merge<float>(problem, plan, args, stream);
    case Storage::f16: return merge<__half>(problem, plan, args, stream);
    case Storage::bf16: return merge<__nv_bfloat16>(problem, plan, args, stream);
    case Storage::f16x4: return merge<OfFour<__half>>(problem, plan, args, stream);
    case Storage::bf16x4: return merge<OfFour<__nv_bfloat16>>(problem, plan, args, stream);
    default: return cudaErrorInvalidValue;
  }
}

template <>
cudaError_t merge_pieces(const Problem& problem, const Plan& plan, const Args<double>& args, cudaStream_t stream) {
  return merge<double>(problem, plan, args, stream);
}

}  // namespace edgeless::cuda
