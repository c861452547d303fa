// What the fused kernels of sums over relations do for given sizes: which of two kernels runs, and its tiles per block.
// The ops (fused_cuda.cpp) and the printed plans (../plans.cpp) call the same functions. Pure functions of sizes and of
// the device; no CUDA and no torch.
#pragma once

#include <algorithm>
#include <cstdint>

#include "../common/thresholds.h"
#include "cuda/expression.h"
#include "cuda/kernels.h"
#include "plan.h"

namespace edgeless::cuda::relational {

// The segments of one direction, in tiles of one type, and the matrices [in, out] of the types.
struct SegmentSizes {
  Storage storage = Storage::f32;
  Weights weights = Weights::none;
  int64_t edges = 0, segments = 0, tiles = 0, types = 0;
  int in_width = 0, out_width = 0;

  constexpr int widest() const { return std::max(in_width, out_width); }
};

// by_warps: every warp sums and multiplies its own segments (cuda/short_sums.cuh). share: tiles per block or, for
// products with by_warps, per chunk of the queue. few: there are few blocks, so they have twice as many warps.
struct SegmentsPlan {
  bool by_warps = false;
  int share = 1;
  bool few = false;

  int64_t blocks(const SegmentSizes& p) const { return num_tiles(p.tiles, p.types, share); }
};

// Tiles per block: several, to amortize the prologue of a block, if there is work for all SMs.
constexpr int tiles_of_block(int64_t tiles, int64_t processors) {
  return static_cast<int>(std::clamp<int64_t>(tiles / (16 * processors), 1, 16));
}

// Returns whether so few blocks leave room on the SMs for twice as many warps per block.
constexpr bool few_blocks(int64_t blocks, int64_t processors) { return blocks <= 2 * processors; }

// Sums of segments times the matrices of their types.
inline SegmentsPlan plan_products(const SegmentSizes& p, int64_t processors) {
  SegmentsPlan plan;
  // A kernel of short segments whose weights are in the order of the edges is not compiled.
  plan.by_warps = p.storage == Storage::f32 && p.weights != Weights::in_order &&
                  short_segments_pay(p.edges, p.segments, p.tiles, p.widest());
  if (plan.by_warps) {
    plan.share = static_cast<int>(std::clamp<int64_t>(p.tiles / processors / 100, 2, 8));
    return plan;
  }
  plan.share = tiles_of_block(p.tiles, processors);
  plan.few = few_blocks(plan.blocks(p), processors);
  return plan;
}

inline jit::Expression products_expression(const SegmentSizes& p, const SegmentsPlan& plan) {
  if (plan.by_warps) return short_products_expression(p.in_width, p.out_width, p.weights);
  return segment_products_expression(p.storage, tile_shape(p.storage, p.widest(), plan.few));
}

// Gradients of the sources' rows and of the matrices.
inline SegmentsPlan plan_gradients(const SegmentSizes& p, int64_t processors) {
  SegmentsPlan plan;
  plan.by_warps = p.storage == Storage::f32 && short_gradients_pay(p.in_width, p.out_width);
  // Enough blocks for all SMs, but their partial sums take at most an eighth of the memory of the segments' rows, a
  // quarter if a block has half as many warps, or 1 MiB.
  const int64_t of_rows = p.segments * (p.in_width + p.out_width) / (plan.by_warps ? 4 : 8);
  const int64_t most = std::max<int64_t>(of_rows, 1 << 18) / (int64_t{p.in_width} * p.out_width);
  const int64_t wanted = std::clamp(p.tiles / 24, 8 * processors, 16 * processors);
  const int64_t blocks = std::clamp<int64_t>(wanted, 1, std::max<int64_t>(most, 1));
  plan.share = static_cast<int>(std::max<int64_t>(1, p.tiles / blocks));
  plan.few = few_blocks(plan.blocks(p), processors);
  return plan;
}

inline jit::Expression gradients_expression(const SegmentSizes& p, const SegmentsPlan& plan) {
  if (plan.by_warps) return short_gradients_expression(p.out_width, p.weights);
  return segment_gradients_expression(p.storage, tile_shape(p.storage, p.widest(), plan.few));
}

// Sums of the segments of every row, and of the rows' own product with a matrix [own_width, width], which is stored
// transposed or not. own_width is `width` if there is no matrix.
struct RowSizes {
  Storage storage = Storage::f32;
  int64_t segments = 0, rows = 0, tiles = 0;
  int own_width = 0, width = 0;
  bool transposed = false;

  constexpr int widest() const { return std::max(own_width, width); }
};

// by_warps: a warp adds up sixteen rows. little: the variant with less shared memory.
struct RowsPlan {
  bool by_warps = false;
  int share = 1;
  bool few = false, little = false;
};

inline RowsPlan plan_rows(const RowSizes& p, int64_t processors, const FusedDevice& device) {
  RowsPlan plan;
  plan.by_warps = short_rows_pay(p.segments, p.rows, p.widest(), p.storage != Storage::f32);
  if (plan.by_warps) return plan;
  plan.share = tiles_of_block(p.tiles, processors);
  plan.few = few_blocks(p.tiles / plan.share, processors);
  plan.little = has_little_memory(p.storage, p.widest(), device);
  return plan;
}

inline jit::Expression rows_expression(const RowSizes& p, const RowsPlan& plan) {
  if (plan.by_warps) return short_rows_expression(p.storage, p.width, p.transposed);
  const TileShape tile = row_tile_shape(p.storage, p.widest(), plan.few);
  return row_sums_expression(p.storage, tile, p.transposed, splits_root_once(p.storage, tile, plan.little));
}

}  // namespace edgeless::cuda::relational
