// What the CUDA kernels of neighbor_reduce are given: plain pointers and sizes, no torch.
//
// `arg` [rows, width] says where the gradient of an element goes: the position of the extremum within its row, or, in
// its highest bit and the others, that several edges share it, and their number less one. Only rules that share set
// that bit; `tied` [rows] says whether a row has such elements.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "../../common/fold.h"

namespace edgeless::cuda::reduction {

struct ReduceArgs {
  CompressedGraph graph;
  FoldPlan plan;
  int vectors = 0;     // of a row of x
  int width = 0;       // numbers of a row
  bool whole = false;  // width is a number of whole vectors
  bool is_max = false;
  bool zero_shares = false;  // an extremum of 0 is shared with one more, who takes nothing (torch's scatter_reduce)
  double fill = 0;           // of rows without edges
  FoldRows x;
  void* out = nullptr;  // [rows, width]
  void* arg = nullptr;  // [rows, width] of arg_size bytes
  int arg_size = 4;
  uint8_t* tied = nullptr;  // [rows], zero before
  char* carry = nullptr;    // pieces of hubs: [2, slots, vectors]
  int zero = 0, one = 1;    // see best.cuh
};

// The gradient adds up in whole numbers: a column's values are multiplied by a power of two such that their sum fits
// 63 bits. Adding those is exact, so its order does not matter. See scatter_grad.cuh.
struct ScatterArgs {
  CompressedGraph graph;
  FoldPlan plan;  // of the edge walk
  int width = 0;
  int64_t num_columns = 0;                // of the graph: rows of grad_x
  int first = 0, columns = 0;             // features of this slice
  int columns_log2 = 0;                   // a row of sums has 2^columns_log2 places
  const void* grad = nullptr;             // [rows, width]
  int64_t grad_row = 0, grad_column = 0;  // strides in numbers
  const void* arg = nullptr;
  int arg_size = 4;
  bool shares = false;  // arg may say "shared"
  bool zero_shares = false;
  const uint8_t* tied = nullptr;  // [rows]
  FoldRows x;
  const void* out = nullptr;  // [rows, width] of the forward
  void* largest = nullptr;    // [width + 2] of unsigned words of the arithmetic type: bits of the largest finite
                              // magnitude of each feature, whether something is not finite, and whether rows are tied
  long long* sums = nullptr;  // [num_columns, 2^columns_log2, words of a sum]
  void* grad_x = nullptr;     // [num_columns, width]
  int headroom = 0;           // bits that a sum may take beyond its largest term
};

// The sums of ScatterArgs in shared memory, see shared_scatter_grad.cuh. `first` is 0, `columns` the width; plan and
// sums are not used.
struct SharedScatterArgs {
  ScatterArgs scatter;  // columns_log2: the columns of a group
  int owners_log2 = 0;  // one block, or a cluster of two, for a group of columns: block r has the nodes n % owners == r
  int nodes = 0;        // of a block
  unsigned groups = 0;  // of columns
};

// The gradient gathered over the other direction of the graph, see gather_grad.cuh. FoldRows are whole vectors.
struct GatherArgs {
  CompressedGraph graph;  // rows are the nodes of x
  FoldPlan plan;
  int vectors = 0;  // of a row
  int width = 0;
  FoldRows grad;
  const void* arg = nullptr;
  int arg_size = 4;
  const int32_t* positions = nullptr;  // [E] of every edge within its destination's row, by original id
  FoldRows x, out;                     // where edges share
  void* grad_x = nullptr;              // [rows, width]
  char* carry = nullptr;               // pieces of hubs: [2, slots, vectors]
  const uint8_t* bytes =
      nullptr;  // [rows of grad, width] arguments for masked_gather_grad.cuh, whose vectors are lanes of a row
};

constexpr int kMaskedPer = 16;  // numbers of a lane in masked_gather_grad.cuh

// The gradient sorted by the edges that take it and then gathered, one slice of the columns after the other, see
// sorted_grad.cuh. plan.team_log2 lanes of a team have kSortPer columns each.
struct SortArgs {
  CompressedGraph csr;    // of the forward: rows are destinations
  CompressedGraph graph;  // its other direction: rows are the nodes of x
  FoldPlan plan;          // of graph
  int vectors = 0;        // lanes of a team
  int width = 0;
  int first = 0, columns = 0;  // of this slice
  FoldRows grad;
  const void* arg = nullptr;
  int arg_size = 4;
  int item_row = 0;            // items from row to row: at least columns, a multiple of eight
  void* items = nullptr;       // [csr.num_rows, item_row]
  uint32_t* places = nullptr;  // [E] by original id: where an edge's items begin in the row, and in the upper half how
                               // many there are
  void* grad_x = nullptr;      // [graph.num_rows, width]
  char* carry = nullptr;       // pieces of hubs: [2, slots, vectors]
};

constexpr int kSortPer = 16;
constexpr int64_t kSortItemBytes = 4;
constexpr int64_t kSortPieceBytes = kSortPer * sizeof(float);  // of a lane, in the carry

}  // namespace edgeless::cuda::reduction
