// A relational layer composed of other ops.
#pragma once

#include "../common/autograd.h"
#include "../relational/inputs.h"

namespace edgeless {

// The graph in the form of the op's schema. `edges`: from unique (source, type) to destinations, or empty.
struct TypedEdges {
  at::TensorList by_dst, by_src;
  GraphArrays edges;

  bool multiplies_first() const { return !edges.csr.empty(); }
};

void check_relational_layer(const char* op, const Tensor& x, const OptTensor& own, const OptTensor& root,
                            const OptTensor& bias, const TypedEdges& graph, int64_t num_dst, int64_t width);

Tensor layer_of_parts(const Tensor& x, const Tensor& weight, const OptTensor& edge_weight, const OptTensor& own,
                      const OptTensor& root, const OptTensor& bias, at::TensorList by_dst, at::TensorList by_src,
                      at::TensorList csr, at::TensorList csc, int64_t num_dst, at::ScalarType out_dtype,
                      at::IntArrayRef max_degrees);
std::vector<Tensor> layer_backward_of_parts(const Tensor& grad, const Tensor& x, const Tensor& weight,
                                            const OptTensor& edge_weight, const OptTensor& own, const OptTensor& root,
                                            at::TensorList by_dst, at::TensorList by_src, at::TensorList csr,
                                            at::TensorList csc, c10::List<bool> needs, at::IntArrayRef max_degrees);

}  // namespace edgeless
