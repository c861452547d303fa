// segment_tiles on CUDA: checks and allocation; the algorithm is in cuda/tiling.cuh. The host reads back the number of
// hub parts once, if there are enough segments for a row to be a hub.
#include <ATen/ATen.h>
#include <ATen/Dispatch.h>
#include <torch/library.h>

#include <tuple>

#include "../common/launch.h"
#include "cuda/tiling.h"
#include "inputs.h"

namespace edgeless::cuda::relational {
namespace {

using at::Tensor;
using TileArrays = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

template <class I>
TileArrays made_tiles(Tiling<I> args, const at::TensorOptions& options, bool splits, const jit::Queue& queue) {
  const auto empty = [&](int64_t size) { return at::empty({size}, options); };
  const auto at_of = [](const Tensor& t) { return t.mutable_data_ptr<I>(); };
  const Tensor type_tiles = empty(args.types + 1), tiles = empty(args.num_tiles());
  args.type_tiles = at_of(type_tiles), args.tiles = at_of(tiles);
  const bool may_have_hubs = splits && args.num_rows > 0 && edgeless::is_hub(args.segments);
  Tensor totals;
  if (may_have_hubs) totals = at::empty({2}, options.dtype(at::kLong));
  tile_segments(args, may_have_hubs ? totals.mutable_data_ptr<int64_t>() : nullptr, queue);
  int64_t added = args.segments;
  if (may_have_hubs) {
    const Tensor found = totals.cpu();
    args.num_parts = found.const_data_ptr<int64_t>()[0];
    added += args.num_parts - found.const_data_ptr<int64_t>()[1];
  }
  Tensor of_rows = empty(0);
  const Tensor parts = at::empty({2, args.num_parts}, options), row_tiles = empty(args.num_row_tiles(added));
  if (args.num_parts) {
    of_rows = empty(args.num_rows + 1 + added);
    const Tensor hub_parts = empty(args.num_rows + 1);
    args.of_rows = at_of(of_rows), args.hub_parts = at_of(hub_parts), args.parts = at_of(parts);
    const auto bytes = static_cast<int64_t>(hubs_scratch<I>(args.num_rows));
    const Tensor scratch = at::empty({bytes}, options.dtype(at::kByte));
    split_hubs(args, scratch.mutable_data_ptr(), queue);
  }
  const I* ptr = args.num_parts ? args.of_rows : args.by_row;
  tile_rows(ptr, args.num_rows, row_tiles.numel(), at_of(row_tiles), queue);
  return {type_tiles, tiles, row_tiles, of_rows, parts};
}

TileArrays segment_tiles(const Tensor& type_ptr, const Tensor& rows, const Tensor& ptr, const Tensor& by_row,
                         int64_t num_edges, bool splits) {
  constexpr const char* op = "segment_tiles";
  check_segment_tiles(op, type_ptr, rows, ptr, by_row, num_edges);
  const OnDevice on_device(type_ptr.device());
  TileArrays result;
  AT_DISPATCH_INDEX_TYPES(type_ptr.scalar_type(), op, [&] {
    const Tensor of[] = {type_ptr.contiguous(), rows.contiguous(), ptr.contiguous(), by_row.contiguous()};
    const auto args = tiling_of<index_t>(of[0], of[1], of[2], of[3], num_edges);
    result = made_tiles(args, type_ptr.options(), splits, on_device.queue());
  });
  return result;
}

}  // namespace

TORCH_LIBRARY_IMPL(edgeless, CUDA, m) { m.impl("segment_tiles", segment_tiles); }

}  // namespace edgeless::cuda::relational
