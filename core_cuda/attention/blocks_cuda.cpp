#include "../wsb/cuda/dot.h"

#include "../common/decisions.h"
#include "../common/engine.h"
#include "../common/launch.h"
#include "../common/storage_of.h"
#include "../wsb/blocks_cuda.h"
#include "blocks_cuda.h"

namespace edgeless::cuda {
namespace {

wsb::HeadRows head_rows(const Rows& rows) { return {rows.base, rows.row, rows.head}; }

wsb::HeadSums head_sums(const OutRows& rows) { return {rows.base, int64_t{rows.heads} * rows.dim, rows.wide}; }

}  // namespace

bool runs_on_blocks(const AttentionCall& in, bool backward) {
  if (in.score != Score::dot) return false;
  const char* op = backward ? "dot_backward_D" : "dot_D";
  const Engine engine =
      decided_engine(chosen_engine(), in.graph.csr, op, in.rows(), in.heads() * in.dim(), false, in.dim());
  if (engine != Engine::wsb && engine != Engine::automatic) return false;
  const bool chosen = engine == Engine::wsb ? !wsb_refusal(in, backward) : blocks_pay(in, backward);
  return chosen && device_attribute(jit::Attribute::capability_major, in.dst.get_device()) >= 8;
}

void run_on_blocks(Pass pass, const AttentionCall& in, const Args<float>& args, const jit::Queue& queue) {
  const bool by_src = pass == Pass::by_src;
  const at::TensorList arrays = by_src ? in.graph.csc : in.graph.csr;
  const auto side = blocks_of(arrays);
  wsb::DotArgs to;
  to.blocks = blocks_as_kernels_read(*side);
  to.graph = args.graph;
  to.wide_index = arrays[0].scalar_type() == at::kLong;
  to.heads = args.heads, to.scale = args.coefficient;
  const wsb::HeadRows query = head_rows(args.dst), key = head_rows(args.src), value = head_rows(args.value);
  const wsb::HeadRows grad = head_rows(args.grad_out);
  to.row_logit = by_src ? key : query, to.row_value = by_src ? value : grad;
  to.column_logit = by_src ? query : key, to.column_value = by_src ? grad : value;
  to.logsumexp = args.logsumexp, to.delta = args.delta, to.delta_given = args.delta_given;
  to.saved_out = head_rows(args.saved_out);
  if (pass == Pass::forward) to.value_sum = head_sums(args.out);
  if (pass == Pass::by_dst) to.logit_sum = head_sums(args.grad_dst);
  if (by_src) to.value_sum = head_sums(args.grad_value), to.logit_sum = head_sums(args.grad_src);
  const auto which = by_src                 ? wsb::DotPass::by_src
                     : pass == Pass::by_dst ? wsb::DotPass::by_dst
                                            : wsb::DotPass::forward;
  wsb::run_dot(which, storage_of(in.rows()), static_cast<int>(in.dim()), to, queue);
}

}  // namespace edgeless::cuda
