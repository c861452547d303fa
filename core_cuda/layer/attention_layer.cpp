// A whole attention layer as one autograd node: the maps of its rows, the node logits, the attention, and the row or
// map that is added to the attention's output. On small graphs an autograd node costs the host as much time as a kernel
// costs the GPU. On large graphs, a single node saves memory: the layer owns the mapped rows, and if no other backward
// follows, their gradients overwrite these rows. The layer is composed of other ops.
#include "../attention/plain.h"
#include "../common/kept_result.h"
#include "../common/packed.h"
#include "../common/thresholds.h"
#include "../projection/calls.h"

namespace edgeless {
namespace {

// The attention's operands by score. In the order of the weights, the maps of the rows are:
//
//   gat    the values; the vectors give the logits of sources and of destinations
//   gatv2  sources, destinations (one map: both); the vector is att
//   dot    queries, keys, values and, with four maps, the rows added to the result (one map: the first three)
struct Operands {
  Tensor dst, src;
  OptTensor value, att;
};

Operands operands(Score score, at::TensorList mapped, at::TensorList vectors) {
  switch (score) {
    case Score::gat: {
      const auto logits = call_node_logits(mapped[0], vectors);
      return {logits[1], logits[0], mapped[0], {}};
    }
    case Score::gatv2: return {mapped.back(), mapped[0], {}, vectors[0].squeeze(0)};
    default: {
      const bool shared = mapped.size() == 1;
      return {mapped[0], shared ? mapped[0] : mapped[1], shared ? mapped[0] : mapped[2], {}};
    }
  }
}

void check_layer(Score score, size_t weights, size_t vectors, size_t row) {
  const char* op = "edgeless::attention_layer";
  const auto expect = [&](bool fits, const char* name, const char* expected, size_t came) {
    TORCH_CHECK_VALUE(fits, op, ": ", name, " must be ", expected, " for this score, got ", came);
  };
  switch (score) {
    case Score::gat:
      expect(weights == 1, "weights", "1", weights);
      expect(vectors == 2, "vectors", "2", vectors);
      break;
    case Score::gatv2:
      expect(weights == 1 || weights == 2, "weights", "1 or 2", weights);
      expect(vectors == 1, "vectors", "1", vectors);
      break;
    case Score::dot:
      expect(weights == 1 || weights == 3 || weights == 4, "weights", "1, 3 or 4", weights);
      expect(vectors == 0, "vectors", "none", vectors);
      expect(weights != 4 || row == 0, "row", "none, with a map that is added,", row);
      break;
    default: TORCH_CHECK_VALUE(false, op, ": score must be 'gat', 'gatv2' or 'dot'");
  }
}

// The arguments without a gradient.
struct Layer {
  GraphArrays graph;
  const OptTensor& seed;
  Score score;
  double coefficient, dropout;
  int64_t heads;
  bool by_head;  // the result is [N, H, C] instead of [N, H * C]
  Optional<at::ScalarType> dtype, out_dtype;

  // Number of maps that are column ranges of one tensor. If there are many rows, a map that is added has a tensor of
  // its own, which becomes the result.
  int64_t joined(const Tensor& x, size_t maps) const {
    if (is_traced(x)) return 0;
    return static_cast<int64_t>(adds_map(maps) && x.size(0) >= cuda::kLaunchBoundRows ? maps - 1 : maps);
  }
  AttentionCall call(const Operands& o) const {
    return {o.dst, o.src, o.value, o.att, {}, {}, {}, graph, seed, score, coefficient, dropout};
  }
  bool adds_map(size_t maps) const { return score == Score::dot && maps == 4; }
  c10::SmallVector<int64_t, 4> heads_of_maps(size_t maps) const {
    c10::SmallVector<int64_t, 4> all(maps, heads);
    if (adds_map(maps)) all.back() = 0;
    return all;
  }
};

struct Results {
  std::vector<Tensor> mapped;
  Operands operands;
  Tensor out, softmax_stats;  // results of the attention; out is [N, H, C]
  Tensor result;              // result of the layer, [N, H * C] or [N, H, C]
};

Results compute(const Maps& maps, at::TensorList vectors, at::TensorList row, const Layer& layer, int64_t joined) {
  Results r;
  const size_t count = maps.weights.size();
  r.mapped = call_project(maps.x, maps.weights, maps.biases, joined, {}, layer.heads_of_maps(count));
  r.operands = operands(layer.score, r.mapped, vectors);
  std::tie(r.out, r.softmax_stats) = call_attention(layer.call(r.operands), layer.out_dtype);
  const at::AutoDispatchBelowADInplaceOrView guard;
  if (layer.adds_map(count)) {
    const Tensor& last = r.mapped.back();
    const bool apart = joined == static_cast<int64_t>(count) - 1;  // the map has a tensor of its own
    r.result = apart && last.scalar_type() == r.out.scalar_type() ? last.add_(r.out.flatten(1))
                                                                  : at::add(r.out.flatten(1), last);
  } else {
    r.result = row.empty() ? r.out : call_add_row(r.out, row[0]);
  }
  if (layer.by_head && r.result.dim() == 2) {
    r.result = heads_apart(r.result, r.out.sym_size(1), r.out.sym_size(2));
  } else if (!layer.by_head && r.result.dim() == 3) {
    r.result = r.result.flatten(1);
  }
  return r;
}

// Returns the gradient of the map that is added, [N, H * C], in the dtype of the other maps' gradients. If the
// gradients of queries, keys and values are column ranges of a tensor with a free fourth range, copies this gradient
// into that range, so that one GEMM processes all four.
Tensor in_fourth_part(const variable_list& three, const Tensor& grad, at::ScalarType dtype) {
  const int64_t width = grad.size(1);
  const auto packed = is_traced(grad) || is_batched(grad) ? Optional<Packed>() : Packed::of(three);
  if (!packed || !packed->in_order() || packed->stride != 4 * width) return grad.to(dtype);
  return packed->columns(3 * width, width).copy_(grad);
}

// The attention backward that overwrites saved tensors. The gradients of sources overwrite the sources' rows. The
// gradients of destinations, which are computed first, overwrite the attention's output if the layer owns it.
std::vector<Tensor> gradients_in_place(const AttentionCall& call, const AttentionGrads& given, bool own_out) {
  const Tensor &dst = call.dst, &src = call.src, &out = *given.out;
  Tensor of_dst;
  if (!own_out) {
    of_dst = at::empty(dst.sizes(), dst.options());
  } else if (out.scalar_type() == dst.scalar_type()) {
    of_dst = out;
  } else {
    of_dst = out.view(-1).view(dst.scalar_type()).narrow(0, 0, dst.numel()).view(dst.sizes());
  }
  variable_list into{of_dst, src};
  if (call.value) into.push_back(*call.value);
  const Tensor of_att = call_attention_backward_into(call, given, into);
  // Moves this gradient to the columns of the destinations' rows, next to the other gradients, so that the backward of
  // the maps is one GEMM instead of several.
  if (Packed::of({dst, src})) {
    dst.copy_(of_dst);
    of_dst = dst;
    if (own_out) give_back(out);
  }
  return {of_dst, src, call.value.value_or(Tensor()), of_att};
}

// Plain form of the layer, for second derivatives.
struct PlainLayer {
  PlainAttention attention;
  Score score;
  c10::List<bool> has_bias;  // per map
  std::vector<Tensor> rows;  // saved results of the maps, except that of an added map, since biases are not saved
  size_t vectors;
  int64_t heads;
  bool by_head;

  // Inputs: x, weights, biases, vectors and row.
  variable_list operator()(const variable_list& inputs) const {
    const auto wide = [](const Tensor& t) { return t.to(opmath_dtype(t.scalar_type())); };
    const auto apart = [&](const Tensor& t) { return t.view({t.size(0), heads, t.size(1) / heads}); };
    const size_t maps = has_bias.size();
    size_t next = 1 + maps;
    variable_list mapped;
    for (size_t k = 0; k < maps; ++k) {
      const Tensor made =
          at::linear(wide(inputs[0]), wide(inputs[1 + k]), has_bias[k] ? wide(inputs[next++]) : Tensor());
      mapped.push_back(k < rows.size() ? apart(with_derivatives_of(wide(rows[k]).flatten(1), made)) : made);
    }
    variable_list of(kAttentionInputs);
    if (score == Score::gat) {
      const auto logits = [&](size_t k) { return (mapped[0] * wide(inputs[next + k])).sum(-1); };
      of[kDst] = logits(1), of[kSrc] = logits(0), of[kValue] = mapped[0];
    } else if (score == Score::gatv2) {
      of[kDst] = mapped.back(), of[kSrc] = mapped[0], of[kAtt] = inputs[next].squeeze(0);
    } else {
      const bool shared = maps == 1;
      of[kDst] = mapped[0], of[kSrc] = mapped[shared ? 0 : 1], of[kValue] = mapped[shared ? 0 : 2];
    }
    next += vectors;
    Tensor out = attention.output(of).flatten(1);
    if (maps > rows.size()) out = out + mapped.back();
    if (next < inputs.size()) out = out + inputs[next];
    return {by_head ? apart(out) : out};
  }
};

struct AttentionLayer : Function<AttentionLayer> {
  // Indices of the saved tensors. The weights, the vectors, csr and csc follow.
  enum Saved : size_t { kX, kDstRows, kSrcRows, kValueRows, kAttRow, kOut, kSoftmaxStats, kSeed, kFixed };

  static Tensor forward(AutogradContext* ctx, const Tensor& x, at::TensorList weights, at::TensorList biases,
                        at::TensorList vectors, at::TensorList row, const std::vector<bool>& has_bias,
                        const Layer& layer) {
    const int64_t joined = layer.joined(x, weights.size());
    const Maps maps = MapInputs::take(ctx, x, weights, biases, has_bias, joined, layer.dtype);
    const Results r = compute(maps, vectors, row, layer, joined);
    // If nothing is added, the result is the attention's output itself.
    const bool same = !layer.adds_map(weights.size()) && row.empty();
    variable_list saved{maps.x,
                        r.operands.dst,
                        r.operands.src,
                        r.operands.value.value_or(Tensor()),
                        r.operands.att.value_or(Tensor()),
                        same ? keep_result(ctx, r.result) : r.out,
                        r.softmax_stats,
                        layer.seed.value_or(Tensor())};
    saved.insert(saved.end(), maps.weights.begin(), maps.weights.end());
    for (const at::TensorList list : {vectors, layer.graph.csr, layer.graph.csc}) {
      saved.insert(saved.end(), list.begin(), list.end());
    }
    ctx->save_for_backward(std::move(saved));
    save_options(ctx, layer.call(r.operands));
    ctx->saved_data["heads"] = r.out.sym_size(1);
    ctx->saved_data["channels"] = r.out.sym_size(2);
    ctx->saved_data["biases"] = static_cast<int64_t>(biases.size());
    ctx->saved_data["weights"] = static_cast<int64_t>(weights.size());
    ctx->saved_data["vectors"] = static_cast<int64_t>(vectors.size());
    ctx->saved_data["csr"] = static_cast<int64_t>(layer.graph.csr.size());
    ctx->saved_data["max_degrees"] = at::IntArrayRef(layer.graph.max_degrees).vec();
    ctx->saved_data["row"] = !row.empty();
    ctx->saved_data["own_rows"] = saves_unseen();
    ctx->saved_data["own_out"] = !same;
    ctx->set_materialize_grads(false);
    return r.result;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& given) {
    const auto count = [&](const char* name) { return static_cast<size_t>(ctx->saved_data.at(name).toInt()); };
    const size_t weights = count("weights"), biases = count("biases"), vectors = count("vectors");
    const bool has_row = ctx->saved_data.at("row").toBool();
    const size_t inputs = 1 + weights + biases + vectors + has_row;
    variable_list results(inputs + 2);
    if (!given[0].defined()) return results;
    const variable_list saved = ctx->get_saved_variables();
    check_not_written_over(ctx, "layer");
    const auto compute = [&] { return gradients(ctx, given[0], saved, weights, biases, vectors, has_row); };
    if (!at::GradMode::is_enabled()) {
      results = compute();
    } else {
      const PlainLayer plain = plain_layer(ctx, saved, weights, vectors, given[0].dim() == 3);
      results = with_plain_form(inputs_again(ctx, saved, weights, vectors, has_row), given, plain, compute);
    }
    results.resize(inputs + 2);
    return results;
  }

  // graph: index of csr's first array in `saved`.
  static AttentionCall call_of(AutogradContext* ctx, const variable_list& saved, size_t graph) {
    const auto csr = static_cast<size_t>(ctx->saved_data.at("csr").toInt());
    const at::TensorList arrays = at::TensorList(saved).slice(graph);
    const auto kept = [&](size_t i) { return saved[i].defined() ? OptTensor(saved[i]) : OptTensor(); };
    return saved_call(ctx, {kept(kDstRows), kept(kSrcRows), kept(kValueRows), kept(kAttRow)},
                      {arrays.slice(0, csr), arrays.slice(csr), ctx->saved_data.at("max_degrees").toIntVector()},
                      kept(kSeed));
  }

  static PlainLayer plain_layer(AutogradContext* ctx, const variable_list& saved, size_t weights, size_t vectors,
                                bool by_head) {
    const Score score = saved_score(ctx);
    PlainLayer plain{PlainAttention(call_of(ctx, saved, kFixed + weights + vectors)),
                     score,
                     ctx->saved_data.at("has_bias").toBoolList(),
                     {},
                     vectors,
                     ctx->saved_data.at("heads").toInt(),
                     by_head};
    std::vector<Saved> of_maps{kDstRows, kSrcRows, kValueRows};
    if (score == Score::gat) of_maps = {kValueRows};
    if (score == Score::gatv2) of_maps = {kSrcRows, kDstRows};
    of_maps.resize(std::min(of_maps.size(), weights));
    for (const Saved i : of_maps) plain.rows.push_back(saved[i].clone());  // the last backward may overwrite them
    return plain;
  }

  // The inputs with their autograd history. Biases and the row are only added, so zeros replace their values.
  static variable_list inputs_again(AutogradContext* ctx, const variable_list& saved, size_t weights, size_t vectors,
                                    bool has_row) {
    variable_list all{with_history(saved[kX], 0)};
    const auto add_zeros = [&](int64_t size) {
      all.push_back(with_history(at::zeros({size}, saved[kX].options()), all.size()));
    };
    for (size_t k = 0; k < weights; ++k) all.push_back(with_history(saved[kFixed + k], all.size()));
    const c10::List<bool> has_bias = ctx->saved_data.at("has_bias").toBoolList();
    for (size_t k = 0; k < weights; ++k) {
      if (has_bias[k]) add_zeros(saved[kFixed + k].size(0));
    }
    for (size_t k = 0; k < vectors; ++k) all.push_back(saved[kFixed + weights + k]);
    if (has_row) add_zeros(ctx->saved_data.at("heads").toInt() * ctx->saved_data.at("channels").toInt());
    return all;
  }

  static variable_list gradients(AutogradContext* ctx, const Tensor& grad, const variable_list& saved, size_t weights,
                                 size_t biases, size_t vectors, bool has_row) {
    const Score score = saved_score(ctx);
    const c10::SymInt heads = ctx->saved_data.at("heads").toSymInt(),
                      channels = ctx->saved_data.at("channels").toSymInt();
    const auto needs = [&](size_t first, size_t count) {
      for (size_t i = first; i < first + count; ++i) {
        if (ctx->needs_input_grad(i)) return true;
      }
      return false;
    };
    const size_t maps = 1 + weights + biases;  // number of inputs of the maps
    const bool of_rows = needs(0, maps), of_vectors = needs(maps, vectors);
    const auto part = [&](size_t first, size_t size) { return at::TensorList(saved.data() + first, size); };
    const at::TensorList of_maps = part(kFixed, weights), given_vectors = part(kFixed + weights, vectors);
    variable_list results(maps + vectors + has_row);
    const auto as_columns = [](const Tensor& t) { return t.dim() == 3 ? heads_joined(t) : t; };
    if (has_row && ctx->needs_input_grad(maps + vectors)) results.back() = call_column_sums(as_columns(grad));
    if (!of_rows && !of_vectors) return results;

    const at::AutoDispatchBelowADInplaceOrView guard;
    const bool gat = score == Score::gat;
    const auto by_head = [&](const Tensor& t) { return t.dim() == 3 ? t : heads_apart(t, heads, channels); };
    const AttentionChoice choice{of_rows || gat, of_rows || gat, of_rows && saved[kValueRows].defined(),
                                 of_vectors && saved[kAttRow].defined()};
    std::vector<Tensor> found = [&] {
      AttentionCall call = call_of(ctx, saved, kFixed + weights + vectors);
      const bool as_left = result_is_kept(ctx);
      const Tensor out = as_left ? saved[kOut] : std::get<0>(call_attention(call, saved[kOut].scalar_type()));
      AttentionGrads given{by_head(grad), {}, by_head(out), saved[kSoftmaxStats], choice};
      // Rows are not overwritten if a single map computes all of them, as in gat, whose rows are read again for the
      // gradients of its vectors.
      if (of_rows && weights > 1 && ctx->saved_data.at("own_rows").toBool() && is_last_backward(grad)) {
        note_written_over(ctx);
        return gradients_in_place(call, given, !as_left || ctx->saved_data.at("own_out").toBool());
      }
      call.dst = as_rows(call.dst), call.src = as_rows(call.src);
      given.side_by_side = !is_traced(grad);
      return call_attention_backward(call, given);
    }();

    variable_list mapped;  // gradients of the maps' results
    if (gat) {
      c10::List<bool> which({of_rows});
      for (size_t k = 0; k < vectors; ++k) which.push_back(ctx->needs_input_grad(maps + k));
      const variable_list logits{found[kSrc].squeeze(2), found[kDst].squeeze(2)};
      auto all = call_node_logits_backward(optional(logits), saved[kValueRows], given_vectors, which,
                                           of_rows ? OptTensor(found[kValue]) : OptTensor());
      mapped.push_back(std::move(all[0]));
      for (size_t k = 0; k < vectors; ++k) {
        if (which[1 + k]) results[maps + k] = all[1 + k];
      }
    } else if (weights == 1 && of_rows) {
      if (choice[kValue]) found[kSrc].add_(found[kValue]);
      mapped.push_back(found[kSrc].add_(found[kDst]));
    } else if (score == Score::gatv2) {
      mapped.assign({found[kSrc], found[kDst]});
    } else {
      mapped.assign({found[kDst], found[kSrc], found[kValue]});
      if (weights == 4) mapped.push_back(in_fourth_part(mapped, as_columns(grad), saved[kX].scalar_type()));
    }
    if (score == Score::gatv2 && of_vectors) {
      results[maps] = found[kAtt].view_as(given_vectors[0]);
    }
    if (!of_rows) return results;
    found.clear();
    for (Tensor& t : mapped) t = as_columns(t);
    const variable_list of_inputs = MapInputs::gradients(ctx, mapped, saved[kX], of_maps);
    std::copy(of_inputs.begin(), of_inputs.end(), results.begin());
    return results;
  }
};

Tensor attention_layer(const Tensor& x, at::TensorList weights, const OptTensors& biases, at::TensorList vectors,
                       const OptTensor& row, at::TensorList csr, at::TensorList csc, const OptTensor& seed,
                       c10::string_view score, int64_t heads, double coefficient, double dropout,
                       Optional<at::ScalarType> dtype, Optional<at::ScalarType> out_dtype, at::IntArrayRef max_degrees,
                       bool by_head) {
  const Score kind = parse_score("edgeless::attention_layer", std::string_view(score.data(), score.size()));
  variable_list rows;
  if (row) rows.push_back(*row);
  check_layer(kind, weights.size(), vectors.size(), rows.size());
  const Layer layer{{csr, csc, max_degrees}, seed, kind, coefficient, dropout, heads, by_head, dtype, out_dtype};
  if (!at::GradMode::is_enabled()) {
    const int64_t joined = layer.joined(x, weights.size());
    const Maps maps(x, weights, biases, joined, dtype,
                    [](const auto& tensors, at::ScalarType to) { return call_cast_all(tensors, to, true); });
    return compute(maps, vectors, rows, layer, joined).result;
  }
  const Biases given(biases);
  return AttentionLayer::apply(x, weights, at::TensorList(given.present), vectors, at::TensorList(rows), given.has,
                               layer);
}

}  // namespace

// The layer is composed of other ops on every device and has no kernels of its own.
TORCH_LIBRARY_IMPL(edgeless, CompositeImplicitAutograd, m) { m.impl("attention_layer", attention_layer); }

}  // namespace edgeless
