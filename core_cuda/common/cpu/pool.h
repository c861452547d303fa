// Memory pool for large results: a freed block serves the next result of about its size.
//
// malloc returns blocks of this size to the system immediately, and the system clears every page of the next block: for
// a result of 87 MB that takes 5 to 35 ms, while writing the result takes 2 ms. An idle block is marked MADV_FREE, so
// that the system can reclaim its pages when memory is short.
#pragma once

#include <cstddef>
#include <cstdint>

namespace edgeless::cpu {

// In bytes. Smaller blocks stay in malloc's heap, where their pages are reused anyway.
constexpr std::size_t kLeastPooled = std::size_t{32} << 20;

struct Block {
  void* data = nullptr;
  std::size_t capacity = 0;
};

// Returns a block of at least `bytes`, on huge pages where the system has them. `data` is null if there is no pool
// (other systems than Linux, EDGELESS_POOL=0) or no memory.
Block take_block(std::size_t bytes);
void give_block(Block block) noexcept;

// Returns every idle block to the system.
void release_blocks() noexcept;
// Total bytes of the idle blocks.
std::size_t pooled_bytes() noexcept;

}  // namespace edgeless::cpu
