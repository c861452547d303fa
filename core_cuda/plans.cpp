// The planner of the CUDA kernels for Python: the kernel that would run for given sizes on a given device. Needs no
// GPU. The headers that decide state the reasons.
#include "plans.h"

#include <pybind11/stl.h>

#include <string>

#include "attention/cuda/expression.h"
#include "attention/cuda/plan.h"
#include "attention/inputs.h"
#include "common/segment_reduce.h"
#include "common/thresholds.h"
#include "jit/launch.h"
#include "plan_names.h"
#include "programs/walk_plan.h"
#include "relational/plan.h"
#include "spmm/plan.h"

namespace edgeless {
namespace {

namespace py = pybind11;
using cuda::Storage;

int vectors_of(int64_t numbers, Storage storage) {
  const int64_t per = cuda::vector_numbers(storage);
  return static_cast<int>((numbers + per - 1) / per);
}

py::dict attention_plan(const std::string& pass, const std::string& score, const std::string& dtype, int64_t heads,
                        int64_t key_dim, int64_t value_dim, int64_t num_rows, int64_t num_edges, int64_t num_gathered,
                        int64_t max_degree, bool dropout, bool arrays, int edge_dim, int edge_arrays, bool wide_index,
                        int multiprocessors, int64_t l2_bytes) {
  cuda::Problem p;
  p.pass = pass_named(pass), p.score = parse_score("plan", score);
  if (p.score == Score::gat) key_dim = 0;
  if (values_are_keys(p.score)) value_dim = key_dim;
  const bool by_src = p.pass == cuda::Pass::by_src;
  const int64_t bytes =
      heads * (key_dim + (values_are_keys(p.score) ? 0 : value_dim)) * cuda::size_of(storage_named(dtype));
  const bool fives = cuda::takes_fives(num_edges, by_src ? num_gathered : num_rows, by_src ? num_rows : num_gathered,
                                       bytes, edge_dim > 0, l2_bytes);
  p.storage = cuda::storage_of_rows(storage_named(dtype), key_dim, value_dim, fives);
  p.wide_index = wide_index, p.dropout = dropout, p.arrays = arrays, p.edge_arrays = edge_arrays;
  p.edge_term = edge_dim > 0, p.edge_dim = edge_dim;
  p.heads = static_cast<int>(heads);
  p.key_vectors = vectors_of(key_dim, p.storage), p.value_vectors = vectors_of(value_dim, p.storage);
  p.num_rows = num_rows, p.num_edges = num_edges, p.num_gathered = num_gathered, p.max_degree = max_degree;
  const cuda::Plan plan = cuda::make_plan(p, {multiprocessors, l2_bytes});
  py::dict found;
  if (!plan.kernel.vectors) return found;
  const cuda::Kernel& k = plan.kernel;
  static const char* const modes[] = {"plain",     "dropout",           "edge arrays", "dropout and edge arrays",
                                      "edge term", "edge term in tiles"};
  add_name(found, cuda::expression_of(p.pass, p.score, p.storage, k));
  found["kernel"] = k.mma ? "tensor cores" : "vectors";
  found["options"] = modes[k.mode];
  found["lanes"] = cuda::lanes_of(plan);
  found["vectors"] = k.vectors, found["vector_bytes"] = cuda::bytes_of_vector(p.storage);
  found["edges"] = k.edges;
  found["edges_of_lane"] = k.edges_of_lane();
  found["heads_per_slice"] = plan.layout.heads_per_slice;
  found["slices"] = (p.heads + plan.layout.heads_per_slice - 1) / plan.layout.heads_per_slice;
  found["blocks"] = plan.part.num_ranges;
  found["resident"] = cuda::resident_blocks(p, k);
  found["merges"] = plan.hubs;
  return found;
}

// number_bytes: bytes per value of a sum; 0 for other segment reductions.
py::dict reduce_plan(int64_t vectors, int64_t vector_bytes, int64_t num_rows, int64_t num_edges, int64_t num_gathered,
                     int64_t max_degree, int64_t carry_bytes, int64_t carry_budget, bool narrow_sub_warps,
                     int number_bytes, bool weighed, bool wide_index, int multiprocessors, int64_t l2_bytes) {
  cuda::ReduceProblem p;
  p.num_rows = num_rows, p.num_edges = num_edges, p.num_gathered = num_gathered, p.max_degree = max_degree;
  p.vectors = static_cast<int>(vectors), p.vector_bytes = static_cast<int>(vector_bytes);
  p.carry_bytes = carry_bytes, p.carry_budget = carry_budget, p.narrow_sub_warps = narrow_sub_warps;
  p.multiprocessors = multiprocessors, p.l2_bytes = l2_bytes;
  const cuda::ReducePlan plan = number_bytes > 0
                                    ? cuda::spmm::make_sum_plan(p, weighed, false, number_bytes, wide_index)
                                    : cuda::make_reduce_plan(p);
  py::dict found;
  found["lanes"] = 1 << plan.sub_warp_log2;
  found["slice_bytes"] = plan.slice_vectors * vector_bytes;
  found["slices"] = plan.slices;
  found["blocks"] = plan.part.num_ranges;
  found["merges"] = plan.hubs;
  return found;
}

// The plan of a generated walk: (blocks, feature tiles, segments in each half of the workspace or 0 if no row is split,
// the bytes of the plan among the kernel's arguments).
py::tuple walk_plan(int vectors, int64_t carry_bytes, bool has_totals, int64_t num_rows, int64_t num_edges,
                    int64_t max_degree, int multiprocessors) {
  cuda::ReduceProblem p;
  p.num_rows = num_rows, p.num_edges = num_edges, p.max_degree = carry_bytes > 0 ? max_degree : 0;
  p.vectors = vectors, p.carry_bytes = carry_bytes * vectors, p.multiprocessors = multiprocessors;
  const cuda::ReducePlan plan = cuda::programs::make_walk_plan(p, has_totals);
  return py::make_tuple(plan.part.num_ranges, plan.slices, plan.hubs ? plan.slots : 0,
                        py::bytes(reinterpret_cast<const char*>(&plan), sizeof(plan)));
}

// capability: 80 means 8.0. shared_bytes: the most that a thread block can request.
int most_fused_width(const std::string& dtype, bool wide_index, int capability, int64_t shared_bytes) {
  return cuda::relational::most_fused_width(storage_named(dtype), wide_index, {capability, shared_bytes});
}

bool fuses_widths(const std::string& dtype, bool wide_index, int capability, int64_t shared_bytes, int64_t in_width,
                  int64_t out_width) {
  return cuda::relational::fuses_widths(storage_named(dtype), wide_index, {capability, shared_bytes}, in_width,
                                        out_width);
}

}  // namespace

void define_plans(py::module_& m) {
  define_kernel_plans(m);
  m.def("attention_plan", &attention_plan, py::kw_only(), py::arg("pass_"), py::arg("score"), py::arg("dtype"),
        py::arg("heads"), py::arg("key_dim"), py::arg("value_dim"), py::arg("num_rows"), py::arg("num_edges"),
        py::arg("num_gathered"), py::arg("max_degree"), py::arg("dropout"), py::arg("arrays"), py::arg("edge_dim"),
        py::arg("edge_arrays"), py::arg("wide_index"), py::arg("multiprocessors"), py::arg("l2_bytes"));
  m.def("reduce_plan", &reduce_plan, py::kw_only(), py::arg("vectors"), py::arg("vector_bytes"), py::arg("num_rows"),
        py::arg("num_edges"), py::arg("num_gathered"), py::arg("max_degree"), py::arg("carry_bytes"),
        py::arg("carry_budget"), py::arg("narrow_sub_warps"), py::arg("number_bytes"), py::arg("weighed"),
        py::arg("wide_index"), py::arg("multiprocessors"), py::arg("l2_bytes"));
  m.def("walk_plan", &walk_plan, py::kw_only(), py::arg("vectors"), py::arg("carry_bytes"), py::arg("has_totals"),
        py::arg("num_rows"), py::arg("num_edges"), py::arg("max_degree"), py::arg("multiprocessors"));
  m.def("narrow_sums_pay", &cuda::narrow_sums_pay, py::kw_only(), py::arg("num_edges"), py::arg("num_rows"),
        py::arg("halves"), py::arg("weighted"));
  m.def("short_segments_pay", &cuda::short_segments_pay, py::arg("edges"), py::arg("segments"), py::arg("tiles"),
        py::arg("widest"));
  m.def("short_rows_pay", &cuda::short_rows_pay, py::arg("added"), py::arg("rows"), py::arg("widest"),
        py::arg("halves"));
  m.def("short_gradients_pay", &cuda::short_gradients_pay, py::arg("in_width"), py::arg("out_width"));
  m.def("most_fused_width", &most_fused_width, py::kw_only(), py::arg("dtype"), py::arg("wide_index"),
        py::arg("capability"), py::arg("shared_bytes"));
  m.def("fuses_widths", &fuses_widths, py::kw_only(), py::arg("dtype"), py::arg("wide_index"), py::arg("capability"),
        py::arg("shared_bytes"), py::arg("in_width"), py::arg("out_width"));
  // The most bytes of shared memory that a thread block can request, which older versions of PyTorch do not report.
  m.def(
      "shared_bytes_of_block",
      [](int device) { return jit::Driver::get().attribute(jit::Attribute::shared_bytes_of_block, device); },
      py::arg("device"));
  m.attr("SCORES") = py::tuple(py::cast(kScoreNames));
  m.def(
      "values_are_keys", [](const std::string& score) { return values_are_keys(parse_score("edgeless", score)); },
      py::arg("score"));
}

}  // namespace edgeless
