// Arguments of the kernels that reduce segments and multiply the sums in shared memory. No CUDA and no torch.
#pragma once

#include "kernels.h"
#include "shared_layout.h"

namespace edgeless::cuda::relational {

// The segments of one direction of a typed graph, in tiles of segments of one type. All ids are int32.
struct SegmentTiles {
  const int32_t* type_tiles = nullptr;  // [types + 1] first tile of a type
  const int32_t* tiles = nullptr;  // [count + 1] first segment of a tile; behind the last tile the number of segments
  int64_t count = 0;
  int types = 0;
  const int32_t* ptr = nullptr;   // [segments + 1] first edge of a segment
  const int32_t* rows = nullptr;  // [segments] row of a segment

  constexpr Entries by_type() const { return {type_tiles, count, types}; }
};

// The rows that are summed: those of the neighbours at the edges, each times its edge's weight.
struct Neighbors {
  const int32_t* indices = nullptr;  // [edges]
  const float* weights = nullptr;    // null: 1
  const int32_t* ids = nullptr;      // [edges] index in `weights` of an edge's weight; null: the edge's own index
  const char* rows = nullptr;
  uint32_t row_bytes = 0;
  int vectors = 0;                     // 16-byte vectors of a row
  int sub_warp_log2 = 0;               // log2 of the lanes of a row, which are at least four and at least `vectors`
  const float* of_segments = nullptr;  // [segments] factor of a segment's sum; null: 1
};

// How the kernels of short segments (short_sums.cuh) weigh edges or, with of_segments, the sums of segments.
enum class Weights { none, in_order, by_id, of_segments };
inline constexpr const char* type_text(Weights) { return "edgeless::cuda::relational::Weights"; }

// A matrix [*, columns] whose rows are whole 16-byte vectors. row_numbers: elements from row to row.
struct Rows {
  const void* numbers = nullptr;
  int64_t row_numbers = 0;
};

// out[segment] = (sum over the segment's edges) W, with W of the segment's type
struct SegmentProductsArgs {
  SegmentTiles segments;
  Neighbors neighbors;
  Rows weight;  // [types, in, out]
  int64_t weight_type = 0;
  void* out = nullptr;  // [segments, out_width]
  int in_width = 0, out_width = 0;
  int share = 0;     // tiles per block
  bool few = false;  // there are few blocks, so tiles of width 64 have twice as many warps
};

// The gradients of this product. g is the sum over a segment's edges, x the segment's own row: out[segment] = g W^T,
// and partial[block] = the sum of x^T g over the segments of a block.
struct SegmentGradientsArgs {
  SegmentTiles segments;
  Neighbors neighbors;
  Rows weight, x;
  int64_t weight_type = 0;
  void* out = nullptr;       // [segments, in_width]; null: not requested
  float* partial = nullptr;  // [num_tiles(count, types, share), in_width, out_width]; null: not requested
  int in_width = 0, out_width = 0;
  int share = 0;
  bool few = false;
};

// out[i] = the sum of the rows of row i's neighbours + own[i] root + bias
struct RowSumsArgs {
  const int32_t* tiles = nullptr;  // [num_tiles + 1] first row of a tile, which has up to kTileSegments rows
  const int32_t* ptr = nullptr;    // [num_rows + 1] first neighbour of a row
  Neighbors neighbors;
  int num_tiles = 0;
  int64_t num_rows = 0;
  int64_t own_rows = 0;     // rows from own_rows on have no own row
  Rows own, root;           // own.numbers null: no own rows
  bool transposed = false;  // root is stored as [width, own_width]
  const void* bias = nullptr;
  void* out = nullptr;  // [num_rows, width]
  bool wide = false;    // out is float32, whatever the dtype of the rows
  int own_width = 0, width = 0;
  int share = 0;  // tiles per block
  bool few = false;
  bool little = false;  // variant with the least shared memory: float tiles of width 64 split root for every tile
};

// out[i] = the sum of the rows of the neighbours [begins[i], ends[i]), parts of the sums of hubs.
struct HubSumsArgs {
  const int32_t *begins = nullptr, *ends = nullptr;  // [count]
  int count = 0;
  Neighbors neighbors;  // without weights
  void* out = nullptr;  // [count] rows like those of the neighbours
};

// What is computed from an output's gradient besides the relations, in one pass: the gradient in the dtype of the rows,
// and for every block the sums of own^T grad and of grad over its rows.
struct OwnGradientsArgs {
  Rows grad, own;            // own.numbers null: no own rows
  bool wide = false;         // grad is float32
  void* rows = nullptr;      // [num_rows, width]; null: not requested
  float* partial = nullptr;  // [blocks, own_width width + width]; null: neither sum is requested
  int64_t num_rows = 0;
  int own_width = 0, width = 0;
  int share = 0;  // tiles of kTileSegments rows per block
};

// Adds the partial sums of SegmentGradientsArgs and of OwnGradientsArgs in a fixed order.
struct AddGradientsArgs {
  Entries tiles;  // by_type() of SegmentGradientsArgs, with its share
  int share = 1, size = 0;
  const float* partial = nullptr;  // null: none
  void* weights = nullptr;         // [types, size]
  bool wide = false;               // weights are float32
  int64_t own_chunks = 0;
  int own_size = 0, own_width = 0;  // elements of root and bias, and of root alone
  const float* own_partial = nullptr;
  void *root = nullptr, *bias = nullptr;  // null: not requested
};

// For widths that fuses_widths() accepts (../plan.h).
void run_segment_products(Storage storage, const SegmentProductsArgs& args, const jit::Queue& queue);
// The same for float rows of up to kMostShortWidth, if segments have few edges. A chunk has `share` tiles. scratch:
// that many bytes, aligned to 16.
int64_t short_products_scratch(const SegmentProductsArgs& args);
void run_short_products(const SegmentProductsArgs& args, void* scratch, int processors, const jit::Queue& queue);
void run_segment_gradients(Storage storage, const SegmentGradientsArgs& args, const jit::Queue& queue);
// The same for float rows of up to kMostShortWidth. scratch: that many bytes, aligned to 16.
int64_t short_gradients_scratch(const SegmentGradientsArgs& args);
void run_short_gradients(const SegmentGradientsArgs& args, void* scratch, const jit::Queue& queue);
void run_hub_sums(Storage storage, const HubSumsArgs& args, const jit::Queue& queue);
void run_row_sums(Storage storage, const RowSumsArgs& args, const jit::Queue& queue);
// The same for rows of up to kMostShortWidth elements that have few neighbours.
void run_short_rows(Storage storage, const RowSumsArgs& args, int processors, const jit::Queue& queue);
void run_own_gradients(Storage storage, const OwnGradientsArgs& args, const jit::Queue& queue);
void run_add_gradients(Storage storage, const AddGradientsArgs& args, const jit::Queue& queue);

}  // namespace edgeless::cuda::relational
