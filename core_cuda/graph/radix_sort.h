// A stable LSD radix sort of many keys with their positions, one launch per digit (onesweep: Adinets and Merrill, 2022,
// arXiv:2206.01784). No CUDA and no torch.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../jit/queue.h"

namespace edgeless::cuda {

constexpr int kSortBits = 8, kSortDigits = 1 << kSortBits;  // maximum bits and values of a digit
constexpr int kSortThreads = kSortDigits;                   // per block: one for each digit
// Keys per thread, and keys per tile, which one block sorts. Keys and their positions pass through shared memory.
constexpr int sort_keys_of_thread(int key_bytes) { return key_bytes == 4 ? 20 : 12; }
constexpr int sort_tile(int key_bytes) { return kSortThreads * sort_keys_of_thread(key_bytes); }

// The digit of a pass: the bits [shift, shift + width) of a key.
struct SortDigit {
  int shift, width;
};

// Bytes of scratch memory for radix_sort(), to be aligned to 256 bytes.
size_t radix_sort_scratch(int64_t count, int64_t num_keys, bool wide_index);

// Sorts keys [count] in [0, num_keys) to sorted [count]; order [count] receives their positions, those of equal keys
// ascending. All are int32, or int64 if `wide_index`. Keys out of range are sorted by some of their bits.
void radix_sort(const void* keys, int64_t count, int64_t num_keys, bool wide_index, void* scratch, void* sorted,
                void* order, const jit::Queue& queue);

}  // namespace edgeless::cuda
