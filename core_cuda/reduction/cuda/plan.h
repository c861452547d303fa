// The choice among the five backward kernels of an extremum on CUDA (docs/design.md describes them). Pure functions of
// sizes; no CUDA and no torch.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string_view>

#include "../../common/fold.h"
#include "args.h"

namespace edgeless::cuda::reduction {

// gather: every edge of the transpose reads the gradient. masked_gather: the same, but only where an argument matches.
// sorted: the gradient is sorted by receiving edge, then gathered. shared_scatter: atomics into the shared memory of a
// block or of a cluster of two. scatter: atomics into L2.
enum class GradientEngine : uint8_t { gather, masked_gather, sorted, shared_scatter, scatter };

struct GradientProblem {
  Storage storage = Storage::f32;
  int arg_bytes = 4;
  bool wide_index = false;
  bool shares = false;  // ties share the gradient
  bool has_transpose = false;
  int64_t num_rows = 0, num_columns = 0, num_edges = 0, width = 0;
};

struct GradientDevice {
  int multiprocessors = 1;
  int64_t shared_bytes = 0;  // opt-in limit of shared memory per block
  bool clusters = false;
};

// Gathering needs the CSC and rows of whole vectors.
constexpr bool can_gather(const GradientProblem& p) {
  return p.has_transpose && p.width % 8 == 0 && p.storage != Storage::f64 && !p.wide_index;
}
constexpr bool can_mask(const GradientProblem& p) { return can_gather(p) && !p.shares && p.storage == Storage::f32; }
constexpr bool can_sort(const GradientProblem& p) {
  return can_gather(p) && !p.shares && (p.storage == Storage::f16 || p.storage == Storage::bf16);
}

// The layout of sums in shared memory: a block, or a cluster of two, has a group of columns of all nodes.
struct BlockSums {
  int blocks_log2 = 0;   // log2 of the blocks of a cluster
  int columns_log2 = 0;  // log2 of the columns of a group
  int64_t nodes = 0;     // nodes per block
  int64_t groups = 0;    // groups of columns
};

inline std::optional<BlockSums> plan_block_sums(const GradientProblem& p, const GradientDevice& device,
                                                int blocks_log2) {
  const int64_t room = device.shared_bytes / 8;  // in sums
  BlockSums sums;
  sums.blocks_log2 = blocks_log2;
  sums.nodes = ((p.num_columns - 1) >> blocks_log2) + 1;
  if (p.storage == Storage::f64 || sums.nodes > room || (blocks_log2 > 0 && !device.clusters)) return {};
  // As many columns as fit in shared memory while every SM has a block.
  const auto groups = [&](int log2) { return ((p.width - 1) >> log2) + 1; };
  while (sums.columns_log2 < 5 && sums.nodes << (sums.columns_log2 + 1) <= room &&
         groups(sums.columns_log2 + 1) << blocks_log2 >= device.multiprocessors) {
    ++sums.columns_log2;
  }
  sums.groups = groups(sums.columns_log2);
  return sums;
}

struct GradientPlan {
  GradientEngine engine;
  BlockSums sums;  // for GradientEngine::shared_scatter
};

inline GradientPlan plan_gradient(const GradientProblem& p, const GradientDevice& device) {
  const bool few_fit = p.num_edges >= kSortDegree * p.num_rows;  // few elements match an edge
  // One warp sorts a row, which is too slow for hubs: 32-bit arguments mean that rows may exceed 65,536 edges.
  if (few_fit && p.arg_bytes <= 2 && can_sort(p)) return {GradientEngine::sorted, {}};
  if (few_fit && p.width >= kMaskedWidth && can_mask(p)) return {GradientEngine::masked_gather, {}};
  if (can_gather(p)) return {GradientEngine::gather, {}};
  // Atomics across a cluster are slower than within a block: profitable only where ties share, which is slower in L2.
  for (int blocks_log2 = 0; blocks_log2 <= (p.shares ? 1 : 0); ++blocks_log2) {
    const auto sums = plan_block_sums(p, device, blocks_log2);
    if (sums && sums->groups << blocks_log2 >= device.multiprocessors / 2)
      return {GradientEngine::shared_scatter, *sums};
  }
  return {GradientEngine::scatter, {}};
}

// The plan of the engine with that name, if the inputs allow it.
inline std::optional<GradientPlan> plan_gradient_by(std::string_view name, const GradientProblem& p,
                                                    const GradientDevice& device) {
  if (name == "gather" && can_gather(p)) return GradientPlan{GradientEngine::gather, {}};
  if (name == "masked_gather" && can_mask(p)) return GradientPlan{GradientEngine::masked_gather, {}};
  if (name == "sorted" && can_sort(p)) return GradientPlan{GradientEngine::sorted, {}};
  if (name == "scatter") return GradientPlan{GradientEngine::scatter, {}};
  if (name == "shared_scatter" || name == "cluster_scatter") {
    const auto sums = plan_block_sums(p, device, name == "cluster_scatter");
    if (sums) return GradientPlan{GradientEngine::shared_scatter, *sums};
  }
  return {};
}

// The feature tiles of the sorted backward: log2 of the lanes of a sub-warp, and columns of a tile.
struct SortedColumns {
  int team_log2 = 3, columns = 0;
};

// Chooses the fewest feature tiles, of equal width, whose items fit in memory (tiles of 128 columns always do), and the
// smallest of the kernels for 128, 256 and 512 columns that covers them.
inline SortedColumns sort_columns(int64_t rows, int64_t width, int64_t result_bytes) {
  SortedColumns found;
  int64_t fewest = 0;
  for (int log2 = 3; log2 <= 5; ++log2) {
    const int64_t slices = (width - 1) / (kSortPer << log2) + 1;
    const int64_t columns = ((width / 8 - 1) / slices + 1) * 8;
    const int64_t bytes = rows * columns * kSortItemBytes;
    if (log2 > 3 && (slices == fewest || bytes > std::max(result_bytes, kSortMemory))) continue;
    fewest = slices;
    found.team_log2 = log2, found.columns = static_cast<int>(columns);
  }
  return found;
}

// The name for plan_gradient_by() and explanations.
inline const char* name_of(const GradientPlan& plan) {
  switch (plan.engine) {
    case GradientEngine::gather: return "gather";
    case GradientEngine::masked_gather: return "masked_gather";
    case GradientEngine::sorted: return "sorted";
    case GradientEngine::shared_scatter: return plan.sums.blocks_log2 ? "cluster_scatter" : "shared_scatter";
    default: return "scatter";
  }
}

}  // namespace edgeless::cuda::reduction
