// Arguments of dot product attention over weighted sparse blocks. No torch.
#pragma once

#include "blocks.h"

namespace edgeless::cuda::wsb {

// Operand rows, [rows, heads, D], 16-byte aligned.
struct HeadRows {
  const char* base = nullptr;
  uint32_t row = 0;  // bytes from row to row
  int64_t head = 0;  // bytes from head to head
};

// Result rows, [rows, heads, D]. A result with a null base is not written.
struct HeadSums {
  char* base = nullptr;
  int64_t row = 0;    // elements from row to row; heads are contiguous
  bool wide = false;  // float32
};

// Each pass has two vectors per row of a window and two per column. The product of the first vectors is the logit, the
// product of the second ones the gradient of the weight.
enum class DotPass {
  forward,  // rows: query. Columns: key, value.
  by_dst,   // rows: query, gradient of the output. Columns: key, value.
  by_src,   // rows: key, value. Columns: query, gradient of the output.
};

struct DotArgs {
  Blocks blocks;          // by_src: blocks of the transpose
  CompressedGraph graph;  // the same edges, to recompute results that are not finite
  bool wide_index = false;
  int heads = 0;
  HeadRows row_logit, row_value, column_logit, column_value;
  float scale = 1;  // logit = scale * product
  // [destinations, heads] each. Delta is the dot product of the output and its gradient.
  float* logsumexp = nullptr;          // written by the forward
  float* delta = nullptr;              // written by by_dst, read by by_src
  const float* delta_given = nullptr;  // by_dst: delta if the caller has it; null: computed from saved_out
  HeadRows saved_out;                  // by_dst: the forward's output in 16-bit storage
  HeadSums value_sum;                  // sum of weight * column's second vector: the output, or the value's gradient
  HeadSums logit_sum;  // sum of logit gradient * column's first vector: the gradient of the query or the key
};

// dim: elements of a head, 32, 64 or 128. 16-bit storage only.
cudaError_t run_dot(DotPass pass, Storage storage, int dim, const DotArgs& args, cudaStream_t stream);

}  // namespace edgeless::cuda::wsb
