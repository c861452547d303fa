// The template arguments of an attention kernel. No CUDA and no torch.
#pragma once

namespace edgeless::cuda {

// Options of the call that a kernel is compiled for: none, dropout, per-edge arrays, both. The last two modes have
// gatv2's edge term, computed by each lane or in tiles (edge_term.cuh); they support arrays, and test for dropout at
// run time.
enum Mode : int { kPlain = 0, kDropout = 1, kArrays = 2, kOptions = 3, kEdgeTerm = 4, kEdgeTiles = 5 };
constexpr bool has_arrays(int mode) { return mode >= kArrays; }
constexpr bool has_edge_term(int mode) { return mode >= kEdgeTerm; }

// Lanes of the widest narrow sub-warp. Narrow sub-warps have as many lanes as a row has vectors.
constexpr int kNarrowLanes = 2;
constexpr bool is_narrow(int lanes) { return lanes > 0 && lanes <= kNarrowLanes; }

// True for sub-warps of one or two groups of five lanes (SubWarpOfFives in common/warp.cuh), which have batches of five
// edges.
constexpr bool has_fives(int lanes) { return lanes == 5 || lanes == 10; }

struct Kernel {
  bool wide_index = false;  // int64 ids
  bool mma = false;         // tensor cores (mma.cuh)
  bool whole = false;       // mma: every lane has all its vectors
  int vectors = 0;          // vectors per lane; 0: no kernel holds a row this wide
  int lanes = 0;            // lanes per sub-warp: a power of two up to 32, 5 or 10; 0: any power of two from 4 on
  int edges = 4;            // edges per batch
  Mode mode = kPlain;
  bool spread = false;  // every lane processes an edge of its own

  constexpr int edges_of_lane() const { return spread ? 1 : edges; }  // edges per batch whose rows a lane reads
};

}  // namespace edgeless::cuda
