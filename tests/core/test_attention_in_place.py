"""The backward of attention whose gradients take the place of what has no other use: the op, and the layer with it."""

import pytest
import torch
from devices import EVERY_DEVICE
from test_attention_layer import KINDS, arrays, flat, graph_of, inputs, layer, parts

from edgeless import Graph, functional

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
WRITTEN_OVER = ["gatv2", "dot", "dot-added"]
ops = torch.ops.edgeless


def hub_graph(nodes, edges, device):
    """A third of the edges at one hub of either side, parallel edges, and nodes without any."""
    gen = torch.Generator().manual_seed(5)
    ends = torch.randint(0, nodes - 9, (2, edges), generator=gen)
    ends[0, : edges // 3], ends[1, -edges // 3 :] = 4, 7
    return Graph.from_edge_index(ends.to(device), nodes, nodes)


def rows_of(score, nodes, heads, channels, dtype, device, joined):
    """dst, src, value, att: parts of one tensor as a map of all gives them, or one by one."""
    gen = torch.Generator().manual_seed(6)
    count = 3 if score == "dot" else 2
    rows = torch.randn(nodes, count * heads * channels, generator=gen).to(device, dtype)
    found = [part.view(nodes, heads, channels) for part in rows.chunk(count, 1)]
    if not joined:
        found = [part.clone() for part in found]
    if score == "dot":
        return (*found, None)
    src, dst = found
    statistics = torch.float64 if dtype == torch.float64 else torch.float32
    return dst, src, None, torch.randn(heads, channels, generator=gen).to(device, statistics)


@pytest.mark.parametrize("joined", [True, False])
@pytest.mark.parametrize("heads,channels", [(4, 32), (3, 40), (1, 7), (2, 128)])
@pytest.mark.parametrize(
    "dtype,wide", [*((dtype, False) for dtype in DTYPES), *((dtype, True) for dtype in DTYPES[2:])]
)
@pytest.mark.parametrize("score", ["dot", "gatv2"])
@EVERY_DEVICE
def test_gradients_in_place_equal_those_elsewhere(device, score, dtype, wide, heads, channels, joined):
    """wide: the output is float32, as under autocast."""
    graph = hub_graph(500, 30_000 if device == "cuda" else 3000, device)
    dst, src, value, att = rows_of(score, 500, heads, channels, dtype, device, joined)
    csr, csc = (list(t) for t in (graph.csr, graph.csc))
    seed = torch.tensor([3], device=device)
    common = (dst, src, value, att)
    options = (seed, score, 0.3, 0.2)
    kind = torch.float32 if wide else None
    out, stats = ops.attention(*common, None, None, None, csr, csc, *options, kind)
    grad = torch.randn_like(out)
    before = (grad.clone(), stats.clone())
    needs = [True, True, value is not None, att is not None, False, False, False]
    expected = ops.attention_backward(
        grad, None, out, stats, *common, None, None, None, csr, csc, *options, False, needs
    )
    place = out.view(-1).view(dtype)[: dst.numel()].view(dst.shape) if wide else out
    into = [place, src] if value is None else [place, src, value]
    of_att = ops.attention_backward_into(into, grad, out, stats, *common, csr, csc, *options, att is not None)
    gradients = [*into, of_att] if att is not None else into
    wanted = [e for e, needed in zip(expected, needs, strict=True) if needed]
    assert all(torch.equal(a, b) for a, b in zip(gradients, wanted, strict=True))
    assert torch.equal(grad, before[0]) and torch.equal(stats, before[1])


@pytest.mark.skipif(not hasattr(torch.library, "opcheck"), reason="torch.library.opcheck came with torch 2.4")
@pytest.mark.parametrize("score", ["dot", "gatv2"])
@EVERY_DEVICE
def test_opcheck(device, score):
    graph = hub_graph(20, 60, device)
    dst, src, value, att = rows_of(score, 20, 2, 4, torch.float32, device, False)
    csr, csc = (list(t) for t in (graph.csr, graph.csc))
    out, stats = ops.attention(dst, src, value, att, None, None, None, csr, csc, None, score, 0.2, 0.0, None)
    into = [torch.empty_like(t) for t in (dst, src, value) if t is not None]
    args = (into, torch.ones_like(out), out, stats, dst, src, value, att, csr, csc, None, score, 0.2, 0.0)
    torch.library.opcheck(ops.attention_backward_into, (*args, att is not None))


@EVERY_DEVICE
@pytest.mark.parametrize(
    "changes,message",
    [
        ({"score": "gat"}, "must be 'gatv2', or 'dot' with a value"),
        ({"into": lambda into: into[:2]}, "into must hold 3 tensors, got 2"),
        ({"into": lambda into: [into[0][1:], *into[1:]]}, r"into must have shape \[20, 2, 4\], got \[19, 2, 4\]"),
        ({"into": lambda into: [into[0].double(), *into[1:]]}, "into must be Float, got Double"),
        ({"into": lambda into: [into[0].transpose(1, 2).contiguous().transpose(1, 2), *into[1:]]}, "contiguous"),
        ({"grad": lambda grad: grad[1:]}, "grad_out must have shape"),
    ],
)
def test_bad_input(device, changes, message):
    graph = hub_graph(20, 60, device)
    dst, src, value, att = rows_of("dot", 20, 2, 4, torch.float32, device, False)
    csr, csc = (list(t) for t in (graph.csr, graph.csc))
    out, stats = ops.attention(dst, src, value, att, None, None, None, csr, csc, None, "dot", 0.2, 0.0, None)
    score = changes.get("score", "dot")
    if score == "gat":
        dst, src = dst[:, :, :1], src[:, :, :1]
    into = changes.get("into", list)([torch.empty_like(out) for _ in range(3)])
    grad = changes.get("grad", lambda t: t)(torch.ones_like(out))
    with pytest.raises(ValueError, match=message):
        ops.attention_backward_into(
            into, grad, out, stats, dst, src, value, att, csr, csc, None, score, 0.2, 0.0, False
        )


def moved(given, device):
    def one(t):
        return t if t is None else t.detach().to(device).requires_grad_()

    return tuple([one(t) for t in part] if isinstance(part, list) else one(part) for part in given)


@pytest.mark.parametrize("row", [True, False])
@pytest.mark.parametrize("kind", WRITTEN_OVER)
@EVERY_DEVICE
def test_a_graph_that_is_kept_is_not_written_over(device, kind, row):
    graph, given = graph_of().to(device), moved(inputs(kind, row), device)
    want = torch.autograd.grad(parts(kind, given, graph).square().sum(), flat(*given))
    out = layer(kind, given, graph)
    loss = out.square().sum()
    for retain in (True, True, False):
        torch.testing.assert_close(torch.autograd.grad(loss, flat(*given), retain_graph=retain), want)
    torch.testing.assert_close(out, parts(kind, given, graph))  # the result stands
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, flat(*given))


@pytest.mark.parametrize("kind", WRITTEN_OVER)
@EVERY_DEVICE
def test_what_a_hook_has_seen_is_not_written_over(device, kind):
    graph, given = graph_of().to(device), moved(inputs(kind), device)
    seen = []

    def pack(t):
        seen.append((t, t.clone()))
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = layer(kind, given, graph)
    want = torch.autograd.grad(parts(kind, given, graph).sum(), flat(*given))
    torch.testing.assert_close(torch.autograd.grad(out.sum(), flat(*given)), want)
    assert len(seen) > 4 and all(torch.equal(t, copy) for t, copy in seen)


@pytest.mark.parametrize("kind", WRITTEN_OVER)
def test_with_checkpoints(kind):
    from torch.utils.checkpoint import checkpoint

    graph, given = graph_of(), inputs(kind)
    want = torch.autograd.grad(parts(kind, given, graph).sum(), flat(*given))
    for reentrant in (False, True):
        x, *rest = given
        out = checkpoint(lambda x: layer(kind, (x, *rest), graph), x, use_reentrant=reentrant)  # noqa: B023
        for t in flat(*given):
            t.grad = None
        out.sum().backward()
        torch.testing.assert_close([t.grad for t in flat(*given)], list(want))


@pytest.mark.parametrize("kind", WRITTEN_OVER)
def test_a_batch_of_gradients_writes_over_nothing(kind):
    graph, given = graph_of(), inputs(kind)
    out = layer(kind, given, graph)
    ones = torch.ones(3, *out.shape, dtype=out.dtype)
    found = torch.autograd.grad(out, flat(*given), ones, is_grads_batched=True, retain_graph=True)
    want = torch.autograd.grad(parts(kind, given, graph).sum(), flat(*given))
    torch.testing.assert_close([t[2] for t in found], list(want))
    torch.testing.assert_close(torch.autograd.grad(out.sum(), flat(*given)), want)


@pytest.mark.parametrize("kind", WRITTEN_OVER)
def test_a_second_backward_is_torchs_error(kind):
    out = layer(kind, inputs(kind), graph_of())
    out.backward(torch.ones_like(out))
    with pytest.raises(RuntimeError, match="Trying to backward through the graph a second time"):
        out.backward(torch.ones_like(out))


def layer_without_a_transpose(kind):
    """Its backward fails half way."""
    graph, (x, weights, biases, vectors, row) = graph_of(), inputs(kind)
    csr, _ = arrays(graph)
    score = kind.partition("-")[0]
    return ops.attention_layer(x, weights, biases, vectors, row, csr, [], None, score, 3, 0.2, 0.0, None, None)


@pytest.mark.parametrize("kind", WRITTEN_OVER)
def test_a_backward_that_failed_is_not_tried_again(kind):
    """What it read is not there any more."""
    out = layer_without_a_transpose(kind)
    with pytest.raises(ValueError, match="csc is needed"):
        out.sum().backward()
    with pytest.raises(RuntimeError, match="did not come to its end"):
        out.sum().backward()


def test_kinds_that_share_rows_are_not_written_over():
    assert set(KINDS) - set(WRITTEN_OVER) == {"gat", "gatv2-shared", "dot-shared"}
    for kind in ("gat", "gatv2-shared"):
        out = layer_without_a_transpose(kind)
        for _ in range(2):
            with pytest.raises(ValueError, match="csc is needed"):
                out.sum().backward()


# Sources that a caller gives away ------------------------------------------------------------------------------------


def donated(score, device, donate=True, joined=False, size=None, **options):
    """The output of attention over rows that are no leaves, as maps and exchanges make them; the leaves; the rows.
    size: of the logits, which are near each other.
    """
    graph = hub_graph(60, 400, device)
    dst, src, value, att = rows_of(score, 60, 2, 8, torch.float32, device, joined)
    if size is not None and score == "gatv2":
        src[:, :, 0], dst[:, :, 0], att[:, 0] = 8, 0.5, size / 8.5
    elif size is not None:
        src[:, :, 0], dst[:, :, 0] = 4, size / 4 * 8**0.5
    leaves = [t.detach().clone().requires_grad_() for t in (dst, src, value, att) if t is not None]
    own = [t * 1 for t in leaves]
    if joined and value is not None:  # keys and values side by side, as an exchange of both leaves them
        own[1:3] = torch.cat([t.flatten(1) for t in own[1:3]], 1).view(60, 2, 2, 8).unbind(1)
    if score == "gatv2":
        out = functional.gatv2_attention(graph, own[1], own[0], own[2], donate=donate, **options)
        return out, leaves, own[1:2]
    return functional.dot_attention(graph, *own, donate=donate, **options), leaves, own[1:]


@pytest.mark.parametrize("options", [{}, {"dropout": 0.4, "seed": 3}])
@pytest.mark.parametrize("score,joined", [("gatv2", False), ("dot", False), ("dot", True)])
@EVERY_DEVICE
def test_gradients_of_donated_rows_stand_where_the_rows_were(device, score, joined, options):
    out, leaves, rows = donated(score, device, False, joined, **options)
    want = torch.autograd.grad(out.square().sum(), leaves)
    out, leaves, rows = donated(score, device, True, joined, **options)
    places, came = [t.data_ptr() for t in rows], []
    for t in rows:
        t.register_hook(lambda grad: came.append(grad.data_ptr()))
    found = torch.autograd.grad(out.square().sum(), leaves)
    assert sorted(came) == sorted(places)
    assert all(torch.equal(a, b) and not a.requires_grad for a, b in zip(found, want, strict=True))


@pytest.mark.parametrize("score", ["gatv2", "dot"])
@EVERY_DEVICE
def test_donated_rows_of_large_logits(device, score):
    """Other rows are walked again than without: on CUDA all of them are."""
    both = []
    for donate in (False, True):
        out, leaves, _ = donated(score, device, donate, size=4e3)
        both.append(torch.autograd.grad(out.square().sum(), leaves))
    for a, b in zip(*both, strict=True):
        a, b = a[..., 1:], b[..., 1:]  # the first channel's are sums that are zero, times the size of the logits
        assert (a - b).norm() <= 1e-5 * b.norm()


@pytest.mark.parametrize("score", ["gatv2", "dot"])
def test_donated_rows_stay_while_anyone_may_read_them(score):
    def intact(out, leaves, rows, **options):
        before = [t.clone() for t in rows]
        torch.autograd.grad(out.sum(), leaves, allow_unused=True, **options)
        return all(torch.equal(t, copy) for t, copy in zip(rows, before, strict=True))

    assert not intact(*donated(score, "cpu"))
    assert intact(*donated(score, "cpu", donate=False))
    assert intact(*donated(score, "cpu"), retain_graph=True)
    (out, _), leaves, rows = donated(score, "cpu", return_weights="softmax")
    assert intact(out, leaves, rows)
    assert intact(*donated(score, "cpu", edge_scale=torch.rand(400)))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        given = donated(score, "cpu")
    assert intact(*given)
    out, leaves, rows = donated(score, "cpu")
    assert intact(out, leaves[:1], rows)  # no gradient of the sources is asked for


def test_rows_that_share_memory_are_not_written_over():
    graph = hub_graph(60, 400, "cpu")
    x = torch.randn(60, 2, 8, requires_grad=True)
    one_row = torch.randn(1, 2, 8, requires_grad=True)
    for rows in (
        lambda: (x * 1,) * 3,
        lambda: (x * 2, *((x * 1,) * 2)),
        lambda: (x, *[(one_row * 1).expand(60, 2, 8)] * 2),
        lambda: (both := x * 1, both, x * 2),
        lambda: (both := x * 1, x * 2, both),
    ):
        q, k, v = rows()
        found = torch.autograd.grad(functional.dot_attention(graph, q, k, v, donate=True).sum(), x)
        q, k, v = rows()
        assert torch.equal(found[0], torch.autograd.grad(functional.dot_attention(graph, q, k, v).sum(), x)[0])


def test_sources_that_are_the_destinations_are_not_written_over():
    graph, att = hub_graph(60, 400, "cpu"), torch.randn(2, 8)
    x = torch.randn(60, 2, 8, requires_grad=True)
    shifted = torch.cat([x, x[:1]])  # whose first 60 rows and last 60 rows overlap
    for rows in (lambda: [x * 1] * 2, lambda: [(more := shifted * 1)[:60], more[1:]]):
        found = []
        for donate in (True, False):
            x_l, x_r = rows()
            found.append(torch.autograd.grad(functional.gatv2_attention(graph, x_l, x_r, att, donate=donate).sum(), x))
        assert torch.equal(*(grads[0] for grads in found))


def test_a_backward_over_donated_rows_that_failed_is_not_tried_again():
    graph = hub_graph(60, 400, "cpu")
    dst, src, _, att = rows_of("gatv2", 60, 2, 8, torch.float32, "cpu", False)
    csr, _ = arrays(graph)
    given = [t.requires_grad_() * 1 for t in (dst, src, att)]
    out, _ = ops.attention(
        *given[:2], None, given[2], None, None, None, csr, [], None, "gatv2", 0.2, 0.0, None, [], True
    )
    with pytest.raises(ValueError, match="csc is needed"):
        out.sum().backward()
    with pytest.raises(RuntimeError, match="did not come to its end"):
        out.sum().backward()
