// The entries of the CUDA kernels, for the ops that call them. Each returns the error of its launch.
#pragma once

#include <cuda_runtime_api.h>

#include "args.h"
#include "plan.h"

namespace edgeless::cuda {

// One pass. args.part and args.layout are the plan's.
template <class A>
cudaError_t run_pass(const Problem& problem, const Plan& plan, const Args<A>& args, cudaStream_t stream);

// Merges the pieces of hubs that a pass left in args.carry.
template <class A>
cudaError_t merge_pieces(const Problem& problem, const Plan& plan, const Args<A>& args, cudaStream_t stream);

// Divides args.weights_out, as the pass by destination left it without dropout, by the sums of its rows; drops then.
template <class A>
cudaError_t normalize_weights(const Args<A>& args, bool wide_index, cudaStream_t stream);

// Sums `sums` equal shares of the rows of [rows, cols] and, below them, [more_rows, cols], each in a fixed order: out
// is [sums, cols], in storage.
template <class A>
cudaError_t sum_rows(const A* in, int64_t rows, const A* more, int64_t more_rows, int64_t cols, int sums, void* out,
                     Storage storage, cudaStream_t stream);

// delta[row, h] = <grad[row, h], out[row, h]>, where out holds floats and grad 16-bit numbers; both in whole vectors
// of as many numbers as the storage's have. With `rounded` [rows, heads, that * vectors], grad holds floats too:
// rounded to it, they are what counts.
cudaError_t row_delta(const Rows& grad, Storage storage, const Rows& out, int64_t rows, int heads, int vectors,
                      void* rounded, float* delta, cudaStream_t stream);

// over[row, h] = 1 / |rows[row, h]|; where the norm is below `least`, -1 / least. Rows of `vectors` whole vectors.
template <class A>
cudaError_t inverse_norms(const Rows& rows, Storage storage, int64_t num_rows, int heads, int vectors, A least, A* over,
                          cudaStream_t stream);

// out[row, h] = sum of a * b over the row's edges, both [E, H] by original id.
template <class A, class I>
cudaError_t row_dot(const CompressedGraph& graph, const A* a, const A* b, int heads, A* out, cudaStream_t stream);

}  // namespace edgeless::cuda
