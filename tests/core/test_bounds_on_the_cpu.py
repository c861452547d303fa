"""What the CPU kernels read lies within the tensors that they are given: behind each of these begins a page that nobody
may read.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

GUARDED = """
import ctypes, mmap, sys
import torch
from edgeless import Graph, TypedGraph, _C, functional

libc = ctypes.CDLL(None, use_errno=True)
kept = []

def guarded(t):
    '''The same numbers, the last of them at the end of a page.'''
    size = t.numel() * t.element_size()
    pages = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, pages + mmap.PAGESIZE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert libc.mprotect(ctypes.c_void_p(start + pages), mmap.PAGESIZE, 0) == 0
    kept.append(memory)
    view = torch.frombuffer(memory, dtype=t.dtype, count=t.numel(), offset=pages - size).view(t.shape)
    return view.copy_(t.detach()).requires_grad_(t.requires_grad)
"""

ATTENTION = """
from attention_cases import OPTIONS, SCORES, function_of, graph_of, inputs_of

few = Graph.from_edge_index(torch.tensor([[0, 1, 1, 2], [0, 70, 70, 3]]), 3, 90)
for graph in (few, few.reverse(), graph_of("bipartite"), graph_of("hub")):
    for score in SCORES:
        for dtype in (torch.float32, torch.bfloat16):
            for options in OPTIONS:
                for heads, channels in ((2, 7), (4, 8), (1, 32)):
                    args, tensors, rest = inputs_of(score, graph, heads, channels, OPTIONS[options], dtype)
                    args, tensors = map(guarded, args), {name: guarded(t) for name, t in tensors.items()}
                    found = function_of(score)(graph, *args, **tensors, **rest)
                    sum(t.float().sum() for t in (found if isinstance(found, tuple) else (found,))).backward()
                    kept.clear()
"""

SUMS = """
edges, types = torch.tensor([[0, 70, 89, 89, 2], [0, 1, 1, 2, 2]]), torch.tensor([0, 1, 0, 1, 1])
graph, typed = Graph.from_edge_index(edges, 90, 3), TypedGraph.from_edge_index(edges, types, 2, 90, 3)
for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
    for width in (*range(1, 35), 47, 65):
        x = torch.randint(-4, 5, (90, width)).to(dtype)
        weight = torch.tensor([1.0, 2, 3, -1, 2], dtype=dtype)
        messages = x.double()[edges[0]]
        for given, by in ((None, messages), (guarded(weight), weight.double().unsqueeze(1) * messages)):
            found = functional.spmm(graph, guarded(x), given)
            assert torch.equal(found.double(), torch.zeros(3, width).double().index_add(0, edges[1], by)), width
        dots = functional.sddmm_dot(graph, guarded(x[:3]), guarded(x))
        assert torch.equal(dots, (x.double()[edges[1]] * messages).sum(1).to(dtype)), width
        w = torch.randint(-2, 3, (2, width, 5)).to(dtype)
        found = functional.relational_sum(typed, guarded(x), guarded(w))
        products = torch.einsum("ek,ekm->em", messages, w.double()[types])
        assert torch.equal(found, torch.zeros(3, 5).double().index_add(0, edges[1], products).to(dtype)), width
        kept.clear()
"""

IN_ORDER = """
def grad_of(found, leaves, grad):
    return torch.autograd.grad(found, leaves, guarded(grad))

def check(what, found, expected):
    assert all(torch.equal(f, e.to(f.dtype)) for f, e in zip(found, expected, strict=True)), what

for n in (1, 5, 6, 7, 96, 101, 200, 5000):
    ids, types = torch.arange(n), torch.arange(n) * 3 // n
    ends = {"one each": (ids, ids), "reversed": (ids.flip(0), ids), "hub": (ids, ids // 2), "gap": (ids, 2 * ids)}
    for width, out_width in ((4, 8), (8, 5), (32, 32)):
        for dtype in (torch.float32, torch.float64, torch.bfloat16) if n < 5000 else (torch.float32,):
            x = guarded(torch.randint(-2, 3, (n, width)).to(dtype)).requires_grad_()
            w = guarded(torch.randint(-2, 3, (3, width, out_width)).to(dtype)).requires_grad_()
            products = torch.einsum("ek,ekm->em", x.double(), w.double()[types])
            grad = torch.randint(-1, 2, (n, out_width)).to(dtype)
            found = functional.segment_mm(x, w, torch.bincount(types, minlength=3))
            check("segment_mm", (found, *grad_of(found, (x, w), grad)),
                  (products, *torch.autograd.grad(products, (x, w), grad.double(), retain_graph=True)))
            for name, (src, dst) in ends.items():
                rows = int(dst.max()) + 1
                graph = TypedGraph.from_edge_index(torch.stack([src, dst]), types, 3, n, rows)
                of = torch.einsum("ek,ekm->em", x.double()[src], w.double()[types])
                sums = torch.zeros(rows, out_width).double().index_add(0, dst, of)
                grad = torch.randint(-1, 2, (rows, out_width)).to(dtype)
                found = functional.relational_sum(graph, x, w, order="transform")
                check((n, name, width, dtype), (found, *grad_of(found, (x, w), grad)),
                      (sums, *torch.autograd.grad(sums, (x, w), grad.double())))
            kept.clear()
"""

EVERY_CAPABILITY = """
for capability in ("baseline", "avx2", "avx512"):
    print(capability, "begins", flush=True)
    _C.limit_cpu_capability(capability)
    exec(sys.argv[1])
    print(capability, "is done", flush=True)
"""


pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="protects pages as Linux does")


def check_in_a_child(script):
    """What reads behind its inputs ends the process."""
    here = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-c", GUARDED + EVERY_CAPABILITY, script]
    ran = subprocess.run(command, capture_output=True, text=True, env=os.environ | here)
    assert ran.returncode == 0 and ran.stdout.count("is done") == 3, (ran.returncode, ran.stdout, ran.stderr[-2000:])


def test_products_of_rows_in_order_stay_within_them():
    """Such rows are multiplied where they lie, in whole tiles. Small whole numbers, whose sums are exact."""
    check_in_a_child(IN_ORDER)


def test_sums_of_any_width_read_nothing_behind_their_rows():
    """Small whole numbers, whose sums are exact."""
    check_in_a_child(SUMS)


def test_attention_reads_nothing_behind_its_inputs():
    """Weights of the cosine had read a row of the sources for every destination."""
    check_in_a_child(ATTENTION)
