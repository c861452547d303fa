// Arguments of a CUDA attention pass: plain pointers and sizes. No CUDA and no torch.
//
// "Rows" are [rows, heads, dim] tensors read in vectors of 16 bytes: the innermost dimension is contiguous and padded
// with zeros to whole vectors, and every head is 16-byte aligned. A is the opmath dtype: float, and double for float64
// rows.
#pragma once

#include <cstdint>

#include "plan.h"

namespace edgeless::cuda {

struct Rows {
  const char* base = nullptr;
  uint32_t row = 0;  // stride of rows in bytes
  int64_t head = 0;  // stride of heads in bytes
  constexpr explicit operator bool() const { return base != nullptr; }
};

struct OutRows {
  char* base = nullptr;  // [rows, heads, dim]; a row is contiguous
  int32_t dim = 0;
  bool wide = false;     // elements have the opmath dtype, not the storage dtype
  bool aligned = false;  // every head is 16-byte aligned
  bool whole = false;    // every head is a whole number of vectors of the storage dtype, each aligned to its size
  bool halves = false;   // every head is 8-byte aligned and a whole number of half vectors
  // Row stride in heads; larger than Args::heads where several tensors share a buffer. Not adjacent to dim: a single
  // load of both would be of a slower kind, which makes passes over rows of few edges a tenth slower.
  int32_t heads = 0;
  constexpr explicit operator bool() const { return base != nullptr; }
};

template <class A>
struct Args {
  CompressedGraph graph;  // rows are destinations; in the source pass they are sources
  Partition part;
  Layout layout;
  int heads = 0;
  int key_vectors = 0;    // vectors per head of dst and src
  int value_vectors = 0;  // vectors per head of value and grad_out

  Rows dst, src, value;        // value is null where the values are the keys
  const void* att = nullptr;   // [heads, key_vectors * vector] of A; cosine: [heads], the factor
  A coefficient = 0;           // dot: scale; cosine: least norm; others: negative slope
  A base_two_coefficient = 0;  // coefficient * log2 e
  // cosine: [Nd, H] and [Ns, H]; 1 / norm, or -1 / least where the norm is below the least norm
  const A *dst_over_norm = nullptr, *src_over_norm = nullptr;

  // Options. Per-edge arrays are indexed by original edge id; [E, H] arrays are contiguous unless strides are given.
  bool has_dropout = false;
  bool att_stored = false;  // att has the storage dtype: it is read without a copy
  const int64_t* seed = nullptr;
  uint64_t threshold = 0;
  A keep_scale = 1;          // 1 / (1 - p)
  const A* scale = nullptr;  // multiplies a weight after softmax and dropout
  int64_t scale_edge = 0, scale_head = 0;
  const A* logit_term = nullptr;  // [E, H] added to the logit (gat: inside the LeakyReLU)
  const A* value_term = nullptr;  // [E, H] added to <grad_out, value>
  const A* given = nullptr;       // [E, H] gat's forward only: weights used as they are, no softmax
  Rows edge_attr;                 // gatv2: [E, edge_dim] of the storage dtype; head unused
  const A* proj = nullptr;        // gatv2: [heads, edge_dim, key_vectors * vector]
  const A* given_proj = nullptr;  // [heads, dim, edge_dim]
  bool edge_in_pairs = false;     // given_proj and edge_attr may be read two aligned elements at a time
  int dim = 0;                    // elements per head
  int edge_dim = 0;

  // forward
  OutRows out;
  A* logsumexp = nullptr;   // [Nd, H]; read by the other passes
  A* logits_out = nullptr;  // [E, H]; may alias logit_term

  // backward
  Rows grad_out, saved_out;
  const A* delta_given = nullptr;  // [Nd, H]; null: Delta is <saved_out, grad_out>
  // Written by the destination pass for the source pass: pairs (shift, Delta) with P = 2^(sum - shift), where sum is
  // what the source pass computes of the logit (scores.cuh); or Delta alone, where shift is the base-2 logsumexp and
  // memory is short.
  A* stats = nullptr;  // [Nd, H, 2]
  A* delta = nullptr;  // [Nd, H], where stats is null
  // Rows with large logits (exact.cuh). exact: [Nd, H, 2], the correction of their logsumexp and their Delta, for the
  // source pass. some_large: 0 before the destination pass, 1 after it if such a row exists; null unless the gradients
  // of the source pass overwrite its rows.
  A* exact = nullptr;
  int* some_large = nullptr;
  const A* grad_weights = nullptr;  // [E, H]: gradient of the returned weights, in place of grad_out
  OutRows grad_dst, grad_src, grad_value;
  A* grad_att = nullptr;     // [ranges, heads, key_vectors * vector] partial sums; cosine: [ranges, heads]
  A* ds_out = nullptr;       // [E, H] gradient of the logit (gat: of the LeakyReLU's argument)
  bool ds_in_order = false;  // gatv2 with edge features: ds_out is indexed by CSR position, not by id
  A* weights_out = nullptr;  // [E, H] P times the dropout factor and, with weights_scaled, times scale
  bool weights_scaled = false;
  A* grad_scale = nullptr;  // [E, H]

  A* carry = nullptr;  // fix-up workspace for the segments of hubs: [2, slots, heads, carry_size]
  int carry_size = 0;
};

}  // namespace edgeless::cuda
