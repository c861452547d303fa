// Entry points of the CUDA kernels, except those of edge_terms.h. No CUDA and no torch.
#pragma once

#include "../../jit/queue.h"
#include "args.h"
#include "plan.h"

namespace edgeless::cuda {

// Launches one pass. args.part and args.layout are those of the plan.
template <class A>
void run_pass(const Problem& problem, const Plan& plan, const Args<A>& args, const jit::Queue& queue);

// Compiles the kernels of a forward and of its backward in parallel if the forward's is not loaded yet, since a
// backward usually follows. max_degree: edges of the longest row of the CSC; -1: unknown.
void prepare_passes(const Problem& forward, const Plan& plan, const Device& device, int64_t max_degree,
                    const jit::Queue& queue);

// Merges the segments of hubs that a pass left in the fix-up workspace args.carry.
template <class A>
void merge_segments(const Problem& problem, const Plan& plan, const Args<A>& args, const jit::Queue& queue);

// Divides args.weights_out, which the destination pass left without dropout, by the sums of its rows, then applies
// dropout.
template <class A>
void normalize_weights(const Args<A>& args, bool wide_index, const jit::Queue& queue);
// Warps and threads per block of the kernel of normalize_weights().
constexpr int kWeightWarps = 8, kWeightThreads = 32 * kWeightWarps;

// Splits the rows of in [rows, cols], followed by those of more [more_rows, cols], into `sums` equal parts and sums
// each part in a fixed order. out is [sums, cols] of the storage dtype.
template <class A>
void sum_rows(const A* in, int64_t rows, const A* more, int64_t more_rows, int64_t cols, int sums, void* out,
              Storage storage, const jit::Queue& queue);

// delta[row, h] = <grad[row, h], out[row, h]>, where out is float32 and grad 16-bit, both padded to `vectors` times the
// values of a storage vector. If `rounded` [rows, heads, vectors] is given, grad is float32 as well and is rounded into
// it; the products are those of the rounded values.
void row_delta(const Rows& grad, Storage storage, const Rows& out, int64_t rows, int heads, int vectors, void* rounded,
               float* delta, const jit::Queue& queue);

// over[row, h] = 1 / |rows[row, h]|; where the norm is below `least`, -1 / least. Rows of `vectors` whole vectors.
template <class A>
void inverse_norms(const Rows& rows, Storage storage, int64_t num_rows, int heads, int vectors, A least, A* over,
                   const jit::Queue& queue);

// out[row, h] = sum of a * b over the row's edges, both [E, H] by original id.
template <class A>
void row_dot(const CompressedGraph& graph, bool wide_index, const A* a, const A* b, int heads, A* out,
             const jit::Queue& queue);

}  // namespace edgeless::cuda
