// Forward: out_i = sum_j softmax_j(s_ij) v_j, with online softmax.
//
// A team owns a row of one head and walks its edges in batches of four. The keys of a batch are loaded while the one
// before it is worked on; the four logits meet in the lanes that own the edges; one maximum and one rescaling serve
// all four. Softmax is kept in base 2: maximum m, sum l of 2^(s - m), sum acc of 2^(s - m) v. See walk.cuh for who
// owns what, scores.cuh for s.
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
  constexpr bool kKeys = !Fn::kScalar, kValues = Fn::kOwnValue;
  __shared__ BlockShares<I> shares;
  __shared__ ForwardPieces<A, kPer> pieces;

  const Place<kWidth> place(args.layout, args.heads);
  divide_block(args.graph, args.part, place, shares);
  Walk<I> walk(args.graph, place, shares);

  const Offsets<kVecs> key_offsets(place, args.key_vectors), value_offsets(place, args.value_vectors);
  const RowPointers<kVecs> own_rows(args.dst, place.head, key_offsets);
  RowPointers<kVecs> keys(args.src, place.head, key_offsets);
  RowPointers<kVecs> values(kValues ? args.value : args.src, place.head, value_offsets);
  if constexpr (kKeys) keys.hold();
  if constexpr (kValues) values.hold();
  const uint64_t seed = kMode >= kOptions && args.has_dropout ? static_cast<uint64_t>(*args.seed) : 0;

  A att[kPer], own[kPer], acc[kPer];
  A m = -INFINITY, l = 0;  // l: of the team, with options of the lane until the row ends
  A own_scalar = 0;        // of the row: gat's number; gatv2: the lane's share of <att, x>
  uint4 own_raw[kVecs];
  if constexpr (Fn::kAtt) load_vector<S, kVecs>(args.att, place, args.key_vectors, att);
#pragma unroll
  for (int k = 0; k < kPer; ++k) {
    acc[k] = 0;
    if constexpr (Fn::kAtt) att[k] *= A(kLog2e);
  }

  // The own row is asked for one row ahead.
  I asked_row = walk.row;
  auto ask_row = [&](I row) {
    asked_row = row;
    if constexpr (kKeys) {
#pragma unroll
      for (int v = 0; v < kVecs; ++v) own_raw[v] = load_once(own_rows.row(v, row));
    }
  };
  auto begin_row = [&] {
    if constexpr (kKeys) {
      if (asked_row != walk.row) ask_row(walk.row);
      unpack_row<S, kVecs>(own_raw, place, args.key_vectors, own, [&](A x) { return Fn::own(x, args.coefficient); });
      if (walk.row < walk.last_row && walk.row + 1 < args.graph.num_rows) ask_row(walk.row + 1);
    } else if (args.dst) {
      own_scalar = load_scalar<S>(args.dst, walk.row, place.head);
    }
    if constexpr (Fn::kAtt) {
      own_scalar = 0;
#pragma unroll
      for (int k = 0; k < kPer; ++k) own_scalar = fma(att[k], Fn::raw(own[k]), own_scalar);
    }
  };

  // Writes a row, or its piece where other blocks have others. total: l of the team
  auto emit = [&](I row, bool lead, bool complete, A total) {
    if (lead || !complete) {
      A* piece = carry_at(args, shares, lead, place.head);
      store_piece<S, kVecs>(piece, place, args.value_vectors, acc);
      if (place.lane == 0) piece[args.value_vectors * kV] = m, piece[args.value_vectors * kV + 1] = total;
      return;
    }
    A out[kPer];
    const A inverse = total != 0 ? reciprocal(total) : A(0);
#pragma unroll
    for (int k = 0; k < kPer; ++k) out[k] = acc[k] * inverse;
    store_row<S, kVecs>(args.out, row, args.heads, place, out);
    if (place.lane == 0 && args.logsumexp) {
      args.logsumexp[static_cast<int64_t>(row) * args.heads + place.head] = (m + log_base_two(total)) * A(kLn2);
    }
  };

  bool leader = false, leader_lead = false;
  auto end_row = [&] {
    if (kMode >= kOptions) l = args.given ? A(1) : quad_sum(l, place.mask());
    if (kMode >= kOptions && args.given) m = 0;
    if (walk.lead && place.chain > 0) {
#pragma unroll
      for (int k = 0; k < kPer; ++k) pieces.acc[k][threadIdx.x] = acc[k];
      if (place.lane == 0) {
        pieces.m[place.team] = m, pieces.l[place.team] = l;
        shares.status[place.team] = walk.row_complete() ? kRowEnds : kRowGoesOn;
      }
    } else if (walk.row_complete()) {
      emit(walk.row, walk.lead, true, l);
    } else {
      leader = true, leader_lead = walk.lead;
      return;
    }
    m = -INFINITY, l = 0;
#pragma unroll
    for (int k = 0; k < kPer; ++k) acc[k] = 0;
  };

  if (walk.pending) ask_row(walk.row);
  EdgeWindow<I> window(args.graph, place, walk);
  uint4 key_raw[kBatch][kVecs];
  if constexpr (kKeys) {
    if (args.graph.num_edges > 0) window.load(keys, key_raw);
  }
  if (walk.edge < walk.row_end) begin_row();

  while (true) {
    if (walk.at_row_end() && walk.finish_rows(end_row)) begin_row();
    if (!__any_sync(kFullWarp, walk.edge < walk.row_end)) break;
    const int n = window.take(walk);
    const bool valid = place.slot < n;
    uint4 value_raw[kBatch][kVecs];
    if constexpr (kValues) window.load(values, value_raw);
    A source_scalar = 0;
    if constexpr (!kKeys) {
      if (args.src) source_scalar = load_scalar<S>(args.src, window.index, place.head);
    }

    // logits
    A s;
    A other[kBatch][kPer];
    if constexpr (kKeys) {
      A partial[kBatch];
#pragma unroll
      for (int u = 0; u < kBatch; ++u) {
        unpack_all<S, kVecs>(key_raw[u], other[u]);
        typename Fn::template Partial<A, true> sum(own_scalar);
        if constexpr (kMode == kEdgeTerm) {
          A keyed[kPer];
#pragma unroll
          for (int k = 0; k < kPer; ++k) keyed[k] = other[u][k];
          if (n > 0 && args.proj) {
            add_edge_term<S, kVecs>(args, place, edge_id(args.graph, walk.edge - n + min(u, n - 1)), keyed);
          }
#pragma unroll
          for (int k = 0; k < kPer; ++k) sum.add(own[k], keyed[k], att[k]);
        } else {
#pragma unroll
          for (int k = 0; k < kPer; ++k) sum.add(own[k], other[u][k], att[k]);
        }
        partial[u] = sum.sum(args.coefficient);
      }
      window.advance(walk);
      window.load(keys, key_raw);
      s = sum_of_own_edge(partial, place.lane, place.width());
    } else {
      s = own_scalar + source_scalar;
      window.advance(walk);
    }
    A factor = 1;
    if constexpr (kMode >= kOptions) {
      const EdgeFactors<A> edge(args, seed, static_cast<I>(walk.edge - n + place.slot), place.head, valid);
      factor = edge.keep * edge.scale;
      if (args.logit_term && valid) s += args.logit_term[edge.at] * (Fn::kScalar ? A(1) : A(kLog2e));
      if constexpr (Fn::kScalar) s = GatScore::leaky(s, args.coefficient) * A(kLog2e);
      if (args.logits_out && valid) args.logits_out[edge.at] = s * A(kLn2);
      if (args.given) factor = valid ? args.given[edge.at] : A(0), s = 0;
    } else if constexpr (Fn::kScalar) {
      s = GatScore::leaky(s, args.coefficient) * A(kLog2e);
    }
    if (!valid) s = -INFINITY;

    // Softmax. An idle team goes on with an edge of its last row and weight 0.
    if (__any_sync(kFullWarp, s > m)) {
      const A top = max(m, quad_max(s));
      const A shrink = top > m ? power_of_two(m - top) : A(1);
      m = top;
      l *= shrink;
#pragma unroll
      for (int k = 0; k < kPer; ++k) acc[k] *= shrink;
    }
    const A p = power_of_two(s - m);
    A w[kBatch];
#pragma unroll
    for (int u = 0; u < kBatch; ++u) w[u] = from_owner(kMode >= kOptions ? p * factor : p, u);
    l += kMode >= kOptions ? p : (w[0] + w[1]) + (w[2] + w[3]);
#pragma unroll
    for (int u = 0; u < kBatch; ++u) {
      if constexpr (kValues) unpack_all<S, kVecs>(value_raw[u], other[u]);
#pragma unroll
      for (int k = 0; k < kPer; ++k) acc[k] = fma(w[u], other[u][k], acc[k]);
    }
  }

  __syncthreads();
  if (leader) {
    bool complete = false;
    for (int chain = place.chain + 1; chain < place.chains && !complete; ++chain) {
      const int ahead = (chain - place.chain) * place.chain_distance, team = place.team + ahead;
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
