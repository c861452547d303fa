// Checks and allocation of the index arrays of attention over pairs, shared by all devices.
#pragma once

#include <ATen/ATen.h>

#include <tuple>
#include <vector>

#include "../common/checks.h"
#include "walks.h"

namespace edgeless {

// edge_pairs, edge_segments, pair_segments, segment_types, numbers, begins, places, sums_ptr, columns, weights, longest
using WalkTensors = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor,
                               at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

// The checked arguments of pair_walks, made contiguous.
class WalkInputs {
 public:
  WalkInputs(const char* op, const at::Tensor& indptr, at::TensorList by_pair, const at::Tensor& pair_nodes,
             const at::Tensor& pair_of_edge, at::TensorList by_node, at::TensorList segments,
             const at::Tensor& segment_ptr, const at::Tensor& order) {
    TORCH_CHECK_VALUE(by_pair.size() == 2, op, ": by_pair must hold 2 tensors, got ", by_pair.size());
    TORCH_CHECK_VALUE(by_node.size() == 2, op, ": by_node must hold 2 tensors, got ", by_node.size());
    TORCH_CHECK_VALUE(segments.size() == 4, op, ": segments must hold 4 tensors, got ", segments.size());
    check_dim(op, "indptr", indptr, 1, "[nodes + 1]");
    check_dim(op, "pair_nodes", pair_nodes, 1, "[pairs]");
    check_dim(op, "pair_of_edge", pair_of_edge, 1, "[E]");
    check_dim(op, "segments", segments[0], 1, "[types + 1]");
    check_dim(op, "order", order, 1, "[segments]");
    TORCH_CHECK_VALUE(indptr.numel() > 0, op, ": indptr must have shape [nodes + 1], got ", indptr.sizes());
    TORCH_CHECK_VALUE(indptr.scalar_type() == at::kInt || indptr.scalar_type() == at::kLong, op,
                      ": indptr must be int32 or int64, got ", indptr.scalar_type());
    const int64_t nodes = indptr.numel() - 1, edges = pair_of_edge.numel();
    take(op, "indptr", indptr, nodes + 1, indptr);
    take(op, "by_pair", by_pair[0], pair_nodes.numel() + 1, indptr);
    take(op, "by_pair", by_pair[1], edges, indptr);
    take(op, "pair_of_edge", pair_of_edge, edges, indptr);
    take(op, "pair_nodes", pair_nodes, pair_nodes.numel(), indptr);
    take(op, "by_node", by_node[0], nodes + 1, indptr);
    take(op, "by_node", by_node[1], pair_nodes.numel(), indptr);
    take(op, "segments", segments[0], segments[0].numel(), indptr);
    take(op, "segments", segments[1], order.numel(), indptr);
    take(op, "segments", segments[2], order.numel() + 1, indptr);
    take(op, "segments", segments[3], edges, indptr);
    take(op, "segment_ptr", segment_ptr, nodes + 1, indptr);
    take(op, "order", order, order.numel(), indptr);
  }

  at::ScalarType dtype() const { return given_[0].scalar_type(); }
  at::Device device() const { return given_[0].device(); }

  // The kernel arguments. Allocates the results in `to`, and in `kept` the scratch array place_of_edge.
  template <class I>
  WalksArgs<I> args(WalkTensors& to, at::Tensor& kept) const {
    const auto in = [this](int i) { return given_[i].const_data_ptr<I>(); };
    WalksArgs<I> args;
    args.nodes = given_[0].numel() - 1, args.edges = given_[3].numel(), args.pairs = given_[4].numel();
    args.types = given_[7].numel() - 1, args.segments = given_[12].numel();
    args.indptr = in(0), args.pair_ptr = in(1), args.pair_edges = in(2), args.pair_of_edge = in(3);
    args.pair_nodes = in(4), args.node_ptr = in(5), args.node_pairs = in(6), args.type_ptr = in(7);
    args.rows = in(8), args.ptr = in(9), args.edge_ids = in(10), args.segment_ptr = in(11), args.order = in(12);
    const auto made = [&](at::Tensor& t, int64_t size) {
      t = at::empty({size}, given_[0].options());
      return t.mutable_data_ptr<I>();
    };
    args.edge_pairs = made(std::get<0>(to), args.edges), args.edge_segments = made(std::get<1>(to), args.edges);
    args.pair_segments = made(std::get<2>(to), args.edges), args.segment_types = made(std::get<3>(to), args.segments);
    args.numbers = made(std::get<4>(to), args.segments), args.begins = made(std::get<5>(to), args.segments + 1);
    args.places = made(std::get<6>(to), args.edges), args.sums_ptr = made(std::get<7>(to), args.nodes + 1);
    args.columns = made(std::get<8>(to), args.pairs + args.segments);
    args.weights = made(std::get<9>(to), args.pairs + args.segments);
    std::get<10>(to) = at::zeros({3}, given_[0].options().dtype(at::kLong));
    args.longest = std::get<10>(to).mutable_data_ptr<int64_t>();
    args.place_of_edge = made(kept, args.edges);
    return args;
  }

 private:
  void take(const char* op, const char* name, const at::Tensor& t, int64_t size, const at::Tensor& like) {
    check_like(op, name, t, {size}, like);
    given_.push_back(t.contiguous());
  }

  std::vector<at::Tensor> given_;
};

}  // namespace edgeless
