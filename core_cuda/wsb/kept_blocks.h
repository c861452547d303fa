// The weighted sparse blocks (WSB) of a graph, which shared/wsb.py makes. Owned by the graph and found again, below
// autograd, by the arrays that an op is given.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "../attention/inputs.h"
#include "../common/owners_by_arrays.h"
#include "../spmm/inputs.h"
#include "../thresholds.h"

namespace edgeless {

// Of one direction: see cuda/blocks.h. Shared by whoever computes with it.
struct BlocksOfSide {
  at::Tensor indptr, indices;
  int64_t version;  // of both when the blocks were made
  at::Tensor first, order, columns, bits;
  double reuse;  // edges that share a gathered row
};

class KeptBlocks : public std::enable_shared_from_this<KeptBlocks> {
 public:
  static std::shared_ptr<KeptBlocks> make() { return std::shared_ptr<KeptBlocks>(new KeptBlocks()); }
  ~KeptBlocks();

  // blocks: first, order, columns, bits.
  void add(const at::Tensor& indptr, const at::Tensor& indices, const std::vector<at::Tensor>& blocks, double reuse);
  // Null where there are none.
  std::shared_ptr<const BlocksOfSide> of(const at::Tensor& indptr, const at::Tensor& indices) const;
  std::vector<at::Tensor> kept_tensors() const;
  int64_t num_entries() const;

 private:
  KeptBlocks() = default;

  mutable std::mutex mutex_;
  std::vector<std::shared_ptr<const BlocksOfSide>> sides_;
};

// Of a direction's arrays; null where no graph has made blocks of them.
std::shared_ptr<const BlocksOfSide> blocks_of(at::TensorList csr);

// Why a sum of x [columns, F] or [columns, H, F] cannot be computed with blocks, in words that go behind "wsb: ". Null:
// it can. For arguments that the op accepts.
const char* wsb_refusal(const at::Tensor& x, const OptTensor& weight, at::TensorList csr);

// Whether a sum is to be computed with blocks though nobody asked for them.
bool blocks_pay(const at::Tensor& x, const OptTensor& weight, at::TensorList csr);

// The same for dot product attention; backward: of out, all passes of it.
const char* wsb_refusal(const AttentionCall& in, bool backward);
bool blocks_pay(const AttentionCall& in, bool backward);

}  // namespace edgeless
