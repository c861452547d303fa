// The edge term t_e = proj @ edge_attr[e] of a chunk and its gradients: small matrix products on rows in the L1 cache,
// so that no [E, H, D] tensor exists. Included once per instruction set.

// attr[e] = the edge features of the chunk as A, [n, edge_dim]
template <class A>
static inline void load_edge_attr(const Args<A>& args, const int64_t* edge_ids, int64_t n, A* attr) {
  for (int64_t e = 0; e < n; ++e) {
    widen(attr + e * args.edge_dim, args.edge_attr.data, args.edge_attr.dtype, edge_ids[e] * args.edge_attr.stride,
          args.edge_dim);
  }
}

// term[e, :] = sum over d of attr[e, d] * proj[d, :]. Reads attr and writes term up to the next multiple of four rows.
template <class A>
static inline void project_edges(const Args<A>& args, const A* attr, int64_t n, A* term) {
  constexpr int64_t W = kWidth<A>;
  const int64_t stride = term_stride(args), depth = args.edge_dim;
  for (int64_t e = 0; e < n; e += 4) {
    const A* x = attr + e * depth;
    for (int64_t at = 0; at < stride; at += W) {
      Vec<A> t[4] = {};
      for (int64_t d = 0; d < depth; ++d) {
        const Vec<A> p = load(args.proj + d * stride + at);
        for (int i = 0; i < 4; ++i) t[i] += p * x[i * depth + d];
      }
      for (int i = 0; i < 4; ++i) store(term + (e + i) * stride + at, t[i]);
    }
  }
}

// grad_proj[d, :] += sum over e of attr[e, d] * grad_term[e, :]
template <class A>
static inline void grad_of_proj(const Args<A>& args, const A* attr, const A* grad_term, int64_t n, A* grad_proj) {
  constexpr int64_t W = kWidth<A>;
  const int64_t stride = term_stride(args), depth = args.edge_dim;
  int64_t d = 0;
  for (; d < depth; d += 4) {
    const int64_t rows = depth - d < 4 ? depth - d : 4;
    for (int64_t at = 0; at < stride; at += W) {
      Vec<A> t[4] = {};
      for (int64_t e = 0; e < n; ++e) {
        const Vec<A> g = load(grad_term + e * stride + at);
        const A* x = attr + e * depth + d;
        for (int64_t i = 0; i < rows; ++i) t[i] += g * x[i];
      }
      for (int64_t i = 0; i < rows; ++i) {
        A* out = grad_proj + (d + i) * stride + at;
        store(out, load(out) + t[i]);
      }
    }
  }
}

// grad_attr[edge, d] = sum over the elements of grad_term[e] * proj
template <class A>
static inline void grad_of_attr(const Args<A>& args, const A* grad_term, const int64_t* edge_ids, int64_t n, A* row) {
  const int64_t depth = args.edge_dim, stride = term_stride(args);
  for (int64_t e = 0; e < n; ++e) {
    for (int64_t d = 0; d < depth; ++d) row[d] = A(0);
    for (int64_t h = 0; h < args.heads; ++h) {
      for (int64_t c = 0; c < args.dim; ++c) {
        const A g = grad_term[e * stride + h * args.padded_dim + c];
        const A* p = args.proj_rows + (h * args.dim + c) * depth;
        for (int64_t d = 0; d < depth; ++d) row[d] += g * p[d];
      }
    }
    narrow(args.grad_attr.data, args.grad_attr.dtype, edge_ids[e] * depth, row, depth);
  }
}
