// segment_tiles on the CPU, whose kernels use no tiles: the reference for the GPU, which does the same arithmetic.
#include <ATen/ATen.h>
#include <ATen/Dispatch.h>
#include <torch/library.h>

#include <tuple>

#include "inputs.h"
#include "tiling.h"

namespace edgeless {
namespace {

using at::Tensor;
using TileArrays = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

template <class I>
TileArrays made_tiles(Tiling<I> args, const at::TensorOptions& options, bool splits) {
  const auto empty = [&](int64_t size) { return at::empty({size}, options); };
  const auto at_of = [](const Tensor& t) { return t.mutable_data_ptr<I>(); };
  const Tensor type_tiles = at::zeros({args.types + 1}, options), tiles = empty(args.num_tiles());
  args.type_tiles = at_of(type_tiles), args.tiles = at_of(tiles);
  for (int64_t t = 0; t < args.types; ++t) {
    args.type_tiles[t + 1] = static_cast<I>(args.type_tiles[t] + tiles_of_type(args, t));
  }
  for (int64_t tile = 0; tile < tiles.numel(); ++tile)
    args.tiles[tile] = static_cast<I>(first_segment_of_tile(args, tile));
  int64_t hub_segments = 0;
  for (int64_t row = 0; splits && row < args.num_rows; ++row) {
    const int64_t segments = args.segments_of_row(row);
    if (is_hub(segments)) hub_segments += segments, args.num_parts += parts_of_hub(segments);
  }
  const int64_t added = args.segments - hub_segments + args.num_parts;
  Tensor of_rows = empty(0);
  const Tensor parts = at::empty({2, args.num_parts}, options), row_tiles = empty(args.num_row_tiles(added));
  if (args.num_parts) {
    of_rows = empty(args.num_rows + 1 + added);
    const Tensor hub_parts = empty(args.num_rows + 1);
    args.of_rows = at_of(of_rows), args.hub_parts = at_of(hub_parts), args.parts = at_of(parts);
    args.hub_parts[0] = args.of_rows[0] = 0;
    for (int64_t row = 0; row < args.num_rows; ++row) {
      const int64_t segments = args.segments_of_row(row), of_hub = is_hub(segments) ? parts_of_hub(segments) : 0;
      args.hub_parts[row + 1] = static_cast<I>(args.hub_parts[row] + of_hub);
      args.of_rows[row + 1] = static_cast<I>(args.of_rows[row] + (of_hub ? of_hub : segments));
    }
    for (int64_t place = 0; place < args.by_row[args.num_rows]; ++place) place_segment(args, place);
  }
  const I* ptr = args.num_parts ? args.of_rows : args.by_row;
  I* first_rows = at_of(row_tiles);
  for (int64_t tile = 0; tile < row_tiles.numel(); ++tile) {
    first_rows[tile] = static_cast<I>(first_row_of_tile(ptr, args.num_rows, tile));
  }
  return {type_tiles, tiles, row_tiles, of_rows, parts};
}

TileArrays segment_tiles_cpu(const Tensor& type_ptr, const Tensor& rows, const Tensor& ptr, const Tensor& by_row,
                             int64_t num_edges, bool splits) {
  constexpr const char* op = "segment_tiles";
  check_segment_tiles(op, type_ptr, rows, ptr, by_row, num_edges);
  TileArrays result;
  AT_DISPATCH_INDEX_TYPES(type_ptr.scalar_type(), op, [&] {
    const Tensor of[] = {type_ptr.contiguous(), rows.contiguous(), ptr.contiguous(), by_row.contiguous()};
    result = made_tiles(tiling_of<index_t>(of[0], of[1], of[2], of[3], num_edges), type_ptr.options(), splits);
  });
  return result;
}

}  // namespace

TORCH_LIBRARY_IMPL(edgeless, CPU, m) { m.impl("segment_tiles", segment_tiles_cpu); }

}  // namespace edgeless
