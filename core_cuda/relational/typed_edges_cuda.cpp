// typed_edges, typed_means and pairs_of_edges on CUDA: checks and allocation; the algorithms are in cuda/pieces.cu and
// graph/edge_sort.cu. What follows from types is read back once, whether one is out of range.
#include <ATen/ATen.h>
#include <ATen/Dispatch.h>
#include <torch/library.h>

#include <tuple>

#include "../common/launch.h"
#include "../graph/edge_sort_cuda.h"
#include "cuda/pieces.h"
#include "inputs.h"

namespace edgeless::cuda::relational {
namespace {

using at::Tensor;
using Arrays = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

template <class I>
I* at_of(const Tensor& t) {
  return t.mutable_data_ptr<I>();
}

void check_types(const Tensor& types, int64_t num_types, cudaStream_t stream) {
  const Tensor bad = at::zeros({1}, types.options().dtype(at::kInt));
  AT_DISPATCH_INDEX_TYPES(types.scalar_type(), "typed_edges", [&] {
    C10_CUDA_CHECK(
        check_ids(types.const_data_ptr<index_t>(), types.numel(), num_types, bad.mutable_data_ptr<int32_t>(), stream));
  });
  if (bad.item<int32_t>() == 0) return;
  const Tensor first = at::nonzero(at::logical_or(types < 0, types >= num_types)).select(0, 0);
  const auto position = first.item<int64_t>();
  TORCH_CHECK_INDEX(false, "edge_type has id ", types[position].item<int64_t>(), " at position ", position,
                    ", expected 0 <= id < num_types = ", num_types);
}

// The stable order of keys below num_keys, and the keys in it.
template <class I>
std::pair<Tensor, Tensor> sorted(const Tensor& keys, int64_t num_keys, cudaStream_t stream) {
  Tensor order = at::empty_like(keys), in_order = at::empty_like(keys);
  const auto bytes = static_cast<int64_t>(sort_scratch<I>(keys.numel(), num_keys));
  const Tensor scratch = at::empty({bytes}, keys.options().dtype(at::kByte));
  C10_CUDA_CHECK(sort_keys(keys.const_data_ptr<I>(), keys.numel(), num_keys, scratch.mutable_data_ptr(),
                           at_of<I>(in_order), at_of<I>(order), stream));
  return {order, in_order};
}

// As on the CPU, but for parts: [rows + 1 + E], where the pieces of every row begin and behind it the pieces in the
// order of their rows.
Arrays typed_edges(const Tensor& indptr, const Tensor& indices, const OptTensor& edge_ids, const Tensor& types,
                   int64_t num_types, int64_t cut) {
  constexpr const char* op = "typed_edges";
  check_typed_edges(op, indptr, indices, edge_ids, types, num_types, cut);
  const OnDevice on_device(indptr.device());
  const cudaStream_t stream = on_device.stream();
  const Tensor pointers = indptr.contiguous(), others = indices.contiguous(), kinds = types.contiguous();
  const Tensor ids = edge_ids ? edge_ids->contiguous() : Tensor();
  const int64_t rows = pointers.numel() - 1, edges = others.numel();
  check_types(kinds, num_types, stream);
  const auto empty = [&](int64_t size) { return at::empty({size}, pointers.options()); };
  Arrays result(empty(num_types + 1), empty(edges), empty(edges + 1), empty(edges), empty(edges),
                empty(rows + 1 + edges));
  auto& [type_ptr, piece_rows, ptr, out_indices, out_ids, by_row] = result;
  AT_DISPATCH_INDEX_TYPES(pointers.scalar_type(), op, [&] {
    using I = index_t;
    Tensor keys = kinds.to(pointers.scalar_type());
    if (ids.defined()) {
      const Tensor by_id = keys;
      keys = at::empty_like(by_id);
      C10_CUDA_CHECK(permute(by_id.const_data_ptr<I>(), ids.const_data_ptr<I>(), edges, at_of<I>(keys), stream));
    }
    const auto [order, in_order] = sorted<I>(keys, num_types, stream);
    const I* places = order.template const_data_ptr<I>();
    const Tensor row_of_edge = empty(edges), sorted_rows = empty(edges), type_begins = empty(num_types + 1);
    C10_CUDA_CHECK(expand_rows(pointers.const_data_ptr<I>(), rows, edges, at_of<I>(row_of_edge), stream));
    C10_CUDA_CHECK(permute(row_of_edge.const_data_ptr<I>(), places, edges, at_of<I>(sorted_rows), stream));
    C10_CUDA_CHECK(permute(others.const_data_ptr<I>(), places, edges, at_of<I>(out_indices), stream));
    if (ids.defined()) {
      C10_CUDA_CHECK(permute(ids.const_data_ptr<I>(), places, edges, at_of<I>(out_ids), stream));
    } else {
      out_ids = order;
    }
    C10_CUDA_CHECK(
        row_pointers(in_order.template const_data_ptr<I>(), edges, num_types, at_of<I>(type_begins), stream));
    PiecesArgs<I> args;
    args.types = in_order.template const_data_ptr<I>(), args.rows = sorted_rows.const_data_ptr<I>();
    args.type_begins = type_begins.const_data_ptr<I>();
    args.edges = edges, args.num_types = num_types, args.num_rows = rows, args.cut = cut;
    const Tensor numbers = empty(edges);
    args.numbers = at_of<I>(numbers), args.type_ptr = at_of<I>(type_ptr);
    args.piece_rows = at_of<I>(piece_rows), args.ptr = at_of<I>(ptr);
    const Tensor scratch =
        at::empty({static_cast<int64_t>(pieces_scratch<I>(edges))}, pointers.options().dtype(at::kByte));
    C10_CUDA_CHECK(cut_into_pieces(args, scratch.mutable_data_ptr(), stream));
    const auto [pieces, piece_keys] = sorted<I>(piece_rows, rows + 1, stream);
    C10_CUDA_CHECK(row_pointers(piece_keys.template const_data_ptr<I>(), edges, rows, at_of<I>(by_row), stream));
    by_row.narrow(0, rows + 1, edges).copy_(pieces);
  });
  return result;
}

Tensor typed_means(const Tensor& type_ptr, const Tensor& rows, const Tensor& ptr, const Tensor& edge_ids,
                   at::ScalarType dtype) {
  constexpr const char* op = "typed_means";
  check_typed_means(op, type_ptr, rows, ptr, edge_ids, dtype);
  const OnDevice on_device(type_ptr.device());
  Tensor means = at::empty({edge_ids.numel()}, edge_ids.options().dtype(dtype));
  AT_DISPATCH_INDEX_TYPES(type_ptr.scalar_type(), op, [&] {
    AT_DISPATCH_FLOATING_TYPES(dtype, op, [&] {
      const auto at = [](const Tensor& t) { return t.const_data_ptr<index_t>(); };
      MeansArgs<index_t, scalar_t> args;
      args.type_ptr = at(type_ptr), args.rows = at(rows), args.ptr = at(ptr), args.edge_ids = at(edge_ids);
      args.num_types = type_ptr.numel() - 1, args.most_pieces = rows.numel();
      args.means = means.mutable_data_ptr<scalar_t>();
      C10_CUDA_CHECK(run_means(args, on_device.stream()));
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
    C10_CUDA_CHECK(run_pairs(begins.const_data_ptr<index_t>(), begins.numel() - 1, ids.const_data_ptr<index_t>(),
                             ids.numel(), at_of<index_t>(pairs), on_device.stream()));
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
