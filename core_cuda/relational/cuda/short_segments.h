// Scratch memory of the kernels of short_segments.cuh. No CUDA and no torch.
#pragma once

#include <cstdint>

#include "shared_layout.h"

namespace edgeless::cuda::relational {

// Segments [begin, end) of a type; type -1 marks the end of the list.
struct alignas(16) Chunk {
  int type, begin, end, unused;
};

constexpr int kBegun = 3;  // chunks that a block has before it takes any from the queue
static_assert(short_products_bytes(64) + sizeof(Chunk[kBegun]) <= ProductsLayout<float, 64>::kBytes,
              "the plan knows the memory of that kernel alone");

// The parts of scratch memory.
struct ShortScratch {
  void* parts;    // [types, part_vectors(width)] vectors of 16 bytes
  Chunk* chunks;  // [num_chunks + 1]
  int* taken;     // number of chunks that blocks took from the queue
};

// memory: aligned to 16 bytes.
inline ShortScratch short_scratch(void* memory, int64_t types, int width, int64_t num_chunks) {
  auto* const chunks = reinterpret_cast<Chunk*>(static_cast<char*>(memory) + types * part_vectors(width) * 16);
  return {memory, chunks, reinterpret_cast<int*>(chunks + num_chunks + 1)};
}

}  // namespace edgeless::cuda::relational
