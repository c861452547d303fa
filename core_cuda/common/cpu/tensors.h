// Conversions from tensors to the views of the CPU kernels, and scheduling of parts on threads.
#pragma once

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <atomic>
#include <memory>

#include "huge_pages.h"
#include "pool.h"
#include "views.h"

namespace edgeless::cpu {

inline Dtype dtype_of(at::ScalarType t) {
  switch (t) {
    case at::kDouble: return Dtype::f64;
    case at::kBFloat16: return Dtype::bf16;
    case at::kHalf: return Dtype::f16;
    default: return Dtype::f32;
  }
}

// Returns `t`, or a contiguous copy if its rows are not contiguous. Rows may have any stride, so column ranges of a
// wider tensor are read in place.
inline at::Tensor packed_rows(const at::Tensor& t) {
  int64_t expected = 1;
  for (int64_t d = t.dim() - 1; d >= 1; --d) {
    if (t.size(d) != 1 && t.stride(d) != expected) return t.contiguous();
    expected *= t.size(d);
  }
  return t;
}

inline Compressed compressed(at::TensorList graph) {
  Compressed g;
  g.indptr = graph[0].data_ptr();
  g.indices = graph[1].data_ptr();
  g.edge_ids = graph.size() == 3 ? graph[2].data_ptr() : nullptr;
  g.wide = graph[0].scalar_type() == at::kLong;
  g.num_rows = graph[0].size(0) - 1;
  g.num_edges = g.row_begin(g.num_rows);  // the arrays may have unused entries beyond this index
  return g;
}

// `t` must come from packed_rows().
inline Rows rows_of(const at::Tensor& t) {
  return {t.data_ptr(), t.size(0) > 1 ? t.stride(0) : 0, dtype_of(t.scalar_type())};
}

// The rows of `t` must be contiguous.
inline OutRows out_rows(const at::Tensor& t) {
  constexpr size_t cache = size_t{32} << 20;
  return {t.data_ptr(), t.size(0) > 1 ? t.stride(0) : 0, dtype_of(t.scalar_type()), t.nbytes() > cache};
}

// Like at::empty, but large tensors are allocated from the pool.
inline at::Tensor empty_rows(at::IntArrayRef shape, const at::TensorOptions& options) {
  const caffe2::TypeMeta type = options.dtype();
  const size_t bytes = c10::multiply_integers(shape) * type.itemsize();
  if (bytes < kLeastPooled) return at::empty(shape, options);
  const Block block = take_block(bytes);
  if (!block.data) {
    at::Tensor t = at::empty(shape, options);
    prefer_huge_pages(t.data_ptr(), t.nbytes());
    return t;
  }
  c10::DataPtr data(
      block.data, new Block(block),
      [](void* context) {
        const std::unique_ptr<Block> owned(static_cast<Block*>(context));
        give_block(*owned);
      },
      at::Device(at::kCPU));
  c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, std::move(data), c10::GetCPUAllocator(),
                       /*resizable=*/true);
  at::Tensor t =
      at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), type);
  t.unsafeGetTensorImpl()->set_sizes_contiguous(shape);
  return t;
}

// Calls f with a zero of the opmath type of rows of this dtype.
template <class F>
auto with_arithmetic(at::ScalarType rows, F&& f) {
  return rows == at::kDouble ? f(double{}) : f(float{});
}

// Calls work(part, memory) for every part, with `scratch` elements of memory per thread, zeroed once. A thread that
// finishes a part gets the next one, so the results of a part must not depend on the thread.
template <class A, class F>
void for_each_part(int64_t parts, int64_t scratch, F&& work) {
  std::atomic<int64_t> next{0};
  auto thread = [&](int64_t, int64_t) {
    std::unique_ptr<A[]> memory(new A[scratch]());
    for (int64_t part = next++; part < parts; part = next++) work(part, memory.get());
  };
  const int64_t threads = std::min<int64_t>(parts, at::get_num_threads());
  if (threads <= 1 || at::in_parallel_region()) {
    thread(0, 1);
  } else {
    at::parallel_for(0, threads, 1, thread);
  }
}

}  // namespace edgeless::cpu
