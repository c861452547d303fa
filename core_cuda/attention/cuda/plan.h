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
  Dtype storage = Dtype::f32;
  bool wide_index = false;
  bool options = false;    // anything beyond the plain inputs
  bool edge_term = false;  // gatv2 with edge features
  int heads = 1;
  int key_vectors = 0, value_vectors = 0;
  int64_t num_rows = 0, num_edges = 0, num_gathered = 0;  // rows of what is gathered
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
  bool hubs = false;   // rows may be cut: a carry is needed
  int64_t slots = 0;   // pieces in each half of the carry
};

inline bool is_narrow(Dtype storage) { return storage == Dtype::bf16 || storage == Dtype::f16; }

// The table of kernels; instances.cuh generates just these. Sixteen-bit rows need as many registers a vector as two
// float vectors, so lanes hold one vector of them and two of float.
//
//   int32, plain     16-bit: 1 vector, 4 to 32 lanes; 2 vectors, 32 lanes.    float: 1, 4 lanes; 2, 4 to 32 lanes
//   int32, options   1 (16-bit) or 2 (float) vectors and 4 vectors, any lanes
//   int64, double    4 vectors, any lanes, with all options
inline void choose_kernel(const Problem& problem, Plan& plan) {
  const int vectors = std::max(problem.score == Score::gat ? 0 : problem.key_vectors, problem.value_vectors);
  const int top = problem.score == Score::gatv2 ? 2 : 1;
  auto lanes_log2 = [&](int per_lane) {
    int log2 = 2;
    while (log2 < 5 && (per_lane << log2) < vectors) ++log2;
    return log2;
  };
  const int few = is_narrow(problem.storage) ? 1 : 2;
  Layout& layout = plan.layout;
  if (vectors > 4 * 32) {
    layout.vectors = 0;
  } else if (problem.wide_index || problem.storage == Dtype::f64) {
    layout.vectors = 4, plan.mode = top;
  } else if (problem.options || vectors > 64) {
    layout.vectors = vectors <= few * 32 ? few : 4;
    plan.mode = problem.edge_term || (top == 2 && layout.vectors == 4) ? top : 1;
  } else {
    layout.vectors = vectors <= 4 ? 1 : vectors <= few * 32 ? few : 2;
    plan.mode = 0;
  }
  layout.team_log2 = layout.vectors ? lanes_log2(layout.vectors) : 2;
  plan.width = plan.mode == 0 ? 1 << layout.team_log2 : 0;
}

// As many heads at once as keep what they gather in L2; all of them where one head alone is far too much.
inline void choose_slice(const Problem& problem, const Device& device, Layout& layout) {
  const int teams = kBlockThreads >> layout.team_log2;
  const bool keys = problem.score != Score::gat;
  const bool values = problem.score != Score::gatv2 || problem.pass == Pass::by_src;
  const int64_t head = 16 * problem.num_gathered * (keys * problem.key_vectors + values * problem.value_vectors);
  const int64_t fits = device.l2_bytes * 7 / 10;
  int most = std::min(problem.heads, teams);
  if (head * problem.heads > fits && head <= 4 * fits) {
    most = static_cast<int>(std::min<int64_t>(most, std::max<int64_t>(1, fits / std::max<int64_t>(head, 1))));
  }
  // Of those the number that leaves the fewest teams without work.
  double best = 0;
  for (int heads = 1; heads <= most; ++heads) {
    const int slices = (problem.heads + heads - 1) / heads, busy = teams / heads * heads;
    const double share = double(busy) / teams * problem.heads / (slices * heads);
    if (share >= best * 0.999) best = std::max(best, share), layout.heads_per_slice = heads;
  }
}

inline Plan make_plan(const Problem& problem, const Device& device) {
  Plan plan;
  choose_kernel(problem, plan);
  if (!plan.layout.vectors) return plan;
  choose_slice(problem, device, plan.layout);
  const int heads = plan.layout.heads_per_slice, slices = (problem.heads + heads - 1) / heads;
  const int64_t chains = (kBlockThreads >> plan.layout.team_log2) / heads;
  const int64_t units = problem.num_edges + kRowUnits * problem.num_rows;
  // A share of 256 units hides a block's start; small graphs take smaller ones to fill the device some four times.
  const int64_t wanted_blocks = int64_t(device.multiprocessors) * 20;
  const int64_t share = std::clamp<int64_t>(units * slices / (chains * wanted_blocks), 32, 256);
  plan.part.range_units = std::max(share * chains, units * problem.range_bytes / problem.range_budget);
  plan.part.num_ranges = std::max<int64_t>(1, (units + plan.part.range_units - 1) / plan.part.range_units);
  const int64_t budget = std::max<int64_t>(problem.carry_budget, 1);
  plan.part.piece = std::max(2 * plan.part.range_units, 2 * problem.num_edges * problem.carry_bytes / budget);
  plan.hubs = problem.num_edges > 2 * plan.part.piece;
  plan.slots = number_of_slots(problem.num_edges, plan.part.piece);
  return plan;
}

}  // namespace edgeless::cuda
