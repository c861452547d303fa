// gather_dots on the CPU, where by_neighbor and vectors make no difference.
#include <ATen/ATen.h>
#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include "inputs.h"

namespace edgeless::cpu {
namespace {

using at::Tensor;

template <class I>
void add_dots(const Tensor& x, const Tensor& indptr, const Tensor& indices, int64_t passes, Tensor& out) {
  const float* rows = x.const_data_ptr<float>();
  const I *ptr = indptr.const_data_ptr<I>(), *neighbors = indices.const_data_ptr<I>();
  float* sums = out.mutable_data_ptr<float>();
  const int64_t width = x.size(1);
  at::parallel_for(0, x.size(0), 256, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      double sum = 0;
      for (int64_t pass = 0; pass < passes; ++pass) {
        for (I e = ptr[i]; e < ptr[i + 1]; ++e) {
          const float *a = rows + i * width, *b = rows + int64_t{neighbors[e]} * width;
          for (int64_t k = 0; k < width; ++k) sum += double{a[k]} * b[k];
        }
      }
      sums[i] = static_cast<float>(sum);
    }
  });
}

Tensor gather_dots(const Tensor& x, const Tensor& indptr, const Tensor& indices, bool by_neighbor, bool vectors,
                   int64_t passes) {
  check_gather_dots(x, indptr, indices, vectors, passes);
  Tensor out = at::empty({x.size(0)}, x.options());
  AT_DISPATCH_INDEX_TYPES(indices.scalar_type(), "gather_dots",
                          [&] { add_dots<index_t>(x, indptr, indices, passes, out); });
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(edgeless, CPU, m) { m.impl("gather_dots", gather_dots); }

}  // namespace edgeless::cpu
