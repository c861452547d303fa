// All measured crossover points between kernels and layouts on a GPU. The number in parentheses is the record of the
// measurement in docs/decisions/.
//
// The points were measured on Hopper (sm_90, an H200) and are used from sm_80 on; no other architecture has been
// measured. Properties in which devices of a family differ (SMs, bytes of L2 and of shared memory) are inputs of the
// plans. Tests call the plans without a GPU, for the sizes of an A100 and of an H200. No CUDA and no torch.
#pragma once

#include <cstdint>

#include "score.h"
#include "storage.h"
#include "weighing.h"

namespace edgeless::cuda {

// The host ----------------------------------------------------------------------------------------------------------

// Number of rows below which a product takes less time than its launch. There the fewest launches are fastest, and
// copies cost nothing (0022).
constexpr int64_t kLaunchBoundRows = 1 << 15;

// Graphs ------------------------------------------------------------------------------------------------------------

// Number of edges up to which a single launch, whose blocks wait for each other, sorts a graph (0044).
constexpr int64_t kSmallGraphEdges = 1 << 18;

// Tile loops --------------------------------------------------------------------------------------------------------

// Mean degrees from which batches are long, and below which they are short (0012).
constexpr int64_t kManyEdgesARow = 8, kFewEdgesARow = 3;
// Quota of a worker in units of work (common/partition.h): kMostShare hides a block's start; smaller graphs go down to
// kLeastShare, to have kBlocksOfAProcessor blocks per SM (0011).
constexpr int64_t kLeastShare = 32, kMostShare = 1024, kBlocksOfAProcessor = 16;
// True if a single wave is profitable, in which every worker has a quota of `share` units and no block starts after
// another ends: for long rows, if all gathered rows fit in L2, so that it does not matter which are in use at a time
// (0056).
constexpr bool one_wave_pays(int64_t share, int64_t num_edges, int64_t num_rows, int64_t gathered_bytes,
                             int64_t l2_bytes) {
  constexpr int64_t kMost = 384;
  return num_edges >= kManyEdgesARow * num_rows && gathered_bytes <= l2_bytes && share >= kLeastShare && share <= kMost;
}

// Attention ---------------------------------------------------------------------------------------------------------

// Target occupancy in blocks per SM. Passed to __launch_bounds__, so it caps registers; the planner assumes it is
// reached. plain: a kernel without options; vectors: per lane; numbers: registers of these vectors in the opmath dtype;
// edges: rows of a batch that a lane reads; narrow: a sub-warp has one or two lanes; edge_term: the kernel adds gatv2's
// edge term. Chosen by the kernels' times on five graphs (0011, 0041, 0043, 0052).
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
  if (numbers > 8) {  // two gathered rows this wide, or one and options, need the registers of a third block
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
// Upper limit of min_blocks() for 64-bit values or ids, which need the registers of further blocks.
constexpr int most_long_blocks(Pass pass, Score score) { return score == Score::gat && pass != Pass::by_src ? 5 : 4; }
// Target occupancy of the kernels of attention/cuda/mma.cuh. lanes: lanes per sub-warp; vectors: vectors per lane.
constexpr int mma_blocks(Pass pass, Score score, bool plain, int lanes, int vectors) {
  if (pass == Pass::forward) return vectors == 1 ? 5 : 4;
  if (vectors == 1) return 4;
  return plain && score == Score::gatv2 && (pass == Pass::by_src || lanes == 4) ? 4 : 3;
}

// Vectors of a row, 16 bytes each, up to which tensor cores are not faster (0013): rows of 64 bytes; of 128 in the
// backward of the dot product; in the forward of gatv2 those that fit a sub-warp of two lanes. gat is slower on tensor
// cores at any width: it has one dot product in its backward and none in its forward.
constexpr int most_without_mma(Pass pass, Score score) {
  if (pass == Pass::forward) return score != Score::gatv2 ? 4 : 2;
  return score == Score::dot ? 8 : 4;
}
// Vectors of a row beyond which the kernels of attention/cuda/mma.cuh have no registers left.
constexpr int kMmaVectors = 16;
constexpr bool use_mma(Pass pass, Score score, bool halves, int vectors) {
  return halves && score != Score::gat && vectors <= kMmaVectors && vectors > most_without_mma(pass, score);
}
// Edges per batch of the kernels of attention/cuda/mma.cuh. vectors: vectors per lane.
constexpr int mma_edges(Pass pass, int vectors) { return vectors == 1 || pass != Pass::by_src ? 4 : 2; }

// A batch has four edges, except in two cases (0012). It has eight where rows of the graph are long and an edge gathers
// only one feature row, which leaves registers for 16 or more warps (many_edges()). It has two where rows are short and
// values are float32 (kFewEdges): instructions then take the time, including those for batch entries beyond a row's
// end.
constexpr int many_edges(Pass pass, Score score) {
  return score == Score::gat || (score != Score::dot && pass != Pass::by_src) ? 8 : 4;
}
constexpr int kFewEdges = 2;
// True if two edges per batch are profitable where rows of the graph are short, for float32 rows and for narrow rows of
// any type (0012, 0041).
constexpr bool few_edges_pay(Pass pass, Score score, bool narrow) {
  if (narrow) return score == Score::gat || pass == Pass::forward;
  return score == Score::gatv2 || score == Score::gat || (score == Score::dot && pass == Pass::forward);
}
// True if narrow rows also have narrow sub-warps in kernels with options. The heads of a node end their rows together;
// with one head, each sub-warp of a warp ends its rows at a different time, which is profitable only where an edge
// needs much work (0041).
constexpr bool narrow_sub_warps_pay(Pass pass, Score score, int heads, bool short_rows, bool few_rows) {
  return heads > 1 || ((score == Score::gatv2 || pass == Pass::by_dst) && !short_rows && !few_rows);
}

// Rows of one head and one vector of 16 bytes: with one lane per row an SM holds 1024 rows. In graphs with fewer rows
// per SM a row gets four lanes, each with an edge of its own; likewise in graphs of up to twice as many rows if the
// mean degree is kLongRows or more (0041).
constexpr int64_t kFewRows = 1024, kLongRows = 64;
constexpr int kSpreadEdges = 4;
// True if a lane per edge is profitable: for vectors of 8 values only where an edge needs little work.
constexpr bool spread_pays(Score score, Storage storage) {
  return storage == Storage::f32 || is_of_four(storage) || score == Score::gat;
}

// Vectors of a row per lane, in kernels with options and where loads_much() is true. More vectors mean more loads in
// flight, which is profitable where an edge keeps few values in registers (keeps_little()); with the two gathered rows
// of most backwards, the vectors would not stay in registers (0052).
constexpr bool keeps_little(Pass pass, Score score) {
  return score == Score::gat || (score == Score::cosine && pass == Pass::forward);
}
constexpr int vectors_of_lane(Pass pass, Score score, Storage storage, int vectors) {
  if (keeps_little(pass, score)) return vectors <= (storage == Storage::f64 ? 8 : 32) ? 1 : 4;
  return vectors <= 32 ? 1 : vectors <= 64 ? 2 : 4;
}
// True if kernels without options hold a row like those with options: in float64, in wide 16-bit rows, and in a float32
// forward that keeps little per edge, where four vectors per lane and four edges per batch are faster than two (0052).
constexpr bool loads_much(Pass pass, Score score, Storage storage, int vectors) {
  if (storage == Storage::f64) return true;
  if (storage != Storage::f32) return vectors > 64;
  return vectors > 32 && pass == Pass::forward && keeps_little(pass, score);
}
// Edges per batch if a lane holds several vectors. If an edge gathers two rows, the vectors of more than two edges
// would not stay in registers where a lane has four of a row or, in a backward, three of 16-bit values.
constexpr int wide_edges(Pass pass, Score score, Storage storage, int vectors) {
  const bool many = vectors == 4 || (vectors == 3 && is_half(storage) && pass != Pass::forward);
  return many && !keeps_little(pass, score) ? kFewEdges : 4;
}

// True if rows of 5 or 10 vectors are held by sub-warps of 5 or 10 lanes, of which a warp has 6 and 3; of sub-warps of
// 8 or 16 lanes it has 4 and 2 (0072). Always true for rows of 5 vectors of 8 bytes. Float32 rows of 10 vectors are
// excepted in a forward of gatv2 with one head, where three vectors per lane are faster, and in backwards of gat over
// very long rows, which profit more from batches of eight edges. 16-bit rows are excepted if they have 10 vectors,
// for the cosine, and in forwards whose head tiles fill the tensor cores.
constexpr bool fives_pay(Pass pass, Score score, Storage storage, int heads, int vectors, bool very_long_rows) {
  if (storage == Storage::f64 || (vectors != 5 && vectors != 10)) return false;
  const bool forward = pass == Pass::forward;
  if (is_of_four(storage)) return vectors == 5;
  if (storage == Storage::f32) {
    if (vectors == 10 && score == Score::gatv2 && forward) return heads > 1;
    return vectors == 5 || score != Score::gat || forward || !very_long_rows;
  }
  if (vectors != 5 || score == Score::cosine) return false;
  if (score == Score::gat || !forward) return true;
  return score == Score::dot ? heads > 1 : heads > 1 && heads % 2;
}
// True if five lanes with two vectors each hold rows of 10 vectors in a forward: this has more loads in flight, but
// does not help scores other than gatv2 over very long rows, where gathers take the time.
constexpr bool two_of_ten_pay(Score score, Storage storage, int vectors, bool very_long_rows) {
  return vectors == 10 && storage == Storage::f32 && (score == Score::gatv2 || !very_long_rows);
}
// Most vectors per node of a head tile with sub-warps of fives, where L2 holds the gathered rows.
constexpr int kVectorsOfFives = 40;

// True if three vectors per lane leave fewer of a sub-warp's vectors empty (0053). With powers of two alone, a row of
// 2^n + 1 vectors leaves almost half of them empty; with three per lane at most a third are empty, for the rows for
// which this is true.
constexpr bool three_fill_better(int vectors) {
  for (int lanes = 4; lanes <= 32; lanes *= 2) {
    if (vectors > 2 * lanes && vectors <= 3 * lanes) return true;
  }
  return false;
}
// True if three vectors per lane are worth the occupancy that their registers cost. They mostly are with options, whose
// work a lane does once for all its vectors, and for rows of more than 64 vectors, where the alternative is four. A
// float32 forward over long rows is bound by its gathers, except gatv2's. halves: 16-bit rows, of which three vectors
// have 24 values, too many for the two gathered rows of most backwards; rows of up to 16 vectors mostly use tensor
// cores.
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

// Head tiles (0010): the percentage of L2 that gathered rows may fill; the bytes that a tile reads per edge besides the
// rows (an index, per-node values and the rest of a sector); the gain that a larger tile must bring to be worth its
// space in L2.
constexpr int64_t kAttentionL2Percent = 65;
constexpr double kBesideRows = 40, kGainOfAHead = 1.04;
// Vectors of 16 bytes per node, so about lanes per row, below which head tiles are not made narrower for L2: a warp
// would end many rows, each at a different time. In the source pass gat reads three values of a node besides its row,
// and every tile reads these values again.
constexpr int least_vectors_of_slice(Pass pass, Score score) {
  return pass == Pass::by_src && score == Score::gat ? 16 : 8;
}
// Least vectors per node of a head tile where per-edge arrays are read: every tile reads a sector of 32 bytes of each
// array for its heads (0043).
constexpr int vectors_of_slice(int edge_arrays) { return edge_arrays > 1 ? 64 : edge_arrays > 0 ? 32 : 0; }
// Least lanes per edge, over all heads of a tile, and least edge features from which gatv2's edge term is computed in
// tiles (0048).
constexpr int kLeastTermLanes = 4, kLeastTermFeatures = 4;

// Sums and extrema --------------------------------------------------------------------------------------------------

// Percentage of L2 that the gathered rows of a feature tile may fill (45 MiB of the H200's 60): gathers from L2 run at
// twice the speed, and reading the indices again for every tile costs about 3 percent. Where a node is read fewer than
// kReadsThatPay times, rows are not tiled for L2 (0017).
constexpr int64_t kReduceL2Percent = 75;
constexpr int64_t kReadsThatPay = 8;
// Mean degree from which sums use batches of eight edges instead of four: in a graph of low degree rows end in most
// batches, and a row's end costs more in a long batch.
constexpr int64_t kLongSums = 16;
constexpr int sum_batch(int sub_warp_log2, int64_t num_edges, int64_t num_rows) {
  return sub_warp_log2 < 3 || num_edges < kLongSums * num_rows ? 4 : 8;  // sub-warps of four lanes: one edge per lane
}
// Edges per block of SDDMM: enough to make the search for the block's first and last row a small part of its work, few
// enough to have blocks for all SMs (0063).
constexpr int sampled_edges_of_block(int64_t num_edges) {
  return num_edges >= 1 << 19 ? 2048 : num_edges >= 1 << 18 ? 1024 : 256;
}
// Target occupancy of a sum's kernel in blocks per SM: as many as leave the kernel the registers that it needs. Passed
// to __launch_bounds__; plans assume that it is reached (0056). batch: edges per batch in kernels for vectors of 16
// bytes; the other kernels have four.
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
// True if rows of up to four vectors are summed by sub-warps of four lanes, which have four edges per batch: where
// batches have four edges anyway, and for 16-bit values without weights, whose lanes have the most work. us on one H100
// with sub-warps of eight and of four lanes, forward + backward, 2026-11-26: float32 of 16, city-reviews 136, 83, arxiv
// 99, 76, pokec 2,151, 2,401; bfloat16 of 32, city-reviews 160, 120, twitch 517, 394; float32 of 16 with weights,
// twitch 1,232, 1,469.
constexpr bool narrow_sums_pay(int64_t num_edges, int64_t num_rows, bool halves, bool weighted) {
  return num_edges < kLongSums * num_rows || (halves && !weighted);
}

// True if per-edge weights are permuted to the order of the graph before a sum. Unpermuted, the sum reads a sector for
// each weight, and these sectors evict gathered rows from L2: permuting is profitable if weights and rows have many
// bytes and a row of a feature tile is short (0047).
constexpr bool orders_weights(int64_t weight_bytes, int64_t gathered_bytes, int64_t slice_bytes) {
  constexpr int64_t kMany = int64_t(16) << 20, kShort = 128;
  return weight_bytes >= kMany && gathered_bytes >= kMany && slice_bytes <= kShort;
}

// The gradient of an extremum (0016).
// Percentage of L2 that the sums to which gradients are scattered may fill.
constexpr int64_t kScatterL2Percent = 80;

// Dense products ----------------------------------------------------------------------------------------------------

// Least columns and depth that fill a tile of our GEMM; the depth (kMostDepth) from which the libraries' 16-bit
// products are faster and, for results of fewer than kLargeProduct values, their float32 ones; least rows of a result
// whose depth is split (0021).
constexpr int64_t kLeastColumns = 32, kLeastDepth = 16, kMostDepth = 1024, kLargeProduct = 1 << 20, kDividedRows = 64;
// float32 tiles are 128 by 64, not 64 by 64, from kWideDepth and kWideTiles tiles on, which is six per SM of an H200;
// where the depth is split (split-K), from a result of kWideResult values and kWideDividedDepth on (0021).
constexpr int64_t kWideDepth = 192, kWideTiles = 792, kWideResult = 128 * 256, kWideDividedDepth = 1 << 15;

// Relations ---------------------------------------------------------------------------------------------------------

// Values of the widest row for which a single warp reduces sixteen segments.
constexpr int64_t kMostShortWidth = 64;
// True if sixteen segments per warp are profitable: if segments have few edges, and there are so many tiles that all
// warps always have work, 48 per SM of an H200 (0059). The limit is a total and not a number per SM, so that a graph
// uses the same kernel on devices that differ in a few SMs.
constexpr int64_t kLeastShortTiles = 48 * 132;
constexpr bool short_segments_pay(int64_t edges, int64_t segments, int64_t tiles, int64_t widest) {
  return widest <= kMostShortWidth && edges <= 8 * segments && tiles >= kLeastShortTiles;
}
// True if sixteen rows per warp are profitable for rows that add up `added` products of segments: if a row adds few
// products, so that no warp has much more work than others. The limit is lower for 16-bit values, which this kernel
// unpacks and the other one sums on tensor cores. At least 192 rows per SM of an H200 (0061).
constexpr int64_t kLeastShortRows = 192 * 132;
constexpr bool short_rows_pay(int64_t added, int64_t rows, int64_t widest, bool halves) {
  const bool few = halves ? 2 * added <= 7 * rows : added <= 10 * rows;
  return widest <= kMostShortWidth && widest > 32 && few && rows >= kLeastShortRows;
}
// True if sixteen segments per warp are profitable for the gradients of features and of weights [in, out], for segments
// of any length: not if the summed gradients are narrow, or both widths are (0060).
constexpr bool short_gradients_pay(int64_t in, int64_t out) {
  const int64_t widest = in > out ? in : out;
  return widest <= kMostShortWidth && widest > 32 && out > 16;
}

// True if attention over unique (node, relation) rows without gradients computes keys and values one after the other in
// the same memory. This saves half of `bytes`, the bytes of keys and values together, but needs two more launches and a
// second tile loop over the edges (0062).
constexpr bool one_buffer_pays(int64_t bytes) { return bytes >= int64_t(256) << 20; }

// Blocks ------------------------------------------------------------------------------------------------------------

// Edges per gathered row from which weighted sparse blocks are faster than rowsplit: for sums (head_dim 0) and for dot
// product attention, where the work of the tensor cores per row grows as heads get narrower (0033, 0034).
//
// If the gathered rows have kBeyondL2 bytes or more, L2 holds next to nothing of them, and a few edges that share a row
// are enough (2026-11-24, pokec, 1.6 GB: in community order, 1.07 edges per gathered row, sums over blocks take 0.87 of
// the time and attention 0.91; shuffled, 1.00, they take 1.06 and 1.18). That is at a mean degree of 19; windows of few
// edges cost more than they save (2026-11-26, web-traffic, 3.0 GB, mean degree 4.5: sums over blocks take 1.2 of the
// time).
constexpr int64_t kBeyondL2 = int64_t(1) << 30, kDegreeBeyondL2 = 8;
constexpr double reuse_that_pays(int64_t head_dim, int64_t gathered_bytes, int64_t rows, int64_t edges) {
  const bool wide = head_dim == 0 || head_dim >= 128;
  if (wide && gathered_bytes >= kBeyondL2 && edges >= kDegreeBeyondL2 * rows) return 1.03;
  return head_dim == 0 ? 1.5 : head_dim >= 128 ? 1.3 : head_dim >= 64 ? 1.5 : 2.5;
}

}  // namespace edgeless::cuda
