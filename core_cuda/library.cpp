// The schema of every op and the Python module; nothing else. Kernels and gradients register themselves from their own
// files. Two ops of Python alone stand in shared/program_cache.py, since their tag is newer than the oldest torch.
#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include "capture/call_key.h"
#include "capture/recorded_call.h"
#include "choices.h"
#include "common/cpu/capability.h"
#include "common/cpu/pool.h"
#include "common/own_memory.h"
#include "decisions.h"
#include "engine.h"
#include "graph/few_edges_cpu.h"
#include "graph/row_hashes.h"
#include "graph/stamp.h"
#include "jit/python.h"
#include "plans.h"

#ifdef EDGELESS_WITH_CUDA
namespace edgeless::cuda {
const char* built_archs();
}
#endif

TORCH_LIBRARY(edgeless, m) {
  // Graphs. Index tensors are all int32 or all int64; edge_ids maps a position to the original edge id.
  m.def(
      "coo_to_csr(Tensor row, Tensor col, SymInt num_rows, SymInt num_cols, bool validate) -> (Tensor indptr, Tensor "
      "indices, Tensor edge_ids)");
  m.def(
      "csr_transpose(Tensor indptr, Tensor indices, Tensor? edge_ids, SymInt num_cols) -> (Tensor indptr, Tensor "
      "indices, Tensor edge_ids)");

  // Attention. att may be of the rows' dtype, in attention alone. The score 'gat' takes dst and src [N, H, 1] or,
  // forward, [N, H]. csr = [indptr, indices] or [indptr, indices, edge_ids], rows are destinations; csc the same with
  // sources as rows, or [] where no gradient of a source tensor, or on CUDA of gatv2's att, is needed; behind its edge
  // ids may stand the places of its edges in csr, which on CUDA a backward with edge_attr looks up. Beyond the last
  // row's end, indices and edge_ids may hold anything that they may hold before it: no op reads it but to return
  // something by edge. softmax_stats [1 or 2, Nd, H]: what the other ops need of the softmax, for the same device alone
  // (cpu/args.h and cuda/args.h in core_cuda/attention). max_degrees: the most edges of a row of csr, and of csc, as
  // far as that is known; where no row is cut, ops on CUDA look for no pieces to merge. side_by_side: gradients of dst,
  // src and value may be parts of one tensor where these are. donated: src and value have no other use than this call,
  // so that a backward which is known to be the last may write their gradients over them.
  m.def(
      "attention(Tensor dst, Tensor src, Tensor? value, Tensor? att, Tensor? edge_attr, Tensor? edge_proj, "
      "Tensor? edge_scale, Tensor[] csr, Tensor[] csc, Tensor? seed, str score, float coefficient, float dropout, "
      "ScalarType? out_dtype, int[] max_degrees=[], bool donated=False) -> (Tensor out, Tensor softmax_stats)");
  m.def(
      "attention_backward(Tensor? grad_out, Tensor? grad_weights, Tensor? out, Tensor softmax_stats, Tensor dst, "
      "Tensor src, Tensor? value, Tensor? att, Tensor? edge_attr, Tensor? edge_proj, Tensor? edge_scale, "
      "Tensor[] csr, Tensor[] csc, Tensor? seed, str score, float coefficient, float dropout, bool dropped_weights, "
      "bool[] needs, bool side_by_side=False, int[] max_degrees=[]) -> Tensor[]");
  // The gradients of dst, src and, where there is one, value go to `into`, in this order; that of att is returned,
  // empty where att_grad does not ask for it. To save memory they may take the place of what has no other use: a
  // source's that of its own rows, src and value, and a destination's that of out: the same rows, or, where these are
  // of a wider dtype, any of their memory.
  m.def(
      "attention_backward_into(Tensor(a!)[] into, Tensor grad_out, Tensor out, Tensor softmax_stats, Tensor dst, "
      "Tensor src, Tensor? value, Tensor? att, Tensor[] csr, Tensor[] csc, Tensor? seed, str score, "
      "float coefficient, float dropout, bool att_grad, int[] max_degrees=[]) -> Tensor");
  m.def(
      "attention_weights(Tensor softmax_stats, Tensor dst, Tensor src, Tensor? att, Tensor? edge_attr, "
      "Tensor? edge_proj, Tensor[] csr, Tensor[] csc, Tensor? seed, str score, float coefficient, float dropout) -> "
      "Tensor");
  // The softmax of each row's logits [E, H], which stand in the order of csr, and the sum of value [Ns, H, C] by these
  // weights: [Nd, H, C]. Without gradients.
  m.def("softmax_sum(Tensor logits, Tensor value, Tensor[] csr, int[] max_degrees=[]) -> Tensor");

  // Sums: out[i] = dst_scale[i] * sum of weight[e] * src_scale[j] * x[j]; its transpose is the same op on the other
  // direction of the graph. sddmm: <dst[i], src[j]> of every edge, scaled alike. Rows [N, F] are one head.
  m.def(
      "spmm(Tensor x, Tensor? weight, Tensor? src_scale, Tensor? dst_scale, Tensor[] csr, Tensor[] csc, "
      "ScalarType? out_dtype, int[] max_degrees=[]) -> Tensor");
  // The sum without weights and scales, written to `out`: contiguous, and on CUDA at a whole number of 16 bytes.
  m.def("spmm_into(Tensor(a!) out, Tensor x, Tensor[] csr, int[] max_degrees=[]) -> ()");
  m.def("sddmm(Tensor dst, Tensor src, Tensor? src_scale, Tensor? dst_scale, Tensor[] csr, Tensor[] csc) -> Tensor");
  // Of the bench: the sum of <x[i], x[j]> over every row's neighbours, `passes` times over, for x [N, F] of float32. On
  // CUDA a warp has a row; its lanes divide the features, or by_neighbor the neighbours, and load a number or, vectors,
  // 16 bytes at a time.
  m.def("gather_dots(Tensor x, Tensor indptr, Tensor indices, bool by_neighbor, bool vectors, int passes) -> Tensor");

  // Min and max: arg is the position of the extremum within its row. ties: what equal extrema get of the gradient,
  // "first" all to the first, "shared" equal parts, "scatter" equal parts and one more part lost where the extremum is
  // 0 (torch's scatter_reduce on zeros). tied says in which rows there is something to share; there arg on CUDA says
  // among how many (core_cuda/reduction/cuda/args.h). arg and tied are for the backward on the same device alone.
  // With "first" the backward does not read x and out: only their sizes count. csc: [], or gradients may be gathered
  // over it; behind its edge ids may stand what edge_positions gives, in the order of its edges.
  m.def(
      "neighbor_reduce(Tensor x, Tensor[] csr, Tensor[] csc, str reduce, float fill, ScalarType arg_dtype, "
      "str ties, int[] max_degrees=[]) -> (Tensor out, Tensor arg, Tensor tied)");
  // The position of every edge within its row: [E], int32, by the id of the edge.
  m.def("edge_positions(Tensor[] csr) -> Tensor");
  m.def(
      "neighbor_reduce_backward(Tensor grad_out, Tensor x, Tensor out, Tensor arg, Tensor tied, Tensor[] csr, "
      "Tensor[] csc, str reduce, str ties, int[] max_degrees=[]) -> Tensor");

  // Linear maps of one input: x weights[k]^T + biases[k], in `dtype` as autocast would do them. The first `joined`
  // results may be parts of the rows of one tensor; heads: 0, or what number of heads a result is returned in, as
  // [N, heads, C]. needs: x, every weight, every bias. x_dtype, map_dtype: of the gradients of x and of the maps, where
  // it is not that of x.
  m.def(
      "project(Tensor x, Tensor[] weights, Tensor?[] biases, int joined=0, ScalarType? dtype=None, int[] heads=[]) -> "
      "Tensor[]");
  m.def(
      "project_backward(Tensor?[] grads, Tensor x, Tensor[] weights, bool[] needs, ScalarType? x_dtype=None, "
      "ScalarType? map_dtype=None) -> Tensor[]");
  // The sum of one map of each of several inputs: xs[0] weights[0]^T + xs[1] weights[1]^T + ... + bias. needs: every x,
  // every weight, the bias.
  m.def("project_sum(Tensor[] xs, Tensor[] weights, Tensor? bias, ScalarType? dtype=None) -> Tensor");
  m.def(
      "project_sum_backward(Tensor grad, Tensor[] xs, Tensor[] weights, bool[] needs, ScalarType? x_dtype=None, "
      "ScalarType? map_dtype=None) -> Tensor[]");
  // to += x weight^T + bias, in place; `to` is of x's dtype or of its statistics'.
  m.def("project_onto(Tensor(a!) to, Tensor x, Tensor weight, Tensor? bias) -> ()");
  // x [N, F] or [N, H, C] + row [F] or [H C], as [N, F]; the sum over the rows of x, [F]
  m.def("add_row(Tensor x, Tensor row) -> Tensor");
  m.def("column_sums(Tensor x) -> Tensor");
  // Dot products of every head of x [N, H, C] with vectors [H, C] or [1, H, C]: [N, H] each. needs: x, every vector.
  // more: added to the gradient of x.
  m.def("node_logits(Tensor x, Tensor[] vectors) -> Tensor[]");
  m.def(
      "node_logits_backward(Tensor?[] grads, Tensor x, Tensor[] vectors, bool[] needs, Tensor? more=None) -> "
      "Tensor[]");
  // A layer of attention whose sources are its destinations, as one node of autograd: maps of x [N, F] in `dtype`
  // (project), the attention of `heads` heads over them, and `row` [H * C] added: [N, H * C], or [N, H, C] with
  // by_head. What the maps and the vectors [1, H, C] are, the score says: core_cuda/layer/attention_layer.cpp.
  m.def(
      "attention_layer(Tensor x, Tensor[] weights, Tensor?[] biases, Tensor[] vectors, Tensor? row, Tensor[] csr, "
      "Tensor[] csc, Tensor? seed, str score, int heads, float coefficient, float dropout, ScalarType? dtype, "
      "ScalarType? out_dtype, int[] max_degrees=[], bool by_head=False) -> Tensor");
  // The same of a sum: spmm(x) weights[0]^T + x weights[1]^T + bias. edge_weight [E, 1] has no gradient here.
  m.def(
      "sum_layer(Tensor x, Tensor[] weights, Tensor? bias, Tensor? edge_weight, Tensor? src_scale, Tensor? dst_scale, "
      "Tensor[] csr, Tensor[] csc, ScalarType? dtype, int[] max_degrees=[]) -> Tensor");
  // Products with the weights of types. Entries are sorted by type, type t has [offsets[t], offsets[t + 1]). Entry i is
  // row rows[i] of x, row i where rows is missing; rows are distinct. typed_mm: every row times weight[t] of [types, K,
  // M]. typed_outer: the sums of x[row]^T y[row] of every type, [types, K, M].
  m.def("typed_mm(Tensor x, Tensor weight, Tensor offsets, Tensor? rows) -> Tensor");
  m.def("typed_outer(Tensor x, Tensor y, Tensor offsets, Tensor? rows) -> Tensor");
  // x[index], with members[indptr[r] .. indptr[r + 1]) the places in index that hold r, for the gradient. indptr and
  // members are of one dtype.
  m.def("gather_rows(Tensor x, Tensor index, Tensor indptr, Tensor members) -> Tensor");
  // Linear maps by type: x weight[t]^T + bias[t] for weights [types, M, K] and biases [types, M]. typed_sums: the sums
  // of the rows of every type, [types, M].
  m.def("typed_linear(Tensor x, Tensor weight, Tensor? bias, Tensor offsets) -> Tensor");
  m.def("typed_sums(Tensor x, Tensor offsets) -> Tensor");
  // alpha[t] y[i] + (1 - alpha[t]) x[i]; needs: y, x, alpha, an empty tensor for what is not asked for.
  m.def("typed_blend(Tensor y, Tensor x, Tensor alpha, Tensor offsets, Tensor? rows) -> Tensor");
  m.def(
      "typed_blend_backward(Tensor grad, Tensor y, Tensor x, Tensor alpha, Tensor offsets, Tensor? rows, "
      "bool[] needs) -> Tensor[]");
  // Edges of a direction of a graph sorted by type and, within a type, by row, and cut into pieces of one type and one
  // row, of at most `cut` edges: (type_ptr [types + 1], rows [E], ptr [E + 1], indices [E], edge_ids [E], parts,
  // count). There are type_ptr[types] pieces; behind them rows and ptr hold anything. parts is for the same device
  // alone (core_cuda/relational/cpu/args.h), count [1] the number of pieces, on the CPU.
  m.def(
      "typed_edges(Tensor indptr, Tensor indices, Tensor? edge_ids, Tensor types, SymInt num_types, int cut) -> "
      "(Tensor type_ptr, Tensor rows, Tensor ptr, Tensor indices, Tensor edge_ids, Tensor parts, Tensor count)");
  // One over the number of edges of the same type and row, from what typed_edges gives: for every edge by its id, or,
  // without ids, for every piece.
  m.def("typed_means(Tensor type_ptr, Tensor rows, Tensor ptr, Tensor? edge_ids, ScalarType dtype) -> Tensor");
  // The piece of every edge by its id, where pieces are whole pairs.
  m.def("pairs_of_edges(Tensor ptr, Tensor edge_ids) -> Tensor");
  // Pieces and rows cut into tiles of bounded work, as CUDA kernels want them (core_cuda/relational/tiling.h), from
  // what typed_edges gives, and by_row [num_rows + 1 + pieces], its parts on CUDA: the first tile of every type
  // [types + 1], the first piece of every tile, and the first row of every tile of rows. split_hubs: rows of many
  // pieces add up parts of these, parts [2, num_parts] being from where to where in by_row's, and of_rows, as by_row,
  // what rows add up; of_rows is empty where there are no such rows.
  m.def(
      "piece_tiles(Tensor type_ptr, Tensor rows, Tensor ptr, Tensor by_row, SymInt num_edges, bool split_hubs) -> "
      "(Tensor type_tiles, Tensor tiles, Tensor row_tiles, Tensor of_rows, Tensor parts)");
  // out[i] = sum over types t of (sum over edges e of type t from j to i of edge_weight[e] x[j]) weight[t], for weights
  // [types, K, M], or block-diagonal ones [types, blocks, K / blocks, M / blocks]. by_dst, by_src: what typed_edges
  // gives of both directions, by_src [] where no gradient is needed. weight and out_dtype: of x's dtype or its
  // statistics'.
  m.def(
      "relational_sum(Tensor x, Tensor weight, Tensor? edge_weight, Tensor[] by_dst, Tensor[] by_src, SymInt num_dst, "
      "ScalarType? out_dtype) -> Tensor");
  // needs: x, weight, edge_weight; an empty tensor for what is not asked for.
  m.def(
      "relational_sum_backward(Tensor grad, Tensor x, Tensor weight, Tensor? edge_weight, Tensor[] by_dst, "
      "Tensor[] by_src, bool[] needs) -> Tensor[]");
  // Keys and values of pairs of a source and a type, a row each: k[j] k_weight[t] k_scale[t] and v[j] v_weight[t], for
  // weights [types, H, K, M], heads side by side in a row, and k_scale [types, H]. by_dst, by_src: as above, of the
  // graph whose edges and destinations are the pairs (TypedGraph.compact). Weights and scale: of k's dtype or its
  // statistics'. joined: keys and values may be columns of one tensor. needs: k, v, k_weight, v_weight, k_scale. _over:
  // grad_keys and grad_values may have been written over.
  m.def(
      "pair_maps(Tensor k, Tensor v, Tensor k_weight, Tensor v_weight, Tensor k_scale, Tensor[] by_dst, "
      "Tensor[] by_src, bool joined) -> (Tensor keys, Tensor values)");
  m.def(
      "pair_maps_backward(Tensor grad_keys, Tensor grad_values, Tensor k, Tensor v, Tensor k_weight, Tensor v_weight, "
      "Tensor k_scale, Tensor[] by_dst, Tensor[] by_src, bool[] needs) -> Tensor[]");
  m.def(
      "pair_maps_backward_over(Tensor(a!) grad_keys, Tensor(b!) grad_values, Tensor k, Tensor v, Tensor k_weight, "
      "Tensor v_weight, Tensor k_scale, Tensor[] by_dst, Tensor[] by_src, bool[] needs) -> "
      "(Tensor, Tensor, Tensor, Tensor, Tensor)");
  // attention of the score 'dot' with q [Nd, H M] for its rows and these keys and values: [Nd, H M]. Without gradients;
  // on CUDA with memory for keys or for values alone. csr: [indptr, indices], of the edges from pairs to destinations.
  m.def(
      "pair_dot_attention(Tensor q, Tensor k, Tensor v, Tensor k_weight, Tensor v_weight, Tensor k_scale, "
      "Tensor[] by_dst, Tensor[] csr, float coefficient, int[] max_degrees=[]) -> Tensor");
  // A layer over relations as one node of autograd: relational_sum(x, weight, edge_weight) + own root + bias, for root
  // [K', M]; own [Nd, K'], or the first rows of x where it is missing. Parameters are of x's dtype, out_dtype is that
  // or its statistics', and edge_weight has no gradient here. csr, csc []: neighbours are summed, then multiplied. Else
  // by_dst and by_src are those of the pairs of sources (TypedGraph.compact), each of which is multiplied once, and csr
  // and csc the edges from pairs to destinations, over which the products are summed. needs: x, weight, own, root,
  // bias; an empty tensor for what is not asked for.
  m.def(
      "relational_layer(Tensor x, Tensor weight, Tensor? edge_weight, Tensor? own, Tensor? root, Tensor? bias, "
      "Tensor[] by_dst, Tensor[] by_src, Tensor[] csr, Tensor[] csc, SymInt num_dst, ScalarType out_dtype, "
      "int[] max_degrees=[]) -> Tensor");
  m.def(
      "relational_layer_backward(Tensor grad, Tensor x, Tensor weight, Tensor? edge_weight, Tensor? own, Tensor? root, "
      "Tensor[] by_dst, Tensor[] by_src, Tensor[] csr, Tensor[] csc, bool[] needs, int[] max_degrees=[]) -> Tensor[]");
  // What the next op walks, as far as it has to be made (shared/pair_attention.py). indptr: edges by node. by_pair:
  // indptr and edge ids. pair_nodes, pair_of_edge: the source of a pair, the pair of an edge. by_node: indptr and
  // pairs. pieces: type_ptr, rows, ptr, edge_ids of typed_edges; piece_ptr, order: these pieces by row. longest [3],
  // int64: the most edges of a node and of a pair, and the most that a node sums.
  m.def(
      "pair_walks(Tensor indptr, Tensor[] by_pair, Tensor pair_nodes, Tensor pair_of_edge, Tensor[] by_node, "
      "Tensor[] pieces, Tensor piece_ptr, Tensor order) -> (Tensor edge_pairs, Tensor edge_pieces, Tensor pair_pieces, "
      "Tensor piece_types, Tensor numbers, Tensor begins, Tensor places, Tensor sums_ptr, Tensor columns, "
      "Tensor weights, Tensor longest)");
  // The attention of a layer over relations of one head: with the values v = x[j] weight[t] of a pair of a source j and
  // a type t, the sum of softmax(LeakyReLU(<x[i] weight[t], query> + <v, key>)) v over the edges of i, and bias. walks,
  // max_degrees: shared/pair_attention.py. edge_ids: [], or with dropout the ids by which it is drawn, of the edges by
  // destination and by pair. query, key [M, 1]. Behind the result stands what the backward on the same device needs,
  // last the sums without the bias, or nothing where there is none or keep_sums does not ask for them; the backward
  // takes them for out. Where autograd is on, the values are its own, and empty here. needs: x, weight, query, key,
  // bias; an empty tensor for what is not asked for. _over: values may have been written over.
  m.def(
      "pair_attention(Tensor x, Tensor weight, Tensor query, Tensor key, Tensor? bias, Tensor[] walks, "
      "Tensor[] edge_ids, float negative_slope, int[] max_degrees=[], bool keep_sums=False, Tensor? seed=None, "
      "float dropout=0.0) -> (Tensor out, Tensor values, Tensor vectors, Tensor queries, Tensor shift, Tensor sums)");
  m.def(
      "pair_attention_backward(Tensor grad, Tensor out, Tensor values, Tensor vectors, Tensor queries, Tensor shift, "
      "Tensor x, Tensor weight, Tensor query, Tensor key, Tensor? bias, Tensor[] walks, Tensor[] edge_ids, "
      "float negative_slope, bool[] needs, int[] max_degrees=[], Tensor? seed=None, float dropout=0.0) -> Tensor[]");
  m.def(
      "pair_attention_backward_over(Tensor grad, Tensor out, Tensor(a!) values, Tensor vectors, Tensor queries, "
      "Tensor shift, Tensor x, Tensor weight, Tensor query, Tensor key, Tensor? bias, Tensor[] walks, "
      "Tensor[] edge_ids, float negative_slope, bool[] needs, int[] max_degrees=[], Tensor? seed=None, "
      "float dropout=0.0) -> (Tensor, Tensor, Tensor, Tensor, Tensor)");
  // Contiguous copies in another dtype; side_by_side: as parts of one tensor, which on CUDA follow each other without a
  // gap where all are whole vectors of 16 bytes.
  m.def("cast_all(Tensor[] tensors, ScalarType dtype, bool side_by_side=False) -> Tensor[]");
}

namespace edgeless {
namespace {

bool is_edge_list(pybind11::handle value, const at::Device& device) {
  if (!THPVariable_CheckExact(value.ptr())) return false;
  const at::Tensor& t = THPVariable_Unpack(value.ptr());
  const bool integers = t.scalar_type() == at::kLong || t.scalar_type() == at::kInt;
  return t.layout() == at::kStrided && t.dim() == 2 && t.size(0) == 2 && integers && t.device() == device;
}

}  // namespace
}  // namespace edgeless

PYBIND11_MODULE(_C, m) {
  m.doc() = "Compiled core of edgeless. The ops live in torch.ops.edgeless.";
  m.def("cpu_capability", [] {
    switch (edgeless::cpu::capability()) {
      case edgeless::cpu::Capability::avx512: return "AVX-512";
      case edgeless::cpu::Capability::avx2: return "AVX2";
      default: return "baseline";
    }
  });
  m.def("limit_cpu_capability", &edgeless::cpu::limit_capability);
  m.def("pooled_bytes", &edgeless::cpu::pooled_bytes);
  m.def("release_pool", &edgeless::cpu::release_blocks);
  m.def("saves_unseen", &edgeless::saves_unseen);
  edgeless::define_plans(m);
  edgeless::define_choices(m);
  edgeless::define_engines(m);
  edgeless::define_decisions(m);
  edgeless::define_call_key(m);
  edgeless::define_recorded_call(m);
  edgeless::jit::define_jit(m);
  m.def("graph_of_few_edges", &edgeless::graph_of_few_edges);
  m.def("powers_of_few_degrees", &edgeless::powers_of_few_degrees);
  m.def("sum_of_row_hashes", &edgeless::sum_of_row_hashes);
  m.def("stamps", [](const std::vector<at::Tensor>& tensors, bool whole) {
    std::string all;
    all.reserve(tensors.size() * edgeless::kStampBytes);
    for (const at::Tensor& tensor : tensors) edgeless::add_stamp(all, tensor, whole);
    return pybind11::bytes(all);
  });
  // Of a sequence of any objects: whether all are tensors and no subclasses but parameters, and whether there is one
  // that was made in inference mode.
  m.def("are_concrete", [](const pybind11::sequence& values) {
    bool concrete = true, inference = false;
    for (const pybind11::handle value : values) {
      concrete = concrete && THPVariable_CheckExact(value.ptr());
      inference = inference || (concrete && THPVariable_Unpack(value.ptr()).is_inference());
    }
    return std::make_pair(concrete, inference);
  });
  // Whether these are plain tensors [2, E] of int64 or int32 on one device, no subclasses: asked of hundreds every
  // call.
  m.def("are_edge_lists", [](const pybind11::sequence& values, const at::Device& device) {
    for (const pybind11::handle value : values) {
      if (!edgeless::is_edge_list(value, device)) return false;
    }
    return true;
  });
  // Whether features [N, F] of sources and, unless that is None, of destinations are plain strided tensors of floats
  // that may be saved for a backward, and edges a plain tensor [2, E] of int64 or int32 on the sources' device: asked
  // in every call of a layer, where Python would take longer than the layer.
  m.def("are_rows_and_edges", [](pybind11::handle src, pybind11::handle dst, pybind11::handle edges) {
    const auto are_rows = [](pybind11::handle value) {
      if (!THPVariable_CheckExact(value.ptr())) return false;
      const at::Tensor& t = THPVariable_Unpack(value.ptr());
      const auto type = t.scalar_type();
      const bool floats = type == at::kFloat || type == at::kDouble || type == at::kBFloat16 || type == at::kHalf;
      return floats && t.layout() == at::kStrided && !t.is_nested() && t.dim() == 2 &&
             !(t.is_inference() && at::GradMode::is_enabled());
    };
    if (!are_rows(src) || !(dst.is_none() || dst.is(src) || are_rows(dst))) return false;
    return edgeless::is_edge_list(edges, THPVariable_Unpack(src.ptr()).device());
  });
  // EDGELESS_CACHE, which Python takes longer to read than the cache to find a graph; null is "".
  m.def("cache_setting", [] {
    const char* setting = std::getenv("EDGELESS_CACHE");
    return setting ? setting : "";
  });
#ifdef EDGELESS_WITH_CUDA
  m.attr("with_cuda") = true;
  m.attr("cuda_archs") = edgeless::cuda::built_archs();
#else
  m.attr("with_cuda") = false;
#endif
}
