"""What the CPU kernels read lies within the tensors that they are given: behind each of these begins a page that nobody
may read.
"""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import ctypes, mmap, sys
import torch
sys.path.insert(0, {folder!r})
from attention_cases import OPTIONS, SCORES, function_of, graph_of, inputs_of
from edgeless import Graph

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

few = Graph.from_edge_index(torch.tensor([[0, 1, 1, 2], [0, 70, 70, 3]]), 3, 90)
for graph in (few, few.reverse(), graph_of("bipartite"), graph_of("hub")):
    for score in SCORES:
        for dtype in (torch.float32, torch.bfloat16):
            for options in OPTIONS:
                for heads, channels in ((2, 7), (4, 8), (1, 32)):
                    args, tensors, rest = inputs_of(score, graph, heads, channels, OPTIONS[options], dtype)
                    args, tensors = map(guarded, args), {{name: guarded(t) for name, t in tensors.items()}}
                    found = function_of(score)(graph, *args, **tensors, **rest)
                    sum(t.float().sum() for t in (found if isinstance(found, tuple) else (found,))).backward()
                    kept.clear()
print("all of them")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="protects pages as Linux does")
def test_attention_reads_nothing_behind_its_inputs():
    """Weights of the cosine had read a row of the sources for every destination."""
    script = SCRIPT.format(folder=str(Path(__file__).parent))
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert ran.returncode == 0 and "all of them" in ran.stdout, (ran.returncode, ran.stderr[-2000:])
