// Merges the pieces of hubs: rows so long that several blocks walk them (common/partition.cuh), in their order.
#include "../../common/merge.cuh"
#include "kernels.h"

namespace edgeless::cuda {
namespace {

// Piece number `piece` of a hub, of all heads.
template <class A>
__device__ const A* piece_at(const Args<A>& args, const Hub& hub, int64_t piece) {
  const int64_t slots = number_of_slots(args.graph.num_edges, args.part.piece);
  const int64_t at = piece == 0 ? hub.slot : slots + hub.slot + piece - 1;
  return args.carry + at * args.heads * args.carry_size;
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
  for_each_hub<I>(args.graph, args.part, [&](const Hub& hub) {
    merge_softmax<A, false>(
        hub.pieces, args.heads, args.carry_size, [&](int64_t p) { return piece_at(args, hub, p); },
        [&](int number, A sum, A top, A total) {
          const int head = number / args.carry_size, k = number % args.carry_size;
          if (k < args.out.dim) store_element<S>(args.out, hub.row, head, k, args.given ? sum : sum / total);
          if (k == 0 && args.logsumexp) {
            args.logsumexp[hub.row * args.heads + head] = (top + (args.given ? A(0) : log2(total))) * A(kLn2);
          }
        });
  });
}

// Two vectors a piece: `second` begins at element `split`.
template <class S, class I>
__global__ void __launch_bounds__(kMergeThreads)
    merge_sum_kernel(const __grid_constant__ Args<Arithmetic<S>> args, OutRows first, OutRows second, int split) {
  using A = Arithmetic<S>;
  for_each_hub<I>(args.graph, args.part, [&](const Hub& hub) {
    sum_pieces<A>(
        hub.pieces, args.heads * args.carry_size, [&](int64_t p) { return piece_at(args, hub, p); },
        [&](int number, A sum) {
          const int head = number / args.carry_size, k = number % args.carry_size;
          const OutRows& out = k < split ? first : second;
          const int at = k < split ? k : k - split;
          if (out && at < out.dim) store_element<S>(out, hub.row, head, at, sum);
        });
  });
}

template <class S, class I>
cudaError_t merge(const Problem& problem, const Plan& plan, const Args<Arithmetic<S>>& args, cudaStream_t stream) {
  const dim3 grid = merge_grid(plan.slots, int64_t{args.heads} * args.carry_size);
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
