// Launches the kernels of radix_sort.cuh.
#include "radix_sort.h"

#include <algorithm>

#include "../common/kernel_types.h"
#include "../jit/launch.h"

namespace edgeless::cuda {
namespace {

constexpr const char* kRadixSortHeader = "graph/radix_sort.cuh";
constexpr int64_t kMostCountBlocks = 1024;

// Layout of a sort's scratch memory: if there are several passes, an array of keys and one of positions, then the
// arrays that must be zero at first.
struct SortRoom {
  int passes, width;  // number of digits, and bits of each
  int64_t tiles;
  bool wide_words;                                         // published counts have 64 bits
  size_t positions, counts, next_tiles, published, bytes;  // offsets of the arrays, and the total

  SortRoom(int64_t count, int64_t num_keys, bool wide_index) {
    int bits = 1;
    while (bits < 63 && (int64_t{1} << bits) < num_keys) ++bits;
    passes = (bits + kSortBits - 1) / kSortBits, width = (bits + passes - 1) / passes;
    const int key_bytes = wide_index ? 8 : 4;
    tiles = (count + sort_tile(key_bytes) - 1) / sort_tile(key_bytes);
    wide_words = count >= int64_t{1} << 30;
    const auto behind = [](size_t begin, size_t size) { return (begin + size + 255) / 256 * 256; };
    const size_t array = passes > 1 ? static_cast<size_t>(count) * key_bytes : 0;
    positions = behind(0, array);
    counts = behind(positions, array);
    next_tiles = behind(counts, size_t{8} * passes * kSortDigits);
    published = behind(next_tiles, sizeof(unsigned) * passes);
    bytes = published + static_cast<size_t>(passes) * of_pass();
  }

  size_t of_pass() const { return static_cast<size_t>(tiles) * kSortDigits * (wide_words ? 8 : 4); }
};

}  // namespace

size_t radix_sort_scratch(int64_t count, int64_t num_keys, bool wide_index) {
  return SortRoom(count, num_keys, wide_index).bytes;
}

void radix_sort(const void* keys, int64_t count, int64_t num_keys, bool wide_index, void* scratch, void* sorted,
                void* order, const jit::Queue& queue) {
  if (count == 0) return;
  const SortRoom room(count, num_keys, wide_index);
  char* const base = static_cast<char*>(scratch);
  void* const counts = base + room.counts;
  const jit::Type key = index_type(wide_index), word = room.wide_words ? kUint64Type : kUint32Type;
  jit::clear(queue, counts, room.bytes - room.counts);
  const int64_t blocks = std::min((count + kSortThreads - 1) / kSortThreads, kMostCountBlocks);
  jit::launch(queue, {kRadixSortHeader, "sort_counts_kernel", {key}}, {blocks, kSortThreads}, keys, count, room.passes,
              room.width, counts);
  jit::launch(queue, {kRadixSortHeader, "sort_places_kernel"}, {room.passes, kSortThreads}, counts);
  const void *from = keys, *from_order = nullptr;
  for (int pass = 0; pass < room.passes; ++pass) {
    const bool last = (room.passes - 1 - pass) % 2 == 0;  // passes alternate so that the last one ends in the result
    void *to = last ? sorted : base, *to_order = last ? order : base + room.positions;
    const SortDigit digit{pass * room.width, room.width};
    const void* const places = static_cast<const char*>(counts) + size_t{8} * pass * kSortDigits;
    void* const next_tile = base + room.next_tiles + sizeof(unsigned) * pass;
    void* const published = base + room.published + pass * room.of_pass();
    jit::launch(queue, {kRadixSortHeader, "sort_pass_kernel", {key, word}}, {room.tiles, kSortThreads}, from,
                from_order, to, to_order, count, digit, places, next_tile, published);
    from = to, from_order = to_order;
  }
}

}  // namespace edgeless::cuda
