// What the launch of short_segments.cuh hands from one kernel to the next. No CUDA and no torch.
#pragma once

#include <cstdint>

#include "shared_layout.h"

namespace edgeless::cuda::relational {

// Segments [begin, end) of a type; type -1: there is no such chunk.
struct alignas(16) Chunk {
  int type, begin, end, unused;
};

constexpr int kBegun = 3;  // chunks that a block begins with
static_assert(short_products_bytes(64) + sizeof(Chunk[kBegun]) <= ProductsLayout<float, 64>::kBytes,
              "the plan knows the memory of that kernel alone");

// What the kernels find in their scratch memory.
struct ShortScratch {
  void* parts;    // [types, part_vectors(width)] vectors of 16 bytes
  Chunk* chunks;  // [num_chunks + 1]
  int* taken;     // chunks that blocks took beside those that they begin with
};

// memory: of whole vectors.
inline ShortScratch short_scratch(void* memory, int64_t types, int width, int64_t num_chunks) {
  auto* const chunks = reinterpret_cast<Chunk*>(static_cast<char*>(memory) + types * part_vectors(width) * 16);
  return {memory, chunks, reinterpret_cast<int*>(chunks + num_chunks + 1)};
}

}  // namespace edgeless::cuda::relational
