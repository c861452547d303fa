// The kernels of sums, extrema, relations, pairs and linear maps for Python: the kernel that runs for given sizes, its
// file and its C++ expression. Launches call the same functions to choose a kernel. Needs no GPU.
#include <pybind11/stl.h>

#include <string>

#include "pair_attention/cuda/expression.h"
#include "pair_attention/cuda/kernels.h"
#include "plan_names.h"
#include "plans.h"
#include "projection/cuda/expression.h"
#include "reduction/cuda/expression.h"
#include "relational/fused_plan.h"
#include "spmm/cuda/expression.h"

namespace edgeless {
namespace {

namespace py = pybind11;

py::dict named(const jit::Expression& kernel) {
  py::dict plan;
  add_name(plan, kernel);
  return plan;
}

// Sums and extrema ----------------------------------------------------------------------------------------------------

// weight, scale: edges have weights, sources have scales; by_head: an edge has a weight for each head.
py::dict sum_kernel(const std::string& dtype, bool wide_index, int vector_bytes, bool weight, bool scale, bool by_head,
                    int lanes, int slices, int64_t slice_bytes, int64_t num_rows, int64_t num_edges,
                    int64_t gathered_bytes, int64_t result_bytes) {
  namespace spmm = cuda::spmm;
  const cuda::Storage storage = storage_named(dtype);
  const bool weighed = weight || scale, by_edge = weighed && !by_head && !wide_index && vector_bytes == 16;
  const int64_t value_bytes = num_edges * (storage == cuda::Storage::f64 ? 8 : 4);
  const bool filled =
      spmm::fills_values(by_edge, weight, value_bytes, gathered_bytes, result_bytes, slices, slice_bytes);
  int sub_warp_log2 = 0;
  while (1 << sub_warp_log2 < lanes) ++sub_warp_log2;
  const int words = vector_bytes / 4;
  const spmm::SumKernel use =
      spmm::sum_kernel(wide_index, words, {weighed, by_head, filled}, sub_warp_log2, num_edges, num_rows);
  py::dict plan = named(spmm::sum_expression(storage, wide_index, words, use));
  plan["edges"] = use.batch, plan["fills_values"] = filled;
  return plan;
}

py::dict sampled_kernel(const std::string& dtype, bool wide_index, int vectors) {
  return named(cuda::spmm::sampled_expression(storage_named(dtype), wide_index, vectors));
}

py::dict extremum_kernel(const std::string& dtype, bool wide_index, bool shares, bool is_max) {
  return named(cuda::reduction::reduce_expression(storage_named(dtype), wide_index, shares, is_max));
}

py::dict gradient_plan(const std::string& dtype, int arg_bytes, bool wide_index, bool shares, bool has_transpose,
                       int64_t num_rows, int64_t num_columns, int64_t num_edges, int64_t width, int multiprocessors,
                       int64_t shared_bytes, bool clusters) {
  namespace reduction = cuda::reduction;
  const reduction::GradientProblem p{storage_named(dtype), arg_bytes, wide_index, shares, has_transpose, num_rows,
                                     num_columns,          num_edges, width};
  const reduction::GradientPlan chosen = reduction::plan_gradient(p, {multiprocessors, shared_bytes, clusters});
  py::dict plan = named(reduction::expression_of(p, chosen));
  plan["engine"] = reduction::name_of(chosen);
  return plan;
}

// Relations -----------------------------------------------------------------------------------------------------------

cuda::relational::Weights weights_named(const std::string& weights) {
  using cuda::relational::Weights;
  if (weights == "none") return Weights::none;
  if (weights == "in_order") return Weights::in_order;
  if (weights == "by_id") return Weights::by_id;
  if (weights == "of_segments") return Weights::of_segments;
  throw py::value_error("plan: weights must be 'none', 'in_order', 'by_id' or 'of_segments', got '" + weights + "'");
}

// The fused kernel of the segments, forward (products of sums) or backward (gradients).
py::dict segments_plan(bool backward, const std::string& dtype, const std::string& weights, int64_t edges,
                       int64_t segments, int64_t tiles, int64_t types, int in_width, int out_width,
                       int multiprocessors) {
  namespace relational = cuda::relational;
  const relational::SegmentSizes sizes{
      storage_named(dtype), weights_named(weights), edges, segments, tiles, types, in_width, out_width};
  const relational::SegmentsPlan chosen =
      backward ? relational::plan_gradients(sizes, multiprocessors) : relational::plan_products(sizes, multiprocessors);
  py::dict plan = named(backward ? relational::gradients_expression(sizes, chosen)
                                 : relational::products_expression(sizes, chosen));
  plan["by_warps"] = chosen.by_warps, plan["share"] = chosen.share, plan["blocks"] = chosen.blocks(sizes);
  return plan;
}

// The fused kernel that adds up the segments of every row. own_width: columns of the rows of the own product, `width`
// if there is none.
py::dict rows_plan(const std::string& dtype, int64_t segments, int64_t rows, int64_t tiles, int own_width, int width,
                   bool transposed, int multiprocessors, int capability, int64_t shared_bytes) {
  namespace relational = cuda::relational;
  const relational::RowSizes sizes{storage_named(dtype), segments, rows, tiles, own_width, width, transposed};
  const relational::RowsPlan chosen = relational::plan_rows(sizes, multiprocessors, {capability, shared_bytes});
  py::dict plan = named(relational::rows_expression(sizes, chosen));
  plan["by_warps"] = chosen.by_warps, plan["share"] = chosen.share;
  return plan;
}

bool on_tensor_cores(cuda::Storage storage, int capability) {
  return storage != cuda::Storage::f64 && capability >= 80;
}

// Products of rows with the matrices of their types [depth, columns], stored transposed or not.
py::dict typed_product_kernel(const std::string& dtype, int depth, int columns, bool transposed, int capability) {
  namespace relational = cuda::relational;
  const cuda::Storage storage = storage_named(dtype);
  if (!on_tensor_cores(storage, capability)) return named(relational::any_product_expression(storage));
  const int vector = 16 / cuda::size_of(storage);
  const bool whole = depth % vector == 0 && columns % vector == 0;  // else a padded, row-major copy is multiplied
  const int padded = (columns + vector - 1) / vector * vector;
  return named(relational::product_expression(storage, padded, transposed && whole));
}

// Sums of x^T y by type.
py::dict typed_outer_kernel(const std::string& dtype, int capability) {
  namespace relational = cuda::relational;
  const cuda::Storage storage = storage_named(dtype);
  return named(on_tensor_cores(storage, capability) ? relational::outer_expression(storage)
                                                    : relational::any_outer_expression(storage));
}

// A pass of attention over pairs, forward or by_src, with rows of `vectors` vectors of 16 bytes.
py::dict pair_plan(const std::string& pass, const std::string& dtype, int vectors, int64_t num_rows, int64_t num_edges,
                   int64_t num_gathered, int64_t max_degree, bool dropout, int multiprocessors, int64_t l2_bytes) {
  cuda::Problem p;
  p.pass = pass_named(pass), p.score = Score::gat, p.storage = storage_named(dtype), p.value_vectors = vectors;
  p.num_rows = num_rows, p.num_edges = num_edges, p.num_gathered = num_gathered, p.max_degree = max_degree;
  const cuda::Plan chosen = cuda::pair_plan(p, {multiprocessors, l2_bytes});
  py::dict plan = named(cuda::pair_expression(p.pass, p.storage, chosen.kernel, dropout));
  plan["lanes"] = chosen.kernel.lanes, plan["edges"] = chosen.kernel.edges;
  plan["blocks"] = chosen.part.num_ranges, plan["merges"] = chosen.hubs;
  return plan;
}

py::dict deltas_kernel(const std::string& dtype, int vectors) {
  return named(cuda::deltas_expression(storage_named(dtype), vectors));
}

// A skip connection by type of aligned rows, or its gradient.
py::dict blend_kernel(const std::string& dtype, int width, bool backward) {
  namespace relational = cuda::relational;
  const cuda::Storage storage = storage_named(dtype);
  const int vector = relational::typed_rows_vector(storage, width, true);
  return named(backward ? relational::typed_sums_expression(storage, vector, true)
                        : relational::blend_expression(storage, vector));
}

// Linear maps ---------------------------------------------------------------------------------------------------------

// A product [rows, columns] of aligned operands; empty if a library computes it. nodes: rows of the first operand;
// divided: the product is a sum over the nodes; transposed: the second operand is stored transposed.
py::dict map_kernel(const std::string& dtype, int64_t rows, int64_t columns, int64_t depth, int64_t nodes, bool divided,
                    bool transposed, int capability, bool allows_tf32) {
  namespace projection = cuda::projection;
  const projection::ProductSizes sizes{storage_named(dtype), rows, columns, depth, divided};
  if (!projection::takes(sizes, nodes, capability, allows_tf32)) return {};
  return named(projection::expression_of(sizes, transposed, false));
}

}  // namespace

void define_kernel_plans(py::module_& m) {
  m.def("sum_kernel", &sum_kernel, py::kw_only(), py::arg("dtype"), py::arg("wide_index"), py::arg("vector_bytes"),
        py::arg("weight"), py::arg("scale"), py::arg("by_head"), py::arg("lanes"), py::arg("slices"),
        py::arg("slice_bytes"), py::arg("num_rows"), py::arg("num_edges"), py::arg("gathered_bytes"),
        py::arg("result_bytes"));
  m.def("sampled_kernel", &sampled_kernel, py::kw_only(), py::arg("dtype"), py::arg("wide_index"), py::arg("vectors"));
  m.def("extremum_kernel", &extremum_kernel, py::kw_only(), py::arg("dtype"), py::arg("wide_index"), py::arg("shares"),
        py::arg("is_max"));
  m.def("gradient_plan", &gradient_plan, py::kw_only(), py::arg("dtype"), py::arg("arg_bytes"), py::arg("wide_index"),
        py::arg("shares"), py::arg("has_transpose"), py::arg("num_rows"), py::arg("num_columns"), py::arg("num_edges"),
        py::arg("width"), py::arg("multiprocessors"), py::arg("shared_bytes"), py::arg("clusters"));
  m.def("segments_plan", &segments_plan, py::kw_only(), py::arg("backward"), py::arg("dtype"), py::arg("weights"),
        py::arg("edges"), py::arg("segments"), py::arg("tiles"), py::arg("types"), py::arg("in_width"),
        py::arg("out_width"), py::arg("multiprocessors"));
  m.def("rows_plan", &rows_plan, py::kw_only(), py::arg("dtype"), py::arg("segments"), py::arg("rows"),
        py::arg("tiles"), py::arg("own_width"), py::arg("width"), py::arg("transposed"), py::arg("multiprocessors"),
        py::arg("capability"), py::arg("shared_bytes"));
  m.def("typed_product_kernel", &typed_product_kernel, py::kw_only(), py::arg("dtype"), py::arg("depth"),
        py::arg("columns"), py::arg("transposed"), py::arg("capability"));
  m.def("typed_outer_kernel", &typed_outer_kernel, py::kw_only(), py::arg("dtype"), py::arg("capability"));
  m.def("pair_plan", &pair_plan, py::kw_only(), py::arg("pass_"), py::arg("dtype"), py::arg("vectors"),
        py::arg("num_rows"), py::arg("num_edges"), py::arg("num_gathered"), py::arg("max_degree"), py::arg("dropout"),
        py::arg("multiprocessors"), py::arg("l2_bytes"));
  m.def("deltas_kernel", &deltas_kernel, py::kw_only(), py::arg("dtype"), py::arg("vectors"));
  m.def("blend_kernel", &blend_kernel, py::kw_only(), py::arg("dtype"), py::arg("width"), py::arg("backward"));
  m.def("map_kernel", &map_kernel, py::kw_only(), py::arg("dtype"), py::arg("rows"), py::arg("columns"),
        py::arg("depth"), py::arg("nodes"), py::arg("divided"), py::arg("transposed"), py::arg("capability"),
        py::arg("allows_tf32"));
}

}  // namespace edgeless
