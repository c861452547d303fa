#include "cusparse_refusal.h"

#include "cusparse_plans.h"

namespace edgeless {
namespace {

bool is_aligned(const at::Tensor& t) { return reinterpret_cast<uintptr_t>(t.data_ptr()) % 16 == 0; }

const char* graph_refusal(at::TensorList csr) {
  if (csr[1].numel() == 0) return "there are no edges";
  if (!is_aligned(csr[0]) || !is_aligned(csr[1])) return "the graph's arrays do not begin on 16 bytes";
  const auto plans = plans_of(csr);
  if (!plans) return "no plan can be kept for these arrays: they belong to no Graph, or to one first used in a capture";
  if (!plans->is_whole(csr)) return "the graph's arrays have room for more edges than it has";
  return nullptr;
}

}  // namespace

const char* cusparse_spmm_refusal(Engine engine, const at::Tensor& x, const OptTensor& weight, at::TensorList csr) {
  if (!x.is_cuda()) return "the tensors are not on a GPU";
  if (const char* refusal = cusparse_library_refusal()) return refusal;
  if (const char* refusal = cusparse_capture_refusal(engine, x)) return refusal;
  if (weight && weight->size(1) > 1 && weight->stride(1) != 0) return "edge weights differ from head to head";
  return graph_refusal(csr);
}

const char* cusparse_sddmm_refusal(const at::Tensor& dst, const at::Tensor& src, at::TensorList csr) {
  if (!src.is_cuda()) return "the tensors are not on a GPU";
  if (const char* refusal = cusparse_library_refusal()) return refusal;
  if (src.dim() == 3 && src.size(1) > 1) return "sampled products of several heads";
  const bool uniform = dst.scalar_type() == src.scalar_type();
  if (!uniform || src.element_size() < 4) return "sampled products of rows that are not float32 or float64";
  return graph_refusal(csr);
}

}  // namespace edgeless
