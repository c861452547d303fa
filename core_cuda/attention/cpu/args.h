// What a CPU attention kernel is given. A is the type of all arithmetic: float for float, bfloat16 and float16 rows,
// double for double rows.
#pragma once

#include <cstdint>

#include "../../common/cpu/views.h"
#include "../score.h"

namespace edgeless::cpu {

constexpr int64_t kStats = 3;  // numbers that the backward keeps of a destination and head

template <class A>
struct Args {
  Compressed graph;        // rows are destinations, in the pass by source rows are sources
  int64_t items_per_part;  // see partition.h
  int64_t heads, dim, channels, edge_dim;
  int64_t padded_dim, padded_channels;

  Rows dst, src, value;  // value is null where the values are the keys (gatv2, cosine)
  Rows edge_attr;        // [E, edge_dim]
  const A* att;          // [H, padded_dim]; the cosine's beta stands in [H, 0]
  const A* proj;         // [edge_dim, H, padded_dim]: the edge projection, transposed
  const A* proj_rows;    // [H, dim, edge_dim]: the same as given
  const A* edge_scale;   // [E, H] with the strides below
  int64_t scale_edge_stride, scale_head_stride;
  A coefficient;  // scale of the dot product, least norm of the cosine, negative slope of the others

  bool has_dropout;
  uint64_t seed, threshold;
  A keep_scale;  // 1 / (1 - p)

  // forward
  OutRows out;     // [Nd, H, C]
  A* maximum;      // [Nd, H]: of the row's logits; these two are also read by the weights pass
  A* inverse_sum;  // [Nd, H]: 1 / sum of exp(s - maximum)
  A* weights;      // [E, H]: the weights pass
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

  A* carry;  // [parts, 2, carry_size]: rows that a part does not hold whole
};

// delta: Delta of returned weights, edge by edge; delta_of_out: <out, grad_out>, row by row.
enum class Pass : uint8_t { forward, weights, delta, delta_of_out, by_dst, by_src };

// The kernels of one instruction set. `run` does one part of one pass; `merge` finishes the split row that ends in
// the part; both use `scratch`, `scratch_size` elements.
template <class A>
struct Kernels {
  int64_t width;  // elements of a vector
  int64_t (*carry_size)(Pass, const Args<A>&);
  int64_t (*scratch_size)(const Args<A>&);
  void (*run)(Pass, const Args<A>&, int64_t part, A* scratch);
  void (*merge)(Pass, const Args<A>&, int64_t part, A* scratch);
};

}  // namespace edgeless::cpu
