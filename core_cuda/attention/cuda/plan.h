// Choices of the launcher: which kernel, how many lanes a row gets, how the graph is cut. Pure functions of sizes, so
// that results do not depend on anything else. No torch.
#pragma once

#include <algorithm>
#include <cstdint>

#include "args.h"

namespace edgeless::cuda {

// What a plan is made for.
struct Problem {
  Pass pass = Pass::forward;
  Score score = Score::dot;
  Storage storage = Storage::f32;
  bool wide_index = false;
  bool options = false;    // anything beyond the plain inputs
  bool edge_term = false;  // gatv2 with edge features
  int heads = 1;
  int key_vectors = 0, value_vectors = 0;
  int64_t num_rows = 0, num_edges = 0, num_gathered = 0;  // rows of what is gathered
  int64_t longest = -1;                                   // edges of a row, -1: unknown
  int64_t carry_bytes = 0;                                // of a piece of a hub, all heads
  int64_t carry_budget = 0;                               // bytes that pieces may take
  int64_t range_bytes = 0, range_budget = 1;              // bytes kept by block range, and what they may add up to
};

struct Device {
  int multiprocessors = 1;
  int64_t l2_bytes = 0;
};

struct Plan {
  Layout layout;
  Partition part;
  int mode = 0;        // of the kernel, see lane.cuh
  int width = 0;       // lanes of a team where the kernel knows them, else 0
  int edges = 4;       // of a batch
  bool mma = false;    // the kernels of mma.cuh
  bool whole = false;  // of those: every lane has all its vectors
  bool hubs = false;   // rows may be cut: a carry is needed
  int64_t slots = 0;   // pieces in each half of the carry
};

// Where tensor cores are the faster way (docs/decisions/0013): rows of more than 64 bytes, without options of more than
// 128 in the backward of the dot product, and in the forward pass of gatv2 any. gat is slower there: it has one dot
// product in its backward and none in its forward pass.
constexpr int most_without_mma(Pass pass, Score score, bool plain) {
  if (pass == Pass::forward) return score == Score::gatv2 ? 0 : 4;
  return score == Score::dot && plain ? 8 : 4;
}
constexpr int kMmaVectors = 16;
inline bool use_mma(const Problem& problem, int vectors) {
  const bool narrow = problem.storage == Storage::bf16 || problem.storage == Storage::f16;
  const bool there_is = problem.score != Score::gat;
  if (!there_is || !narrow || problem.edge_term || vectors > kMmaVectors) return false;
  return vectors > most_without_mma(problem.pass, problem.score, !problem.options);
}

// Edges of a batch: four; where rows are long and an edge gathers one row alone, eight, which leaves registers for 16
// or more warps; where they are short, of float, two: instructions take the time there, those for places beyond a row's
// end as well (docs/decisions/0012).
constexpr int many_edges(Pass pass, Score score) {
  return score == Score::gat || (score != Score::dot && pass != Pass::by_src) ? 8 : 4;
}
constexpr int kFewEdges = 2;
constexpr bool few_edges_pay(Pass pass, Score score) {
  return score == Score::gatv2 || score == Score::gat || (score == Score::dot && pass == Pass::forward);
}

// The table of kernels; instances.cuh generates just these. What a lane holds is bounded by registers.
//
//   16-bit, int32   where use_mma() says so: mma.cuh, whole rows or not; with options or plain
//   f32, 16-bit     int32, plain: 1 vector a lane: 4 lanes, or 8 to 32 with four edges a batch, many, or few (f32); of
//                   8 and 16 those that mma.cuh does not take; 2 vectors: 32
//   the same        with options: 1 or 4 vectors, any number of lanes
//   int64, double   4 vectors, any number of lanes, with all options
inline void choose_kernel(const Problem& problem, Plan& plan) {
  const int keys = problem.score == Score::gat ? 0 : problem.key_vectors;
  const int vectors = std::max(keys, problem.value_vectors);
  const int top = problem.score == Score::gatv2 ? 2 : 1;
  Layout& layout = plan.layout;
  if (vectors > 4 * 32) {
    layout.vectors = 0;
    return;
  }
  if (problem.wide_index || problem.storage == Storage::f64) {
    layout.vectors = 4, plan.mode = top;
  } else if (use_mma(problem, vectors)) {
    const bool lines = vectors > 4 && problem.pass == Pass::by_src;  // a line of 128 bytes by one instruction
    layout.team_log2 = vectors > 8 || lines ? 3 : 2;
    layout.vectors = vectors <= 1 << layout.team_log2 ? 1 : 2;
    plan.mma = true;
    const int whole = layout.vectors << layout.team_log2;
    plan.whole = problem.value_vectors == whole && (keys == 0 || keys == whole);
    plan.mode = problem.options ? 1 : 0;
    return;
  } else if (problem.options || vectors > 64) {
    layout.vectors = vectors <= 32 ? 1 : 4;
    plan.mode = problem.edge_term || (top == 2 && layout.vectors == 4) ? top : 1;
  } else {
    layout.vectors = vectors <= 32 ? 1 : 2;
    plan.mode = 0;
    const bool chosen = layout.vectors == 1 && vectors > 4;  // else four
    if (chosen && problem.num_edges >= 8 * problem.num_rows) {
      plan.edges = many_edges(problem.pass, problem.score);
    } else if (chosen && problem.num_edges < 3 * problem.num_rows && problem.storage == Storage::f32 &&
               few_edges_pay(problem.pass, problem.score)) {
      plan.edges = kFewEdges;
    }
  }
  layout.team_log2 = 2;
  while (layout.team_log2 < 5 && (layout.vectors << layout.team_log2) < vectors) ++layout.team_log2;
  plan.width = plan.mode == 0 ? 1 << layout.team_log2 : 0;
}

// One head at a time, so that what is gathered stays in L2 if it can, but at least 256 bytes of a node.
inline void choose_slice(const Problem& problem, const Device& device, bool mma, Layout& layout) {
  const int teams = kBlockThreads >> layout.team_log2;
  const int keys = problem.score != Score::gat ? problem.key_vectors : 0;
  const int values = !values_are_keys(problem.score) || problem.pass == Pass::by_src ? problem.value_vectors : 0;
  const int64_t head = 16 * problem.num_gathered * (keys + values), fits = device.l2_bytes * 65 / 100;
  int64_t most = 16 / std::max(1, std::max(keys, values));
  if (head * most > fits && head <= 2 * fits) most = fits / head;
  most = std::clamp<int64_t>(most, 1, std::min(problem.heads, mma ? 4 : teams));  // a warp has one head
  // Of those the number that is worth most: few teams without work, and little that a slice reads of an edge beside its
  // rows, an index, numbers of nodes and the rest of a sector. More of them have to be worth their place in L2
  // (docs/decisions/0010).
  constexpr double beside = 40, gain = 1.04;
  double best = 0;
  for (int heads = 1; heads <= most; heads += mma ? heads : 1) {
    const int slices = (problem.heads + heads - 1) / heads, busy = teams / heads * heads;
    const double bytes = 16.0 * heads * (keys + values);
    const double worth = double(busy) / teams * problem.heads / (slices * heads) * bytes / (bytes + beside);
    if (worth >= best * gain) best = worth, layout.heads_per_slice = heads;
  }
}

// Blocks that a multiprocessor holds.
inline int resident_blocks(const Problem& problem, const Plan& plan) {
  const Layout& layout = plan.layout;
  const bool plain = plan.mode == 0;
  if (plan.mma) return mma_blocks(problem.pass, problem.score, plain, 1 << layout.team_log2, layout.vectors);
  const bool narrow = problem.storage == Storage::bf16 || problem.storage == Storage::f16;
  const int numbers = layout.vectors * (narrow ? 8 : 4);
  return min_blocks(problem.pass, problem.score, plain, layout.vectors, numbers, plan.edges);
}

// Cuts the graph: a share of 1024 units hides a block's start; smaller graphs take smaller shares to fill the device.
// Blocks take about equally long, so they are as many as the device holds at once, some whole number of times: a few
// more would have it to themselves.
inline void choose_partition(const Problem& problem, const Device& device, Plan& plan) {
  const int heads = plan.layout.heads_per_slice, slices = (problem.heads + heads - 1) / heads;
  const int64_t chains = (kBlockThreads >> plan.layout.team_log2) / heads;
  const int64_t units = problem.num_edges + kRowUnits * problem.num_rows;
  const int64_t wanted_blocks = int64_t(device.multiprocessors) * 16;
  int64_t share = std::clamp<int64_t>(units * slices / (chains * wanted_blocks), 32, 1024);
  const int64_t at_once = int64_t(device.multiprocessors) * resident_blocks(problem, plan);
  const int64_t blocks = (units / (share * chains) + 1) * slices,
                ranges = (blocks + at_once / 2) / at_once * at_once / slices;
  if (ranges > 0) share = (units + ranges * chains - 1) / (ranges * chains);
  Partition& part = plan.part;
  part.range_units = std::max(share * chains, units * problem.range_bytes / problem.range_budget);
  part.num_ranges = std::max<int64_t>(1, (units + part.range_units - 1) / part.range_units);
  const int64_t budget = std::max<int64_t>(problem.carry_budget, 1);
  part.piece = std::max(part.range_units, 2 * problem.num_edges * problem.carry_bytes / budget);
  plan.hubs = may_cut(problem.longest, problem.num_edges, part);
  plan.slots = number_of_slots(problem.num_edges, part.piece);
}

inline Plan make_plan(const Problem& problem, const Device& device) {
  Plan plan;
  choose_kernel(problem, plan);
  if (plan.layout.vectors) {
    choose_slice(problem, device, plan.mma, plan.layout);
    choose_partition(problem, device, plan);
  }
  return plan;
}

}  // namespace edgeless::cuda
