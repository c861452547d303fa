// What attention over pairs is given.
#pragma once

#include <vector>

#include "../attention/inputs.h"

namespace edgeless {

// The arrays of shared/pair_attention.py, by their order there.
struct PairWalks {
  static constexpr size_t kSize = 18;
  at::TensorList all;

  PairWalks(const char* op, at::TensorList all) : all(all) {
    TORCH_CHECK_VALUE(all.size() == kSize, op, ": walks must hold ", kSize, " tensors, got ", all.size());
  }

  const at::Tensor& offsets() const { return all[0]; }     // [R + 1] pairs of a type
  const at::Tensor& pair_nodes() const { return all[1]; }  // [P] source of a pair
  at::TensorList by_dst() const { return all.slice(2, 3); }
  at::TensorList by_pair() const { return all.slice(5, 3); }
  at::TensorList types_of_nodes() const { return all.slice(8, 2); }
  at::TensorList nodes_of_types() const { return all.slice(10, 3); }
  at::TensorList edges_of_pieces() const { return all.slice(13, 2); }
  at::TensorList sums() const { return all.slice(15, 3); }

  int64_t types() const { return all[0].size(0) - 1; }
  int64_t pairs() const { return all[1].size(0); }
  int64_t pieces() const { return all[9].size(0); }
  int64_t edges() const { return all[3].size(0); }
  int64_t nodes() const { return all[2].size(0) - 1; }
};

inline void check_pair_attention(const char* op, const at::Tensor& x, const at::Tensor& weight, const at::Tensor& query,
                                 const at::Tensor& key, const OptTensor& bias, const PairWalks& walks) {
  const auto dtype = x.scalar_type();
  TORCH_CHECK_VALUE(dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf, op,
                    ": x must be float32, bfloat16 or float16, got ", dtype);
  check_shape(op, "x", x, {walks.nodes(), x.size(-1)});
  check_dim(op, "weight", weight, 3, "[R, K, M]");
  const int64_t width = weight.size(2), bytes = width * x.element_size();
  check_like(op, "weight", weight, {walks.types(), x.size(1), width}, x);
  check_like(op, "query", query, {width, 1}, x);
  check_like(op, "key", key, {width, 1}, x);
  if (bias) check_like(op, "bias", *bias, {width}, x);
  TORCH_CHECK_VALUE(bytes > 0 && bytes % 16 == 0 && bytes <= 512, op,
                    ": rows of values must be whole vectors of 16 bytes and at most 32 of them, got ", width,
                    " numbers");
  TORCH_CHECK_VALUE(x.size(1) > 0 && x.size(1) * x.element_size() % 4 == 0, op,
                    ": rows of x must be made of 4 bytes each, got ", x.size(1), " numbers");
  TORCH_CHECK_VALUE(walks.edges() > 0, op, ": there must be edges");
  for (const at::Tensor& t : walks.all) {
    check_device(op, "walks", t, x.device());
    check_dtype(op, "walks", t, at::kInt);
    TORCH_CHECK_VALUE(t.dim() == 1 && t.is_contiguous(), op, ": walks must be contiguous tensors of one dimension");
  }
  check_shape(op, "walks", walks.all[4], {walks.edges()});
  check_shape(op, "walks", walks.all[5], {walks.pairs() + 1});
  check_shape(op, "walks", walks.all[6], {walks.edges()});
  check_shape(op, "walks", walks.all[7], {walks.edges()});
  check_shape(op, "walks", walks.all[13], {walks.pieces() + 1});
  check_shape(op, "walks", walks.all[14], {walks.edges()});
  check_shape(op, "walks", walks.all[16], {walks.pairs() + walks.pieces()});
}

}  // namespace edgeless
