// The schemas of all ops and the Python module. Kernels and gradients register themselves in their own files. Two ops
// are defined in Python alone (shared/graph/program_cache.py), because their tag is newer than the oldest supported
// torch.
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
#include "common/choices.h"
#include "common/cpu/capability.h"
#include "common/cpu/pool.h"
#include "common/cpu/tensors.h"
#include "common/decisions.h"
#include "common/own_memory.h"
#include "engines.h"
#include "graph/few_edges_cpu.h"
#include "graph/row_hashes.h"
#include "graph/stamp.h"
#include "jit/python.h"
#include "plans.h"
#include "programs/same_call.h"

TORCH_LIBRARY(edgeless, m) {
  // Graphs. The index tensors of a call are all int32 or all int64. edge_ids maps an index in the CSR to the original
  // edge id.
  m.def(
      "coo_to_csr(Tensor row, Tensor col, SymInt num_rows, SymInt num_cols, bool validate) -> (Tensor indptr, Tensor "
      "indices, Tensor edge_ids)");
  m.def(
      "csr_transpose(Tensor indptr, Tensor indices, Tensor? edge_ids, SymInt num_cols) -> (Tensor indptr, Tensor "
      "indices, Tensor edge_ids)");

  // Gathers the attributes of the graphs of a batch from `columns`. A column has an attribute of many graphs,
  // concatenated along dims[i], and belongs to level levels[i]. The batch has sizes[l] entries of level l. starts
  // [levels, graphs + 1]: index in the batch of every graph's first entry; begins [levels, graphs]: the same in the
  // columns. Where a column has too few entries, its last one is repeated. If increments[i] is not -1, each graph's
  // start of that level is added to the graph's values, which are integers. last[i] [.., entries]: the entries of the
  // batch's last graph, which are then not read from the column. All tables are int64. Has no gradients.
  m.def(
      "gather_packed(Tensor[] columns, int[] dims, int[] levels, int[] increments, Tensor?[] last, Tensor starts, "
      "Tensor begins, int[] sizes) -> Tensor[]");

  // Attention. att has the opmath dtype; the op `attention` also accepts the rows' dtype. The score 'gat' takes dst and
  // src as [N, H, 1] or, in the forward, as [N, H]. csr = [indptr, indices] or [indptr, indices, edge_ids], with
  // destinations as rows. csc is the same with sources as rows, or [] if no gradient of a source tensor is needed, nor,
  // on CUDA, that of gatv2's att. The CSC-to-CSR permutation may follow its edge ids; on CUDA a backward with edge_attr
  // uses it. indices and edge_ids may be longer than indptr[-1]: the values beyond must be valid, and only ops that
  // return something per edge read them. softmax_stats [1 or 2, Nd, H]: softmax statistics for the other ops, valid
  // only on the same device (cpu/args.h and cuda/args.h in core_cuda/attention). max_degrees: the maximum degrees of
  // csr and csc, as far as they are known; if no row is split, ops on CUDA skip the merge. side_by_side: the gradients
  // of dst, src and value may be column ranges of one tensor if dst, src and value are. donated: src and value have no
  // other use than this call, so the last backward may overwrite them with their gradients.
  m.def(
      "attention(Tensor dst, Tensor src, Tensor? value, Tensor? att, Tensor? edge_attr, Tensor? edge_proj, "
      "Tensor? edge_scale, Tensor[] csr, Tensor[] csc, Tensor? seed, str score, float coefficient, float dropout, "
      "ScalarType? out_dtype, int[] max_degrees=[], bool donated=False) -> (Tensor out, Tensor softmax_stats)");
  m.def(
      "attention_backward(Tensor? grad_out, Tensor? grad_weights, Tensor? out, Tensor softmax_stats, Tensor dst, "
      "Tensor src, Tensor? value, Tensor? att, Tensor? edge_attr, Tensor? edge_proj, Tensor? edge_scale, "
      "Tensor[] csr, Tensor[] csc, Tensor? seed, str score, float coefficient, float dropout, bool dropped_weights, "
      "bool[] needs, bool side_by_side=False, int[] max_degrees=[]) -> Tensor[]");
  // Writes the gradients of dst, src and, if given, value to `into`, in this order, and returns the gradient of att,
  // which is empty if not att_grad. To save memory, `into` may alias inputs that have no other use: the gradients of
  // src and value may overwrite src and value, and the gradient of dst may overwrite out: its rows or, if out has a
  // wider dtype, any part of its memory.
  m.def(
      "attention_backward_into(Tensor(a!)[] into, Tensor grad_out, Tensor out, Tensor softmax_stats, Tensor dst, "
      "Tensor src, Tensor? value, Tensor? att, Tensor[] csr, Tensor[] csc, Tensor? seed, str score, "
      "float coefficient, float dropout, bool att_grad, int[] max_degrees=[]) -> Tensor");
  m.def(
      "attention_weights(Tensor softmax_stats, Tensor dst, Tensor src, Tensor? att, Tensor? edge_attr, "
      "Tensor? edge_proj, Tensor[] csr, Tensor[] csc, Tensor? seed, str score, float coefficient, float dropout) -> "
      "Tensor");
  // The sum of value [Ns, H, C] weighted by the softmax over each row's logits [E, H], which are in CSR order: [Nd, H,
  // C]. Has no gradients.
  m.def("softmax_sum(Tensor logits, Tensor value, Tensor[] csr, int[] max_degrees=[]) -> Tensor");

  // SpMM: out[i] = dst_scale[i] * sum of weight[e] * src_scale[j] * x[j]. Its transpose is the same op on the other
  // direction of the graph. SDDMM: <dst[i], src[j]> of every edge, with the same scales. Rows [N, F] have one head.
  m.def(
      "spmm(Tensor x, Tensor? weight, Tensor? src_scale, Tensor? dst_scale, Tensor[] csr, Tensor[] csc, "
      "ScalarType? out_dtype, int[] max_degrees=[]) -> Tensor");
  // SpMM without weights and scales into `out`, which is contiguous and, on CUDA, aligned to 16 bytes.
  m.def("spmm_into(Tensor(a!) out, Tensor x, Tensor[] csr, int[] max_degrees=[]) -> ()");
  m.def("sddmm(Tensor dst, Tensor src, Tensor? src_scale, Tensor? dst_scale, Tensor[] csr, Tensor[] csc) -> Tensor");
  // For the benchmark only: `passes` times the sum of <x[i], x[j]> over each row's neighbours, for float32 x [N, F]. On
  // CUDA one warp computes one row. Its lanes divide the features or, if by_neighbor, the neighbours, and load 4 bytes
  // or, if vectors, 16 bytes at a time.
  m.def("gather_dots(Tensor x, Tensor indptr, Tensor indices, bool by_neighbor, bool vectors, int passes) -> Tensor");

  // Min and max. arg is the extremum's position within its row. ties: how equal extrema share the gradient. "first"
  // gives all of it to the first, "shared" gives equal parts, and "scatter" gives equal parts of which one is lost if
  // the extremum is 0 (torch's scatter_reduce on zeros). tied marks the rows in which extrema share; for these, arg on
  // CUDA also encodes their number (core_cuda/reduction/cuda/args.h). arg and tied are valid only for the backward on
  // the same device. With "first", the backward uses only the sizes of x and out. csc: [], or the CSC over which
  // gradients may be gathered; the result of edge_positions, in CSC order, may follow its edge ids. arg_dtype: dtype of
  // arg. On the CPU, bool means that no gradient is needed: arg and tied are then empty.
  m.def(
      "neighbor_reduce(Tensor x, Tensor[] csr, Tensor[] csc, str reduce, float fill, ScalarType arg_dtype, "
      "str ties, int[] max_degrees=[]) -> (Tensor out, Tensor arg, Tensor tied)");
  // Position of every edge within its row, indexed by edge id: [E], int32.
  m.def("edge_positions(Tensor[] csr) -> Tensor");
  m.def(
      "neighbor_reduce_backward(Tensor grad_out, Tensor x, Tensor out, Tensor arg, Tensor tied, Tensor[] csr, "
      "Tensor[] csc, str reduce, str ties, int[] max_degrees=[]) -> Tensor");

  // Linear maps of one input: x weights[k]^T + biases[k], in `dtype` as autocast would compute them. The first `joined`
  // results may be column ranges of one tensor. heads[k]: 0, or the number of heads of result k, which then is [N,
  // heads, C]. needs: x, every weight, every bias. x_dtype, map_dtype: dtypes of the gradients of x and of the maps, if
  // they are not x's.
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
  // to += x weight^T + bias, in place. `to` has x's dtype or its opmath dtype.
  m.def("project_onto(Tensor(a!) to, Tensor x, Tensor weight, Tensor? bias) -> ()");
  // add_row: x [N, F] or [N, H, C] plus row [F] or [H * C], as [N, F]. column_sums: the sum over the rows of x, [F].
  m.def("add_row(Tensor x, Tensor row) -> Tensor");
  m.def("column_sums(Tensor x) -> Tensor");
  // Dot products of every head of x [N, H, C] with vectors [H, C] or [1, H, C]: one [N, H] per vector. needs: x, every
  // vector. more: a tensor that is added to the gradient of x.
  m.def("node_logits(Tensor x, Tensor[] vectors) -> Tensor[]");
  m.def(
      "node_logits_backward(Tensor?[] grads, Tensor x, Tensor[] vectors, bool[] needs, Tensor? more=None) -> "
      "Tensor[]");
  // The output of attention, or its weights by edge id, computed by a generated program, for second derivatives; [] if
  // no program is of use. The inputs are those of AttentionInput. In Python: shared/programs/attention.py.
  m.def(
      "attention_program(Tensor?[] inputs, Tensor[] csr, Tensor[] csc, Tensor? seed, str score, float coefficient, "
      "float dropout, bool weights) -> Tensor[]");
  // An attention layer whose sources are its destinations, as one autograd node: maps of x [N, F] in `dtype` (project),
  // attention with `heads` heads, then plus `row` [H * C]. Returns [N, H * C], or [N, H, C] if by_head. The score
  // determines the maps and the vectors [1, H, C]: core_cuda/layer/attention_layer.cpp.
  m.def(
      "attention_layer(Tensor x, Tensor[] weights, Tensor?[] biases, Tensor[] vectors, Tensor? row, Tensor[] csr, "
      "Tensor[] csc, Tensor? seed, str score, int heads, float coefficient, float dropout, ScalarType? dtype, "
      "ScalarType? out_dtype, int[] max_degrees=[], bool by_head=False) -> Tensor");
  // A sum layer as one autograd node: spmm(x) weights[0]^T + x weights[1]^T + bias. edge_weight [E, 1] has no gradient
  // here.
  m.def(
      "sum_layer(Tensor x, Tensor[] weights, Tensor? bias, Tensor? edge_weight, Tensor? src_scale, Tensor? dst_scale, "
      "Tensor[] csr, Tensor[] csc, ScalarType? dtype, int[] max_degrees=[]) -> Tensor");
  // Typed GEMM. Entries are sorted by type; type t has entries [offsets[t], offsets[t + 1]). Entry i is row rows[i] of
  // x, or row i without rows; rows are distinct. typed_mm: every row times weight[t] of [types, K, M]. typed_outer: per
  // type the sum of x[row]^T y[row], [types, K, M].
  m.def("typed_mm(Tensor x, Tensor weight, Tensor offsets, Tensor? rows) -> Tensor");
  m.def("typed_outer(Tensor x, Tensor y, Tensor offsets, Tensor? rows) -> Tensor");
  // x[index]. For the gradient, members[indptr[r] .. indptr[r + 1]) are the indices at which `index` holds r. indptr
  // and members have one dtype.
  m.def("gather_rows(Tensor x, Tensor index, Tensor indptr, Tensor members) -> Tensor");
  // typed_linear: x weight[t]^T + bias[t] per type, for weights [types, M, K] and biases [types, M]. typed_sums: the
  // sum of each type's rows, [types, M].
  m.def("typed_linear(Tensor x, Tensor weight, Tensor? bias, Tensor offsets) -> Tensor");
  m.def("typed_sums(Tensor x, Tensor offsets) -> Tensor");
  // alpha[t] y[i] + (1 - alpha[t]) x[i]. needs: y, x, alpha; a gradient that is not needed is an empty tensor.
  m.def("typed_blend(Tensor y, Tensor x, Tensor alpha, Tensor offsets, Tensor? rows) -> Tensor");
  m.def(
      "typed_blend_backward(Tensor grad, Tensor y, Tensor x, Tensor alpha, Tensor offsets, Tensor? rows, "
      "bool[] needs) -> Tensor[]");
  // Sorts the edges of one direction of a graph by type and, within a type, by row, and splits them into segments of
  // one type and one row with at most `cut` edges: (type_ptr [types + 1], rows [E], ptr [E + 1], indices [E], edge_ids
  // [E], parts, count). There are type_ptr[types] segments; beyond them rows and ptr are unspecified. parts is valid
  // only on the same device (core_cuda/relational/cpu/args.h). count [1] is the number of segments, on the CPU.
  m.def(
      "typed_edges(Tensor indptr, Tensor indices, Tensor? edge_ids, Tensor types, SymInt num_types, int cut) -> "
      "(Tensor type_ptr, Tensor rows, Tensor ptr, Tensor indices, Tensor edge_ids, Tensor parts, Tensor count)");
  // Reciprocal number of edges of the same type and row, from the result of typed_edges: per edge by its id or, without
  // edge_ids, per segment.
  m.def("typed_means(Tensor type_ptr, Tensor rows, Tensor ptr, Tensor? edge_ids, ScalarType dtype) -> Tensor");
  // Index of every edge's segment, by edge id, if each segment is a whole unique (node, relation).
  m.def("pairs_of_edges(Tensor ptr, Tensor edge_ids) -> Tensor");
  // Splits the segments and rows of typed_edges into tiles of bounded work for the CUDA kernels
  // (core_cuda/relational/tiling.h). by_row [num_rows + 1 + segments] is `parts` of typed_edges on CUDA. Returns the
  // first tile of every type [types + 1], the first segment of every tile, and the first row of every tile of rows.
  // split_hubs: a row of many segments sums parts of them instead. Then parts [2, num_parts] has each part's begin and
  // end in by_row, and of_rows, laid out as by_row, lists what each row sums; of_rows is empty if there are no such
  // rows.
  m.def(
      "segment_tiles(Tensor type_ptr, Tensor rows, Tensor ptr, Tensor by_row, SymInt num_edges, bool split_hubs) -> "
      "(Tensor type_tiles, Tensor tiles, Tensor row_tiles, Tensor of_rows, Tensor parts)");
  // out[i] = sum over types t of (sum over edges e of type t from j to i of edge_weight[e] x[j]) weight[t], for weights
  // [types, K, M], or block-diagonal ones [types, blocks, K / blocks, M / blocks]. by_dst, by_src: the results of
  // typed_edges for both directions; by_src is [] if no gradient is needed. weight and out_dtype: x's dtype or its
  // opmath dtype.
  m.def(
      "relational_sum(Tensor x, Tensor weight, Tensor? edge_weight, Tensor[] by_dst, Tensor[] by_src, SymInt num_dst, "
      "ScalarType? out_dtype) -> Tensor");
  // needs: x, weight, edge_weight; a gradient that is not needed is an empty tensor.
  m.def(
      "relational_sum_backward(Tensor grad, Tensor x, Tensor weight, Tensor? edge_weight, Tensor[] by_dst, "
      "Tensor[] by_src, bool[] needs) -> Tensor[]");
  // Keys and values per unique (source, type) ("pair"), one row each: k[j] k_weight[t] k_scale[t] and v[j] v_weight[t],
  // for weights [types, H, K, M], heads contiguous in a row, and k_scale [types, H]. by_dst, by_src: as above, for
  // the graph whose edges and destinations are the pairs (TypedGraph.compact). Weights and scale have k's dtype or its
  // opmath dtype. joined: keys and values may be column ranges of one tensor. needs: k, v, k_weight, v_weight, k_scale.
  // _over: the op may overwrite grad_keys and grad_values.
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
  // Attention with the score 'dot' of queries q [Nd, H M] over these keys and values: [Nd, H M]. Has no gradients. On
  // CUDA the values overwrite the keys, so that the op needs memory for only one of them. csr: [indptr, indices] of the
  // edges from pairs to destinations.
  m.def(
      "pair_dot_attention(Tensor q, Tensor k, Tensor v, Tensor k_weight, Tensor v_weight, Tensor k_scale, "
      "Tensor[] by_dst, Tensor[] csr, float coefficient, int[] max_degrees=[]) -> Tensor");
  // A relational layer as one autograd node: relational_sum(x, weight, edge_weight) + own root + bias, for root [K', M]
  // and own [Nd, K'], which defaults to the first rows of x. Parameters have x's dtype, out_dtype is x's dtype or its
  // opmath dtype, and edge_weight has no gradient here. If csr and csc are [], neighbours are summed, then multiplied.
  // Otherwise by_dst and by_src are those of the unique (source, type) (TypedGraph.compact), each of which is
  // multiplied once, and csr and csc are the edges from these to destinations, over which the products are summed.
  // needs: x, weight, own, root, bias; a gradient that is not needed is an empty tensor.
  m.def(
      "relational_layer(Tensor x, Tensor weight, Tensor? edge_weight, Tensor? own, Tensor? root, Tensor? bias, "
      "Tensor[] by_dst, Tensor[] by_src, Tensor[] csr, Tensor[] csc, SymInt num_dst, ScalarType out_dtype, "
      "int[] max_degrees=[]) -> Tensor");
  m.def(
      "relational_layer_backward(Tensor grad, Tensor x, Tensor weight, Tensor? edge_weight, Tensor? own, Tensor? root, "
      "Tensor[] by_dst, Tensor[] by_src, Tensor[] csr, Tensor[] csc, bool[] needs, int[] max_degrees=[]) -> Tensor[]");
  // Computes the index arrays of pair_attention that the graph does not have yet (shared/functional/pair_attention.py).
  // A pair is a unique (source, type). indptr: edges by node. by_pair: indptr and edge ids. pair_nodes, pair_of_edge:
  // the source of each pair, the pair of each edge. by_node: indptr and pairs. segments: type_ptr, rows, ptr and
  // edge_ids of typed_edges. segment_ptr, order: these segments by row. longest [3], int64: the most edges of a node,
  // the most edges of a pair, and the most rows that a node's gradient sums.
  m.def(
      "pair_walks(Tensor indptr, Tensor[] by_pair, Tensor pair_nodes, Tensor pair_of_edge, Tensor[] by_node, "
      "Tensor[] segments, Tensor segment_ptr, Tensor order) -> (Tensor edge_pairs, Tensor edge_segments, Tensor "
      "pair_segments, "
      "Tensor segment_types, Tensor numbers, Tensor begins, Tensor places, Tensor sums_ptr, Tensor columns, "
      "Tensor weights, Tensor longest)");
  // Attention of a relational layer with one head. With the values v = x[j] weight[t] per unique (source j, type t),
  // out[i] is the sum of softmax(LeakyReLU(<x[i] weight[t], query> + <v, key>)) v over the edges of i, plus bias.
  // walks, max_degrees: shared/functional/pair_attention.py. edge_ids: [], or with dropout the edge ids from which its
  // mask is drawn, in the order of destinations and in that of pairs. query, key [M, 1]. The tensors after `out` are
  // for the backward on the same device. `sums` is the sums without bias, which the backward takes as its `out`; it is
  // empty if there is no bias or keep_sums is false. With autograd enabled, the autograd node owns the values, and the
  // returned `values` is empty. needs: x, weight, query, key, bias; a gradient that is not needed is an empty tensor.
  // _over: the op may overwrite `values`.
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
  // Contiguous copies in another dtype. side_by_side: the copies are parts of one tensor and, on CUDA, have no gaps
  // between them if all are whole 16-byte vectors.
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
  m.def("empty_rows", [](const std::vector<int64_t>& shape, at::ScalarType dtype) {
    return edgeless::cpu::empty_rows(shape, at::TensorOptions().dtype(dtype));
  });
  m.def("pooled_bytes", &edgeless::cpu::pooled_bytes);
  m.def("release_pool", &edgeless::cpu::release_blocks);
  m.def("saves_unseen", &edgeless::saves_unseen);
  edgeless::define_plans(m);
  edgeless::define_choices(m);
  edgeless::define_engines(m);
  edgeless::define_decisions(m);
  edgeless::define_call_key(m);
  edgeless::define_recorded_call(m);
  edgeless::define_same_call(m);
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
  // Returns whether all objects of a sequence are tensors of no subclass but Parameter, and whether one of them was
  // created in inference mode.
  m.def("are_concrete", [](const pybind11::sequence& values) {
    bool concrete = true, inference = false;
    for (const pybind11::handle value : values) {
      concrete = concrete && THPVariable_CheckExact(value.ptr());
      inference = inference || (concrete && THPVariable_Unpack(value.ptr()).is_inference());
    }
    return std::make_pair(concrete, inference);
  });
  // Returns whether all values are plain tensors [2, E] of int64 or int32 on `device`, without subclasses. It is in C++
  // because every call checks hundreds of values.
  m.def("are_edge_lists", [](const pybind11::sequence& values, const at::Device& device) {
    for (const pybind11::handle value : values) {
      if (!edgeless::is_edge_list(value, device)) return false;
    }
    return true;
  });
  // Returns whether the features [N, F] of sources and, unless None, of destinations are plain strided floating-point
  // tensors that may be saved for a backward, and the edges are a plain tensor [2, E] of int64 or int32 on the sources'
  // device. It is in C++ because every call of a layer checks this, and Python would take longer than the layer.
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
  // EDGELESS_CACHE, or "" if it is not set. It is read in C++ because Python takes longer to read it than the cache to
  // find a graph.
  m.def("cache_setting", [] {
    const char* setting = std::getenv("EDGELESS_CACHE");
    return setting ? setting : "";
  });
}
