// Sums over relations on CUDA in two launches, and their gradients in three: one kernel sums and multiplies segments,
// the next sums the products row by row, together with the rows' own map. Hubs add a launch. Callers check the
// arguments; nothing here waits for the device.
#include "fused_cuda.h"

#include <algorithm>

#include "../common/storage_of.h"
#include "../common/thresholds.h"
#include "cuda/segment_tiles.h"
#include "fused_plan.h"
#include "plan.h"

namespace edgeless::cuda::relational {
namespace {

using at::Tensor;

template <class T>
const T* data(const Tensor& t) {
  return t.const_data_ptr<T>();
}

int64_t processors(const Tensor& t) { return device_attribute(jit::Attribute::multiprocessors, t.get_device()); }

FusedDevice fused_device(const Tensor& t) {
  using jit::Attribute;
  const auto attribute = [&](Attribute of) { return device_attribute(of, t.get_device()); };
  return {10 * attribute(Attribute::capability_major) + attribute(Attribute::capability_minor),
          attribute(Attribute::shared_bytes_of_block)};
}

Rows rows_of(const Tensor& t) { return {t.const_data_ptr(), t.stride(0)}; }

SegmentTiles tiles_of(const Segments& segments) {
  SegmentTiles tiles;
  tiles.type_tiles = data<int32_t>(*segments.type_tiles), tiles.tiles = data<int32_t>(*segments.tiles);
  tiles.count = segments.tiles->size(0) - 1, tiles.types = static_cast<int>(segments.type_tiles->size(0) - 1);
  tiles.ptr = data<int32_t>(segments.ptr), tiles.rows = data<int32_t>(segments.rows);
  return tiles;
}

void set_rows(Neighbors& neighbors, const Tensor& rows) {
  neighbors.rows = static_cast<const char*>(rows.const_data_ptr());
  neighbors.row_bytes = static_cast<uint32_t>(rows.stride(0) * rows.element_size());
  neighbors.vectors = static_cast<int>(rows.size(1) * rows.element_size() / 16);
  neighbors.sub_warp_log2 = 2;  // at least 4 lanes, one per edge of a batch
  while (1 << neighbors.sub_warp_log2 < neighbors.vectors) ++neighbors.sub_warp_log2;
}

// edge_weight must be contiguous.
Neighbors neighbors_of(const Segments& segments, const Tensor& rows, const OptTensor& edge_weight) {
  Neighbors neighbors;
  neighbors.indices = data<int32_t>(segments.indices);
  if (segments.weighs_segments()) {
    neighbors.of_segments = data<float>(*segments.weights);
  } else if (segments.weights) {
    neighbors.weights = data<float>(*segments.weights);
  } else if (edge_weight) {
    neighbors.weights = data<float>(*edge_weight), neighbors.ids = data<int32_t>(segments.edge_ids);
  }
  set_rows(neighbors, rows);
  return neighbors;
}

// How the edges, or the sums of segments, are weighed.
Weights weights_of(const Neighbors& of) {
  if (of.of_segments) return Weights::of_segments;
  return !of.weights ? Weights::none : of.ids ? Weights::by_id : Weights::in_order;
}

// args: of products or of gradients.
template <class Args>
SegmentSizes sizes_of(const Args& args, const Segments& segments, const Tensor& x) {
  SegmentSizes sizes;
  sizes.storage = storage_of(x.scalar_type()), sizes.weights = weights_of(args.neighbors);
  sizes.edges = segments.indices.size(0), sizes.segments = segments.rows.size(0);
  sizes.tiles = args.segments.count, sizes.types = args.segments.types;
  sizes.in_width = args.in_width, sizes.out_width = args.out_width;
  return sizes;
}

// Weights as [types, K, M] in the dtype of the rows, row-major, with rows of whole aligned 16-byte vectors.
Tensor typed_matrix(const Tensor& weight, at::ScalarType dtype) {
  const Tensor w = matrices(weight, dtype).squeeze(1);
  const int64_t vector = 16 / w.element_size();
  const bool fits = w.stride(2) == 1 && w.stride(1) % vector == 0 && w.stride(0) % vector == 0 &&
                    reinterpret_cast<uintptr_t>(w.const_data_ptr()) % 16 == 0;
  return fits ? w : w.clone(at::MemoryFormat::Contiguous);
}

// Workspace for the products of all segments, followed by the sums of the hubs' parts.
Tensor products_of(const Segments& segments, int64_t width, const at::TensorOptions& options) {
  return at::empty({segments.rows.size(0) + segments.parts->size(1), width}, options);
}

// Sums the products of every row's segments, plus `added`.
Tensor row_sums(const Tensor& of_segments, const Segments& segments, int64_t num_rows, at::ScalarType dtype,
                const Added& added) {
  const bool wide = dtype != of_segments.scalar_type();
  const auto kind = wide ? opmath_dtype(of_segments.scalar_type()) : dtype;
  Tensor out = at::empty({num_rows, of_segments.size(1)}, of_segments.options().dtype(kind));
  if (out.numel() == 0) return out.to(dtype);
  const OnDevice on_device(of_segments.device());
  const auto storage = storage_of(of_segments.scalar_type());
  RowSumsArgs args;
  set_rows(args.neighbors, of_segments);
  HubSumsArgs hubs;
  hubs.count = static_cast<int>(segments.parts->size(1)), hubs.neighbors = args.neighbors;
  hubs.neighbors.indices = data<int32_t>(segments.by_row) + num_rows + 1;
  hubs.begins = data<int32_t>(*segments.parts), hubs.ends = hubs.begins + hubs.count;
  hubs.out = static_cast<char*>(of_segments.mutable_data_ptr()) + segments.rows.size(0) * args.neighbors.row_bytes;
  run_hub_sums(storage, hubs, on_device.queue());
  args.ptr = data<int32_t>(*segments.of_rows), args.neighbors.indices = args.ptr + num_rows + 1;
  args.tiles = data<int32_t>(*segments.row_tiles), args.num_tiles = static_cast<int>(segments.row_tiles->size(0) - 1);
  args.width = args.own_width = static_cast<int>(of_segments.size(1));
  Tensor root;
  if (added.own.defined()) {
    args.own = rows_of(added.own), args.own_rows = added.own.size(0);
    args.own_width = static_cast<int>(added.own.size(1));
    args.transposed = added.root.stride(1) != 1;
    root = args.transposed ? added.root.t() : added.root;
    if (!has_vectors(root, root.size(1))) root = root.clone(at::MemoryFormat::Contiguous);
    args.root = rows_of(root);
  }
  const Tensor bias = added.bias.defined() ? added.bias.contiguous() : Tensor();
  if (bias.defined()) args.bias = bias.const_data_ptr();
  args.out = out.mutable_data_ptr(), args.wide = wide, args.num_rows = num_rows;
  const RowSizes sizes{storage,    segments.rows.size(0), num_rows, args.num_tiles, args.own_width,
                       args.width, args.transposed};
  const RowsPlan plan = plan_rows(sizes, processors(out), fused_device(out));
  if (plan.by_warps) {
    run_short_rows(storage, args, static_cast<int>(processors(out)), on_device.queue());
    return out.to(dtype);
  }
  args.share = plan.share, args.few = plan.few, args.little = plan.little;
  run_row_sums(storage, args, on_device.queue());
  return out.to(dtype);
}

}  // namespace

bool on_tensor_cores(const Tensor& t) {
  return t.scalar_type() != at::kDouble && device_attribute(jit::Attribute::capability_major, t.get_device()) >= 8;
}

bool has_vectors(const Tensor& t, int64_t width) {
  const int64_t vector = 16 / t.element_size();
  return width % vector == 0 && t.stride(0) % vector == 0 && reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0;
}

bool fuses(const Tensor& x, const Tensor& weight, const Segments& segments) {
  const WeightSizes sizes("fuses", weight);
  const bool wide_index = segments.ptr.scalar_type() != at::kInt;
  return segments.tiles && !segments.of_one_edge() && segments.by_row.numel() > 0 && sizes.blocks == 1 &&
         segments.rows.size(0) > 0 &&
         fuses_widths(storage_of(x.scalar_type()), wide_index, fused_device(x), sizes.in, sizes.out) && x.size(0) > 0 &&
         x.stride(1) == 1 && has_vectors(x, sizes.in);
}

bool fuses_map(const Tensor& own, const Tensor& root) {
  return fuses_widths(storage_of(own.scalar_type()), false, fused_device(own), own.size(1), root.size(1)) &&
         own.stride(1) == 1 && has_vectors(own, own.size(1));
}

Tensor fused_sum(const Tensor& x, const Tensor& weight, const OptTensor& given_weight, const Segments& segments,
                 int64_t num_dst, at::ScalarType dtype, const Added& added) {
  const Tensor w = typed_matrix(weight, x.scalar_type());
  const OptTensor edge_weight = contiguous(given_weight);
  SegmentProductsArgs args;
  args.segments = tiles_of(segments), args.neighbors = neighbors_of(segments, x, edge_weight);
  args.weight = {w.const_data_ptr(), w.stride(1)}, args.weight_type = w.stride(0);
  args.in_width = static_cast<int>(w.size(1)), args.out_width = static_cast<int>(w.size(2));
  const Tensor products = products_of(segments, w.size(2), x.options());
  args.out = products.mutable_data_ptr();
  const OnDevice on_device(x.device());
  const SegmentsPlan plan = plan_products(sizes_of(args, segments, x), processors(x));
  args.share = plan.share, args.few = plan.few;
  if (plan.by_warps) {
    const Tensor scratch = at::empty({short_products_scratch(args)}, x.options().dtype(at::kByte));
    run_short_products(args, scratch.mutable_data_ptr(), static_cast<int>(processors(x)), on_device.queue());
  } else {
    run_segment_products(storage_of(x.scalar_type()), args, on_device.queue());
  }
  return row_sums(products, segments, num_dst, dtype, added);
}

OwnGradients gradients_of_own(const Tensor& grad, const Tensor& own, at::ScalarType dtype, bool of_root, bool of_bias) {
  OwnGradients found;
  found.rows = grad, found.of_root = of_root, found.of_bias = of_bias;
  const bool casts = grad.scalar_type() != dtype;
  if (!of_root && !of_bias && !casts) return found;
  OwnGradientsArgs args;
  args.grad = rows_of(grad), args.wide = casts;
  args.num_rows = grad.size(0), args.width = static_cast<int>(grad.size(1));
  if (casts) {
    found.rows = at::empty(grad.sizes(), grad.options().dtype(dtype));
    args.rows = found.rows.mutable_data_ptr();
  }
  if (of_root) args.own = rows_of(own), args.own_width = static_cast<int>(own.size(1));
  const int64_t tiles = (grad.size(0) + kTileSegments - 1) / kTileSegments;
  // At most one wave of blocks: a few more would cost a second one.
  const int64_t most = (dtype == at::kFloat ? 3 : 4) * processors(grad);
  args.share = static_cast<int>(std::max<int64_t>(1, (tiles + most - 1) / most));
  if (of_root || of_bias) {
    found.own_width = args.own_width;
    const int64_t size = args.own_width * grad.size(1) + grad.size(1);
    found.partial = at::empty({(tiles + args.share - 1) / args.share, size}, grad.options().dtype(at::kFloat));
    args.partial = found.partial.mutable_data_ptr<float>();
  }
  run_own_gradients(storage_of(dtype), args, OnDevice(grad.device()).queue());
  return found;
}

FusedGradients fused_gradients(const Tensor& grad, const Tensor& x, const Tensor& weight, const OptTensor& given_weight,
                               const Segments& segments, const FusedNeeds& needs, const Tensor& root,
                               const OwnGradients& own) {
  FusedGradients found;
  const OnDevice on_device(x.device());
  const Tensor w = typed_matrix(weight, x.scalar_type());
  const OptTensor edge_weight = contiguous(given_weight);
  const int64_t size = w.size(1) * w.size(2);
  AddGradientsArgs adding;
  SegmentGradientsArgs args;
  Tensor products, partial;
  if (needs.rows || needs.weight) {
    args.segments = tiles_of(segments), args.neighbors = neighbors_of(segments, grad, edge_weight);
    args.weight = {w.const_data_ptr(), w.stride(1)}, args.weight_type = w.stride(0), args.x = rows_of(x);
    args.in_width = static_cast<int>(w.size(1)), args.out_width = static_cast<int>(w.size(2));
    const SegmentsPlan plan = plan_gradients(sizes_of(args, segments, x), processors(x));
    args.share = plan.share, args.few = plan.few;
    if (needs.rows) {
      products = products_of(segments, w.size(1), x.options());
      args.out = products.mutable_data_ptr();
    }
    if (needs.weight) {
      partial = at::empty({num_tiles(args.segments.count, args.segments.types, args.share), size},
                          x.options().dtype(at::kFloat));
      args.partial = partial.mutable_data_ptr<float>();
      found.weight = at::empty(weight.sizes(), weight.options());
      adding.partial = args.partial, adding.weights = found.weight.mutable_data_ptr();
      adding.wide = weight.scalar_type() == at::kFloat;
    }
    if (plan.by_warps) {
      const Tensor scratch = at::empty({short_gradients_scratch(args)}, x.options().dtype(at::kByte));
      run_short_gradients(args, scratch.mutable_data_ptr(), on_device.queue());
    } else {
      run_segment_gradients(storage_of(x.scalar_type()), args, on_device.queue());
    }
  }
  if (needs.rows) {
    Added added;
    if (root.defined()) added.own = grad, added.root = root.t();
    found.rows = row_sums(products, segments, x.size(0), x.scalar_type(), added);
  }
  adding.tiles = args.segments.by_type(), adding.share = std::max(args.share, 1), adding.size = static_cast<int>(size);
  if (own.partial.defined()) {
    adding.own_chunks = own.partial.size(0), adding.own_size = static_cast<int>(own.partial.size(1));
    adding.own_width = static_cast<int>(own.own_width * grad.size(1));
    adding.own_partial = data<float>(own.partial);
    if (own.of_root) {
      found.root = at::empty({own.own_width, grad.size(1)}, x.options());
      adding.root = found.root.mutable_data_ptr();
    }
    if (own.of_bias) {
      found.bias = at::empty({grad.size(1)}, x.options());
      adding.bias = found.bias.mutable_data_ptr();
    }
  }
  if (adding.partial || adding.own_partial) {
    run_add_gradients(storage_of(x.scalar_type()), adding, on_device.queue());
  }
  return found;
}

}  // namespace edgeless::cuda::relational
