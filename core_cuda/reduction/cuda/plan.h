// The choice among the three backward kernels of an extremum on CUDA (docs/design.md describes them). Pure functions of
// sizes; no CUDA and no torch.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string_view>

#include "../../common/segment_reduce.h"
#include "args.h"

namespace edgeless::cuda::reduction {

// gather: every edge of the transpose reads the gradient. shared_scatter: atomics into the shared memory of a block or
// of a cluster of two. scatter: atomics into L2.
enum class GradientEngine : uint8_t { gather, shared_scatter, scatter };

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
  if (name == "scatter") return GradientPlan{GradientEngine::scatter, {}};
  if (name == "shared_scatter" || name == "cluster_scatter") {
    const auto sums = plan_block_sums(p, device, name == "cluster_scatter");
    if (sums) return GradientPlan{GradientEngine::shared_scatter, *sums};
  }
  return {};
}

// The name for plan_gradient_by() and explanations.
inline const char* name_of(const GradientPlan& plan) {
  switch (plan.engine) {
    case GradientEngine::gather: return "gather";
    case GradientEngine::shared_scatter: return plan.sums.blocks_log2 ? "cluster_scatter" : "shared_scatter";
    default: return "scatter";
  }
}

}  // namespace edgeless::cuda::reduction
