#include "blocks.h"

namespace edgeless {

const char* wsb_refusal(const AttentionCall& in, bool backward) {
  if (in.score != Score::dot) return "of attention it computes that of the dot product";
  if (const char* refusal = refusal_of_rows(in.dst)) return refusal;
  if (in.edge_attr || in.edge_scale || in.dropout > 0) {
    return "its blocks hold bits, and this call has dropout or numbers of edges";
  }
  const int64_t dim = in.dim();
  if ((dim != 32 && dim != 64 && dim != 128) || in.channels() != dim) {
    return "it has kernels for heads of 32, 64 and 128 features, as many in values as in keys";
  }
  if (const char* refusal = refusal_of_blocks(in.graph.csr)) return refusal;
  return backward && !in.graph.csc.empty() ? refusal_of_blocks(in.graph.csc) : nullptr;
}

bool blocks_pay(const AttentionCall& in, bool backward) {
  if (wsb_refusal(in, backward)) return false;
  const at::TensorList csr = in.graph.csr, csc = in.graph.csc;
  return blocks_pay(csr, in.dim(), in.src) && (!backward || csc.empty() || blocks_pay(csc, in.dim(), in.dst));
}

}  // namespace edgeless
