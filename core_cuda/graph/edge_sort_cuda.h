// Sorting edges by a key on the GPU: the steps that coo_to_csr and csr_transpose share. No CUDA and no torch, no host
// sync.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../jit/queue.h"

namespace edgeless::cuda {

// In: type of the input ids; I: type of the output arrays and keys (int32_t or int64_t).

// Sets *bad to 1 if an id is outside [0, limit); otherwise leaves it.
template <class In>
void check_ids(const In* ids, int64_t count, int64_t limit, int32_t* bad, const jit::Queue& queue);

// rows [num_edges]: the row of every edge.
template <class I>
void expand_rows(const I* indptr, int64_t num_rows, int64_t num_edges, I* rows, const jit::Queue& queue);

// Stable radix sort of keys in [0, num_keys): `order` lists the positions of the sorted keys. `scratch` holds
// sort_scratch<I>(count, num_keys) bytes.
template <class I>
size_t sort_scratch(int64_t count, int64_t num_keys);
template <class I>
void sort_keys(const I* keys, int64_t count, int64_t num_keys, void* scratch, I* sorted, I* order,
               const jit::Queue& queue);

// indptr [num_rows + 1] of sorted row ids.
template <class I>
void row_pointers(const I* sorted, int64_t count, int64_t num_rows, I* indptr, const jit::Queue& queue);

// to[p] = from[order[p]]
template <class In, class I>
void permute(const In* from, const I* order, int64_t count, I* to, const jit::Queue& queue);

}  // namespace edgeless::cuda
