#include "kept_blocks.h"

#include <ATen/ATen.h>

namespace edgeless {

KeptBlocks::~KeptBlocks() {
  for (const auto& side : sides_) {
    OwnersByArrays<KeptBlocks>::get().remove({place_of(side->indptr, side->indices)}, this);
  }
}

void KeptBlocks::add(const at::Tensor& indptr, const at::Tensor& indices, const std::vector<at::Tensor>& blocks,
                     double reuse) {
  TORCH_CHECK(blocks.size() == 4, "edgeless: blocks must be first, order, columns and bits, got ", blocks.size(),
              " tensors");
  const auto side = std::make_shared<const BlocksOfSide>(BlocksOfSide{
      indptr, indices, version_of(indptr) + version_of(indices), blocks[0], blocks[1], blocks[2], blocks[3], reuse});
  {
    const std::lock_guard lock(mutex_);
    sides_.push_back(side);
  }
  OwnersByArrays<KeptBlocks>::get().add({place_of(indptr, indices)}, shared_from_this());
}

std::shared_ptr<const BlocksOfSide> KeptBlocks::of(const at::Tensor& indptr, const at::Tensor& indices) const {
  const std::lock_guard lock(mutex_);
  for (const auto& side : sides_) {
    const bool same = place_of(side->indptr, side->indices) == place_of(indptr, indices) &&
                      side->indptr.sizes() == indptr.sizes() && side->indices.sizes() == indices.sizes();
    if (same) return side;
  }
  return nullptr;
}

std::vector<at::Tensor> KeptBlocks::kept_tensors() const {
  const std::lock_guard lock(mutex_);
  std::vector<at::Tensor> all;
  for (const auto& side : sides_) {
    for (const at::Tensor& t : {side->first, side->order, side->columns, side->bits}) all.push_back(t);
  }
  return all;
}

int64_t KeptBlocks::num_entries() const {
  const std::lock_guard lock(mutex_);
  return static_cast<int64_t>(sides_.size());
}

std::shared_ptr<const BlocksOfSide> blocks_of(at::TensorList csr) {
  const auto kept = OwnersByArrays<KeptBlocks>::get().find(place_of(csr[0], csr[1]));
  return kept ? kept->of(csr[0], csr[1]) : nullptr;
}

const char* refusal_of_blocks(at::TensorList csr) {
  const auto blocks = blocks_of(csr);
  if (!blocks) return "no blocks are kept for these arrays: they belong to no Graph, or to one first used in a capture";
  if (blocks->version != version_of(csr[0]) + version_of(csr[1])) return "the graph's arrays were written to";
  return nullptr;
}

bool blocks_pay(at::TensorList side, int64_t head_dim, const at::Tensor& gathered) {
  const auto blocks = blocks_of(side);
  const int64_t bytes = gathered.numel() * gathered.element_size();
  return blocks && blocks->reuse >= cuda::reuse_that_pays(head_dim, bytes, side[0].numel() - 1, side[1].numel());
}

const char* refusal_of_rows(const at::Tensor& x) {
  if (!x.is_cuda()) return "the tensors are not on a GPU";
  if (x.element_size() != 2) return "its blocks multiply bfloat16 and float16, nothing wider";
  return nullptr;
}

const char* wsb_refusal(const at::Tensor& x, const OptTensor& weight, at::TensorList csr) {
  if (const char* refusal = refusal_of_rows(x)) return refusal;
  if (weight) return "its blocks hold bits, and these edges have weights";
  const int64_t width = c10::multiply_integers(x.sizes().slice(1));
  if (width == 0 || width % 8 != 0) return "rows of x are no multiple of 16 bytes";
  return refusal_of_blocks(csr);
}

bool blocks_pay(const at::Tensor& x, const OptTensor& weight, at::TensorList csr) {
  return !wsb_refusal(x, weight, csr) && blocks_pay(csr, 0, x);
}

}  // namespace edgeless
