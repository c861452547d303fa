// Graphs of few edges on the CPU, built by plain Python bindings and not by ops: a batch of small graphs is new in
// every step, and sorting it takes less time than dispatching one op.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <tuple>

#include "../common/optional.h"

namespace edgeless {

// indptr, indices and edge ids of the CSR; the ids of input edges that are not self loops, if self loops were replaced
// and there were any; the number of destinations with in-edges; the maximum in-degree.
using FewEdges = std::tuple<at::Tensor, at::Tensor, at::Tensor, Optional<at::Tensor>, int64_t, int64_t>;

// The graph of the edges from src to dst, int32 or int64 [E]. self_loops: self loops are removed, and one is appended
// at each of the first min(num_src, num_dst) nodes. Returns nothing, and leaves the call to the ops, if there are many
// edges or nodes, an id or node count is out of range, or a tensor is not a plain CPU tensor.
std::optional<FewEdges> graph_of_few_edges(const at::Tensor& src, const at::Tensor& dst, int64_t num_src,
                                           int64_t num_dst, bool self_loops);

// The degree of every row to the power of -1 or -0.5, or `isolated` for empty rows: [rows], float64 if `wide`, else
// float32. Returns nothing for other powers, for many rows, and for tensors that are not plain CPU tensors.
Optional<at::Tensor> powers_of_few_degrees(const at::Tensor& indptr, double power, double isolated, bool wide);

}  // namespace edgeless
