// Decisions of the launcher: which kernel, how many lanes per row, how the graph is partitioned. Pure functions of
// sizes, so that results depend on nothing else. No CUDA and no torch.
#pragma once

#include <algorithm>
#include <cstdint>

#include "../../common/partition.h"
#include "../../common/storage.h"
#include "../../common/thresholds.h"
#include "kernel.h"

namespace edgeless::cuda {

constexpr int kBlockThreads = 128;

// The pass that a plan is made for.
struct Problem {
  Pass pass = Pass::forward;
  Score score = Score::dot;
  Storage storage = Storage::f32;
  bool wide_index = false;
  bool dropout = false;
  bool arrays = false;     // per-edge arrays are read or written
  bool edge_term = false;  // gatv2 with edge features
  int edge_dim = 0;        // features per edge
  int edge_arrays = 0;     // per-edge arrays that are read: logit and value terms, weights, gatv2's features
  int heads = 1;
  int key_vectors = 0, value_vectors = 0;
  int64_t num_rows = 0, num_edges = 0, num_gathered = 0;  // num_gathered: rows of the gathered side
  int64_t max_degree = -1;                                // edges of the longest row; -1: unknown
};

// Vectors of the widest row that has kernels.
constexpr int kMostVectors = 4 * 32;

// Values per vector, bytes per vector, and bytes per value of the opmath dtype.
constexpr int vector_numbers(Storage storage) { return storage == Storage::f64 ? 2 : is_half(storage) ? 8 : 4; }
constexpr int bytes_of_vector(Storage storage) { return is_of_four(storage) ? 8 : 16; }
constexpr int arithmetic_bytes(Storage storage) { return storage == Storage::f64 ? 8 : 4; }

// The storage type by which rows are read. Heads of up to four 16-bit values, which would fill half a vector, are read
// in vectors of 8 bytes; with `fives` (see takes_fives()), so are heads of 17 to 20, which fill five lanes. key_dim: 0
// for gat.
constexpr Storage storage_of_rows(Storage numbers, int64_t key_dim, int64_t value_dim, bool fives) {
  const int64_t fours = (std::max(key_dim, value_dim) + 3) / 4;
  if (!is_half(numbers) || (fours > 1 && (fours != 5 || !fives))) return numbers;
  return numbers == Storage::f16 ? Storage::f16x4 : Storage::bf16x4;
}

// Returns whether 16-bit rows may be read by sub-warps of five lanes (0072). The direction of the destinations decides
// for both directions of the graph. gathered_bytes: bytes of a node's gathered rows, all heads, unpadded.
constexpr bool takes_fives(int64_t num_edges, int64_t num_dst, int64_t num_src, int64_t gathered_bytes, bool edge_term,
                           int64_t l2_bytes) {
  return !edge_term && num_edges >= kFewEdgesARow * num_dst && num_src * gathered_bytes <= l2_bytes;
}

// Values per head of a hub's segment in the fix-up workspace.
inline int carry_size(const Problem& p) {
  const int keys = p.score == Score::gat ? 1 : p.key_vectors * vector_numbers(p.storage);
  const int values = p.value_vectors * vector_numbers(p.storage);
  if (p.pass == Pass::forward) return values + 2;
  return keys + (p.pass == Pass::by_src && !values_are_keys(p.score) ? values : 0);
}

// Values per head of the kernels' att and of the partial sums of its gradient.
inline int64_t att_width(const Problem& p) {
  return p.score == Score::cosine ? 1 : int64_t(p.key_vectors) * vector_numbers(p.storage);
}

// Bytes of one segment (carry_bytes) and of one range's partial sum of att's gradient (range_bytes), and the most bytes
// that all segments (carry) and all partial sums (ranges) may have. Functions of sizes alone: a gradient must not
// depend on which other gradients are requested.
struct Budgets {
  int64_t carry_bytes, carry, range_bytes, ranges;

  explicit Budgets(const Problem& p) {
    // Segments may have half the bytes of a result where the memory peak has room for them. A forward allocates nothing
    // but its result, and the last pass of a backward runs while all results exist (one fewer where the values are the
    // keys): in both, segments may have a sixteenth of a result, for float32 a 512th and at most half a megabyte.
    constexpr int64_t least = 256 << 10;
    const int64_t result = p.num_rows * p.heads * p.value_vectors * bytes_of_vector(p.storage);
    const bool scarce = p.pass == Pass::forward || (p.pass == Pass::by_src && !values_are_keys(p.score));
    const bool floats = p.storage == Storage::f32;
    const int64_t share = result / (scarce ? floats ? 512 : 16 : 2);
    carry_bytes = int64_t(carry_size(p)) * p.heads * arithmetic_bytes(p.storage);
    carry = std::max(least, scarce && floats ? std::min(2 * least, share) : share);
    const bool att_shares =
        p.pass == Pass::by_dst ? values_are_keys(p.score) : p.pass == Pass::by_src && p.score == Score::gatv2;
    range_bytes = att_shares ? p.heads * att_width(p) * arithmetic_bytes(p.storage) : 0;
    ranges = std::max<int64_t>(2 << 20, result / 4);
  }
};

struct Device {
  int multiprocessors = 1;
  int64_t l2_bytes = 0;
};

// How the lanes of a block map to edges and heads.
struct Layout {
  int sub_warp_log2 = 2;    // log2 of the lanes of a sub-warp, 1 to 32
  int heads_per_slice = 1;  // heads per head tile; tiles run one after another, so that what each gathers stays in L2
};

struct Plan {
  Kernel kernel;
  Layout layout;
  Partition part;
  bool hubs = false;  // rows may be split: a fix-up workspace is needed
  int64_t slots = 0;  // segments in each half of the fix-up workspace
};

inline int vectors_of_row(const Problem& problem) {
  return std::max(problem.score == Score::gat ? 0 : problem.key_vectors, problem.value_vectors);
}

inline Mode mode_of(const Problem& problem) {
  if (problem.edge_term) return kEdgeTerm;
  if (problem.arrays) return problem.dropout ? kOptions : kArrays;
  return problem.dropout ? kDropout : kPlain;
}

// The kernel of mma.cuh for a row of `vectors` vectors.
constexpr Kernel mma_kernel(Pass pass, int vectors, Mode mode) {
  const bool line = vectors > 4 && pass == Pass::by_src;  // one instruction reads a line of 128 bytes
  Kernel kernel{false, true, false, 1, vectors > 8 || line ? 8 : 4, 0, mode};
  if (vectors > kernel.lanes) kernel.vectors = 2;
  kernel.edges = mma_edges(pass, kernel.vectors);
  return kernel;
}

// Returns the kernel of a pass. Its `vectors` are 0 if no kernel holds a row this wide.
inline Kernel choose_kernel(const Problem& problem, const Device& device) {
  const Pass pass = problem.pass;
  const Score score = problem.score;
  const Storage storage = problem.storage;
  const int keys = score == Score::gat ? 0 : problem.key_vectors, vectors = vectors_of_row(problem);
  const bool short_rows = problem.num_edges < kFewEdgesARow * problem.num_rows;
  const bool long_rows = problem.num_edges >= kManyEdgesARow * problem.num_rows;
  const bool very_long_rows = problem.num_edges >= kLongRows * problem.num_rows;
  const int64_t few = device.multiprocessors * kFewRows * (very_long_rows ? 2 : 1);
  const bool few_rows = problem.heads == 1 && vectors <= 1 && problem.num_rows <= few;  // too few for one lane per row
  Kernel kernel;
  if (vectors > kMostVectors) return kernel;
  kernel.wide_index = problem.wide_index;
  kernel.mode = mode_of(problem);
  const bool plain = kernel.mode == kPlain;
  if (!short_rows && !problem.edge_term && fives_pay(pass, score, storage, problem.heads, vectors, very_long_rows)) {
    kernel.vectors = pass == Pass::forward && two_of_ten_pay(score, storage, vectors, very_long_rows) ? 2 : 1;
    kernel.lanes = vectors / kernel.vectors, kernel.edges = 5;
  } else if (!problem.wide_index && use_mma(pass, score, is_half(storage) && !problem.edge_term, vectors)) {
    kernel = mma_kernel(pass, vectors, kernel.mode);
    const int whole = kernel.vectors * kernel.lanes;
    kernel.whole = problem.value_vectors == whole && (keys == 0 || keys == whole);
  } else if (storage != Storage::f64 && !problem.edge_term && three_fill_better(vectors) &&
             three_vectors_pay(pass, score, is_half(storage), !plain, vectors, short_rows, long_rows)) {
    kernel.vectors = 3, kernel.edges = wide_edges(pass, score, storage, 3);
  } else if (plain && !loads_much(pass, score, storage, vectors)) {
    kernel.vectors = vectors <= 32 ? 1 : vectors <= 64 ? 2 : 4;
    kernel.lanes = 1;
    while (kernel.vectors * kernel.lanes < vectors) kernel.lanes *= 2;
    // Edges per batch.
    const bool narrow = is_narrow(kernel.lanes), one_of_several = kernel.vectors == 1 && kernel.lanes > 4;
    const bool has_few = narrow || (one_of_several && storage == Storage::f32);
    if (few_rows && spread_pays(score, storage)) {
      kernel.lanes = kernel.edges = kSpreadEdges, kernel.spread = true;
    } else if (one_of_several && long_rows) {
      kernel.edges = many_edges(pass, score);
    } else if (kernel.vectors == 4 || (has_few && short_rows && few_edges_pay(pass, score, narrow))) {
      kernel.edges = kFewEdges;
    }
  } else {
    kernel.vectors = vectors_of_lane(pass, score, storage, vectors);
    kernel.edges = wide_edges(pass, score, storage, kernel.vectors);
    if (is_narrow(vectors) && narrow_sub_warps_pay(pass, score, problem.heads, short_rows, few_rows)) {
      kernel.lanes = vectors;
    }
    if (!plain && !problem.edge_term && storage != Storage::f64 && kernel.vectors == 1 && vectors > 4 && long_rows) {
      kernel.edges = many_edges(pass, score);
    }
  }
  return kernel;
}

// log2 of the lanes of a sub-warp: the kernel's lanes or, if they are 0, as many as a row fills.
inline int choose_sub_warp_log2(const Kernel& kernel, int vectors) {
  int log2 = kernel.lanes ? 0 : 2;
  while (log2 < 5 && (kernel.lanes ? 1 << log2 < kernel.lanes : kernel.vectors << log2 < vectors)) ++log2;
  return log2;
}

// Lanes of a sub-warp, and the sub-warps of a block.
inline int lanes_of(const Plan& plan) {
  return has_fives(plan.kernel.lanes) ? plan.kernel.lanes : 1 << plan.layout.sub_warp_log2;
}
inline int sub_warps_of(const Plan& plan) { return kBlockThreads / 32 * (32 / lanes_of(plan)); }

// Key and value vectors per head that an edge gathers.
inline int keys_gathered(const Problem& problem) { return problem.score != Score::gat ? problem.key_vectors : 0; }
inline int values_gathered(const Problem& problem) {
  return !values_are_keys(problem.score) || problem.pass == Pass::by_src ? problem.value_vectors : 0;
}
// Bytes per head of the gathered rows.
inline int64_t gathered_of_head(const Problem& problem) {
  const int vectors = keys_gathered(problem) + values_gathered(problem);
  return bytes_of_vector(problem.storage) * problem.num_gathered * vectors;
}

// Chooses the heads per head tile. A tile gathers up to 16 vectors per node, or more where per-edge arrays are read and
// in sub-warps of fives. It gets fewer heads, down to `least`, where only then the gathered rows stay in L2.
inline void choose_slice(const Problem& problem, const Device& device, Plan& plan) {
  const int sub_warps = sub_warps_of(plan);
  const bool mma = plan.kernel.mma;
  const int keys = keys_gathered(problem), values = values_gathered(problem);
  const int vector = bytes_of_vector(problem.storage);
  const int64_t head = gathered_of_head(problem), fits = device.l2_bytes * kAttentionL2Percent / 100;
  const int vectors = std::max({1, keys, values});
  // Per-edge arrays are the bottleneck, except in a float32 forward where they fit into L2.
  const int64_t array = 4 * problem.num_edges * problem.heads;
  const bool fits_too = problem.pass == Pass::forward && problem.storage == Storage::f32 && array <= device.l2_bytes;
  const int wanted = fits_too ? 0 : vectors_of_slice(problem.edge_arrays);
  const int usual = has_fives(plan.kernel.lanes) ? kVectorsOfFives : 16;
  int64_t most = std::max(usual, wanted) / vectors, least = 1;
  while (least * vectors < std::max(wanted, least_vectors_of_slice(problem.pass, problem.score))) least *= 2;
  if (head * most > fits && head * least <= device.l2_bytes) most = std::max(fits / head, std::min(least, most));
  most = std::clamp<int64_t>(most, 1, std::min(problem.heads, mma ? 4 : sub_warps));  // mma: a warp has one head
  // The best number of heads up to `most` leaves few sub-warps idle and reads few bytes per tile besides the rows.
  double best = 0;
  for (int heads = 1; heads <= most; heads += mma ? heads : 1) {
    const int slices = (problem.heads + heads - 1) / heads, busy = sub_warps / heads * heads;
    const double bytes = double(vector) * heads * (keys + values);
    const double worth = double(busy) / sub_warps * problem.heads / (slices * heads) * bytes / (bytes + kBesideRows);
    if (worth >= best * kGainOfAHead) best = worth, plan.layout.heads_per_slice = heads;
  }
}

// Resident blocks per SM: the kernel's target occupancy.
inline int resident_blocks(const Problem& problem, const Kernel& kernel) {
  const bool plain = kernel.mode == kPlain;
  if (kernel.mma) return mma_blocks(problem.pass, problem.score, plain, kernel.lanes, kernel.vectors);
  const int numbers = kernel.vectors * vector_numbers(problem.storage) * arithmetic_bytes(problem.storage) / 4;
  const int blocks = min_blocks(problem.pass, problem.score, plain, kernel.vectors, numbers, kernel.edges_of_lane(),
                                is_narrow(kernel.lanes), has_edge_term(kernel.mode));
  const bool wide = kernel.wide_index || problem.storage == Storage::f64;
  return wide ? std::min(blocks, most_long_blocks(problem.pass, problem.score)) : blocks;
}

// Partitions the graph. A quota of 1024 units hides a block's start; smaller graphs get smaller quotas, to fill the
// device. Blocks take about equally long, so the grid is a whole number of waves: a few blocks more would run in a wave
// of their own. One wave is enough for small graphs of long rows; where many rows end, block times differ more, and
// several waves balance them. blocks_at_once: resident blocks per SM; one_wave: allows a single wave.
inline void choose_partition(const Problem& problem, const Device& device, int blocks_at_once, bool one_wave,
                             Plan& plan) {
  const int heads = plan.layout.heads_per_slice, slices = (problem.heads + heads - 1) / heads;
  const int64_t workers = sub_warps_of(plan) / heads;
  const int64_t units = problem.num_edges + kRowUnits * problem.num_rows;
  const int64_t wanted_blocks = device.multiprocessors * kBlocksOfAProcessor;
  int64_t share = std::clamp<int64_t>(units * slices / (workers * wanted_blocks), kLeastShare, kMostShare);
  const int64_t at_once = int64_t(device.multiprocessors) * blocks_at_once;
  const int64_t blocks = (units / (share * workers) + 1) * slices,
                ranges = (blocks + at_once / 2) / at_once * at_once / slices;
  const int64_t of_one_wave = (units + at_once * workers - 1) / (at_once * workers);
  const int64_t gathered = problem.heads * gathered_of_head(problem);
  if (one_wave && slices == 1 &&
      one_wave_pays(of_one_wave, problem.num_edges, problem.num_rows, gathered, device.l2_bytes)) {
    share = of_one_wave;
  } else if (ranges > 0) {
    share = (units + ranges * workers - 1) / (ranges * workers);
  }
  Partition& part = plan.part;
  const Budgets budgets(problem);
  part.range_units = std::max(share * workers, units * budgets.range_bytes / budgets.ranges);
  part.num_ranges = std::max<int64_t>(1, (units + part.range_units - 1) / part.range_units);
  part.segment = std::max(part.range_units, 2 * problem.num_edges * budgets.carry_bytes / budgets.carry);
  plan.hubs = may_cut(problem.max_degree, problem.num_edges, part);
  plan.slots = number_of_slots(problem.num_edges, part.segment);
}

// Returns whether gatv2's edge term is computed in tiles (edge_term.cuh): by narrow sub-warps, whose lanes would each
// read W for one or two edges, where the sub-warps of several heads process an edge together.
inline bool terms_in_tiles(const Problem& problem, const Plan& plan) {
  const int heads = plan.layout.heads_per_slice, lanes = heads << plan.layout.sub_warp_log2;
  const bool sixteen_bits = is_half(problem.storage) || is_of_four(problem.storage);
  return sixteen_bits && plan.kernel.mode == kEdgeTerm && is_narrow(plan.kernel.lanes) && (heads & (heads - 1)) == 0 &&
         lanes >= kLeastTermLanes && problem.edge_dim >= kLeastTermFeatures;
}

inline Plan make_plan(const Problem& problem, const Device& device) {
  Plan plan;
  plan.kernel = choose_kernel(problem, device);
  if (plan.kernel.vectors) {
    plan.layout.sub_warp_log2 = choose_sub_warp_log2(plan.kernel, vectors_of_row(problem));
    choose_slice(problem, device, plan);
    if (terms_in_tiles(problem, plan)) plan.kernel.mode = kEdgeTiles;
    // A single wave was slower where per-edge arrays are read (0056).
    choose_partition(problem, device, resident_blocks(problem, plan.kernel), problem.edge_arrays == 0, plan);
  }
  return plan;
}

}  // namespace edgeless::cuda
