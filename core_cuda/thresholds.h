// From where on one way is quicker than another on a GPU: all such numbers, and where each was measured
// (docs/decisions/).
//
// They are those of one family of devices, Hopper (sm_90, an H200). Everything from sm_80 on takes them, since nobody
// has measured elsewhere. What differs between devices of a family (multiprocessors, bytes of L2 and of shared memory)
// goes into the plans beside them. Tests call the plans without a GPU, for sizes of an A100 and of an H200. No CUDA and
// no torch.
#pragma once

#include <cstdint>

#include "attention/score.h"
#include "common/storage.h"
#include "spmm/weighing.h"

namespace edgeless::cuda {

// The host ----------------------------------------------------------------------------------------------------------

// Rows below which a product takes less time than its launch: as few launches as possible, and copies cost nothing
// (0022).
constexpr int64_t kLaunchBoundRows = 1 << 15;

// Graphs ------------------------------------------------------------------------------------------------------------

// Edges up to which a graph is sorted by one launch whose blocks wait for each other, not by many launches (0044).
constexpr int64_t kSmallGraphEdges = 1 << 18;

// Walks of edges ----------------------------------------------------------------------------------------------------

// Edges a row in the mean from which batches are long, and below which they are short (0012).
constexpr int64_t kManyEdgesARow = 8, kFewEdgesARow = 3;
// Units of a chain's share: as many as hide a block's start, fewer where less than so many blocks a multiprocessor
// would be left (0011).
constexpr int64_t kLeastShare = 32, kMostShare = 1024, kBlocksOfAProcessor = 16;
// Whether all blocks are to be on the device at once, each chain with a share of so many units, so that none begins
// behind another: where rows are long, and all that is gathered stays in L2 whichever rows are walked together (0056).
constexpr bool one_turn_pays(int64_t share, int64_t num_edges, int64_t num_rows, int64_t gathered_bytes,
                             int64_t l2_bytes) {
  constexpr int64_t kMost = 384;
  return num_edges >= kManyEdgesARow * num_rows && gathered_bytes <= l2_bytes && share >= kLeastShare && share <= kMost;
}

// Attention ---------------------------------------------------------------------------------------------------------

// Blocks that a multiprocessor is to hold, which bounds a kernel's registers; plans take it for how many it does hold.
// plain: without options; vectors: of a lane; numbers: registers that they take in the arithmetic's dtype; edges: of a
// batch, that a lane reads; narrow: a team has one lane or two; edge_term: that of gatv2. By the kernels' times on five
// graphs (0011, 0041, 0043, 0052).
constexpr int min_blocks(Pass pass, Score score, bool plain, int vectors, int numbers, int edges, bool narrow,
                         bool edge_term) {
  const bool forward = pass == Pass::forward, few = edges < 4, many = edges > 4;
  if (few && vectors == 1 && (edges == 1 || numbers > 4))
    return forward ? 8 : 6;  // kSpread, or narrow rows of few edges
  if (plain && score == Score::gat && vectors == 1) {
    if (many) return 5;
    if (numbers > 4) return forward ? 7 : pass == Pass::by_src && narrow ? 4 : 5;
    return few && !forward ? 7 : 6;
  }
  if (score == Score::gat && vectors == 1 && (numbers > 4 || !narrow)) {
    const int blocks = many || pass == Pass::by_src ? 5 : 6;
    return numbers > 4 ? blocks - 1 : blocks;
  }
  if (narrow && !plain && score != Score::gat && forward) return numbers > 4 ? 4 : 5;
  if (numbers > 16) return 2;
  if (numbers > 8) {  // two rows of so many numbers, or one and what options take, need the registers of a third block
    const bool two_rows = score == Score::dot || score == Score::gatv2 || (score == Score::cosine && vectors > 2);
    const bool with_options =
        forward ? edge_term && vectors > 2 : score == Score::gat && pass == Pass::by_src && !plain;
    if ((two_rows && !forward) || with_options) return 2;
  }
  if (edge_term && forward && numbers == 4 && !narrow) return 5;
  if (numbers > 4) {
    if (vectors > 1 || edge_term || (narrow && !plain && pass == Pass::by_src)) return 3;
    return plain && forward && score == Score::dot ? 5 : 4;
  }
  if (forward) return many ? 5 : !few ? 6 : score == Score::gatv2 ? 8 : 7;
  return few || (plain && score == Score::gatv2 && pass == Pass::by_dst && !many) ? 5 : 4;
}
// The same for the kernels of attention/cuda/mma.cuh. lanes: of a team.
constexpr int mma_blocks(Pass pass, Score score, bool plain, int lanes, int vectors) {
  if (pass == Pass::forward) return vectors == 1 ? 5 : 4;
  if (vectors == 1) return 4;
  return plain && score == Score::gatv2 && (pass == Pass::by_src || lanes == 4) ? 4 : 3;
}

// Vectors of a row, 16 bytes each, up to which tensor cores are not the faster way (0013): rows of 64 bytes; of 128 in
// the backward of the dot product; in the forward of gatv2 those that fill no more than a team of two lanes. gat
// is slower there at any width: it has one dot product in its backward and none in its forward.
constexpr int most_without_mma(Pass pass, Score score) {
  if (pass == Pass::forward) return score != Score::gatv2 ? 4 : 2;
  return score == Score::dot ? 8 : 4;
}

// Scores and passes for which two edges a batch pay where rows are short: of floats, or narrow rows of any numbers
// (0012, 0041).
constexpr bool few_edges_pay(Pass pass, Score score, bool narrow) {
  if (narrow) return score == Score::gat || pass == Pass::forward;
  return score == Score::gatv2 || score == Score::gat || (score == Score::dot && pass == Pass::forward);
}
// Whether narrow rows have narrow teams with options too. Heads of one node end their rows together; with one head a
// warp ends as many rows as it has teams, each at another time, and that pays where an edge has much to do (0041).
constexpr bool narrow_teams_pay(Pass pass, Score score, int heads, bool short_rows, bool few_rows) {
  return heads > 1 || ((score == Score::gatv2 || pass == Pass::by_dst) && !short_rows && !few_rows);
}

// Rows of one head and one vector, 16 bytes: with a lane for each row a multiprocessor holds 1024 rows, and where there
// are not as many, each of four lanes takes an edge of its own; up to twice as many rows where they are long (0041).
constexpr int64_t kFewRows = 1024, kLongRows = 64;
// Of 8 numbers only where an edge has little to do.
constexpr bool spread_pays(Score score, Storage storage) {
  return storage == Storage::f32 || is_of_four(storage) || score == Score::gat;
}

// Vectors of a row that a lane holds in kernels with options, and of doubles in all. More of them are more loads on
// their way, which pays where little is kept of an edge; of two rows, which most backwards read, they would not stay in
// registers (0052).
constexpr bool keeps_little(Pass pass, Score score) {
  return score == Score::gat || (score == Score::cosine && pass == Pass::forward);
}
constexpr int vectors_of_lane(Pass pass, Score score, Storage storage, int vectors) {
  if (keeps_little(pass, score)) return vectors <= (storage == Storage::f64 ? 8 : 32) ? 1 : 4;
  return vectors <= 32 ? 1 : vectors <= 64 ? 2 : 4;
}

// Three vectors a lane (0053). By powers of two alone a row of 2^n + 1 vectors leaves almost half of its lanes without
// one; three a lane leave a third at most of those rows that take them.
constexpr bool three_fill_better(int vectors) {
  for (int lanes = 4; lanes <= 32; lanes *= 2) {
    if (vectors > 2 * lanes && vectors <= 3 * lanes) return true;
  }
  return false;
}
// Whether they are worth the warps that their registers cost. They mostly are with options, whose work a lane does for
// all its vectors at once, and for rows of more than 64, beside four a lane. A forward over long rows of floats is
// bound by what it gathers, but that of gatv2. halves: three vectors have 24 numbers then, too many of the two rows
// that most backwards read; rows of up to 16 are mostly the tensor cores'.
constexpr bool three_vectors_pay(Pass pass, Score score, bool halves, bool options, int vectors, bool short_rows,
                                 bool long_rows) {
  const bool forward = pass == Pass::forward;
  if (halves) {
    if (vectors <= 16 || vectors > 64) return vectors > 64;
    return options ? forward || score == Score::gat : forward && score == Score::gat && vectors > 32;
  }
  if (short_rows && !options) return false;
  if (forward) return score == Score::gatv2 || (!long_rows && (vectors <= 24 || score == Score::dot));
  if (vectors <= 12) return options && score != Score::gat;
  return vectors <= 24 || vectors > 64 || options || score != Score::gatv2;
}

// Slices of heads (0010): the part of L2 that what is gathered may fill; the bytes that a slice reads of an edge beside
// its rows, an index, numbers of nodes and the rest of a sector; what more heads a slice have to be worth, for their
// place in L2.
constexpr int64_t kAttentionL2Percent = 65;
constexpr double kBesideRows = 40, kGainOfAHead = 1.04;
// Vectors of 16 bytes of a node, and so about lanes that walk one row, below which slices are not made narrower for L2:
// a warp would end many rows, each at another time. By source gat reads three numbers of a node beside its row, and
// each of them again in every slice.
constexpr int least_vectors_of_slice(Pass pass, Score score) {
  return pass == Pass::by_src && score == Score::gat ? 16 : 8;
}
// Where arrays are read by edge, every slice reads a sector of 32 bytes of each for its heads: vectors of a node that a
// slice then has at least (0043).
constexpr int vectors_of_slice(int edge_arrays) { return edge_arrays > 1 ? 64 : edge_arrays > 0 ? 32 : 0; }
// Lanes that walk an edge, of all heads, and features from which on gatv2's edge term is made in tiles (0048).
constexpr int kLeastTermLanes = 4, kLeastTermFeatures = 4;

// Sums and extrema --------------------------------------------------------------------------------------------------

// What is gathered of a slice may fill three quarters of L2 (45 MiB of the H200's 60): from there a gather runs at
// twice the speed, and reading the indices once more for a slice costs about 3 percent. Where a node is read fewer
// times than this, slices are not cut for it (0017).
constexpr int64_t kFoldL2Percent = 75;
constexpr int64_t kReadsThatPay = 8;
// Edges of a row from which on sums take them in batches of eight, not of four: rows end in most batches of a graph of
// low degree, and ends cost more in a long one.
constexpr int64_t kLongSums = 16;
constexpr int sum_batch(int team_log2, int64_t num_edges, int64_t num_rows) {
  return team_log2 < 3 || num_edges < kLongSums * num_rows ? 4 : 8;  // teams of four lanes: one edge a lane
}
// Edges of a block of products by edge (sddmm): so many that the search for its first and last row is little of its
// work, and so few that there are blocks for all multiprocessors (0063).
constexpr int sampled_edges_of_block(int64_t num_edges) {
  return num_edges >= 1 << 19 ? 2048 : num_edges >= 1 << 18 ? 1024 : 256;
}
// Blocks of a sum's kernel that a multiprocessor holds, which bounds its registers: as many as leave it those that it
// wants, so that plans know how many there are (0056). batch: edges, of kernels for vectors of 16 bytes; the other
// kernels take four.
constexpr int sum_blocks(spmm::Weighing weighing, int vector_bytes, int number_bytes, bool wide_index, int batch) {
  using spmm::Weighing;
  if (wide_index) return 4;
  if (number_bytes > 4) return weighing == Weighing::by_head ? 5 : weighing == Weighing::none ? 7 : 6;
  if (vector_bytes < 16) return 8;
  const bool halves = number_bytes == 2;
  if (weighing == Weighing::by_head) return halves ? 5 : 8;
  if (weighing == Weighing::by_edge_ahead) return halves ? 5 : batch > 4 ? 6 : 7;
  const int blocks = batch > 4 ? 7 : halves ? 8 : 9;
  return weighing == Weighing::none ? blocks : blocks - 1;
}
// Whether rows of up to four vectors are summed by teams of four lanes, which take four edges a batch: where that many
// are taken anyway, and of 16-bit numbers without weights, whose lanes have the most to do. us on one H100 by teams of
// eight and of four, forward + backward, 2026-11-26: float32 of 16, city-reviews 136, 83, arxiv 99, 76, pokec 2,151,
// 2,401; bfloat16 of 32, city-reviews 160, 120, twitch 517, 394; float32 of 16 with weights, twitch 1,232, 1,469.
constexpr bool narrow_sums_pay(int64_t num_edges, int64_t num_rows, bool halves, bool weighted) {
  return num_edges < kLongSums * num_rows || (halves && !weighted);
}

// Whether weights by edge are put into the order of the graph before a sum. In it a sector is read for each of them,
// and what these push out of L2 are rows: it pays where both are many and rows, of a slice, are short (0047).
constexpr bool orders_weights(int64_t weight_bytes, int64_t gathered_bytes, int64_t slice_bytes) {
  constexpr int64_t kMany = int64_t(16) << 20, kShort = 128;
  return weight_bytes >= kMany && gathered_bytes >= kMany && slice_bytes <= kShort;
}

// The gradient of an extremum (0016). From this mean degree on 16-bit numbers are sorted, and float32 in rows as wide
// as that read masked: below it there is too little to skip (2026-11-22: arxiv, degree 7, 0.44 ms gathered and 0.82
// sorted; pokec, degree 19, 17.0 and 10.5).
constexpr int64_t kSortDegree = 13, kMaskedWidth = 256;
// Bytes that sorted items may take, or as many as the result where that is more.
constexpr int64_t kSortMemory = int64_t(64) << 20;
// The part of L2 that sums may fill to which gradients are sent.
constexpr int64_t kScatterL2Percent = 80;

// Dense products ----------------------------------------------------------------------------------------------------

// Columns and depth from which ours fill a tile; the depth from which the libraries' 16-bit products are faster and,
// for results of fewer numbers than that, their float32 ones; rows of a result whose depth is divided (0021).
constexpr int64_t kLeastColumns = 32, kLeastDepth = 16, kMostDepth = 1024, kLargeProduct = 1 << 20, kDividedRows = 64;
// Tiles of floats are 128 by 64 in place of 64 by 64 from this depth and so many of them on, which is six for a
// multiprocessor of the H200; where the depth is divided, from so large a result and so great a depth on (0021).
constexpr int64_t kWideDepth = 192, kWideTiles = 792, kWideResult = 128 * 256, kWideDividedDepth = 1 << 15;

// Relations ---------------------------------------------------------------------------------------------------------

// Numbers of the widest rows of which a warp sums sixteen pieces by itself.
constexpr int64_t kMostShortWidth = 64;
// Whether that is best: they have few edges, and so many tiles come on every multiprocessor that its sixteen warps have
// work at any time (0059).
constexpr bool short_pieces_pay(int64_t edges, int64_t pieces, int64_t tiles_of_processor, int64_t widest) {
  return widest <= kMostShortWidth && edges <= 8 * pieces && tiles_of_processor >= 48;
}
// The same of rows that add up `added` products of pieces: few each, so that no warp has much more to do than others;
// of 16-bit numbers fewer, which are unpacked there and summed by tensor cores elsewhere (0061).
constexpr bool short_rows_pay(int64_t added, int64_t rows, int64_t rows_of_processor, int64_t widest, bool halves) {
  const bool few = halves ? 2 * added <= 7 * rows : added <= 10 * rows;
  return widest <= kMostShortWidth && widest > 32 && few && rows_of_processor >= 192;
}
// The same of gradients of features and weights [in, out], whatever pieces there are: but where the gradients that are
// summed are narrow, or all is (0060).
constexpr bool short_gradients_pay(int64_t in, int64_t out) {
  const int64_t widest = in > out ? in : out;
  return widest <= kMostShortWidth && widest > 32 && out > 16;
}

// Whether attention over pairs that nobody differentiates has memory for keys or for values alone, from how many bytes
// both take: that is half of what a layer needs, for two launches more and two walks over the edges (0062).
constexpr bool turns_pay(int64_t bytes) { return bytes >= int64_t(256) << 20; }

// Blocks ------------------------------------------------------------------------------------------------------------

// Edges a gathered row from which weighted sparse blocks are quicker than our other kernels: for sums (head_dim 0) and
// for dot product attention, whose tensor cores have the more to do for a row the narrower a head is (0033, 0034).
//
// Where the rows to gather take this many bytes, L2 holds next to nothing of them, and few edges that share a row pay
// (2026-11-24, pokec, 1.6 GB: in community order, 1.07 edges a row, sums over blocks take 0.87 of the time and
// attention 0.91; shuffled, 1.00, they take 1.06 and 1.18). That is so for 19 edges a row; windows of few edges cost
// more than they save (2026-11-26, web-traffic, 3.0 GB, 4.5 edges a row: sums over blocks take 1.2 of the time).
constexpr int64_t kBeyondL2 = int64_t(1) << 30, kDegreeBeyondL2 = 8;
constexpr double reuse_that_pays(int64_t head_dim, int64_t gathered_bytes, int64_t rows, int64_t edges) {
  const bool wide = head_dim == 0 || head_dim >= 128;
  if (wide && gathered_bytes >= kBeyondL2 && edges >= kDegreeBeyondL2 * rows) return 1.03;
  return head_dim == 0 ? 1.5 : head_dim >= 128 ? 1.3 : head_dim >= 64 ? 1.5 : 2.5;
}

}  // namespace edgeless::cuda
