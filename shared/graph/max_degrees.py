"""The largest degrees of a graph, read back without waiting for a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Optional

import torch
from torch import Tensor

from ..checks import compiling

if TYPE_CHECKING:
    from .handle import Graph


# Answers of GPUs, after which calls may launch other kernels, for captures (shared/capture/model_recording.py).
arrived = 0


class MaxDegrees:
    """The largest degrees of a graph's CSR and CSC, each once it is known.

    The CPU computes them at once. On a GPU, after enough calls to make a reuse likely, an asynchronous copy to pinned
    memory is queued on the current stream, and a later call finds the values there.
    """

    def __init__(self, known: Optional[list[int]] = None):
        self.known: list[int] = known or []  # the largest degree of the CSR, then that of the CSC
        self.times_asked = 0
        self.coming: Optional[tuple[Tensor, torch.cuda.Event]] = None  # in flight, and their event

    def moved(self) -> MaxDegrees:
        """Returns a copy of the known degrees, for the same graph on another device."""
        return MaxDegrees(list(self.known))

    def of_csr(self, graph: Graph) -> int:
        """See :attr:`Graph.max_in_degree`."""
        if not self.known:
            self.known = [int(graph.in_degrees().max()) if graph.num_dst else 0]
        return self.known[0]

    def cached_of_csr(self, graph: Graph) -> Optional[int]:
        """See :meth:`Graph.cached_max_in_degree`."""
        if graph.device.type != "cuda":
            return self.of_csr(graph)
        if not self.known:
            self._ask(graph, 1)
        return self.known[0] if self.known else None

    def cached(self, graph: Graph) -> list[int]:
        """See :meth:`Graph.cached_max_degrees`."""
        if compiling():  # degrees that become known would recompile the program
            return []
        if len(self.known) < 1 + graph.has_csc:
            self._ask(graph, 3)
        return self.known

    def _ask(self, graph: Graph, times_before: int) -> None:
        if graph.device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            return
        global arrived
        if self.coming is not None:
            answer, arrival = self.coming
            if arrival.query():
                self.known, self.coming = answer.tolist(), None
                arrived += 1
            return
        self.times_asked += 1
        if self.times_asked > times_before and graph.has_csr:
            rows = [graph.csr.indptr, *(graph.csc_arrays(False)[:1] if graph.has_csc else ())]
            if len(rows) > len(self.known):
                self.coming = _on_its_way([indptr.diff() for indptr in rows])


def _on_its_way(degrees: list[Tensor]) -> tuple[Tensor, torch.cuda.Event]:
    """Starts the copy of the maxima of GPU tensors to pinned memory.

    Returns:
        The maxima ``[len(degrees)]``, 0 for an empty tensor, and the event after which they are valid.
    """
    answer = torch.zeros(len(degrees), dtype=torch.int64, device="cpu", pin_memory=True)
    for place, numbers in zip(answer, degrees):
        if numbers.numel():
            place.copy_(numbers.amax(), non_blocking=True)
    arrival = torch.cuda.Event()
    arrival.record()
    return answer, arrival
