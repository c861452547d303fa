// The attention kernels that exist. plan.h picks from this table, so that few kernels have to be compiled and tested.
// Constant expressions of sizes; no CUDA and no torch, so that tests run anywhere.
//
//   rows            index    vectors per lane, and the kernels
//   16-bit          int32    tensor cores (mma.cuh) where use_mma() holds: with options, and plain; plain also for rows
//                            that fill all vectors of every lane
//   f32, 16-bit     int32    plain: 1 vector, sub-warps of 1 or 2 lanes with batches of 2 or 4 edges, of 4 lanes with
//                            4 edges, of 8 to 32 lanes with 2, 4 or 8; 2 vectors (f32: or 4), sub-warps of 32 lanes.
//                            Not where every row of that width uses tensor cores or has_plain() does not hold. Rows
//                            of one vector: also sub-warps of 4 lanes with an edge each. 3 vectors, any sub-warp,
//                            where profitable
//   f32, 16-bit     int32    with options: 1 vector, sub-warps of 1 or 2 lanes, and any sub-warp with batches of 4 or 8
//                            edges; 4 vectors, any sub-warp, and 2 where keeps_little() does not hold; 3 where
//                            profitable, without gatv2's edge terms. 16-bit, gatv2 with edge features, sub-warps of 1
//                            or 2 lanes: also in tiles
//   f64             int32    4 vectors, any sub-warp, with all options; 1 vector; 2 where keeps_little() does not hold
//   any             int64    4 vectors, any sub-warp, with all options
//   16-bit, of four          1 vector of 8 bytes, sub-warps of 1 lane: as above; int64 with all options
#pragma once

#include <algorithm>

#include "../../common/storage.h"
#include "../../thresholds.h"

namespace edgeless::cuda {

// Options that a kernel supports: none; all but gatv2's edge term; that as well, computed by each lane or in tiles
// (edge_term.cuh).
enum Mode : int { kPlain = 0, kOptions = 1, kEdgeTerm = 2, kEdgeTiles = 3 };
constexpr bool has_edge_term(int mode) { return mode >= kEdgeTerm; }

// 16-bit values, eight per vector.
constexpr bool is_half(Storage storage) { return storage == Storage::bf16 || storage == Storage::f16; }

// Edges per batch in the kernels of mma.cuh.
constexpr int mma_edges(Pass pass, int vectors) { return vectors == 1 || pass != Pass::by_src ? 4 : 2; }

constexpr int kMmaVectors = 16;
constexpr bool use_mma(Pass pass, Score score, Storage storage, Mode mode, int vectors) {
  if (score == Score::gat || !is_half(storage) || has_edge_term(mode) || vectors > kMmaVectors) return false;
  return vectors > most_without_mma(pass, score);
}

// Edges per batch: four. Eight where rows of the graph are long and an edge gathers only one feature row, which leaves
// registers for 16 or more warps. Two where rows are short and values are float32: there instructions take the time,
// including those for batch entries beyond a row's end (docs/decisions/0012).
constexpr int many_edges(Pass pass, Score score) {
  return score == Score::gat || (score != Score::dot && pass != Pass::by_src) ? 8 : 4;
}
constexpr int kFewEdges = 2;
// Edges per batch where a lane holds several vectors. Where an edge gathers two rows, more than two edges of four
// vectors (or, in a backward, of three 16-bit vectors) would not stay in registers.
constexpr int wide_edges(Pass pass, Score score, Storage storage, int vectors) {
  const bool many = vectors == 4 || (vectors == 3 && is_half(storage) && pass != Pass::forward);
  return many && !keeps_little(pass, score) ? kFewEdges : 4;
}
// Edges per batch where every lane takes an edge of its own.
constexpr int kSpreadEdges = 4;
// Lanes of the widest narrow sub-warp. Narrow sub-warps have as many lanes as a row has vectors, with options as well.
constexpr int kNarrowLanes = 2;
constexpr bool is_narrow(int lanes) { return lanes > 0 && lanes <= kNarrowLanes; }

struct Kernel {
  bool wide_index = false;  // int64 ids
  bool mma = false;         // tensor cores (mma.cuh)
  bool whole = false;       // mma: every lane has all its vectors
  int vectors = 0;          // per lane, of 16 bytes; 0: no kernel holds a row this wide
  int lanes = 0;            // per sub-warp, a power of two up to 32; 0: any from 4 on
  int edges = 4;            // per batch
  Mode mode = kPlain;
  bool spread = false;  // every lane takes an edge of its own

  constexpr bool operator==(const Kernel& other) const {
    return wide_index == other.wide_index && mma == other.mma && whole == other.whole && vectors == other.vectors &&
           lanes == other.lanes && edges == other.edges && mode == other.mode && spread == other.spread;
  }
  constexpr int edges_of_lane() const { return spread ? 1 : edges; }  // whose rows a lane reads per batch
};

struct KernelTable {
  Kernel at[40];
  int size = 0;

  constexpr void add(const Kernel& kernel) { at[size++] = kernel; }
  constexpr bool has(const Kernel& kernel) const {
    for (int k = 0; k < size; ++k) {
      if (at[k] == kernel) return true;
    }
    return false;
  }
};

// Whether float32 or 16-bit rows that do not use tensor cores have kernels without options. In a forward that keeps
// little per edge, wide float32 rows gain nothing from them: the kernels with options hold four vectors per lane and
// four edges per batch (0052).
constexpr bool has_plain(Pass pass, Score score, Storage storage, int vectors) {
  if (storage != Storage::f32) return vectors <= 64;
  return vectors <= 32 || pass != Pass::forward || !keeps_little(pass, score);
}

// Vectors of the widest row that has kernels.
constexpr int most_vectors(Storage storage) { return is_of_four(storage) ? 1 : 4 * 32; }

// Whether some row of more than `least` and up to `most` vectors does not use tensor cores.
constexpr bool any_without_mma(Pass pass, Score score, Storage storage, int least, int most, Mode mode = kPlain) {
  for (int vectors = least + 1; vectors <= most; ++vectors) {
    if (!use_mma(pass, score, storage, mode, vectors)) return true;
  }
  return false;
}

// Whether rows of `vectors` vectors that do not use tensor cores have three vectors per lane; and whether any row of
// the table has. The latter tries no graphs of short rows: three are profitable for fewer widths there.
constexpr bool has_three(Pass pass, Score score, Storage storage, Mode mode, int vectors, bool short_rows,
                         bool long_rows) {
  if (storage == Storage::f64 || has_edge_term(mode) || !three_fill_better(vectors)) return false;
  return three_vectors_pay(pass, score, is_half(storage), mode != kPlain, vectors, short_rows, long_rows);
}
constexpr bool some_have_three(Pass pass, Score score, Storage storage, Mode mode) {
  for (int vectors = 1; vectors <= most_vectors(storage); ++vectors) {
    if (use_mma(pass, score, storage, mode, vectors)) continue;
    for (const bool long_rows : {false, true}) {
      if (has_three(pass, score, storage, mode, vectors, false, long_rows)) return true;
    }
  }
  return false;
}

// How the kernels of mma.cuh hold a row of `vectors` vectors.
constexpr Kernel mma_kernel(Pass pass, int vectors, Mode mode, bool whole) {
  const bool line = vectors > 4 && pass == Pass::by_src;  // one instruction reads a line of 128 bytes
  Kernel kernel{false, true, whole, 1, vectors > 8 || line ? 8 : 4, 0, mode};
  if (vectors > kernel.lanes) kernel.vectors = 2;
  kernel.edges = mma_edges(pass, kernel.vectors);
  return kernel;
}

// All kernels of a pass, a score and a storage type.
constexpr KernelTable kernels_of(Pass pass, Score score, Storage storage) {
  KernelTable table;
  const Mode all = score == Score::gatv2 ? kEdgeTerm : kOptions;
  const int most = most_vectors(storage);  // vectors of a row
  if (most == 1) {
    table.add({true, false, false, 1, 1, 4, all});
  } else {
    table.add({true, false, false, 4, 0, wide_edges(pass, score, storage, 4), all});
    table.add({false, false, false, 4, 0, wide_edges(pass, score, storage, 4), all});
    if (!keeps_little(pass, score)) {
      table.add({false, false, false, 2, 0, 4, all});
      if (all != kOptions && storage != Storage::f64) table.add({false, false, false, 2, 0, 4, kOptions});
    }
  }
  if (storage == Storage::f64) {
    table.add({false, false, false, 1, 0, 4, all});
    return table;
  }
  table.add({false, false, false, 1, 0, 4, kOptions});
  const bool edge_tiles = all == kEdgeTerm && storage != Storage::f32;
  if (all == kEdgeTerm) table.add({false, false, false, 1, 0, 4, kEdgeTerm});
  if (most > 4 && many_edges(pass, score) > 4 && any_without_mma(pass, score, storage, 4, 32, kOptions)) {
    table.add({false, false, false, 1, 0, many_edges(pass, score), kOptions});
  }
  for (int lanes = 1; lanes <= std::min(most, kNarrowLanes); ++lanes) {
    for (const Mode mode : {kOptions, all}) {
      const Kernel kernel{false, false, false, 1, lanes, 4, mode};
      if (any_without_mma(pass, score, storage, lanes - 1, lanes, mode) && !table.has(kernel)) table.add(kernel);
    }
    if (edge_tiles) table.add({false, false, false, 1, lanes, 4, kEdgeTiles});
  }
  for (int lanes = 1; lanes <= std::min(most, 4); lanes *= 2) {
    if (!any_without_mma(pass, score, storage, lanes == 1 ? -1 : lanes / 2, lanes)) continue;
    table.add({false, false, false, 1, lanes, 4, kPlain});
    if (is_narrow(lanes) && few_edges_pay(pass, score, true)) {
      table.add({false, false, false, 1, lanes, kFewEdges, kPlain});
    }
  }
  if (spread_pays(score, storage)) table.add({false, false, false, 1, kSpreadEdges, kSpreadEdges, kPlain, true});
  if (most == 1) return table;
  for (const Mode mode : {kPlain, kOptions}) {
    if (some_have_three(pass, score, storage, mode)) {
      table.add({false, false, false, 3, 0, wide_edges(pass, score, storage, 3), mode});
    }
  }
  const int batches[] = {4, many_edges(pass, score), kFewEdges};
  for (int lanes = 8; lanes <= 32; lanes *= 2) {
    if (!any_without_mma(pass, score, storage, lanes / 2, lanes)) continue;
    for (const int edges : batches) {
      if (edges == kFewEdges && (storage != Storage::f32 || !few_edges_pay(pass, score, false))) continue;
      const Kernel kernel{false, false, false, 1, lanes, edges, kPlain};
      if (!table.has(kernel)) table.add(kernel);
    }
  }
  if (has_plain(pass, score, storage, 64)) table.add({false, false, false, 2, 32, 4, kPlain});
  if (has_plain(pass, score, storage, 128)) table.add({false, false, false, 4, 32, kFewEdges, kPlain});
  for (int vectors = 1; vectors <= kMmaVectors; ++vectors) {
    for (const Mode mode : {kOptions, kPlain}) {
      if (!use_mma(pass, score, storage, mode, vectors)) continue;
      for (const bool whole : {false, true}) {
        const Kernel kernel = mma_kernel(pass, vectors, mode, whole);
        if (whole && (mode != kPlain || vectors != kernel.vectors * kernel.lanes)) continue;
        if (!table.has(kernel)) table.add(kernel);
      }
    }
  }
  return table;
}

}  // namespace edgeless::cuda
