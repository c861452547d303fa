// Arguments of the CPU attention kernels. A is the opmath type: double for double rows, float for float, bfloat16 and
// float16 rows.
#pragma once

#include <cstdint>

#include "../../common/cpu/views.h"
#include "../../common/score.h"

namespace edgeless::cpu {

constexpr int64_t kStats = 3;  // statistics per destination and head in the backward, see Args::stats

template <class A>
struct Args {
  Compressed graph;        // rows are destinations; in the source pass, sources
  int64_t items_per_part;  // see common/cpu/partition.h
  int64_t heads, dim, channels, edge_dim;
  int64_t padded_dim, padded_channels;

  Rows dst, src, value;  // value is null if the call has no value tensor: the values are then src
  Rows edge_attr;        // [E, edge_dim]
  const A* att;          // [H, padded_dim]; the cosine's beta of head h is at [h, 0]
  const A* proj;         // [edge_dim, H, padded_dim]: the transposed edge projection
  const A* proj_rows;    // [H, dim, edge_dim]: the edge projection as given
  const A* edge_scale;   // [E, H] with the strides below
  int64_t scale_edge_stride, scale_head_stride;
  A coefficient;  // scale of the dot product, least norm of the cosine, negative slope of the others

  bool has_dropout;
  uint64_t seed, threshold;
  A keep_scale;  // 1 / (1 - p)

  // forward
  OutRows out;     // [Nd, H, C]
  A* maximum;      // [Nd, H]: maximum of the row's logits; the weights pass reads this and inverse_sum
  A* inverse_sum;  // [Nd, H]: 1 / sum of exp(s - maximum)
  A* weights;      // [E, H]: output of the weights pass
  bool edge_in_value;

  // backward
  Rows grad_out;          // [Nd, H, C]
  Rows saved_out;         // [Nd, H, C], given with grad_out
  const A* grad_weights;  // [E, H] contiguous; given instead of grad_out
  A* stats;               // [Nd, kStats, H]: maximum, inverse_sum, Delta
  OutRows grad_dst, grad_src, grad_value;
  A* grad_att;        // [parts, H, padded_dim] partial sums
  A* grad_proj;       // [parts, edge_dim, H, padded_dim] partial sums
  OutRows grad_attr;  // [E, edge_dim]
  A* grad_scale;      // [E, H] contiguous

  A* carry;  // [parts, 2, carry_size]: fix-up workspace for the rows that parts share
};

// Both delta passes compute Delta: `delta` from the gradient of returned weights, edge by edge; `delta_of_out` as <out,
// grad_out>, row by row.
enum class Pass : uint8_t { forward, weights, delta, delta_of_out, by_dst, by_src };

// The kernels of one instruction set. `run` executes one part of one pass; `merge` finishes the split row that ends in
// the part. Both use `scratch_size` elements of `scratch`.
template <class A>
struct Kernels {
  int64_t width;  // elements per vector
  int64_t (*carry_size)(Pass, const Args<A>&);
  int64_t (*scratch_size)(const Args<A>&);
  void (*run)(Pass, const Args<A>&, int64_t part, A* scratch);
  void (*merge)(Pass, const Args<A>&, int64_t part, A* scratch);
};

}  // namespace edgeless::cpu
