// Arguments of the CUDA kernels of typed products. No CUDA and no torch.
#pragma once

#include <cstdint>

#include "../../common/storage.h"
#include "../../jit/queue.h"

namespace edgeless::cuda::relational {

// Entries sorted by type: type t has entries [offsets[t], offsets[t + 1]). Either all ids are int32 or all are int64.
struct Entries {
  const void* offsets = nullptr;  // [types + 1]
  int64_t count = 0;
  int types = 0;
  bool wide = false;   // int64 ids
  bool given = false;  // the offsets are the caller's: a device assertion fails if they do not match the entries
};

// A matrix row for every entry: row rows[i] for entry i, or row i if `rows` is null. The second half of a row's blocks
// may begin `gap` elements behind the end of the first half.
struct EntryRows {
  const void* numbers = nullptr;
  int64_t stride = 0;  // in elements; a row is contiguous except for the gap
  const void* rows = nullptr;
  int64_t gap = 0;
};

// out = x W + bias for the row of every entry, with W and bias of the entry's type. W is block-diagonal with `blocks`
// matrices [depth, columns]. The rows of out are distinct.
struct ProductArgs {
  Entries entries;
  EntryRows x, out;  // [*, blocks * depth] and [*, blocks * columns]
  const void* weight = nullptr;
  int64_t weight_type = 0, weight_block = 0, weight_row = 0;  // elements from type to type, block to block, row to row
  bool transposed = false;                                    // a matrix is stored as [columns, depth]
  const void* bias = nullptr;                                 // [types, blocks * columns], null: none
  int blocks = 1, depth = 0, columns = 0;
  int share = 0;  // entries per thread block of run_product
};

// sums[t] = x^T y over the entries of type t, for each block of columns of x with the same block of y. Entries are
// summed chunk by chunk into `partial`; then the chunks of a type are added in ascending order.
struct OuterArgs {
  Entries entries;
  EntryRows x, y;  // [*, blocks * rows] and [*, blocks * columns]
  int blocks = 1, rows = 0, columns = 0;
  int chunk = 0;            // entries of a chunk, which are of one type
  void* partial = nullptr;  // [num_chunks, blocks, rows, columns] in the opmath dtype
  void* sums = nullptr;     // [types, blocks, rows, columns]
  bool wide = false;        // sums have the opmath dtype, else x's dtype
};

// Upper bound of the number of tiles that have up to `size` entries of one type; the kernels leave some of them empty.
constexpr int64_t num_tiles(int64_t entries, int64_t types, int64_t size) { return entries / size + types; }

// On tensor cores, from compute capability 8.0 on; not for float64. Rows of x, y, out and of the weights, and the rows
// of every block, must be whole 16-byte vectors and aligned to 16 bytes, and so must the bias.
void run_product(Storage storage, const ProductArgs& args, const jit::Queue& queue);
// For square matrices of up to this many columns, out may be x: a warp reads the blocks of its rows before it writes
// them.
constexpr int kMostColumnsInPlace = 64;
void run_outer(Storage storage, const OuterArgs& args, const jit::Queue& queue);
// For every dtype, width and alignment.
void run_any_product(Storage storage, const ProductArgs& args, const jit::Queue& queue);
void run_any_outer(Storage storage, const OuterArgs& args, const jit::Queue& queue);

}  // namespace edgeless::cuda::relational
