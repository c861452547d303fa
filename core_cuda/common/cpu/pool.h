// Memory for large results, kept when they are freed for the next result of about their size.
//
// malloc gives blocks of this size back to the system at once, and the system clears every page of the next one: for
// a result of 87 MB that takes 5 to 35 ms, and writing it 2 ms. A kept block is marked so that the system may take its
// pages when memory is short (MADV_FREE).
#pragma once

#include <cstddef>
#include <cstdint>

namespace edgeless::cpu {

// Blocks below this stay in malloc's heap, where their pages are reused anyway.
constexpr std::size_t kLeastPooled = std::size_t{32} << 20;

struct Block {
  void* data = nullptr;
  std::size_t capacity = 0;
};

// A block of at least `bytes`, on large pages where the system has them; without data where there is no pool (not on
// Linux, under EDGELESS_POOL=0) or no memory.
Block take_block(std::size_t bytes);
void give_block(Block block) noexcept;

// Gives every block that is not in use back to the system.
void release_blocks() noexcept;
// Bytes of the blocks that are not in use.
std::size_t pooled_bytes() noexcept;

}  // namespace edgeless::cpu
