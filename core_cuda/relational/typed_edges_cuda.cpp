// typed_edges, typed_means and pairs_of_edges on CUDA: checks and allocation; the algorithms are in cuda/segments.cuh
// and graph/edge_sort.cuh, for few edges in cuda/few_segments.cuh. The host reads back once what depends on the types:
// whether one is out of range, and the number of segments.
#include <ATen/ATen.h>
#include <ATen/Dispatch.h>
#include <torch/library.h>

#include <algorithm>
#include <limits>
#include <tuple>

#include "../common/launch.h"
#include "../graph/edge_sort_cuda.h"
#include "../graph/few_edges.h"
#include "cuda/few_segments.h"
#include "cuda/segments.h"
#include "inputs.h"

namespace edgeless::cuda::relational {
namespace {

using at::Tensor;
using Arrays = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

template <class I>
I* at_of(const Tensor& t) {
  return t.mutable_data_ptr<I>();
}

[[noreturn]] void name_bad_type(const Tensor& types, int64_t num_types) {
  const Tensor first = at::nonzero(at::logical_or(types < 0, types >= num_types)).select(0, 0);
  const auto position = first.item<int64_t>();
  TORCH_CHECK_INDEX(false, "edge_type has id ", types[position].item<int64_t>(), " at position ", position,
                    ", expected 0 <= id < num_types = ", num_types);
}

// Writes the stable sort order of keys below num_keys to `order`, and returns the sorted keys.
template <class I>
Tensor sorted(const Tensor& keys, int64_t num_keys, I* order, const jit::Queue& queue) {
  Tensor in_order = at::empty_like(keys);
  const auto bytes = static_cast<int64_t>(sort_scratch<I>(keys.numel(), num_keys));
  const Tensor scratch = at::empty({bytes}, keys.options().dtype(at::kByte));
  sort_keys(keys.const_data_ptr<I>(), keys.numel(), num_keys, scratch.mutable_data_ptr(), at_of<I>(in_order), order,
            queue);
  return in_order;
}

void cut_few(const Tensor& indptr, const Tensor& indices, const Tensor& ids, const Tensor& types, int64_t num_types,
             int64_t cut, const Tensor& facts, const Arrays& to, const jit::Queue& queue) {
  const auto& [type_ptr, segment_rows, ptr, out_indices, out_ids, by_row, count] = to;
  const int multiprocessors = device_attribute(jit::Attribute::multiprocessors, indptr.get_device());
  const Tensor scratch = at::empty({few_segments_scratch(indices.numel(), multiprocessors)}, indptr.options());
  AT_DISPATCH_INDEX_TYPES(types.scalar_type(), "typed_edges", [&] {
    FewTypedArgs<index_t> args;
    args.indptr = indptr.const_data_ptr<int32_t>(), args.indices = indices.const_data_ptr<int32_t>();
    args.edge_ids = ids.defined() ? ids.const_data_ptr<int32_t>() : nullptr;
    args.types = types.const_data_ptr<index_t>();
    args.edges = static_cast<int32_t>(indices.numel()), args.num_rows = static_cast<int32_t>(indptr.numel() - 1);
    args.num_types = static_cast<int32_t>(num_types);
    args.cut = static_cast<int32_t>(std::min<int64_t>(cut, std::numeric_limits<int32_t>::max()));
    args.facts = facts.mutable_data_ptr<int64_t>();
    args.type_ptr = at_of<int32_t>(type_ptr), args.segment_rows = at_of<int32_t>(segment_rows);
    args.ptr = at_of<int32_t>(ptr), args.to_indices = at_of<int32_t>(out_indices);
    args.to_ids = at_of<int32_t>(out_ids), args.by_row = at_of<int32_t>(by_row);
    cut_few_edges(args, at_of<int32_t>(scratch), multiprocessors, queue);
  });
}

// As on the CPU, except that parts is by_row [rows + 1 + E]: row pointers into the segments in the order of their rows,
// then these segments, then zeros.
Arrays typed_edges(const Tensor& indptr, const Tensor& indices, const OptTensor& edge_ids, const Tensor& types,
                   int64_t num_types, int64_t cut) {
  constexpr const char* op = "typed_edges";
  check_typed_edges(op, indptr, indices, edge_ids, types, num_types, cut);
  const OnDevice on_device(indptr.device());
  const jit::Queue& queue = on_device.queue();
  const Tensor pointers = indptr.contiguous(), others = indices.contiguous(), kinds = types.contiguous();
  const Tensor ids = edge_ids ? edge_ids->contiguous() : Tensor();
  const int64_t rows = pointers.numel() - 1, edges = others.numel();
  const auto empty = [&](int64_t size) { return at::empty({size}, pointers.options()); };
  Arrays result(empty(num_types + 1), empty(edges), empty(edges + 1), empty(edges), empty(edges),
                empty(rows + 1 + edges), Tensor());
  auto& [type_ptr, segment_rows, ptr, out_indices, out_ids, by_row, count] = result;
  const bool few = pointers.scalar_type() == at::kInt && sorts_by_one_launch(edges, std::max(rows, num_types));
  // `facts` holds whether a type is out of range, and the number of segments. Kernels stay in bounds whatever the types
  // are, so the check can wait for them.
  const Tensor facts = at::empty({2}, pointers.options().dtype(at::kLong));
  const auto read_back = [&, &count = count] {
    const Tensor found = facts.cpu();
    if (found.const_data_ptr<int64_t>()[0]) name_bad_type(kinds, num_types);
    count = found.narrow(0, 1, 1);
    return *count.const_data_ptr<int64_t>();
  };
  if (few) {
    cut_few(pointers, others, ids, kinds, num_types, cut, facts, result, queue);
    read_back();
    return result;
  }
  facts.zero_();
  auto* bad = reinterpret_cast<int32_t*>(facts.mutable_data_ptr<int64_t>());
  AT_DISPATCH_INDEX_TYPES(pointers.scalar_type(), op, [&] {
    using I = index_t;
    const I* of_ids = ids.defined() ? ids.const_data_ptr<I>() : nullptr;
    Tensor keys = ids.defined() ? empty(edges) : kinds.to(pointers.scalar_type());
    AT_DISPATCH_INDEX_TYPES(kinds.scalar_type(), op, [&] {
      const index_t* of = kinds.const_data_ptr<index_t>();
      check_ids(of, edges, num_types, bad, queue);
      if (of_ids) permute(of, of_ids, edges, at_of<I>(keys), queue);
    });
    const Tensor order = empty(edges), row_of_edge = empty(edges), sorted_rows = empty(edges);
    const Tensor in_order = sorted<I>(keys, num_types, at_of<I>(order), queue), type_begins = empty(num_types + 1);
    expand_rows(pointers.const_data_ptr<I>(), rows, edges, at_of<I>(row_of_edge), queue);
    ArrangeArgs<I> arrange;
    arrange.order = order.const_data_ptr<I>(), arrange.rows = row_of_edge.const_data_ptr<I>();
    arrange.indices = others.const_data_ptr<I>(), arrange.edge_ids = of_ids, arrange.edges = edges;
    arrange.to_rows = at_of<I>(sorted_rows), arrange.to_indices = at_of<I>(out_indices);
    arrange.to_ids = at_of<I>(out_ids);
    arrange_edges(arrange, queue);
    row_pointers(in_order.const_data_ptr<I>(), edges, num_types, at_of<I>(type_begins), queue);
    SegmentsArgs<I> args;
    args.types = in_order.const_data_ptr<I>(), args.rows = sorted_rows.const_data_ptr<I>();
    args.type_begins = type_begins.const_data_ptr<I>();
    args.edges = edges, args.num_types = num_types, args.num_rows = rows, args.cut = cut;
    const Tensor numbers = empty(edges);
    args.numbers = at_of<I>(numbers), args.type_ptr = at_of<I>(type_ptr);
    args.segment_rows = at_of<I>(segment_rows), args.ptr = at_of<I>(ptr);
    args.count = facts.mutable_data_ptr<int64_t>() + 1;
    const Tensor scratch =
        at::empty({static_cast<int64_t>(segments_scratch<I>(edges))}, pointers.options().dtype(at::kByte));
    cut_into_segments(args, scratch.mutable_data_ptr(), queue);
    const int64_t segments = read_back();
    I* by_rows = at_of<I>(by_row) + rows + 1;
    const Tensor of_segments = sorted<I>(segment_rows.narrow(0, 0, segments), rows, by_rows, queue);
    row_pointers(of_segments.const_data_ptr<I>(), segments, rows, at_of<I>(by_row), queue);
    if (segments < edges) jit::clear(queue, by_rows + segments, (edges - segments) * sizeof(I));
  });
  return result;
}

Tensor typed_means(const Tensor& type_ptr, const Tensor& rows, const Tensor& ptr, const OptTensor& edge_ids,
                   at::ScalarType dtype) {
  constexpr const char* op = "typed_means";
  check_typed_means(op, type_ptr, rows, ptr, edge_ids, dtype);
  const OnDevice on_device(type_ptr.device());
  Tensor means = at::empty({edge_ids.value_or(rows).numel()}, rows.options().dtype(dtype));
  AT_DISPATCH_INDEX_TYPES(type_ptr.scalar_type(), op, [&] {
    AT_DISPATCH_FLOATING_TYPES(dtype, op, [&] {
      const auto at = [](const Tensor& t) { return t.const_data_ptr<index_t>(); };
      MeansArgs<index_t, scalar_t> args;
      args.type_ptr = at(type_ptr), args.rows = at(rows), args.ptr = at(ptr);
      args.edge_ids = edge_ids ? at(*edge_ids) : nullptr;
      args.num_types = type_ptr.numel() - 1, args.most_segments = rows.numel();
      args.means = means.mutable_data_ptr<scalar_t>();
      run_means(args, on_device.queue());
    });
  });
  return means;
}

Tensor pairs_of_edges(const Tensor& ptr, const Tensor& edge_ids) {
  constexpr const char* op = "pairs_of_edges";
  check_pairs_of_edges(op, ptr, edge_ids);
  const OnDevice on_device(ptr.device());
  const Tensor begins = ptr.contiguous(), ids = edge_ids.contiguous(), pairs = at::empty_like(ids);
  AT_DISPATCH_INDEX_TYPES(ids.scalar_type(), op, [&] {
    run_pairs(begins.const_data_ptr<index_t>(), begins.numel() - 1, ids.const_data_ptr<index_t>(), ids.numel(),
              at_of<index_t>(pairs), on_device.queue());
  });
  return pairs;
}

}  // namespace

TORCH_LIBRARY_IMPL(edgeless, CUDA, m) {
  m.impl("typed_edges", typed_edges);
  m.impl("typed_means", typed_means);
  m.impl("pairs_of_edges", pairs_of_edges);
}

}  // namespace edgeless::cuda::relational
