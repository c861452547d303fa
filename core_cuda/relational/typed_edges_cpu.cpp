// typed_edges on the CPU: checks, allocation and dispatch. The algorithm is in typed_edges.h.
#include <ATen/ATen.h>
#include <ATen/Dispatch.h>
#include <torch/library.h>

#include <tuple>

#include "../common/cpu/room.h"
#include "../graph/aten_parallel.h"
#include "inputs.h"
#include "typed_edges.h"

namespace edgeless {
namespace {

using at::Tensor;
using Arrays = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

// indptr [rows + 1], indices [E], edge_ids [E] or none: edges by row, as a Graph has them; types [E] by edge id.
Arrays typed_edges_cpu(const Tensor& indptr, const Tensor& indices, const Optional<Tensor>& edge_ids,
                       const Tensor& types, int64_t num_types, int64_t cut) {
  constexpr const char* op = "typed_edges";
  check_typed_edges(op, indptr, indices, edge_ids, types, num_types, cut);
  const Tensor pointers = indptr.contiguous(), others = indices.contiguous(), kinds = types.contiguous();
  const Tensor ids = edge_ids ? edge_ids->contiguous() : Tensor();
  const int64_t rows = pointers.numel() - 1, edges = others.numel();
  const int64_t parts = num_typed_parts(rows, edges, num_types);
  const auto empty = [&](int64_t size) { return at::empty({size}, pointers.options()); };
  const Tensor type_ptr = at::zeros({num_types + 1}, pointers.options());
  const Tensor cut_ends = at::empty({parts + 1, 2 + num_types}, pointers.options().dtype(at::kLong));
  const Tensor count = at::empty({1}, cut_ends.options());
  Arrays result(type_ptr, empty(edges), empty(edges + 1), empty(edges), empty(edges), cut_ends, count);
  AT_DISPATCH_INDEX_TYPES(kinds.scalar_type(), op, [&] {
    using Type = index_t;
    const Type* of = kinds.const_data_ptr<Type>();
    AT_DISPATCH_INDEX_TYPES(pointers.scalar_type(), op, [&] {
      const auto at = [](const Tensor& t) { return t.mutable_data_ptr<index_t>(); };
      const TypedArrays<index_t> to{at(type_ptr),
                                    at(std::get<1>(result)),
                                    at(std::get<2>(result)),
                                    at(std::get<3>(result)),
                                    at(std::get<4>(result)),
                                    cut_ends.mutable_data_ptr<int64_t>()};
      const EdgesOfTypes<Type, index_t> source{pointers.const_data_ptr<index_t>(),
                                               ids.defined() ? ids.const_data_ptr<index_t>() : nullptr, of, rows};
      if (sort_by_type(source, others.const_data_ptr<index_t>(), edges, num_types, cut, parts, to, AtenParallel{})) {
        *count.mutable_data_ptr<int64_t>() = type_ptr.const_data_ptr<index_t>()[num_types];
        return;
      }
      for (int64_t e = 0; e < edges; ++e) {
        TORCH_CHECK_INDEX(of[e] >= 0 && of[e] < num_types, "edge_type has id ", of[e], " at position ", e,
                          ", expected 0 <= id < num_types = ", num_types);
      }
    });
  });
  return result;
}

// A unique (node, relation) may have several consecutive segments.
template <typename Index, typename T>
void means_of_type(const Index* rows, const Index* ptr, const Index* edge_ids, int64_t segment, int64_t last,
                   T* means) {
  while (segment < last) {
    int64_t end = segment + 1;
    while (end < last && rows[end] == rows[segment]) ++end;
    const T mean = T(1) / static_cast<T>(ptr[end] - ptr[segment]);
    if (edge_ids) {
      for (int64_t e = ptr[segment]; e < ptr[end]; ++e) means[edge_ids[e]] = mean;
    } else {
      std::fill(means + segment, means + end, mean);
    }
    segment = end;
  }
}

Tensor typed_means_cpu(const Tensor& type_ptr, const Tensor& rows, const Tensor& ptr, const OptTensor& edge_ids,
                       at::ScalarType dtype) {
  constexpr const char* op = "typed_means";
  check_typed_means(op, type_ptr, rows, ptr, edge_ids, dtype);
  Tensor means = at::empty({edge_ids.value_or(rows).numel()}, rows.options().dtype(dtype));
  const int64_t types = type_ptr.numel() - 1;
  AT_DISPATCH_INDEX_TYPES(type_ptr.scalar_type(), op, [&] {
    AT_DISPATCH_FLOATING_TYPES(dtype, op, [&] {
      const auto at = [](const Tensor& t) { return t.const_data_ptr<index_t>(); };
      const int64_t grain = std::max<int64_t>(1, types * kMinEdgesPerBlock / (means.numel() + 1));
      at::parallel_for(0, types, grain, [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; ++t) {
          means_of_type(at(rows), at(ptr), edge_ids ? at(*edge_ids) : nullptr, at(type_ptr)[t], at(type_ptr)[t + 1],
                        means.mutable_data_ptr<scalar_t>());
        }
      });
    });
  });
  return means;
}

Tensor pairs_of_edges_cpu(const Tensor& ptr, const Tensor& edge_ids) {
  constexpr const char* op = "pairs_of_edges";
  check_pairs_of_edges(op, ptr, edge_ids);
  const Tensor begins = ptr.contiguous(), ids = edge_ids.contiguous(), pairs = at::empty_like(ids);
  AT_DISPATCH_INDEX_TYPES(ids.scalar_type(), op, [&] {
    const index_t *from = begins.const_data_ptr<index_t>(), *of = ids.const_data_ptr<index_t>();
    index_t* to = pairs.mutable_data_ptr<index_t>();
    at::parallel_for(0, ids.numel(), kMinEdgesPerBlock, [&](int64_t begin, int64_t end) {
      int64_t pair = std::upper_bound(from, from + begins.numel(), static_cast<index_t>(begin)) - from - 1;
      for (int64_t e = begin; e < end; ++e) {
        while (from[pair + 1] <= e) ++pair;
        to[of[e]] = static_cast<index_t>(pair);
      }
    });
  });
  return pairs;
}

}  // namespace

TORCH_LIBRARY_IMPL(edgeless, CPU, m) {
  m.impl("typed_edges", cpu::WithRoom<typed_edges_cpu>::call);
  m.impl("typed_means", cpu::WithRoom<typed_means_cpu>::call);
  m.impl("pairs_of_edges", cpu::WithRoom<pairs_of_edges_cpu>::call);
}

}  // namespace edgeless
