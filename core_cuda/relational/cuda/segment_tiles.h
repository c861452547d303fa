// Arguments of the kernels that reduce segments and multiply the sums in shared memory. No CUDA and no torch.
#pragma once

#include "kernels.h"
#include "shared_layout.h"

namespace edgeless::cuda::relational {

// The segments of one direction of a typed graph, in tiles of segments of one type. All ids are of 32 bits.
struct SegmentTiles {
  const int32_t* type_tiles = nullptr;  // [types + 1] first tile of a type
  const int32_t* tiles = nullptr;  // [count + 1] first segment of a tile; behind the last tile the number of segments
  int64_t count = 0;
  int types = 0;
  const int32_t* ptr = nullptr;   // [segments + 1] first edge of a segment
  const int32_t* rows = nullptr;  // [segments] row of a segment

  constexpr Entries by_type() const { return {type_tiles, count, types}; }
};

// What is summed: the rows of the neighbours at the edges, each times its edge's weight.
struct Neighbors {
  const int32_t* indices = nullptr;  // [edges]
  const float* weights = nullptr;    // null: 1
  const int32_t* ids = nullptr;      // [edges] where in `weights` an edge's is; null: at its own position
  const char* rows = nullptr;
  uint32_t row_bytes = 0;
  int vectors = 0;                     // of 16 bytes, of a row
  int sub_warp_log2 = 0;               // lanes of a row: at least two, and no fewer than vectors
  const float* of_segments = nullptr;  // [segments] what the sum of a segment is multiplied by; null: 1
};

// What the edges of the kernels of short segments (short_sums.cuh), or the sums of their segments, are weighed by.
enum class Weights { none, in_order, by_id, of_segments };
inline constexpr const char* type_text(Weights) { return "edgeless::cuda::relational::Weights"; }

// A matrix [*, columns] whose rows are whole vectors of 16 bytes; row_numbers from row to row.
struct Rows {
  const void* numbers = nullptr;
  int64_t row_numbers = 0;
};

// out[segment] = (the sum of the segment's edges) W of its type
struct SegmentProductsArgs {
  SegmentTiles segments;
  Neighbors neighbors;
  Rows weight;  // [types, in, out]
  int64_t weight_type = 0;
  void* out = nullptr;  // [segments, out_width]
  int in_width = 0, out_width = 0;
  int share = 0;     // tiles of a block
  bool few = false;  // there are few blocks: twice as many warps for each, of 16-bit rows
};

// The same turned round, g being the sum of a segment's edges and x the row of its own: out[segment] = g W^T, and
// partial[block] = the sum of x^T g over the segments of a block.
struct SegmentGradientsArgs {
  SegmentTiles segments;
  Neighbors neighbors;
  Rows weight, x;
  int64_t weight_type = 0;
  void* out = nullptr;       // [segments, in_width], null: not wanted
  float* partial = nullptr;  // [num_tiles(count, types, share), in_width, out_width], null: not wanted
  int in_width = 0, out_width = 0;
  int share = 0;
  bool few = false;
};

// out[i] = the sum of the neighbours of row i + own[i] root + bias
struct RowSumsArgs {
  const int32_t* tiles = nullptr;  // [num_tiles + 1] first row of a tile, of kTileSegments at most
  const int32_t* ptr = nullptr;    // [num_rows + 1] first neighbour of a row
  Neighbors neighbors;
  int num_tiles = 0;
  int64_t num_rows = 0;
  int64_t own_rows = 0;     // rows from own_rows on have none of their own
  Rows own, root;           // numbers null: none
  bool transposed = false;  // root lies as [width, own_width]
  const void* bias = nullptr;
  void* out = nullptr;  // [num_rows, width]
  bool wide = false;    // out is of floats, whatever the rows are
  int own_width = 0, width = 0;
  int share = 0;  // tiles of a block
  bool few = false;
  bool little = false;  // the least shared memory: root is split for the tensor cores tile by tile, of 64 floats
};

// out[i] = the sum of the neighbours [begins[i], ends[i]): parts of what is too much for a tile of rows.
struct HubSumsArgs {
  const int32_t *begins = nullptr, *ends = nullptr;  // [count]
  int count = 0;
  Neighbors neighbors;  // without weights
  void* out = nullptr;  // [count], rows as the neighbours' are
};

// What an output's gradient comes to besides the relations, in one pass over it: itself in the dtype of the rows, and
// of every block's rows the sums of own^T grad and of grad.
struct OwnGradientsArgs {
  Rows grad, own;            // own: numbers null: none
  bool wide = false;         // grad is of floats
  void* rows = nullptr;      // [num_rows, width], null: not wanted
  float* partial = nullptr;  // [blocks, own_width width + width], null: neither sum is wanted
  int64_t num_rows = 0;
  int own_width = 0, width = 0;
  int share = 0;  // tiles of kTileSegments rows of a block
};

// The partial sums of the two kernels above, added in their order.
struct AddGradientsArgs {
  Entries tiles;  // of SegmentGradientsArgs, with its share
  int share = 1, size = 0;
  const float* partial = nullptr;  // null: none
  void* weights = nullptr;         // [types, size]
  bool wide = false;               // weights are floats
  int64_t own_chunks = 0;
  int own_size = 0, own_width = 0;  // numbers of root, and of bias
  const float* own_partial = nullptr;
  void *root = nullptr, *bias = nullptr;  // null: not wanted
};

// Of what fuses_widths() takes (../plan.h).
void run_segment_products(Storage storage, const SegmentProductsArgs& args, const jit::Queue& queue);
// The same of floats of up to kMostShortWidth where segments have few edges: `share` tiles are a chunk. scratch: so
// many bytes, of whole vectors.
int64_t short_products_scratch(const SegmentProductsArgs& args);
void run_short_products(const SegmentProductsArgs& args, void* scratch, int processors, const jit::Queue& queue);
void run_segment_gradients(Storage storage, const SegmentGradientsArgs& args, const jit::Queue& queue);
// The same of floats of up to kMostShortWidth. scratch: so many bytes, of whole vectors.
int64_t short_gradients_scratch(const SegmentGradientsArgs& args);
void run_short_gradients(const SegmentGradientsArgs& args, void* scratch, const jit::Queue& queue);
void run_hub_sums(Storage storage, const HubSumsArgs& args, const jit::Queue& queue);
void run_row_sums(Storage storage, const RowSumsArgs& args, const jit::Queue& queue);
// The same of rows of up to kMostShortWidth numbers that have few neighbours.
void run_short_rows(Storage storage, const RowSumsArgs& args, int processors, const jit::Queue& queue);
void run_own_gradients(Storage storage, const OwnGradientsArgs& args, const jit::Queue& queue);
void run_add_gradients(Storage storage, const AddGradientsArgs& args, const jit::Queue& queue);

}  // namespace edgeless::cuda::relational
