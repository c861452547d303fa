// Arguments of dot product attention over weighted sparse blocks, and the launch geometry of its kernels.
// No CUDA and no torch.
#pragma once

#include "../../jit/queue.h"
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
inline constexpr const char* type_text(DotPass) { return "edgeless::cuda::wsb::DotPass"; }

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
void run_dot(DotPass pass, Storage storage, int dim, const DotArgs& args, const jit::Queue& queue);

constexpr int kDotWarps = kHeight / 16, kDotThreads = 32 * kDotWarps;
constexpr int kDotBlocks = 2;                                       // blocks of columns per step
constexpr int kBits = kBlockColumns * (kHeight / 16) / 2 * 4 / 16;  // 16-byte vectors of a block's bits
constexpr int kStats = 2 * kBlockColumns * 4 / 16;                  // 16-byte vectors of its columns' logsumexp, delta

// Shared memory for heads of `dim` elements. All sizes except dot_bytes() are in 16-byte vectors.
constexpr int dot_tile(int dim) { return kBlockColumns * (dim / 8); }  // logit or value tile of a block's columns
constexpr int dot_block(DotPass pass, int dim) {
  return 2 * dot_tile(dim) + kBits + (pass == DotPass::by_src ? kStats : 0);
}
constexpr int dot_stages(DotPass pass, int dim) { return dim == 128 && pass != DotPass::by_src ? 2 : 3; }  // steps
constexpr int dot_bytes(DotPass pass, int dim) {
  return dot_stages(pass, dim) * kDotBlocks * dot_block(pass, dim) * 16;
}

}  // namespace edgeless::cuda::wsb
