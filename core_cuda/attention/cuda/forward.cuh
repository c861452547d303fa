// Forward: out_i = sum_j softmax_j(s_ij) v_j, with online softmax.
//
// A team owns a row of one head and walks its edges in batches of four: the rows of the four sources are loaded before
// the first is used, their logits meet in the lanes that own the edges, one maximum and one rescaling serve four
// edges. Softmax is kept in base 2: maximum m, sum l of 2^(s - m), sum acc of 2^(s - m) v. See walk.cuh for who owns
// what, scores.cuh for s.
#pragma once

#include "lane.cuh"
#include "scores.cuh"

namespace edgeless::cuda {

template <class A, int kPer>
struct ForwardPieces {  // shared memory: the piece of a row that a chain owes to an earlier one
  A acc[kPer][kBlockThreads];
  A m[kMaxTeams], l[kMaxTeams];
};

template <class Fn, class S, class I, int kVecs, int kWidth, int kMode>
__global__ void __launch_bounds__(kBlockThreads, min_blocks<S>(Pass::forward, kVecs))
    forward_kernel(const __grid_constant__ Args<Arithmetic<S>> args) {
  using A = Arithmetic<S>;
  constexpr int kV = kVec<S>, kPer = kVecs * kV;
  __shared__ BlockShares<I> shares;
  __shared__ ForwardPieces<A, kPer> pieces;

  const Place<kWidth> place(args.layout, args.heads);
  divide_block(args.graph, args.part, place, shares);
  Walk<I> walk(args.graph, place, shares);

  const I* indices = held(static_cast<const I*>(args.graph.indices));
  const Offsets<kVecs> key_offsets(place, args.key_vectors), value_offsets(place, args.value_vectors);
  const RowPointers<kVecs> own_rows(args.dst, place.head, key_offsets);
  RowPointers<kVecs> keys(args.src, place.head, key_offsets);
  RowPointers<kVecs> values(Fn::kOwnValue ? args.value : args.src, place.head, value_offsets);
  if constexpr (!Fn::kScalar) keys.hold();
  if constexpr (Fn::kOwnValue) values.hold();
  const uint64_t seed = kMode >= kOptions && args.has_dropout ? static_cast<uint64_t>(*args.seed) : 0;
  const bool steep = kMode >= kOptions && args.coefficient > 1;

  A att[kPer], own[kPer], acc[kPer];
  A m = -INFINITY, l = 0, own_scalar = 0;
  uint4 own_raw[kVecs];
  if constexpr (Fn::kAtt) load_vector<S, kVecs>(args.att, place, args.key_vectors, att);
#pragma unroll
  for (int k = 0; k < kPer; ++k) acc[k] = 0;
  if constexpr (Fn::kAtt) {
#pragma unroll
    for (int k = 0; k < kPer; ++k) att[k] *= A(-kLog2e);
  }

  bool fresh = false;  // the row's own part was asked for, not yet taken
  auto begin_row = [&] {
    if constexpr (Fn::kScalar) {
      if (args.dst) own_scalar = to_arithmetic(*reinterpret_cast<const S*>(
          args.dst.base + place.head * args.dst.head + static_cast<uint64_t>(walk.row) * args.dst.row));
    } else {
#pragma unroll
      for (int v = 0; v < kVecs; ++v) own_raw[v] = load_once(own_rows.row(v, walk.row));
    }
    fresh = true;
  };

  // Writes a row, or its piece where other blocks have others. l is the team's.
  auto emit = [&](I row, bool lead, bool complete, A total) {
    if (lead || !complete) {
      A* piece = carry_at(args, shares, lead, place.head);
      store_piece<S, kVecs>(piece, place, args.value_vectors, acc);
      if (place.lane == 0) piece[args.value_vectors * kV] = m, piece[args.value_vectors * kV + 1] = total;
      return;
    }
    A out[kPer];
    const A inverse = total != 0 ? 1 / total : A(0);
#pragma unroll
    for (int k = 0; k < kPer; ++k) out[k] = acc[k] * inverse;
    store_row<S, kVecs>(args.out, row, args.heads, place, out);
    if (place.lane == 0 && args.logsumexp) {
      args.logsumexp[static_cast<int64_t>(row) * args.heads + place.head] = (m + log2(total)) * A(kLn2);
    }
  };

  bool leader = false, leader_lead = false;
  auto end_row = [&] {
    A total = quad_sum(l, place.mask());
    if (kMode >= kOptions && args.given) total = 1, m = 0;
    if (walk.lead && place.chain > 0) {
#pragma unroll
      for (int k = 0; k < kPer; ++k) pieces.acc[k][threadIdx.x] = acc[k];
      if (place.lane == 0) {
        pieces.m[place.team] = m, pieces.l[place.team] = total;
        shares.status[place.team] = walk.row_complete() ? kRowEnds : kRowGoesOn;
      }
    } else if (walk.row_complete()) {
      emit(walk.row, walk.lead, true, total);
    } else {
      leader = true, leader_lead = walk.lead;
      l = total;
      return;
    }
    m = -INFINITY, l = 0;
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
        if constexpr (Fn::kOwnValue) value_raw[u][v] = load_shared_row(values.row(v, j));
      }
    }
    A source_scalar = 0;
    if constexpr (Fn::kScalar) {
      if (args.src) source_scalar = to_arithmetic(*reinterpret_cast<const S*>(
          args.src.base + place.head * args.src.head + static_cast<uint64_t>(other) * args.src.row));
    }
    walk.edge += n;
    if (place.slot < walk.last_edge - walk.edge) next = __ldg(indices + walk.edge + place.slot);
    if (fresh) {
      if constexpr (!Fn::kScalar) {
        unpack_row<S, kVecs>(own_raw, place, args.key_vectors, own,
                             [&](A x) { return Fn::own(x, args.coefficient); });
      }
      fresh = false;
    }

    // logits
    A s;
    if constexpr (Fn::kScalar) {
      s = own_scalar + source_scalar;
    } else {
      A partial[kBatch];
#pragma unroll
      for (int u = 0; u < kBatch; ++u) {
        A hidden[kPer];
#pragma unroll
        for (int v = 0; v < kVecs; ++v) {
          A x[kV];
          unpack(key_raw[u][v], x, S{});
#pragma unroll
          for (int k = 0; k < kV; ++k) hidden[v * kV + k] = Fn::hidden(own[v * kV + k], x[k]);
        }
        if constexpr (kMode == kEdgeTerm) {
          const I at = walk.edge - n + min(u, max(n - 1, 0));
          const I* ids = static_cast<const I*>(args.graph.edge_ids);
          if (n > 0 && args.proj) subtract_edge_term<S, kVecs>(args, place, ids ? ids[at] : at, hidden);
        }
        partial[u] = 0;
#pragma unroll
        for (int k = 0; k < kPer; ++k) {
          partial[u] = Fn::template logit<kMode >= kOptions>(partial[u], own[k], hidden[k], att[k], args.coefficient, steep);
        }
      }
      s = sum_of_own_edge(partial, place.lane, place.width());
    }
    A factor = 1;
    if constexpr (kMode >= kOptions) {
      const EdgeFactors<A> edge(args, seed, position, place.head, valid);
      factor = edge.keep * edge.scale;
      if (args.logit_term && valid) s += args.logit_term[edge.at] * (Fn::kScalar ? A(1) : A(kLog2e));
      if constexpr (Fn::kScalar) s = GatScore::leaky(s, args.coefficient) * A(kLog2e);
      if (args.logits_out && valid) args.logits_out[edge.at] = s * A(kLn2);
      if (args.given) factor = valid ? args.given[edge.at] : A(0), s = 0;
    } else if constexpr (Fn::kScalar) {
      s = GatScore::leaky(s, args.coefficient) * A(kLog2e);
    }
    if (!valid) s = -INFINITY;

    // softmax
    const A top = max(m, quad_max(s));
    if (__any_sync(kFullWarp, top > m)) {
      const A shrink = top > m ? power_of_two(m - top) : A(1);
      m = top;
      l *= shrink;
#pragma unroll
      for (int k = 0; k < kPer; ++k) acc[k] *= shrink;
    }
    const A p = power_of_two(s - m);
    if (valid) l += p;
    const A weight = valid ? p * factor : A(0);
    A w[kBatch];
#pragma unroll
    for (int u = 0; u < kBatch; ++u) w[u] = from_owner(weight, u);
    if (n > 0) {
#pragma unroll
      for (int u = 0; u < kBatch; ++u) {
#pragma unroll
        for (int v = 0; v < kVecs; ++v) {
          A x[kV];
          unpack(Fn::kOwnValue ? value_raw[u][v] : key_raw[u][v], x, S{});
#pragma unroll
          for (int k = 0; k < kV; ++k) acc[v * kV + k] = fma(w[u], x[k], acc[v * kV + k]);
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
      const A top = max(m, pieces.m[team]);
      const A mine = top > m ? power_of_two(m - top) : A(1), theirs = power_of_two(pieces.m[team] - top);
      m = top;
      l = l * mine + pieces.l[team] * theirs;
#pragma unroll
      for (int k = 0; k < kPer; ++k) {
        acc[k] = acc[k] * mine + pieces.acc[k][threadIdx.x + ahead * place.width()] * theirs;
      }
    }
    if (kMode >= kOptions && args.given) l = 1;
    emit(walk.last_row, leader_lead, complete, l);
  }
}

}  // namespace edgeless::cuda
