// Arguments of the CUDA kernels of neighbor_reduce, plain pointers and sizes, and the constants that their launches
// share. No CUDA and no torch.
//
// `arg` [rows, width] says which edges get the gradient of an element: the position of the extremum within its row or,
// for tied elements, the highest bit and, in the other bits, the number of tied edges less one. Only the tie rules
// "shared" and "scatter" set that bit; `tied` [rows] says whether a row has such elements.
#pragma once

#include <cstdint>

#include "../../common/segment_reduce.h"

namespace edgeless::cuda::reduction {

struct ReduceArgs {
  CompressedGraph graph;
  ReducePlan plan;
  int vectors = 0;     // vectors per row of x
  int width = 0;       // elements per row
  bool whole = false;  // width is a whole number of vectors
  bool is_max = false;
  bool zero_shares = false;  // an extremum of 0 counts one more tie, which gets no gradient (torch's scatter_reduce)
  double fill = 0;           // result of rows without edges
  ReduceRows x;
  void* out = nullptr;  // [rows, width]
  void* arg = nullptr;  // [rows, width] of arg_size bytes
  int arg_size = 4;
  uint8_t* tied = nullptr;  // [rows], zeroed by the caller
  char* carry = nullptr;    // fix-up workspace for hubs: [2, slots, vectors] of BestReducer::Segment
  int zero = 0, one = 1;    // constants hidden from the compiler, see best.cuh
};

// Bytes of BestReducer::Segment, a lane's part of a segment in the fix-up workspace, for values of number_bytes.
constexpr int64_t best_segment_bytes(int number_bytes, bool wide_index, bool shares) {
  const int numbers = 16 / number_bytes, index = wide_index ? 8 : 4, opmath = number_bytes == 8 ? 8 : 4;
  const int counted = shares ? numbers : 1;
  const int sources = shares && number_bytes > 2 ? numbers : 1;  // 16-bit values have packed states without sources
  const auto padded = [](int bytes, int alignment) { return (bytes + alignment - 1) / alignment * alignment; };
  const int begin_of_sources = padded(numbers * (opmath + 4) + counted * 4, index);
  return padded(begin_of_sources + sources * (index + 1), index > opmath ? index : opmath);
}

// The gradient is summed in fixed point: a column's values are scaled by a power of two such that their sum fits in 63
// bits. Integer sums are exact, so their order does not matter. See scatter_grad.cuh.
struct ScatterArgs {
  CompressedGraph graph;
  ReducePlan plan;  // plan of share_kernel
  int width = 0;
  int64_t num_columns = 0;                // columns of the graph: rows of grad_x
  int first = 0, columns = 0;             // features of this feature tile
  int columns_log2 = 0;                   // a row of sums has 2^columns_log2 columns
  const void* grad = nullptr;             // [rows, width]
  int64_t grad_row = 0, grad_column = 0;  // strides in elements
  const void* arg = nullptr;
  int arg_size = 4;
  bool shares = false;  // arg may have the bit of ties
  bool zero_shares = false;
  const uint8_t* tied = nullptr;  // [rows]
  ReduceRows x;
  const void* out = nullptr;  // [rows, width], result of the forward
  void* largest = nullptr;    // [width + 2] unsigned words as wide as the opmath type: bits of the largest finite
                              // magnitude of each feature, whether any gradient is not finite, whether any row is tied
  long long* sums = nullptr;  // [num_columns, 2^columns_log2, words of a sum]
  void* grad_x = nullptr;     // [num_columns, width]
  int headroom = 0;           // bits by which a sum may exceed its largest term
};

constexpr int kScatterThreads = 256;
constexpr int kFinished = 4;  // columns of a sum per thread of finish_kernel
constexpr int kSharedScatterThreads = 1024;

// The sums of ScatterArgs in shared memory, see shared_scatter_grad.cuh. In `scatter`, `first` is 0 and `columns` the
// width; plan and sums are not used.
struct SharedScatterArgs {
  ScatterArgs scatter;  // columns_log2: columns of a group
  int owners_log2 = 0;  // blocks per group of columns, one or a cluster of two: block r owns the nodes n % owners == r
  int nodes = 0;        // nodes per block
  unsigned groups = 0;  // groups of columns
};

// The gradient gathered over the CSC, see gather_grad.cuh. Rows are whole vectors.
struct GatherArgs {
  CompressedGraph graph;  // rows are the nodes of x
  ReducePlan plan;
  int vectors = 0;  // vectors per row
  int width = 0;
  ReduceRows grad;
  const void* arg = nullptr;
  int arg_size = 4;
  const int32_t* positions = nullptr;  // [E] position of every edge within its destination's row, by original edge id
  ReduceRows x, out;                   // read where ties share the gradient
  void* grad_x = nullptr;              // [rows, width]
  char* carry = nullptr;               // fix-up workspace for hubs: [2, slots, vectors]
};

constexpr int kGatherBatch = 4;  // edges per batch in gather_grad.cuh

}  // namespace edgeless::cuda::reduction
