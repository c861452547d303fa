"""Random calls of the functions of edgeless.functional on graphs made in every way, against edgeless.reference on plain
lists of the same edges: results and gradients.
"""

from __future__ import annotations

import pickle
from types import SimpleNamespace

import pytest
import torch
from devices import EVERY_DEVICE, moved
from drawn import DENSE, DrawnCall, drawn

from edgeless import Graph, TypedGraph, functional, reference

EVERY_DTYPE = (*DrawnCall.dtypes, torch.float16)


class Edges:
    """A list of edges, which is all that edgeless.reference asks of a graph."""

    def __init__(self, ends, num_src, num_dst):
        self.ends, self.num_src, self.num_dst = ends, num_src, num_dst
        self.num_edges = ends.size(1)

    def edge_index(self):
        return self.ends

    def in_degrees(self):
        return self.ends[1].bincount(minlength=self.num_dst)

    def out_degrees(self):
        return self.ends[0].bincount(minlength=self.num_src)

    @property
    def reversed(self):
        return Edges(self.ends.flip(0), self.num_dst, self.num_src)

    @property
    def with_self_loops(self):
        loops = torch.arange(min(self.num_src, self.num_dst)).expand(2, -1)
        kept = self.ends[:, self.ends[0] != self.ends[1]]
        return Edges(torch.cat((kept, loops), 1), self.num_src, self.num_dst)

    def reordered(self, src, dst):
        return Edges(
            torch.stack((src.argsort()[self.ends[0]], dst.argsort()[self.ends[1]])), self.num_src, self.num_dst
        )


class Call(DrawnCall):
    """A function and one call of it. Its "layer" has no parameters."""

    dtypes = EVERY_DTYPE

    def draw(self):
        self.autocast = None
        self.is_smooth = self.dtype in (torch.bfloat16, torch.float16)
        self.ids = self.one_of((torch.int64, torch.int32))
        self._draw_graph()
        self.options, self.seeds, self.distinct = {}, self.randint(1 << 30, 1), set()
        self.given = getattr(self, f"draw_{self.name}")()
        for name in self.tensors:
            if self.seldom():
                self.others[name] = self.one_of(self.dtypes)
        matrices = [name for name, tensor in self.tensors.items() if tensor.dim() == 2 and name not in self.distinct]
        self.forms = {name: self.one_of(DENSE) for name in matrices}

    def make(self, package):
        return torch.nn.Module()

    # Graphs

    def _draw_graph(self):
        num_src = self.one_of((6, 9, 30, 6, 9, 30, 2, 1, 0))
        num_dst = self.one_of((num_src, num_src, 4, 30, 1))
        count = self.one_of((20, 60, 6, 200, 20, 60, 1, 0)) if num_src and num_dst else 0
        ends = torch.stack((self.randint(num_src, count), self.randint(num_dst, count)))
        if not self.often():
            ends[self.one_of((0, 1)), : count // 2] = 0  # a hub
        self.is_symmetric = num_src == num_dst and not self.often()
        if self.is_symmetric:
            ends = torch.cat((ends, ends.flip(0)), 1)
        self.source = self.one_of(("edges", "edges", "csr", "csc", "csr with ids", "csc with ids"))
        if self.source in ("csr", "csc"):
            ends = ends[:, ends[int(self.source == "csr")].argsort(stable=True)]
        self.base = Edges(ends, num_src, num_dst)
        steps = ("reverse", "loops", "reorder", "reorder as bipartite", "pickle", "copy")
        self.steps = [self.one_of(steps) for _ in range(self.one_of((0, 0, 1, 2)))]
        self.permutations, self.plain = [], self.base
        for step in self.steps:
            plain = self.plain
            src, dst = (torch.randperm(n, generator=self.generator) for n in (plain.num_src, plain.num_dst))
            if step == "reorder" and plain.num_src == plain.num_dst:
                dst = src
            self.permutations.append((src, dst))
            if step == "reverse":
                self.plain = plain.reversed
            elif step == "loops":
                self.plain = plain.with_self_loops
            elif step.startswith("reorder"):
                self.plain = plain.reordered(src, dst)

    def graph(self):
        """The same edges as those of ``plain``."""
        graph = self._base()
        for step, (src, dst) in zip(self.steps, self.permutations, strict=True):
            if step == "reverse":
                graph = graph.reverse()
            elif step == "loops":
                graph = graph.with_self_loops()
            elif step == "pickle":
                graph = pickle.loads(pickle.dumps(graph))
            elif step == "copy":
                graph = graph.to(self.device)
            elif step == "reorder" and graph.num_src == graph.num_dst:
                graph, _ = graph.reorder(src)
            else:
                graph, _ = graph.reorder((src, dst), bipartite=True)
        return graph

    def _base(self):
        (src, dst), flag = self.base.ends.to(self.ids), {"is_symmetric": self.is_symmetric or None}
        if self.source == "edges":
            graph = Graph.from_edge_index(torch.stack((src, dst)), self.base.num_src, self.base.num_dst, **flag)
            return graph.to(self.device)
        is_csr = self.source.startswith("csr")
        rows, columns = (dst, src) if is_csr else (src, dst)
        sizes = (self.base.num_dst, self.base.num_src) if is_csr else (self.base.num_src, self.base.num_dst)
        order = rows.argsort(stable=True)
        pointers = torch.cat((torch.zeros(1, dtype=torch.int64), rows.bincount(minlength=sizes[0]).cumsum(0)))
        if "ids" in self.source:
            flag["edge_ids"] = order
        make = Graph.from_csr if is_csr else Graph.from_csc
        return make(pointers, columns[order], sizes[1], **flag).to(self.device)

    # Attention

    def draw_attention(self, *, edge_width=()):
        """The options that all scores share, and the sizes: heads, channels."""
        heads, channels, edges = self.one_of((1, 2, 5)), self.one_of((4, 1, 7)), self.plain.num_edges
        self.options["out_dtype"] = self.one_of((None, None, None, torch.float32))
        if edge_width is not None and not self.often():
            self.tensors["edge_attr"] = self.randn(edges, 3)
            widths = (heads, 3) if edge_width == "one" else (heads, channels, 3)
            self.tensors["edge_proj"] = 0.5 * self.randn(*widths)
        if not self.often():
            self.tensors["edge_scale"] = self.randn(edges, heads) if self.often() else self.randn(edges)
        if not self.often():
            self.options |= {"dropout": self.one_of((0.4, 1.0)), "seed": int(self.seeds)}
        if not self.often():
            self.options["return_weights"] = self.one_of(("softmax", "dropped"))
        return heads, channels

    def draw_gatv2_attention(self):
        heads, channels = self.draw_attention()
        self.options["negative_slope"] = 1.0 if self.is_smooth else self.one_of((0.2, -0.5, 1))
        self.tensors |= {
            "x_l": self.randn(self.plain.num_src, heads, channels),
            "x_r": self.randn(self.plain.num_dst, heads, channels),
            "att": self.randn(heads, channels),
        }
        return "x_l", "x_r", "att"

    def draw_gat_attention(self):
        heads, channels = self.draw_attention(edge_width="one")
        self.options["negative_slope"] = 1.0 if self.is_smooth else self.one_of((0.2, -0.5, 1))
        self.tensors |= {
            "x": self.randn(self.plain.num_src, heads, channels),
            "a_l": self.randn(self.plain.num_src, heads),
        }
        if self.often():
            self.tensors["a_r"] = self.randn(self.plain.num_dst, heads)
        return "x", "a_l", "a_r"

    def draw_dot_attention(self):
        heads, channels = self.draw_attention()
        self.options["scale"] = self.one_of((None, 0.7))
        self.tensors |= {
            "q": self.randn(self.plain.num_dst, heads, channels),
            "k": self.randn(self.plain.num_src, heads, channels),
            "v": self.randn(self.plain.num_src, heads, channels),
        }
        return "q", "k", "v"

    def draw_cosine_attention(self):
        heads, channels = self.draw_attention(edge_width=None)
        channels += 1  # of one number, the cosine is its sign
        self.tensors["x"] = self.randn(self.plain.num_src, heads, channels)
        if self.plain.num_src != self.plain.num_dst or self.often():
            self.tensors["x_dst"] = self.randn(self.plain.num_dst, heads, channels)
        if self.often():
            self.tensors["beta"] = self.randn(self.one_of((1, heads)))
        self.wanted = {"x", "x_dst"}  # beta's alone may be all noise
        return "x", "x_dst", "beta"

    # Sums

    def draw_spmm(self):
        heads = self.one_of((None, None, 2))
        sizes = (self.plain.num_src, self.one_of((4, 1, 7))) if heads is None else (self.plain.num_src, heads, 4)
        self.tensors["x"] = self.randn(*sizes)
        if not self.often():
            by_head = heads is not None and self.often()
            self.tensors["weight"] = self.randn(self.plain.num_edges, *((heads,) if by_head else ()))
        self.options = {"norm": self.one_of(("none", "none", "left", "right", "both"))}
        self.options["reduce"] = self.one_of(("sum", "mean"))
        self.options["out_dtype"] = self.one_of((None, None, torch.float32))
        self.scales = {}
        if self.options["norm"] == "none":
            self.scales = {name: self.randn(n) for name, n in self._sides().items() if self.seldom()}
        return "x", "weight"

    def _sides(self):
        return {"src_scale": self.plain.num_src, "dst_scale": self.plain.num_dst}

    def true_spmm(self, x, weight=None, *, norm, reduce, out_dtype):
        scales = dict.fromkeys(self._sides())
        degrees = {"src_scale": self.plain.out_degrees(), "dst_scale": self.plain.in_degrees()}
        powers = {"left": (-1, 0), "right": (0, -1), "both": (-0.5, -0.5), "none": (0, 0)}[norm]
        for power, name in zip(powers, scales, strict=True):
            scales[name] = degrees[name].clamp(min=1).double() ** power
            if name in self.scales:
                scales[name] = scales[name] * self.scales[name]
        if reduce == "mean":
            scales["dst_scale"] = scales["dst_scale"] / degrees["dst_scale"].clamp(min=1)
        rows = torch.promote_types(x.dtype, torch.float32)  # of which is rounded once
        out = reference.spmm(self.plain, x.to(rows), weight, **scales)
        return out.to(out_dtype or (x.dtype if weight is None else torch.promote_types(x.dtype, weight.dtype)))

    def draw_sddmm_dot(self):
        sizes = self.one_of(((4,), (1,), (2, 7)))
        self.tensors["x_dst"] = self.randn(self.plain.num_dst, *sizes)
        self.tensors["x_src"] = self.randn(self.plain.num_src, *sizes)
        self.options["out_dtype"] = self.one_of((None, None, torch.float32))
        return "x_dst", "x_src"

    def draw_neighbor_reduce(self):
        x = self.randn(self.plain.num_src, self.one_of((4, 1, 40)))
        ties = self.one_of(("shared", "first", "scatter"))
        if ties == "first" and (self.steps or self.source != "edges"):  # its rows may have another order than the ids
            self.distinct = {"x"}
        elif not self.often():
            x = (1.5 * x).round()  # with many equal entries, zeros among them
        self.tensors["x"] = x
        self.options = {"ties": ties, "fill": self.one_of((0.0, 0.0, -2.5))}
        return "x", self.one_of(("min", "max"))

    # Relations

    def _draw_types(self):
        self.num_types = self.one_of((4, 1, 9))
        self.in_width, self.out_width = self.one_of((4, 24)), self.one_of((6, 2))
        self.in_blocks = self.seldom()
        sizes = (2, self.in_width // 2, self.out_width // 2) if self.in_blocks else (self.in_width, self.out_width)
        return 0.5 * self.randn(self.num_types, *sizes)

    def draw_relational_sum(self):
        self.tensors["weight"] = self._draw_types()
        self.tensors["x"] = self.randn(self.plain.num_src, self.in_width)
        self.types = self.randint(self.num_types, self.plain.num_edges)
        if not self.often():
            self.tensors["edge_weight"] = self.randn(self.plain.num_edges)
        self.options = {"reduce": self.one_of(("sum", "mean")), "order": self.one_of((None, "aggregate", "transform"))}
        self.options["out_dtype"] = self.one_of((None, None, torch.float32))
        return "x", "weight", "edge_weight"

    def true_relational_sum(self, x, weight, edge_weight=None, *, reduce, order, out_dtype):
        typed = SimpleNamespace(graph=self.plain, edge_type=self.types, num_types=self.num_types)
        typed.num_dst = self.plain.num_dst
        if out_dtype is None:
            return reference.relational_sum(typed, x, weight, edge_weight, reduce)
        rows = torch.promote_types(x.dtype, torch.float32)
        return reference.relational_sum(typed, x.to(rows), weight, edge_weight, reduce).to(out_dtype)

    def draw_gather_mm(self):
        self.tensors["w"] = self._draw_types()
        count = self.one_of((30, 7, 1, 0))
        self.types = self.randint(self.num_types, count)
        self.tensors["x"] = self.randn(count, self.in_width)
        if not self.often():
            self.tensors["bias"] = self.randn(self.num_types, self.out_width)
        return "x", "w", self.types.to(self.ids), "bias"

    def true_gather_mm(self, x, w, index, bias=None):
        if w.dim() == 4:
            w = torch.stack([torch.block_diag(*blocks) for blocks in w])
        out = reference.gather_mm(x, w, index.long())
        return out if bias is None else out + bias[index.long()]

    def draw_segment_mm(self):
        self.in_blocks = False
        self.tensors["w"] = self._draw_types()
        if self.tensors["w"].dim() == 4:
            self.tensors["w"] = self.tensors["w"].flatten(1, 2)
            self.in_width, self.out_width = self.tensors["w"].shape[1:]
        lengths = self.randint(6, self.num_types)
        self.tensors["x"] = self.randn(int(lengths.sum()), self.in_width)
        self.by_lengths = self.often()
        offsets = torch.cat((lengths.new_zeros(1), lengths.cumsum(0)))
        self.ends = (lengths if self.by_lengths else offsets).to(self.ids)
        self.offsets = offsets
        return "x", "w"

    def true_segment_mm(self, x, w):
        return reference.segment_mm(x, w, self.offsets)

    # The call

    def call(self, package, layer, tensors):
        rest = {name: tensors[name] for name in ("edge_attr", "edge_proj", "edge_scale") if name in tensors}
        args = [tensors.get(a, a if a in ("min", "max") else None) if isinstance(a, str) else a for a in self.given]
        if self.name == "cosine_attention" and args[-1] is None:
            args.pop()  # beta is 1
        if package == "stock":
            if truth := getattr(self, f"true_{self.name}", None):
                return truth(*args, **self.options)
            return getattr(reference, self.name)(self.plain, *args, **rest, **self.options)
        function, options = getattr(functional, self.name), dict(self.options)
        if self.name == "spmm":
            options |= {name: scale.to(self.device) for name, scale in self.scales.items()}
        if self.name == "segment_mm":
            options |= {"lengths" if self.by_lengths else "offsets": self.ends.to(self.device)}
        if self.name in ("gather_mm", "segment_mm"):
            return function(*moved(args, self.device), **options)
        graph = self.graph()
        if self.name == "relational_sum":
            graph = TypedGraph(graph, self.types.to(self.device), self.num_types)
        return function(graph, *args, **rest, **options)


# message_passing takes a message: tests/pyg/test_generated_random.py draws them, for layers.
FUNCTIONS = [name for name in functional.__all__ if name != "message_passing"]


@EVERY_DEVICE
@pytest.mark.parametrize("name", FUNCTIONS)
def test_random_calls(name, device):
    @drawn(40)
    def check(rng):
        Call(name, rng).check(device)

    check()
