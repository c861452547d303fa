// Dot product attention over weighted sparse blocks: what the kernels are given. No torch.
#pragma once

#include "blocks.h"

namespace edgeless::cuda::wsb {

// Rows of heads, in vectors of 16 bytes.
struct HeadRows {
  const char* base = nullptr;
  uint32_t row = 0;  // bytes from row to row
  int64_t head = 0;  // bytes from head to head
};

// Results, [rows, heads, D]. Those of a null base are not written.
struct HeadSums {
  char* base = nullptr;
  int64_t row = 0;    // numbers from row to row; heads lie side by side
  bool wide = false;  // float32
};

// In each pass the windows' rows have two vectors and the columns have two: the product of the first ones is the logit,
// the product of the second ones the gradient of the weight.
enum class DotPass {
  forward,  // rows: query. Columns: key, value.
  by_dst,   // rows: query, gradient of the output. Columns: key, value.
  by_src,   // rows: key, value. Columns: query, gradient of the output.
};

struct DotArgs {
  Blocks blocks;          // by_src: of the transpose
  CompressedGraph graph;  // of the same edges, for results that are not finite
  bool wide_index = false;
  int heads = 0;
  HeadRows row_logit, row_value, column_logit, column_value;
  float scale = 1;  // of the product
  // [destinations, heads] each. Delta is the product of the output and its gradient.
  float* logsumexp = nullptr;          // written by the forward
  float* delta = nullptr;              // written by the pass by destination, read by the one by source
  const float* delta_given = nullptr;  // by_dst: delta, or null:
  HeadRows saved_out;                  // the output, of 16-bit numbers
  HeadSums value_sum;                  // of weights and the columns' values: the output, or the gradient of the value
  HeadSums logit_sum;  // of the logits' gradients and the columns' first vectors: that of the query or the key
};

// D: numbers of a head, 32, 64 or 128. Storage must be of 16 bits.
cudaError_t run_dot(DotPass pass, Storage storage, int dim, const DotArgs& args, cudaStream_t stream);

}  // namespace edgeless::cuda::wsb
