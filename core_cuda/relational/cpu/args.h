// Arguments of the CPU kernels for typed GEMM. A is the opmath type.
#pragma once

#include <cstdint>

#include "../../common/cpu/views.h"
#include "../../spmm/cpu/args.h"

namespace edgeless::cpu {

// Rows per block of rows: a block fits in L2, and is whole tiles of 6.
constexpr int64_t kTypedRows = 96;

// Consecutive entries of one type.
struct TypedRun {
  int64_t type, begin, end;
};

// Entries are sorted by type. Entry i belongs to node rows[i], or to node i if `rows` is null. An entry may also be a
// segment, some edges of one node and one type: row i of sum.graph.
template <class A>
struct TypedArgs {
  const void* rows;  // [entries] int32, or int64 where `wide`
  bool wide;

  Rows x;      // [nodes, in]: the left operand, unless it is the sum over a segment's edges
  Rows other;  // [nodes, out], outer: the right operand, unless it is the sum over a segment's edges
  bool sums;   // an operand is the sum over a segment's edges, of rows of sum.x
  SpmmArgs<A> sum;

  // The weight of a type is block-diagonal: `blocks` matrices of [in / blocks, out / blocks].
  int64_t in, out, blocks;
  const A* weight;  // matrix b of type t begins at t * weight_type + b * weight_block
  int64_t weight_type, weight_block;
  int64_t weight_step;  // elements from row to row, which are whole vectors; 0: packed by Tiles::pack()

  const A* bias;   // product: [types, out], null: none
  OutRows result;  // product: [nodes, out], row rows[i] is entry i's
  A* totals;       // sum of products: [nodes, out]
  A* carry;        // [parts, 2, out], zeroed: fix-up workspace for nodes whose entries are in several parts
  const int64_t*
      parts;  // [parts + 1, 2 + types]: first row, whether it began in an earlier part, first entry of each type
  int64_t types;
  A* products;  // sampled: [E]
};

template <class A>
struct TypedKernels {
  int64_t (*packed_size)(int64_t k, int64_t n);
  void (*pack)(const A* b, int64_t k_stride, int64_t n_stride, int64_t k, int64_t n, A* packed);
  int64_t vector;  // values per vector
  // Elements of a thread's scratch, which is zeroed before its first use.
  int64_t (*scratch_size)(const TypedArgs<A>&);
  // result[rows[i]] = x[rows[i]] W + bias
  void (*product)(const TypedArgs<A>&, const TypedRun&, A* scratch);
  // totals[rows[i]] += (sum over segment i) W for the segments of a part. The rows of the part's nodes are zeroed
  // first.
  void (*sum_products)(const TypedArgs<A>&, int64_t part, A* scratch);
  // target [blocks, in / blocks, out / blocks] = sum over the run of x[rows[i]]^T other
  void (*outer)(const TypedArgs<A>&, const TypedRun&, A* target, A* scratch);
  // products[e] = <x[rows[i]] W, sum.x[u]> for the edges e of segment i, where u is the source of e
  void (*sampled)(const TypedArgs<A>&, const TypedRun&, A* scratch);
};

}  // namespace edgeless::cpu
