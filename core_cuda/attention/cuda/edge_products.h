// Launch geometry of the kernels of edge_products.cuh and edge_product_tiles.cuh. No CUDA and no torch.
#pragma once

#include "../../common/threads.h"
#include "edge_terms.h"

namespace edgeless::cuda {

// A tile of edge_tiles.cuh.
constexpr int kTileColumns = 16, kTileEdges = 8, kTileDepth = 8;

// Edges per tile of edge_products.cuh, for `dim` features of `bytes` bytes: as many as shared memory allows, since a
// block stalls on its loads once per tile. attr_grad: the features' gradient is computed as well.
constexpr int edges_of_tile(int dim, int bytes, bool attr_grad) {
  return attr_grad || dim * bytes > 128 ? kEdgesOfUnit : 4 * kEdgesOfUnit;
}
// Dynamic shared memory for `columns` columns per block, where the features' gradient is computed.
constexpr int64_t bytes_of_products(int dim, int columns, int bytes) {
  return int64_t{columns} * (edges_of_tile(dim, bytes, true) + dim) * bytes;
}

// The same for edge_product_tiles.cuh, whose features are float.
constexpr int edges_of_tiles(int dim, bool attr_grad) {
  return attr_grad ? kEdgesOfUnit : dim > 16 ? 2 * kEdgesOfUnit : 4 * kEdgesOfUnit;
}
// Pitches in floats of the edges of g and of the columns of `weighted`, free of bank conflicts.
constexpr int pitch_of_g(int columns) { return columns + 8; }
constexpr int pitch_of_weighted(int dim) { return dim + 4; }
constexpr int64_t bytes_of_tiles(int dim, int columns) {
  return (int64_t{edges_of_tiles(dim, true)} * pitch_of_g(columns) + columns * pitch_of_weighted(dim)) * 4;
}

// Threads per edge in edge_products.cuh: a power of two, such that a block processes at most kEdgesOfUnit edges at
// once.
constexpr int threads_of_edge(int columns, int columns_of_thread) {
  int threads = kThreads / kEdgesOfUnit;
  while (threads * columns_of_thread < columns && threads < kThreads) threads *= 2;
  return threads;
}
// Warps per edge in edge_product_tiles.cuh.
constexpr int warps_of_edge(int columns) {
  int warps = 1;
  while (warps * kTileColumns < columns && warps < kThreads / 32) warps *= 2;
  return warps;
}

}  // namespace edgeless::cuda
