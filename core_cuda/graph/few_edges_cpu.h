// Graphs of few edges on the CPU, by plain calls of Python and not by ops: a batch of small graphs is new in every
// step, and its sort takes less time than one op on the way to it.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <tuple>

#include "../common/optional.h"

namespace edgeless {

// indptr, indices and edge ids by destination; the ids of edges that are no self loops, where these were replaced and
// there were some; how many destinations have in-edges, and the most that one has.
using FewEdges = std::tuple<at::Tensor, at::Tensor, at::Tensor, Optional<at::Tensor>, int64_t, int64_t>;

// The graph of the edges from src to dst, int32 or int64 [E]; self_loops: with a loop at each of the first nodes, as
// many as both sides have, behind the edges that are none. Nothing where edges or nodes are many, an id or a number of
// nodes is out of range, or a tensor is another than a plain one in this process' memory: all that is for the ops.
std::optional<FewEdges> graph_of_few_edges(const at::Tensor& src, const at::Tensor& dst, int64_t num_src,
                                           int64_t num_dst, bool self_loops);

// The number of edges of every row to the power of -1 or -0.5, and `isolated` for rows without; [rows], float64 where
// `wide`, else float32. Nothing for other powers, where rows are many, and for tensors as above.
Optional<at::Tensor> powers_of_few_degrees(const at::Tensor& indptr, double power, double isolated, bool wide);

}  // namespace edgeless
