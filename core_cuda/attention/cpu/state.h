// The state of a row: the accumulators of a pass over its edges. The state of a row segment that parts share is stored
// in the fix-up workspace (`carry`). Nothing here depends on the score. Included once per instruction set.
//
// Layout: forward [H max][H sum][H * padded_channels]; by_dst [keys]; by_src [keys][values]; delta [H]

template <class A>
static inline int64_t keys_size(const Args<A>& a) {
  return round_up(a.heads * a.padded_dim, 16);
}

template <class A>
static inline int64_t values_size(const Args<A>& a) {
  return round_up(a.heads * a.padded_channels, 16);
}

template <class A>
static inline int64_t heads_size(const Args<A>& a) {
  return round_up(a.heads, 16);
}

template <class A>
static inline int64_t carry_size(Pass pass, const Args<A>& a) {
  switch (pass) {
    case Pass::forward: return 2 * heads_size(a) + values_size(a);
    case Pass::by_dst: return keys_size(a);
    case Pass::by_src: return keys_size(a) + values_size(a);
    case Pass::delta: return heads_size(a);
    default: return 0;
  }
}

template <class A>
static inline void clear_state(Pass pass, const Args<A>& a, A* state) {
  const int64_t size = carry_size(pass, a);
  for (int64_t i = 0; i < size; ++i) state[i] = A(0);
  if (pass == Pass::forward) {
    for (int64_t h = 0; h < a.heads; ++h) state[h] = -__builtin_inf();
  }
}

// Merges `other` into `state`, the states of two segments of one row.
template <class A>
static inline void combine_states(Pass pass, const Args<A>& a, A* state, const A* other) {
  const int64_t size = carry_size(pass, a);
  if (pass != Pass::forward) {
    for (int64_t i = 0; i < size; ++i) state[i] += other[i];
    return;
  }
  const int64_t heads = heads_size(a);
  for (int64_t h = 0; h < a.heads; ++h) {
    if (other[heads + h] == A(0)) continue;  // the segment has no edges
    const A now = other[h] > state[h] ? other[h] : state[h];
    const A mine = state[heads + h] == A(0) ? A(0) : exp_vec<A>(splat<A>(state[h] - now))[0];
    const A theirs = exp_vec<A>(splat<A>(other[h] - now))[0];
    state[h] = now;
    state[heads + h] = state[heads + h] * mine + other[heads + h] * theirs;
    for (int64_t i = 0; i < a.padded_channels; ++i) {
      const int64_t at = 2 * heads + h * a.padded_channels + i;
      state[at] = state[at] * mine + other[at] * theirs;
    }
  }
}

// The workspace of a part for the segment of its first row (which = 0), begun by an earlier part, and of its last row
// (which = 1), continued by a later part.
template <class A>
static inline A* carried(Pass pass, const Args<A>& a, int64_t part, int which) {
  return a.carry + (part * 2 + which) * carry_size(pass, a);
}

template <class A>
static inline A* delta_of(const Args<A>& a, int64_t row) {
  return a.stats + (row * kStats + kStats - 1) * a.heads;
}

// The part's partial sums of the gradient of the attention vector; null if it is not needed.
template <class A>
static inline A* part_of_att(const Args<A>& a, int64_t part) {
  return a.grad_att ? a.grad_att + part * a.heads * a.padded_dim : nullptr;
}

// Writes the results of a complete row.
template <class A>
static inline void write_state(Pass pass, const Args<A>& a, int64_t row, A* state) {
  if (pass == Pass::forward) {
    A *top = state, *total = state + heads_size(a), *acc = state + 2 * heads_size(a);
    for (int64_t h = 0; h < a.heads; ++h) {
      const bool empty = top[h] == -__builtin_inf() && total[h] == A(0);
      const A inverse = empty ? A(0) : A(1) / total[h];
      a.maximum[row * a.heads + h] = top[h];
      a.inverse_sum[row * a.heads + h] = inverse;
      for (int64_t i = h * a.padded_channels; i < (h + 1) * a.padded_channels; ++i) acc[i] *= inverse;
    }
    write_row(a.out, row, a.heads, a.channels, a.padded_channels, acc);
  } else if (pass == Pass::delta) {
    for (int64_t h = 0; h < a.heads; ++h) delta_of(a, row)[h] = state[h];
  } else if (pass == Pass::by_dst) {
    if (a.grad_dst) write_row(a.grad_dst, row, a.heads, a.dim, a.padded_dim, state);
  } else if (pass == Pass::by_src) {  // the weights pass has no state
    if (a.grad_src) write_row(a.grad_src, row, a.heads, a.dim, a.padded_dim, state);
    if (a.grad_value) write_row(a.grad_value, row, a.heads, a.channels, a.padded_channels, state + keys_size(a));
  }
}
