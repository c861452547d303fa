#include "engines.h"

#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "attention/blocks.h"
#include "common/engine.h"
#include "spmm/cusparse_plans.h"
#include "spmm/cusparse_refusal.h"

namespace edgeless {
namespace {

namespace py = pybind11;

std::optional<std::string> words(const char* refusal) {
  return refusal ? std::optional<std::string>(refusal) : std::nullopt;
}

}  // namespace

void define_engines(py::module_& m) {
  define_engine_choices(m);
  // These functions release the GIL: they wait for a plan's mutex, and an op that holds this mutex may wait for the
  // GIL.
  using Released = py::call_guard<py::gil_scoped_release>;
  using Arrays = std::vector<at::Tensor>;
  m.def(
      "cusparse_spmm_refusal",
      [](int engine, const at::Tensor& x, const OptTensor& weight, const Arrays& csr) {
        return words(cusparse_spmm_refusal(static_cast<Engine>(engine), x, weight, csr));
      },
      Released());
  m.def(
      "wsb_sum",
      [](const at::Tensor& x, const OptTensor& weight, const Arrays& csr) {
        return std::pair(words(wsb_refusal(x, weight, csr)), blocks_pay(x, weight, csr));
      },
      Released());
  m.def(
      "wsb_attention",
      [](bool backward, const at::Tensor& dst, const at::Tensor& src, const OptTensor& value,
         const OptTensor& edge_attr, const OptTensor& edge_scale, const Arrays& csr, const Arrays& csc,
         const std::string& score, double dropout) {
        const Score parsed = parse_score("edgeless", score);
        const AttentionCall call{dst, src, value, {}, edge_attr, {}, edge_scale, {csr, csc}, {}, parsed, 0, dropout};
        return std::pair(words(wsb_refusal(call, backward)), blocks_pay(call, backward));
      },
      Released());
  m.def(
      "cusparse_sddmm_refusal",
      [](const at::Tensor& dst, const at::Tensor& src, const Arrays& csr) {
        return words(cusparse_sddmm_refusal(dst, src, csr));
      },
      Released());
  m.def("cusparse_waits",
        [](int engine, int64_t element_size) { return cusparse_waits(static_cast<Engine>(engine), element_size); });
  m.def("one_buffer_pays", &cuda::one_buffer_pays, py::arg("bytes"));
  m.def("reuse_that_pays", &cuda::reuse_that_pays, py::arg("head_dim"), py::arg("gathered_bytes"), py::arg("rows"),
        py::arg("edges"));
  m.def(
      "num_blocks",
      [](const Arrays& csr) {
        const auto blocks = blocks_of(csr);
        return blocks ? blocks->columns.size(0) : int64_t{0};
      },
      Released());
  py::class_<KeptBlocks, std::shared_ptr<KeptBlocks>>(m, "KeptBlocks")
      .def(py::init(&KeptBlocks::make))
      .def("add", &KeptBlocks::add, py::arg("indptr"), py::arg("indices"), py::arg("blocks"), py::arg("reuse"),
           Released())
      .def("kept_tensors", &KeptBlocks::kept_tensors, Released())
      .def("num_entries", &KeptBlocks::num_entries, Released());
  py::class_<CusparsePlans, std::shared_ptr<CusparsePlans>>(m, "CusparsePlans")
      .def(py::init(&CusparsePlans::make))
      .def("learn", &CusparsePlans::learn, py::arg("sides"), py::arg("scales"), Released())
      .def("info", &CusparsePlans::info, Released())
      .def("kept_tensors", &CusparsePlans::kept_tensors, Released())
      .def("num_entries", &CusparsePlans::num_entries, Released());
}

}  // namespace edgeless
