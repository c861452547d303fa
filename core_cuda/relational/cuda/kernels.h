// What the CUDA kernels of typed products are given. No CUDA and no torch.
#pragma once

#include <cstdint>

#include "../../common/storage.h"
#include "../../jit/queue.h"

namespace edgeless::cuda::relational {

// Entries that are sorted by type: type t has [offsets[t], offsets[t + 1]). All ids are of 32 or all of 64 bits.
struct Entries {
  const void* offsets = nullptr;  // [types + 1]
  int64_t count = 0;
  int types = 0;
  bool wide = false;   // 64 bits
  bool given = false;  // offsets are a user's: an assertion fails on the device where they do not fit
};

// A row of numbers for every entry: row rows[i] of a matrix, row i where `rows` is null. The second half of a row's
// blocks may lie `gap` numbers behind the first.
struct EntryRows {
  const void* numbers = nullptr;
  int64_t stride = 0;  // in numbers; those of a row, but for the gap, lie side by side
  const void* rows = nullptr;
  int64_t gap = 0;
};

// out = x W + bias: row by row with those of the entry's type, whose W has `blocks` matrices [depth, columns] on its
// diagonal, each transposed where `transposed`. out's rows are distinct.
struct ProductArgs {
  Entries entries;
  EntryRows x, out;  // [*, blocks * depth] and [*, blocks * columns]
  const void* weight = nullptr;
  int64_t weight_type = 0, weight_block = 0, weight_row = 0;  // in numbers
  bool transposed = false;                                    // a matrix lies as [columns, depth]
  const void* bias = nullptr;                                 // [types, blocks * columns], null: none
  int blocks = 1, depth = 0, columns = 0;
  int share = 0;  // entries of a block, of run_product
};

// sums[t] = x^T y over the entries of type t, of every block of columns of x with that of y. Entries are summed chunk
// by chunk into `partial`, then the chunks of a type in their order.
struct OuterArgs {
  Entries entries;
  EntryRows x, y;  // [*, blocks * rows] and [*, blocks * columns]
  int blocks = 1, rows = 0, columns = 0;
  int chunk = 0;            // entries of a chunk; a type begins a new one
  void* partial = nullptr;  // [num_chunks, blocks, rows, columns] of the arithmetic's dtype
  void* sums = nullptr;     // [types, blocks, rows, columns]
  bool wide = false;        // sums are of the arithmetic's dtype, not of x's
};

// Tiles of `size` entries of one type each are at most this many: some are empty.
constexpr int64_t num_tiles(int64_t entries, int64_t types, int64_t size) { return entries / size + types; }

// On tensor cores, from compute capability 8.0 on: rows of x, y, out and weights are whole vectors of 16 bytes and
// begin on 16 bytes, those of a block too, and a bias does. Not of doubles.
void run_product(Storage storage, const ProductArgs& args, const jit::Queue& queue);
// Square matrices of so many columns at most: out may be x, for a warp has read its rows' blocks before it writes them.
constexpr int kMostColumnsInPlace = 64;
void run_outer(Storage storage, const OuterArgs& args, const jit::Queue& queue);
// Of whatever there is.
void run_any_product(Storage storage, const ProductArgs& args, const jit::Queue& queue);
void run_any_outer(Storage storage, const OuterArgs& args, const jit::Queue& queue);

}  // namespace edgeless::cuda::relational
