// The weighted sparse blocks (WSB) of a graph, built by shared/graph/wsb.py and owned by the graph. Ops find them,
// below autograd, by the index arrays of their call.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "../common/optional.h"
#include "../common/owners_by_arrays.h"
#include "../common/thresholds.h"

namespace edgeless {

// The blocks of one direction; cuda/blocks.h describes the arrays.
struct BlocksOfSide {
  at::Tensor indptr, indices;
  int64_t version;  // sum of the tensor versions of both when the blocks were built
  at::Tensor first, order, columns, bits;
  double reuse;  // mean number of edges that share one read of a gathered row
};

class KeptBlocks : public std::enable_shared_from_this<KeptBlocks> {
 public:
  static std::shared_ptr<KeptBlocks> make() { return std::shared_ptr<KeptBlocks>(new KeptBlocks()); }
  ~KeptBlocks();

  // blocks: first, order, columns, bits.
  void add(const at::Tensor& indptr, const at::Tensor& indices, const std::vector<at::Tensor>& blocks, double reuse);
  // The blocks of these arrays, or null.
  std::shared_ptr<const BlocksOfSide> of(const at::Tensor& indptr, const at::Tensor& indices) const;
  std::vector<at::Tensor> kept_tensors() const;
  int64_t num_entries() const;

 private:
  KeptBlocks() = default;

  mutable std::mutex mutex_;
  std::vector<std::shared_ptr<const BlocksOfSide>> sides_;
};

// The blocks of one direction's arrays; null if no graph has built blocks for them.
std::shared_ptr<const BlocksOfSide> blocks_of(at::TensorList csr);

// Returns why the blocks of one direction's arrays cannot be used, or why these rows cannot be multiplied by blocks,
// worded to follow "wsb: ". Null: they can.
const char* refusal_of_blocks(at::TensorList csr);
const char* refusal_of_rows(const at::Tensor& x);

// Returns whether SpMM (head_dim 0) or attention on the blocks of one direction is profitable. gathered: the rows that
// it gathers.
bool blocks_pay(at::TensorList side, int64_t head_dim, const at::Tensor& gathered);

// Returns why an SpMM of x [columns, F] or [columns, H, F] cannot run on blocks, worded to follow "wsb: ". Null: it
// can. The arguments must have passed the checks of the op.
const char* wsb_refusal(const at::Tensor& x, const OptTensor& weight, at::TensorList csr);

// Returns whether an SpMM on blocks is supported and profitable: engine `automatic` then uses them.
bool blocks_pay(const at::Tensor& x, const OptTensor& weight, at::TensorList csr);

}  // namespace edgeless
