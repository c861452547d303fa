#include "few_edges_cpu.h"

#include <ATen/ATen.h>
#include <ATen/Dispatch.h>
#include <ATen/TracerMode.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "aten_parallel.h"
#include "edge_sort.h"
#include "inputs.h"

namespace edgeless {
namespace {

using at::Tensor;

constexpr int64_t kFewRows = int64_t{1} << kDigitBits;

// Returns whether no mode, tracer or transform intercepts ops, so that tensors may be read and created without
// dispatching one.
bool is_unwatched() {
  // A torch.func transform wraps all tensors created inside it.
  const bool transforms = c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode);
  return !transforms && !c10::impl::TorchDispatchModeTLS::any_modes_set() && !at::tracer::impl::is_dispatch_enabled();
}

bool is_plain(const Tensor& t) {
  constexpr c10::DispatchKeySet others({c10::DispatchKey::Python, c10::DispatchKey::Functionalize,
                                        c10::DispatchKey::Batched, c10::DispatchKey::FuncTorchBatched,
                                        c10::DispatchKey::FuncTorchGradWrapper});
  return t.is_cpu() && t.layout() == at::kStrided && t.dim() == 1 && !t.key_set().has_any(others);
}

// Edges in strided arrays.
template <typename In>
struct StridedEdges {
  const In *keys, *others;
  int64_t key_stride, other_stride;

  int64_t key(int64_t position) const { return keys[position * key_stride]; }
  int64_t other(int64_t position) const { return others[position * other_stride]; }

  template <typename F>
  void visit(int64_t begin, int64_t end, const F& f) const {
    for (int64_t p = begin; p < end; ++p) f(key(p), other(p), static_cast<int32_t>(p));
  }
};

// The given edges without self loops, followed by one self loop at each of the first num_loops nodes.
template <typename In>
struct LoopedEdges {
  std::vector<In> keys, others;

  LoopedEdges(const StridedEdges<In>& given, int64_t num_edges, int64_t num_loops, Tensor* kept) {
    keys.reserve(num_edges + num_loops), others.reserve(num_edges + num_loops);
    for (int64_t p = 0; p < num_edges; ++p) {
      if (given.key(p) == given.other(p)) continue;
      keys.push_back(static_cast<In>(given.key(p))), others.push_back(static_cast<In>(given.other(p)));
    }
    if (const auto count = static_cast<int64_t>(keys.size()); count < num_edges) {
      *kept = at::empty({count}, at::kLong);
      int64_t* ids = kept->mutable_data_ptr<int64_t>();
      for (int64_t p = 0; p < num_edges; ++p) {
        if (given.key(p) != given.other(p)) *ids++ = p;
      }
    }
    for (int64_t node = 0; node < num_loops; ++node) {
      keys.push_back(static_cast<In>(node)), others.push_back(static_cast<In>(node));
    }
  }

  StridedEdges<In> edges() const { return {keys.data(), others.data(), 1, 1}; }
  int64_t size() const { return static_cast<int64_t>(keys.size()); }
};

template <typename In>
std::optional<FewEdges> sorted(const StridedEdges<In>& edges, int64_t num_edges, int64_t num_src, int64_t num_dst,
                               Optional<Tensor> kept) {
  const Tensor indptr = at::empty({num_dst + 1}, at::kInt), indices = at::empty({num_edges}, at::kInt),
               ids = at::empty({num_edges}, at::kInt);
  int32_t* begins = indptr.mutable_data_ptr<int32_t>();
  const SortedEdges<int32_t> to{begins, indices.mutable_data_ptr<int32_t>(), ids.mutable_data_ptr<int32_t>()};
  if (!sort_edges(edges, num_edges, num_dst, num_src, to, AtenParallel{})) return {};
  int32_t receiving = 0, most = 0;
  for (int64_t row = 0; row < num_dst; ++row) {
    const int32_t degree = begins[row + 1] - begins[row];
    receiving += degree > 0;
    most = std::max(most, degree);
  }
  return FewEdges(indptr, indices, ids, std::move(kept), receiving, most);
}

}  // namespace

std::optional<FewEdges> graph_of_few_edges(const Tensor& src, const Tensor& dst, int64_t num_src, int64_t num_dst,
                                           bool self_loops) {
  if (!is_plain(src) || !is_plain(dst) || !is_unwatched())
    return {};  // checked first: sizes of other tensors may be symbolic
  const int64_t num_edges = src.numel();
  if (std::min(num_src, num_dst) < 0 || std::max(num_src, num_dst) > kFewRows || num_edges >= kMinEdgesPerBlock ||
      dst.numel() != num_edges || src.scalar_type() != dst.scalar_type() ||
      (src.scalar_type() != at::kInt && src.scalar_type() != at::kLong)) {
    return {};
  }
  std::optional<FewEdges> made;
  AT_DISPATCH_INDEX_TYPES(src.scalar_type(), "graph_of_few_edges", [&] {
    const StridedEdges<index_t> given{dst.const_data_ptr<index_t>(), src.const_data_ptr<index_t>(), dst.stride(0),
                                      src.stride(0)};
    if (self_loops) {
      Tensor kept;
      const LoopedEdges<index_t> looped(given, num_edges, std::min(num_src, num_dst), &kept);
      made = sorted(looped.edges(), looped.size(), num_src, num_dst,
                    kept.defined() ? Optional<Tensor>(kept) : Optional<Tensor>());
    } else {
      made = sorted(given, num_edges, num_src, num_dst, {});
    }
  });
  return made;
}

Optional<Tensor> powers_of_few_degrees(const Tensor& indptr, double power, double isolated, bool wide) {
  if (!is_plain(indptr) || !is_unwatched()) return {};
  const int64_t rows = indptr.numel() - 1;
  if ((power != -1 && power != -0.5) || rows > kFewRows || !indptr.is_contiguous()) return {};
  const auto dtype = wide ? at::kDouble : at::kFloat;
  Tensor powers = at::empty({rows}, dtype);
  AT_DISPATCH_INDEX_TYPES(indptr.scalar_type(), "powers_of_few_degrees", [&] {
    const index_t* begins = indptr.const_data_ptr<index_t>();
    AT_DISPATCH_FLOATING_TYPES(dtype, "powers_of_few_degrees", [&] {
      auto* to = powers.mutable_data_ptr<scalar_t>();
      for (int64_t row = 0; row < rows; ++row) {
        const auto degree = static_cast<scalar_t>(begins[row + 1] - begins[row]);
        const scalar_t by = power == -1 ? degree : std::sqrt(degree);
        to[row] = degree == 0 ? static_cast<scalar_t>(isolated) : scalar_t(1) / by;
      }
    });
  });
  return powers;
}

}  // namespace edgeless
