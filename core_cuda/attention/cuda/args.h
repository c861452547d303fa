// What a CUDA attention pass is given: plain pointers and sizes, no torch.
//
// "Rows" are [rows, heads, dim] tensors read in vectors of 16 bytes: the innermost dimension is contiguous and filled
// up with zeros to whole vectors, every head begins on 16 bytes. A is the type of arithmetic and statistics: float,
// for double rows double.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "plan.h"

namespace edgeless::cuda {

struct Rows {
  const char* base = nullptr;
  uint32_t row = 0;  // bytes from row to row
  int64_t head = 0;  // bytes from head to head
  constexpr explicit operator bool() const { return base != nullptr; }
};

struct OutRows {
  char* base = nullptr;  // [rows, heads, dim], a row contiguous
  int32_t dim = 0;
  bool wide = false;     // elements are A, not storage
  bool aligned = false;  // every head begins on 16 bytes
  bool whole = false;    // and is made of whole vectors of storage
  bool halves = false;   // or begins on 8 bytes and is made of halves of such vectors
  // Heads from row to row, more where tensors lie side by side. Not beside dim: a load of both together would be of the
  // slower kind, and passes over rows of few edges take a tenth longer with it.
  int32_t heads = 0;
  constexpr explicit operator bool() const { return base != nullptr; }
};

template <class A>
struct Args {
  CompressedGraph graph;  // rows are destinations; in the pass by source, sources
  Partition part;
  Layout layout;
  int heads = 0;
  int key_vectors = 0;    // vectors of a head of dst and src
  int value_vectors = 0;  // vectors of a head of value and grad_out

  Rows dst, src, value;        // value is null where the values are the keys
  const void* att = nullptr;   // [heads, key_vectors * vector] of A; of the cosine [heads], its factor
  A coefficient = 0;           // scale of the dot product, least norm of the cosine, negative slope of the others
  A base_two_coefficient = 0;  // times log2 e
  // cosine: [Nd, H], [Ns, H] 1 / norm, negative where the norm is below the least one and that one stands for it
  const A *dst_over_norm = nullptr, *src_over_norm = nullptr;

  // Options, all by original edge id; [E, H] arrays are contiguous unless strides are given.
  bool has_dropout = false;
  bool has_edge_arrays = false;  // some are read or written by edge, or its features
  bool att_stored = false;       // att holds numbers of the rows' type, of which no copy is made
  const int64_t* seed = nullptr;
  uint64_t threshold = 0;
  A keep_scale = 1;          // 1 / (1 - p)
  const A* scale = nullptr;  // multiplies a weight after softmax and dropout
  int64_t scale_edge = 0, scale_head = 0;
  const A* logit_term = nullptr;  // [E, H] added to the logit (gat: inside the LeakyReLU)
  const A* value_term = nullptr;  // [E, H] added to <grad_out, value>
  const A* given = nullptr;       // [E, H] forward of gat only: weights as they are, no softmax
  Rows edge_attr;                 // gatv2: [E, edge_dim], storage; head unused
  const A* proj = nullptr;        // gatv2: [heads, edge_dim, key_vectors * vector]
  const A* given_proj = nullptr;  // [heads, dim, edge_dim]
  bool edge_in_pairs = false;     // pairs of its numbers and of features begin on whole pairs
  int dim = 0;                    // numbers of a head
  int edge_dim = 0;

  // forward
  OutRows out;
  A* logsumexp = nullptr;   // [Nd, H]; read by the other passes
  A* logits_out = nullptr;  // [E, H] may be logit_term

  // backward
  Rows grad_out, saved_out;
  const A* delta_given = nullptr;  // [Nd, H], where it is not <saved_out, grad_out>
  // What the pass by destination leaves for the pass by source: pairs (shift, Delta), so that P = 2^(sum - shift) with
  // the sum that the pass by source makes; or Delta alone, if shift is the logsumexp (base 2) and memory is short.
  A* stats = nullptr;  // [Nd, H, 2]
  A* delta = nullptr;  // [Nd, H], where stats is null
  // Rows of large logits, see exact.cuh: [Nd, H, 2] what the pass by source reads of them; and, where its gradients
  // stand over the rows that they are of, whether there are any: 0 before the pass by destination.
  A* exact = nullptr;
  int* some_large = nullptr;
  const A* grad_weights = nullptr;  // [E, H]: gradient of returned weights, in place of grad_out
  OutRows grad_dst, grad_src, grad_value;
  A* grad_att = nullptr;     // [ranges, heads, key_vectors * vector] partial sums; of the cosine [ranges, heads]
  A* ds_out = nullptr;       // [E, H] gradient of the logit (gat: of what is inside the LeakyReLU)
  bool ds_in_order = false;  // gatv2 with edge features: not by id, but in the order of the graph
  A* weights_out = nullptr;  // [E, H] weights with dropout; times scale where weights_scaled
  bool weights_scaled = false;
  A* grad_scale = nullptr;  // [E, H]

  A* carry = nullptr;  // pieces of hubs: [2, slots, heads, carry_size]
  int carry_size = 0;
};

}  // namespace edgeless::cuda
