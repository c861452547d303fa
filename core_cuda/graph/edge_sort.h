// Stable sort of edges by one end point, with row pointers: builds CSR from an edge list, and CSC from CSR.
//
// An LSD radix sort of records (key, other, id). One pass over one digit:
//   1. every block of consecutive edges counts its digits:                        counts[block][digit]
//   2. an exclusive scan in the order (digit, block) turns counts into offsets:   where (block, digit) writes first
//   3. every block moves its edges there in order.
// Fewer than kMinEdgesPerBlock edges with keys of one digit use a serial counting sort instead.
//
// Work:    blocks have equal numbers of edges, so hubs cost no more than other rows.
// Result:  depends on the edges alone, not on the number of blocks; edges of one key keep their order.
// Memory:  only counters for up to 2^kDigitBits keys; above that one or two buffers of E records, and E keys.
//          A block has at most 2^kDigitBits counters, however many keys there are.
// Node and edge counts must fit Index (int32_t or int64_t).
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "../common/cpu/huge_pages.h"

namespace edgeless {

constexpr int kDigitBits = 14;  // the fastest of 10 to 20; one pass sorts up to 16384 nodes
constexpr int64_t kMinEdgesPerBlock = int64_t{1} << 14;

template <typename Index>
struct EdgeRecord {
  Index key;    // the end point to sort by: the row of the result
  Index other;  // the other end point: the column of the result
  Index id;     // the edge's original id
};

// The three sources of edges. Each offers key(position), and visit(begin, end, f), which calls f(key, other, id) in
// order of position.

template <typename In, typename Index>
struct CooEdges {
  const In* keys;    // [E]
  const In* others;  // [E]

  int64_t key(int64_t position) const { return keys[position]; }

  template <typename F>
  void visit(int64_t begin, int64_t end, const F& f) const {
    for (int64_t p = begin; p < end; ++p) {
      f(int64_t{keys[p]}, int64_t{others[p]}, static_cast<Index>(p));
    }
  }
};

// The edges of a CSR, to be sorted by column.
template <typename Index>
struct CsrEdges {
  const Index* indptr;    // [num_rows + 1], from 0 to E, non-decreasing
  const Index* indices;   // [E]
  const Index* edge_ids;  // [E]; null: edge ids are positions
  int64_t num_rows;

  int64_t key(int64_t position) const { return indices[position]; }

  template <typename F>
  void visit(int64_t begin, int64_t end, const F& f) const {
    int64_t row = std::upper_bound(indptr, indptr + num_rows + 1, static_cast<Index>(begin)) - indptr - 1;
    for (int64_t p = begin; p < end; ++p) {
      while (indptr[row + 1] <= p) {
        ++row;
      }
      f(int64_t{indices[p]}, row, edge_ids != nullptr ? edge_ids[p] : static_cast<Index>(p));
    }
  }
};

template <typename Index>
struct RecordEdges {
  const EdgeRecord<Index>* records;  // [E]

  int64_t key(int64_t position) const { return records[position].key; }

  template <typename F>
  void visit(int64_t begin, int64_t end, const F& f) const {
    for (int64_t p = begin; p < end; ++p) {
      f(int64_t{records[p].key}, int64_t{records[p].other}, records[p].id);
    }
  }
};

// Divides work into blocks. `parallel(count, f)` calls f(0) ... f(count - 1), in any order and on any thread, and
// returns when all are done; `parallel.threads()` is the number of calls that can run concurrently.
template <typename Parallel>
struct Blocks {
  int64_t size;   // items to divide: edges, or rows + edges
  int64_t count;  // number of blocks
  const Parallel& parallel;

  Blocks(int64_t size, int64_t min_size, const Parallel& parallel)
      : size(size), count(std::clamp<int64_t>(size / min_size, 1, parallel.threads())), parallel(parallel) {}

  int64_t begin(int64_t block) const { return size / count * block + std::min(block, size % count); }

  // f(block, begin, end)
  template <typename F>
  void run(const F& f) const {
    parallel(count, [&](int64_t block) { f(block, begin(block), begin(block + 1)); });
  }
};

// counts [num_blocks, bins]. In: how often a digit occurs in a block. Out: where the block writes its first edge with
// that digit.
template <typename Index>
void scan_counts(std::vector<Index>& counts, int64_t num_blocks, int64_t bins) {
  Index sum = 0;
  for (int64_t digit = 0; digit < bins; ++digit) {
    for (int64_t block = 0; block < num_blocks; ++block) {
      sum += std::exchange(counts[block * bins + digit], sum);
    }
  }
}

// One pass over the digit (key >> shift) & (bins - 1); write(position, key, other, id) stores an edge at its new
// position. Returns the offsets [num_blocks, bins] of scan_counts.
template <typename Index, typename Source, typename Parallel, typename Write>
std::vector<Index> radix_pass(const Source& source, const Blocks<Parallel>& blocks, int shift, int64_t bins,
                              const Write& write) {
  std::vector<Index> counts(blocks.count * bins, 0);
  const int64_t mask = bins - 1;  // also keeps a key that is out of range inside the counters
  blocks.run([&](int64_t block, int64_t begin, int64_t end) {
    Index* count = counts.data() + block * bins;
    for (int64_t p = begin; p < end; ++p) {
      ++count[(source.key(p) >> shift) & mask];
    }
  });
  scan_counts(counts, blocks.count, bins);
  blocks.run([&](int64_t block, int64_t begin, int64_t end) {
    std::vector<Index> next(counts.begin() + block * bins, counts.begin() + (block + 1) * bins);
    source.visit(begin, end,
                 [&](int64_t key, int64_t other, Index id) { write(next[(key >> shift) & mask]++, key, other, id); });
  });
  return counts;
}

// indptr[r] = number of sorted keys below r. Blocks divide the merge of rows and keys equally (merge path), so that
// neither a long run of empty rows nor a hub lands in one block.
template <typename Index, typename Parallel>
void row_pointers(const Index* keys, int64_t num_edges, int64_t num_keys, Index* indptr, const Parallel& parallel) {
  const int64_t rows = num_keys + 1;
  const Blocks<Parallel> steps(rows + num_edges, kMinEdgesPerBlock, parallel);
  // Number of the first `step` merge steps that write a row pointer: row r is written before the first key >= r.
  const auto rows_before = [&](int64_t step) {
    int64_t low = std::max<int64_t>(0, step - num_edges), high = std::min(step, rows);
    while (low < high) {
      const int64_t row = (low + high) / 2;
      (keys[step - row - 1] < row) ? high = row : low = row + 1;
    }
    return low;
  };
  steps.run([&](int64_t, int64_t begin, int64_t end) {
    const int64_t last = rows_before(end);
    int64_t row = rows_before(begin), position = begin - row;
    while (row < last) {  // branch-free, because with short rows branches on the keys would be mispredicted
      const bool key_first = keys[position] < row;
      indptr[row] = static_cast<Index>(position);
      position += key_first;
      row += !key_first;
    }
  });
}

inline int bits_for(int64_t num_keys) {
  int bits = 1;
  while (bits < 63 && (int64_t{1} << bits) < num_keys) {
    ++bits;
  }
  return bits;
}

// Records whether any edge had an end point out of range. Thread-safe.
struct RangeCheck {
  int64_t num_keys, num_others;
  std::atomic<bool> passed{true};

  void operator()(int64_t key, int64_t other) {
    // The casts send negative ids above every limit.
    if (static_cast<uint64_t>(key) >= static_cast<uint64_t>(num_keys) ||
        static_cast<uint64_t>(other) >= static_cast<uint64_t>(num_others)) {
      passed.store(false, std::memory_order_relaxed);
    }
  }
};

// The output arrays.
template <typename Index>
struct SortedEdges {
  Index* indptr;  // [num_keys + 1]
  Index* others;  // [E]
  Index* ids;     // [E]
};

// Keys of one digit: the offsets of the pass are the row pointers.
template <typename Index, typename Source, typename Parallel>
bool sort_in_one_pass(const Source& source, const Blocks<Parallel>& blocks, int64_t bins, RangeCheck& check,
                      const SortedEdges<Index>& to) {
  const auto starts = radix_pass<Index>(source, blocks, 0, bins, [&](Index at, int64_t key, int64_t other, Index id) {
    check(key, other);
    to.others[at] = static_cast<Index>(other);
    to.ids[at] = id;
  });
  std::copy_n(starts.begin(), check.num_keys, to.indptr);
  to.indptr[check.num_keys] = static_cast<Index>(blocks.size);
  return check.passed;
}

template <typename Index, typename Source, typename Parallel>
bool sort_in_passes(const Source& source, const Blocks<Parallel>& blocks, int passes, int digit_bits, RangeCheck& check,
                    const SortedEdges<Index>& to) {
  using Record = EdgeRecord<Index>;
  const int64_t bins = int64_t{1} << digit_bits, num_edges = blocks.size;
  auto records = large_array<Record>(num_edges);
  radix_pass<Index>(source, blocks, 0, bins, [&](Index at, int64_t key, int64_t other, Index id) {
    check(key, other);
    records[at] = {static_cast<Index>(key), static_cast<Index>(other), id};
  });
  if (!check.passed) {
    return false;
  }
  decltype(records) spare;
  for (int pass = 1; pass < passes - 1; ++pass) {
    if (spare == nullptr) {
      spare = large_array<Record>(num_edges);
    }
    radix_pass<Index>(RecordEdges<Index>{records.get()}, blocks, pass * digit_bits, bins,
                      [&](Index at, int64_t key, int64_t other, Index id) {
                        spare[at] = {static_cast<Index>(key), static_cast<Index>(other), id};
                      });
    records.swap(spare);
  }
  auto keys = large_array<Index>(num_edges + 1);
  keys[num_edges] = static_cast<Index>(check.num_keys);
  radix_pass<Index>(RecordEdges<Index>{records.get()}, blocks, (passes - 1) * digit_bits, bins,
                    [&](Index at, int64_t key, int64_t other, Index id) {
                      keys[at] = static_cast<Index>(key);
                      to.others[at] = static_cast<Index>(other);
                      to.ids[at] = id;
                    });
  row_pointers(keys.get(), num_edges, check.num_keys, to.indptr, blocks.parallel);
  return true;
}

// Counting sort of few edges by one thread. indptr holds first the counts, then the write position of each row.
template <typename Index, typename Source>
bool sort_by_counting(const Source& source, int64_t num_edges, RangeCheck& check, const SortedEdges<Index>& to) {
  std::fill_n(to.indptr, check.num_keys + 1, Index{0});
  for (int64_t p = 0; p < num_edges; ++p) {
    const int64_t key = source.key(p);
    if (static_cast<uint64_t>(key) >= static_cast<uint64_t>(check.num_keys)) return false;
    ++to.indptr[key + 1];
  }
  Index sum = 0;
  for (int64_t key = 1; key <= check.num_keys; ++key) sum += std::exchange(to.indptr[key], sum);
  bool passed = true;
  source.visit(0, num_edges, [&](int64_t key, int64_t other, Index id) {
    passed &= static_cast<uint64_t>(other) < static_cast<uint64_t>(check.num_others);
    const Index at = to.indptr[key + 1]++;  // ends as the beginning of row key + 1
    to.others[at] = static_cast<Index>(other);
    to.ids[at] = id;
  });
  return passed;
}

// Sorts the edges of `source` by key. Returns false, with unspecified results, if a key is outside [0, num_keys) or
// another end point outside [0, num_others).
template <typename Index, typename Source, typename Parallel>
bool sort_edges(const Source& source, int64_t num_edges, int64_t num_keys, int64_t num_others,
                const SortedEdges<Index>& to, const Parallel& parallel) {
  RangeCheck check{num_keys, num_others};
  const int bits = bits_for(num_keys);
  const int passes = (bits + kDigitBits - 1) / kDigitBits;
  if (passes == 1 && num_edges < kMinEdgesPerBlock) return sort_by_counting(source, num_edges, check, to);
  const int digit_bits = (bits + passes - 1) / passes;
  const int64_t bins = int64_t{1} << digit_bits;
  // The scan over all counters is serial, so blocks have at least four edges per counter.
  const Blocks<Parallel> blocks(num_edges, std::max(kMinEdgesPerBlock, 4 * bins), parallel);
  return passes == 1 ? sort_in_one_pass(source, blocks, bins, check, to)
                     : sort_in_passes(source, blocks, passes, digit_bits, check, to);
}

}  // namespace edgeless
