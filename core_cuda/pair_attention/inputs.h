// Arguments of attention over pairs. A pair is a unique (source, relation); relations are `types` in the code. A
// segment has a few edges of one destination and relation.
#pragma once

#include "../attention/inputs.h"
#include "../spmm/inputs.h"

namespace edgeless {

// The index arrays of shared/functional/pair_attention.py, in the order given there.
struct PairWalks {
  static constexpr size_t kSize = 18;
  at::TensorList all;

  PairWalks(const char* op, at::TensorList all) : all(all) {
    TORCH_CHECK_VALUE(all.size() == kSize, op, ": walks must hold ", kSize, " tensors, got ", all.size());
  }

  const at::Tensor& offsets() const { return all[0]; }     // [R + 1] first pair of every relation
  const at::Tensor& pair_nodes() const { return all[1]; }  // [P] source of every pair
  at::TensorList by_dst() const { return all.slice(2, 3); }
  at::TensorList by_pair() const { return all.slice(5, 3); }
  at::TensorList types_of_nodes() const { return all.slice(8, 2); }
  at::TensorList nodes_of_types() const { return all.slice(10, 3); }
  at::TensorList edges_of_segments() const { return all.slice(13, 2); }
  at::TensorList sums() const { return all.slice(15, 3); }

  int64_t types() const { return all[0].size(0) - 1; }
  int64_t pairs() const { return all[1].size(0); }
  int64_t segments() const { return all[9].size(0); }
  int64_t edges() const { return all[3].size(0); }
  int64_t nodes() const { return all[2].size(0) - 1; }
};

// Dropout of attention weights. edge_ids: the original ids, which seed each edge's draw, of the edges by destination
// and of the edges by pair. Read only with dropout.
struct PairDropout {
  double p = 0;
  OptTensor seed;  // int64 [1]
  at::TensorList edge_ids;

  explicit operator bool() const { return p > 0; }
};

// A call of the op, parsed once.
struct PairCall {
  at::Tensor x, weight, query, key;  // [N, K], [R, K, M], [M, 1], [M, 1]
  OptTensor bias;                    // [M]
  PairWalks walks;
  double negative_slope;
  at::IntArrayRef max_degrees;  // longest rows of edges by destination, edges by pair, sums; unknown where missing
  PairDropout dropout;

  int64_t depth() const { return x.size(1); }
  int64_t width() const { return weight.size(2); }
  int64_t max_degree(size_t of) const { return of < max_degrees.size() ? max_degrees[of] : -1; }
};

// The results of the forward that the backward on the same device reads. out: the sums without the bias; shift [2, N]:
// the maximal logit of a row and, of the softmax's sum, the base 2 logarithm on CUDA, the inverse on the CPU. A
// logsumexp in place of the two would have the absolute precision of a large logit.
struct PairResults {
  at::Tensor out, values, vectors, queries, shift;
};

// The order of the gradients and of `needs`.
enum PairInput : size_t { kPairX, kPairWeight, kPairQuery, kPairKey, kPairBias, kPairInputs };

inline void check_pair_dropout(const char* op, const PairCall& in) {
  const PairDropout& dropout = in.dropout;
  check_dropout(op, dropout.p, dropout.seed, in.x.device());
  if (!dropout) return;
  TORCH_CHECK_VALUE(dropout.edge_ids.size() == 2, op, ": edge_ids must hold 2 tensors, got ", dropout.edge_ids.size());
  for (const at::Tensor& t : dropout.edge_ids) {
    check_shape(op, "edge_ids", t, {in.walks.edges()});
    check_dtype(op, "edge_ids", t, at::kInt);
    check_device(op, "edge_ids", t, in.x.device());
    TORCH_CHECK_VALUE(t.is_contiguous(), op, ": edge_ids must be contiguous");
  }
}

inline void check_pair_attention(const char* op, const PairCall& in) {
  check_rows_dtype(op, "x", in.x);
  check_dim(op, "x", in.x, 2, "[N, K]");
  check_shape(op, "x", in.x, {in.walks.nodes(), in.depth()});
  check_dim(op, "weight", in.weight, 3, "[R, K, M]");
  check_like(op, "weight", in.weight, {in.walks.types(), in.depth(), in.width()}, in.x);
  check_like(op, "query", in.query, {in.width(), 1}, in.x);
  check_like(op, "key", in.key, {in.width(), 1}, in.x);
  if (in.bias) check_like(op, "bias", *in.bias, {in.width()}, in.x);
  const PairWalks& walks = in.walks;
  TORCH_CHECK_VALUE(walks.edges() > 0, op, ": there must be edges");
  for (const at::Tensor& t : walks.all) {
    check_device(op, "walks", t, in.x.device());
    check_dtype(op, "walks", t, at::kInt);
    TORCH_CHECK_VALUE(t.dim() == 1 && t.is_contiguous(), op, ": walks must be contiguous tensors of one dimension");
  }
  check_shape(op, "walks", walks.all[4], {walks.edges()});
  check_shape(op, "walks", walks.all[5], {walks.pairs() + 1});
  check_shape(op, "walks", walks.all[6], {walks.edges()});
  check_shape(op, "walks", walks.all[7], {walks.edges()});
  check_shape(op, "walks", walks.all[13], {walks.segments() + 1});
  check_shape(op, "walks", walks.all[14], {walks.edges()});
  check_shape(op, "walks", walks.all[16], {walks.pairs() + walks.segments()});
  check_pair_dropout(op, in);
}

inline void check_pair_results(const char* op, const PairCall& in, const PairResults& of, const at::Tensor& grad) {
  check_like(op, "grad", grad, {in.walks.nodes(), in.width()}, in.x);
  check_like(op, "out", of.out, grad.sizes(), in.x);
  check_like(op, "values", of.values, {in.walks.pairs(), in.width()}, in.x);
  check_like(op, "vectors", of.vectors, {in.walks.types(), in.depth()}, in.x);
  check_like(op, "queries", of.queries, {in.walks.segments()}, of.shift);
  check_shape(op, "shift", of.shift, {2, in.walks.nodes()});
}

}  // namespace edgeless
