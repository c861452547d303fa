// Matrices that are column ranges of one tensor: the results of the op `project` for several linear maps of one input,
// and their gradients from the attention. One GEMM then reads all of these matrices without a copy.
//
// Ops and autograd pass the matrices as separate tensors, so the receiver recovers the layout by Packed::of(). No other
// code compares strides for this purpose.
#pragma once

#include <ATen/ATen.h>

#include <algorithm>

#include "optional.h"

namespace edgeless {

struct Packed {
  at::Tensor leftmost;                 // the part with the lowest column; its storage holds all parts
  int64_t stride = 0;                  // elements from row to row
  c10::SmallVector<int64_t, 4> begin;  // first column of each part, in the given order, relative to `leftmost`
  c10::SmallVector<int64_t, 4> width;  // columns of each part

  // Splits the first columns of `whole` [N, columns] into parts of these widths.
  Packed(const at::Tensor& whole, at::IntArrayRef widths)
      : leftmost(whole), stride(whole.stride(0)), width(widths.begin(), widths.end()) {
    int64_t column = 0;
    for (const int64_t w : widths) begin.push_back(column), column += w;
  }

  // The layout of tensors [N, F] or [N, H, C], which may come in any order and with other columns between them; empty
  // if they are not parts of the same rows.
  static Optional<Packed> of(at::TensorList parts) {
    Packed packed;
    int64_t first = 0;
    for (const at::Tensor& t : parts) {
      const bool dense = t.dim() == 2 ? t.stride(1) == 1 : t.dim() == 3 && t.stride(2) == 1 && t.stride(1) == t.size(2);
      const bool same_rows = dense && t.storage().is_alias_of(parts[0].storage()) && t.size(0) == parts[0].size(0) &&
                             t.stride(0) == parts[0].stride(0);
      if (!same_rows) return {};
      if (packed.begin.empty() || t.storage_offset() < first) packed.leftmost = t, first = t.storage_offset();
      packed.begin.push_back(t.storage_offset());
      packed.width.push_back(t.dim() == 2 ? t.size(1) : t.size(1) * t.size(2));
    }
    packed.stride = parts[0].stride(0);
    int64_t numbers = 0;
    for (size_t k = 0; k < parts.size(); ++k) {
      packed.begin[k] -= first, numbers += packed.width[k];
      if (packed.begin[k] + packed.width[k] > packed.stride) return {};
    }
    if (numbers > packed.stride) return {};  // some columns overlap
    return packed;
  }

  // True if each part begins where the previous one ends.
  bool in_order() const {
    for (size_t k = 1; k < begin.size(); ++k) {
      if (begin[k] != begin[k - 1] + width[k - 1]) return false;
    }
    return true;
  }

  at::Tensor columns(int64_t from, int64_t count) const {
    return leftmost.as_strided({leftmost.size(0), count}, {stride, 1}, leftmost.storage_offset() + from);
  }
  at::Tensor part(size_t k) const { return columns(begin[k], width[k]); }

 private:
  Packed() = default;
};

}  // namespace edgeless
