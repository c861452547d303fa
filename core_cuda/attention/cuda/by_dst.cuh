// Backward, pass by destination: what a row's own side gets, d q_i or d x_r,i; gathers only, no atomics.
//
//   P = 2^(s - logsumexp)   dP = <grad_out_i, v_j>   Delta_i = <out_i, grad_out_i>   ds = P (dP - Delta_i)
//
// Delta is written for the pass by source. With options: dP carries the edge's dropout and scale, and what is asked
// for by edge is written by the lane that owns it. With weights_out alone this is the pass that returns attention.
// See walk.cuh for who owns what.
#pragma once

#include "lane.cuh"
#include "scores.cuh"

namespace edgeless::cuda {

template <class A, int kPer>
struct BackwardPieces {  // shared memory: the piece of a row that a chain owes to an earlier one
  A acc[kPer][kBlockThreads];
  A scalar[kMaxTeams];
};

// Sums each lane's `mine` over the chains of a block, in their order, and writes one partial sum per block and head.
template <class S, int kVecs, class P>
__device__ inline void store_att_partial(const Args<Arithmetic<S>>& args, const P& place,
                                         const Arithmetic<S> (&mine)[kVecs * kVec<S>],
                                         Arithmetic<S> (&shared)[kVecs * kVec<S>][kBlockThreads]) {
  using A = Arithmetic<S>;
  constexpr int kPer = kVecs * kVec<S>;
  __syncthreads();
#pragma unroll
  for (int k = 0; k < kPer; ++k) shared[k][threadIdx.x] = mine[k];
  __syncthreads();
  if (!place.working || place.chain > 0) return;
  A total[kPer];
#pragma unroll
  for (int k = 0; k < kPer; ++k) total[k] = mine[k];
  for (int chain = 1; chain < place.chains; ++chain) {
#pragma unroll
    for (int k = 0; k < kPer; ++k) total[k] += shared[k][threadIdx.x + chain * place.heads * place.width()];
  }
  const int64_t width = args.key_vectors * kVec<S>;
  A* to = args.grad_att + (static_cast<int64_t>(blockIdx.x) * args.heads + place.head) * width;
  store_piece<S, kVecs>(to, place, args.key_vectors, total);
}

template <class Fn, class S, class I, int kVecs, int kWidth, int kMode>
__global__ void __launch_bounds__(kBlockThreads, min_blocks<S>(Pass::by_dst, kVecs))
    by_dst_kernel(const __grid_constant__ Args<Arithmetic<S>> args) {
  using A = Arithmetic<S>;
  constexpr int kV = kVec<S>, kPer = kVecs * kV, kOutVecs = sizeof(S) < sizeof(A) ? 2 * kVecs : kVecs;
  constexpr bool kVectorGrad = !Fn::kScalar;
  __shared__ BlockShares<I> shares;
  __shared__ BackwardPieces<A, kPer> pieces;

  const Place<kWidth> place(args.layout, args.heads);
  divide_block(args.graph, args.part, place, shares);
  Walk<I> walk(args.graph, place, shares);

  const I* indices = static_cast<const I*>(args.graph.indices);
  const Offsets<kVecs> key_offsets(place, args.key_vectors), value_offsets(place, args.value_vectors);
  const RowPointers<kVecs> own_rows(args.dst, place.head, key_offsets);
  const RowPointers<kVecs> grad_rows(args.grad_out, place.head, value_offsets);
  RowPointers<kVecs> keys(args.src, place.head, key_offsets);
  RowPointers<kVecs> values(Fn::kOwnValue ? args.value : args.src, place.head, value_offsets);
  if constexpr (!Fn::kScalar) keys.hold();
  if constexpr (Fn::kOwnValue) values.hold();
  const uint64_t seed = kMode >= kOptions && args.has_dropout ? static_cast<uint64_t>(*args.seed) : 0;
  const bool steep = kMode >= kOptions && args.coefficient > 1;
  const bool has_grad = kMode == kPlain || args.grad_out;

  A att[kPer], own[kPer], grad[kPer], acc[kPer], att_acc[kPer];
  A own_scalar = 0, acc_scalar = 0;  // of the team (gatv2: sum of ds), for gat of the lane until the row ends
  A shift = 0, delta = 0;            // of the row: logsumexp in base 2, Delta
  uint4 own_raw[kVecs], grad_raw[kVecs], out_raw[kOutVecs];
  if constexpr (Fn::kAtt) load_vector<S, kVecs>(args.att, place, args.key_vectors, att);
#pragma unroll
  for (int k = 0; k < kPer; ++k) {
    acc[k] = 0, att_acc[k] = 0, grad[k] = 0;
    if constexpr (Fn::kAtt) att[k] *= A(-kLog2e);
  }

  bool fresh = false;  // the row's own part was asked for, not yet taken
  auto begin_row = [&] {
    const int64_t at = static_cast<int64_t>(walk.row) * args.heads + place.head;
    shift = args.logsumexp[at];
    if constexpr (Fn::kScalar) {
      if (args.dst) own_scalar = to_arithmetic(*reinterpret_cast<const S*>(
          args.dst.base + place.head * args.dst.head + static_cast<uint64_t>(walk.row) * args.dst.row));
    } else {
#pragma unroll
      for (int v = 0; v < kVecs; ++v) own_raw[v] = load_once(own_rows.row(v, walk.row));
    }
    if (has_grad) {
#pragma unroll
      for (int v = 0; v < kVecs; ++v) grad_raw[v] = load_once(grad_rows.row(v, walk.row));
      const char* out = args.saved_out.base + place.head * args.saved_out.head +
                        static_cast<uint64_t>(walk.row) * args.saved_out.row;
#pragma unroll
      for (int v = 0; v < kVecs; ++v) {
        if (kOutVecs > kVecs && args.saved_out_wide) {
          out_raw[2 * v] = load_once(out + 2 * value_offsets.at[v]);
          out_raw[kOutVecs > kVecs ? 2 * v + 1 : v] = load_once(out + 2 * value_offsets.at[v] + 16);
        } else {
          out_raw[kOutVecs > kVecs ? 2 * v : v] = load_once(out + value_offsets.at[v]);
        }
      }
    }
    fresh = true;
  };
  auto take_row = [&] {
    shift *= A(kLog2e);
    if constexpr (!Fn::kScalar) {
      unpack_row<S, kVecs>(own_raw, place, args.key_vectors, own,
                           [&](A x) { return Fn::own(x, args.coefficient); });
    }
    if (has_grad) {
      unpack_row<S, kVecs>(grad_raw, place, args.value_vectors, grad, [](A x) { return x; });
      A dot = 0;
#pragma unroll
      for (int v = 0; v < kVecs; ++v) {
        A out[kV];
        if (kOutVecs > kVecs && args.saved_out_wide) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            A four[kVec<A>];
            unpack(out_raw[kOutVecs > kVecs ? 2 * v + half : v], four, A{});
#pragma unroll
            for (int k = 0; k < kVec<A>; ++k) out[(half * kVec<A> + k) % kV] = four[k];
          }
        } else {
          unpack(out_raw[kOutVecs > kVecs ? 2 * v : v], out, S{});
        }
#pragma unroll
        for (int k = 0; k < kV; ++k) dot = fma(grad[v * kV + k], out[k], dot);
      }
      delta = team_sum(dot, place.width(), place.mask());
    }
    const int64_t at = static_cast<int64_t>(walk.row) * args.heads + place.head;
    if (kMode >= kOptions && args.delta_given) {
      delta = args.delta[at];
    } else if (args.delta && place.lane == 0 && !walk.lead) {
      args.delta[at] = delta;
    }
    fresh = false;
  };

  // Writes a row's gradient, or its piece where other blocks have others.
  auto emit = [&](I row, bool lead, bool complete) {
    const bool piece = lead || !complete;
    if constexpr (kVectorGrad) {
      if (!args.grad_dst) return;
      A out[kPer];
#pragma unroll
      for (int k = 0; k < kPer; ++k) {
        out[k] = Fn::finish(acc[k], acc_scalar, args.coefficient);
        if constexpr (Fn::kAtt) out[k] *= att[k] * A(-kLn2);
      }
      if (piece) {
        store_piece<S, kVecs>(carry_at(args, shares, lead, place.head), place, args.key_vectors, out);
      } else {
        store_row<S, kVecs>(args.grad_dst, row, args.heads, place, out);
      }
    } else if (place.lane == 0 && args.grad_dst) {
      if (piece) {
        *carry_at(args, shares, lead, place.head) = acc_scalar;
      } else {
        reinterpret_cast<S*>(args.grad_dst.base)[static_cast<int64_t>(row) * args.heads + place.head] =
            to_storage<S>(acc_scalar);
      }
    }
  };

  bool leader = false, leader_lead = false;
  auto end_row = [&] {
    if constexpr (Fn::kScalar) acc_scalar = quad_sum(acc_scalar, place.mask());
    if constexpr (Fn::kAtt) {
#pragma unroll
      for (int k = 0; k < kPer; ++k) {
        att_acc[k] = fma(Fn::raw(own[k]), Fn::finish(acc[k], acc_scalar, args.coefficient), att_acc[k]);
      }
    }
    if (walk.lead && place.chain > 0) {
      if constexpr (kVectorGrad) {
#pragma unroll
        for (int k = 0; k < kPer; ++k) pieces.acc[k][threadIdx.x] = acc[k];
      }
      if (place.lane == 0) {
        pieces.scalar[place.team] = acc_scalar;
        shares.status[place.team] = walk.row_complete() ? kRowEnds : kRowGoesOn;
      }
    } else if (walk.row_complete()) {
      emit(walk.row, walk.lead, true);
    } else {
      leader = true, leader_lead = walk.lead;
      return;
    }
    acc_scalar = 0;
#pragma unroll
    for (int k = 0; k < kPer; ++k) acc[k] = 0;
  };

  I next = 0;  // source of edge walk.edge + slot
  if (args.graph.num_edges > 0) {
    next = __ldg(indices + min(static_cast<int64_t>(walk.edge) + place.slot, args.graph.num_edges - 1));
  }
  if (walk.more() && walk.edge < walk.row_end) begin_row();

  while (true) {
    if (walk.at_row_end() && walk.finish_rows(end_row)) begin_row();
    if (!__any_sync(kFullWarp, walk.edge < walk.row_end)) break;
    const int n = walk.batch();
    const bool valid = place.slot < n;
    const I position = walk.edge + place.slot, other = next;
    uint4 key_raw[kBatch][kVecs], value_raw[kBatch][kVecs];
#pragma unroll
    for (int u = 0; u < kBatch; ++u) {
      const I j = from_owner(next, min(u, max(n - 1, 0)));
#pragma unroll
      for (int v = 0; v < kVecs; ++v) {
        if constexpr (!Fn::kScalar) key_raw[u][v] = load_shared_row(keys.row(v, j));
        if constexpr (Fn::kOwnValue) {
          value_raw[u][v] = has_grad ? load_shared_row(values.row(v, j)) : uint4{0, 0, 0, 0};
        }
      }
    }
    A source_scalar = 0;
    if constexpr (Fn::kScalar) {
      if (args.src) source_scalar = to_arithmetic(*reinterpret_cast<const S*>(
          args.src.base + place.head * args.src.head + static_cast<uint64_t>(other) * args.src.row));
    }
    walk.edge += n;
    if (place.slot < walk.last_edge - walk.edge) next = __ldg(indices + walk.edge + place.slot);
    if (fresh) take_row();

    // logits and dP
    A s, dp;
    A hidden[kBatch][kPer];
    {
      A logit[kBatch], product[kBatch];
#pragma unroll
      for (int u = 0; u < kBatch; ++u) {
        logit[u] = 0, product[u] = 0;
        A value[kPer];
#pragma unroll
        for (int v = 0; v < kVecs; ++v) {
          A x[kV];
          if constexpr (!Fn::kScalar) {
            unpack(key_raw[u][v], x, S{});
#pragma unroll
            for (int k = 0; k < kV; ++k) hidden[u][v * kV + k] = Fn::hidden(own[v * kV + k], x[k]);
          }
          if constexpr (Fn::kOwnValue) unpack(value_raw[u][v], x, S{});
#pragma unroll
          for (int k = 0; k < kV; ++k) value[v * kV + k] = x[k];
        }
        if constexpr (kMode == kEdgeTerm) {
          const I at = walk.edge - n + min(u, max(n - 1, 0));
          const I* ids = static_cast<const I*>(args.graph.edge_ids);
          if (n > 0 && args.proj) subtract_edge_term<S, kVecs>(args, place, ids ? ids[at] : at, hidden[u]);
        }
#pragma unroll
        for (int k = 0; k < kPer; ++k) {
          if constexpr (!Fn::kScalar) {
            logit[u] = Fn::template logit<kMode >= kOptions>(logit[u], own[k], hidden[u][k], att[k], args.coefficient,
                                                             steep);
          }
          product[u] = fma(grad[k], value[k], product[u]);
        }
      }
      if constexpr (Fn::kScalar) {
        s = own_scalar + source_scalar;
      } else {
        s = sum_of_own_edge(logit, place.lane, place.width());
      }
      dp = sum_of_own_edge(product, place.lane, place.width());
    }
    A ds, derivative = 1;
    if constexpr (kMode >= kOptions) {
      const EdgeFactors<A> edge(args, seed, position, place.head, valid);
      if (args.logit_term && valid) s += args.logit_term[edge.at] * (Fn::kScalar ? A(1) : A(kLog2e));
      if constexpr (Fn::kScalar) {
        derivative = GatScore::derivative(s, args.coefficient);
        s = GatScore::leaky(s, args.coefficient) * A(kLog2e);
      }
      const A p = power_of_two(s - shift);
      if (args.value_term && valid) dp += args.value_term[edge.at];
      if (args.grad_scale && valid) args.grad_scale[edge.at] = p * edge.keep * dp;
      if (args.weights_out && valid) {
        args.weights_out[edge.at] = p * edge.keep * (args.weights_scaled ? edge.scale : A(1));
      }
      dp *= edge.scale;
      if (args.grad_weights && valid) dp += args.grad_weights[edge.at];
      ds = valid ? p * (edge.keep * dp - delta) : A(0);
      if (args.ds_out && valid) args.ds_out[edge.at] = ds * derivative;
    } else {
      if constexpr (Fn::kScalar) {
        derivative = GatScore::derivative(s, args.coefficient);
        s = GatScore::leaky(s, args.coefficient) * A(kLog2e);
      }
      ds = valid ? power_of_two(s - shift) * (dp - delta) : A(0);
    }

    if constexpr (Fn::kScalar) {
      acc_scalar = fma(ds, derivative, acc_scalar);
    } else {
      A d[kBatch];
#pragma unroll
      for (int u = 0; u < kBatch; ++u) d[u] = from_owner(ds, u);
      if (n > 0) {
        if constexpr (Fn::kAtt) acc_scalar += (d[0] + d[1]) + (d[2] + d[3]);
#pragma unroll
        for (int u = 0; u < kBatch; ++u) {
#pragma unroll
          for (int k = 0; k < kPer; ++k) acc[k] = Fn::grad(acc[k], hidden[u][k], d[u]);
        }
      }
    }
  }

  __syncthreads();
  if (leader) {
    bool complete = false;
    for (int chain = place.chain + 1; chain < place.chains && !complete; ++chain) {
      const int ahead = (chain - place.chain) * place.heads, team = place.team + ahead;
      if (shares.status[team] == kNoPiece) continue;
      complete = shares.status[team] == kRowEnds;
      acc_scalar += pieces.scalar[team];
      if constexpr (kVectorGrad) {
#pragma unroll
        for (int k = 0; k < kPer; ++k) acc[k] += pieces.acc[k][threadIdx.x + ahead * place.width()];
      }
    }
    emit(walk.last_row, leader_lead, complete);
  }
  if constexpr (Fn::kAtt) {
    if (args.grad_att) store_att_partial<S, kVecs>(args, place, att_acc, pieces.acc);
  }
}

}  // namespace edgeless::cuda
