"""Random calls of layers, one or many over time: hypothesis draws them, and ours are compared with upstream's.

Everything is drawn for each call: options, inputs, graph, dtypes, autocast, and which tensors need gradients.
EDGELESS_DRAWN_TIMES multiplies the number of calls; if it is not 1, every run draws other calls.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import edgeless

TIMES = int(os.environ.get("EDGELESS_DRAWN_TIMES", "1"))
_PHASES = (Phase.explicit, Phase.generate)  # no shrinking: a smaller seed is no simpler call


def drawn(calls: int) -> Callable:
    """A decorator: the function is called with ``calls`` generators of random numbers, whose seeds hypothesis draws.

    If hypothesis drew every choice, many of so few calls would be close to the simplest one and to each other.
    """
    profile = settings(
        max_examples=calls * TIMES,
        derandomize=TIMES == 1,
        deadline=None,
        database=None,
        phases=_PHASES,
        suppress_health_check=list(HealthCheck),
    )
    return lambda function: profile(given(st.randoms(use_true_random=True))(function))


class Drawn:
    """Random choices and tensors from a generator of random numbers or a seed."""

    def __init__(self, source: int | random.Random):
        self.rng = random.Random(source) if isinstance(source, int) else source
        self.generator = torch.Generator().manual_seed(self.rng.randrange(1 << 16))

    def one_of(self, choices):
        return self.rng.choice(tuple(choices))

    def often(self):
        return self.rng.randrange(10) < 7

    def seldom(self):
        return self.rng.randrange(10) > 7

    def randn(self, *sizes):
        return torch.randn(*sizes, generator=self.generator, dtype=torch.float64)

    def randint(self, high, *sizes):
        return torch.randint(high or 1, sizes, generator=self.generator)


DENSE = ("plain", "plain", "transposed", "expanded", "sliced")
FORMS = (*DENSE * 3, "coo", "csr")


def laid_out(x: Tensor, form: str) -> Tensor:
    """The matrix ``x`` in one of :data:`FORMS`, its layouts and strides."""
    if form == "transposed":
        return x.t().contiguous().t()
    if form == "expanded":
        return x[:1].expand(x.shape) if len(x) else x
    if form == "sliced":
        return torch.cat((x, x), 1)[:, 1 : 1 + x.size(1)]
    return x.to_sparse() if form == "coo" else x.to_sparse_csr() if form == "csr" else x


class DrawnCall(Drawn):
    """One layer and one call of it. Subclasses draw the rest, and make layers and call them.

    Attributes:
        name: the layer's name.
        tensors: the floating inputs of the call, by name, in float64.
        forms: the layouts of these inputs, by name, see :data:`FORMS`.
        frozen: the names of tensors and parameters that need no gradient; none of ``wanted``.
        dtype: the dtype of the layer and its inputs.
        autocast: the dtype of autocast, or None.
        others: name -> dtype of tensors and submodules that have another dtype.
        default_dtype: torch's default dtype while layers are called.
        device: the device of the layer that is called.
    """

    sparse_gradients: ClassVar[bool] = False  # whether upstream layers give sparse features a gradient
    dtypes: ClassVar[tuple] = (torch.float64,) * 3 + (torch.float32,) * 3 + (torch.bfloat16,)

    def __init__(self, name: str, source: int | random.Random):
        super().__init__(source)
        self.name = name
        self.tensors: dict[str, Tensor] = {}
        self.forms: dict[str, str] = {}
        self.dtype = self.one_of(self.dtypes)
        self.autocast = self.one_of((torch.bfloat16, None)) if self.dtype == torch.float32 else None
        if self.dtype != torch.float32 and self.seldom() and self.seldom():
            self.autocast = torch.bfloat16
        # Rounding may move a number across a kink, where its gradient changes.
        self.is_smooth = self.dtype in (torch.bfloat16, torch.float16) or self.autocast is not None
        self.backend = self.one_of(("auto", "auto", "auto", "reference"))
        self.trains = self.often()
        self.others: dict[str, torch.dtype] = {}
        self.wanted: set[str] = set()
        self.device = "cpu"
        self.default_dtype = torch.float64 if self.dtype == torch.float64 else torch.float32
        self.draw()
        self.frozen = set()
        if not self.often():
            names = [*self.tensors, *(name for name, _ in self.layer("stock").named_parameters())]
            self.frozen = {name for name in names if not self.often()} - self.wanted

    def draw(self) -> None:
        """Draws options, graph and ``tensors``."""
        raise NotImplementedError

    def make(self, package: str) -> nn.Module:
        """The layer of ``"stock"`` or ``"fused"``."""
        raise NotImplementedError

    def call(self, package: str, layer: nn.Module, tensors: dict[str, Tensor]) -> Any:
        """The layer's result."""
        raise NotImplementedError

    def dropout(self) -> float:
        """A dropout probability without effect: 0 while the layer trains."""
        return 0.0 if self.trains else self.one_of((0.0, 0.6))

    def layer(self, package: str) -> nn.Module:
        """The layer with parameters that depend on their shapes and order alone, in the drawn dtypes."""
        torch.manual_seed(3)
        layer = self.make(package)
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for parameter in layer.parameters():
                values = 0.4 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.data = values.to(self.dtype)
        layer.to(self.dtype).train(self.trains)
        for name, dtype in self.others.items():
            if (module := dict(layer.named_modules()).get(name)) is not None:
                module.to(dtype)
        return layer

    def outcome(self, package: str, exact: bool = False, device: str = "cpu") -> Any:
        """The outputs and gradients of the call, or its error.

        Args:
            exact: compute in float64, from the same numbers.
        """
        self.device = device
        default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64 if exact else self.default_dtype)
        try:
            layer = self.layer(package).to(device)
            if exact:
                layer.double()
            leaves = {}
            for name, tensor in self.tensors.items():
                tensor = tensor.to(self.others.get(name, self.dtype))
                tensor = tensor.double() if exact else tensor
                leaves[name] = laid_out(tensor.to(device), self.forms.get(name, "plain")).detach()
            for name, leaf in (*leaves.items(), *layer.named_parameters()):
                leaf.requires_grad_(name not in self.frozen and (leaf.layout is torch.strided or self.sparse_gradients))
            rounds = self.autocast is not None and not exact
            with torch.autocast(device, self.autocast) if rounds else contextlib.nullcontext():
                result = self.call(package, layer, dict(leaves))
            found = derivatives(result, {**leaves, **dict(layer.named_parameters())})
            return {key: None if value is None else value.cpu() for key, value in found.items()}
        except Exception as error:
            return error
        finally:
            torch.set_default_dtype(default)

    def check(self, device: str = "cpu", stands_for_any: Callable[[Any], bool] = lambda error: False) -> None:
        """Fails unless our layer on a device gives the upstream layer's results on the CPU, or the same error.

        Three things are left out on CUDA: calls that the upstream layer rejects, since ids out of range end the
        process; autocast, which has other rules there; and 16-bit rows, which upstream layers sum with atomics.
        """
        if device != "cpu":
            assume(self.dtype not in (torch.bfloat16, torch.float16))
            self.autocast, self.backend = None, "auto"
        want = self.outcome("stock")
        rounds = self.dtype != torch.float64 or self.autocast is not None or self.others
        truth = self.outcome("stock", exact=True) if rounds and not isinstance(want, Exception) else want
        if device != "cpu" and isinstance(want, Exception):
            return
        with edgeless.backend(self.backend):
            have = self.outcome("fused", device=device)
        assert_alike(self, have, want, lambda *both: assert_as_exact(*both, truth, self.limit), stands_for_any)

    @property
    def limit(self) -> float:
        """The error that any result may have, relative by norm: that of the call's coarsest dtype."""
        return max(LIMITS[dtype] for dtype in (self.dtype, self.autocast, *self.others.values()) if dtype)

    def __str__(self):
        facts = {key: value for key, value in vars(self).items() if key not in ("rng", "generator", "tensors")}
        facts["tensors"] = {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}
        return f"{self.name} {facts}"


# Comparison ------------------------------------------------------------------------------------------------------


def parts_of(value: Any) -> list[Tensor]:
    """The tensors of a result in order; sparse matrices and dictionaries stand for their values."""
    if isinstance(value, Tensor):
        return [value if value.layout is torch.strided else value.values().detach()]
    if hasattr(value, "storage"):  # torch_sparse.SparseTensor
        return [value.storage.value()]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else ()
    return [part for item in items for part in parts_of(item)]


def derivatives(result: Any, leaves: dict[str, Tensor]) -> dict[str, Tensor | None]:
    """The outputs of a call, and the gradients of the leaves that require one, for a loss that weights every number of
    the result differently.
    """
    found, loss = {}, 0.0
    generator = torch.Generator().manual_seed(23)
    for i, part in enumerate(parts_of(result)):
        found[f"output {i}"] = part.detach() if part.is_floating_point() else part.long()
        if part.is_floating_point():
            weight = torch.randn(part.shape, generator=generator, dtype=torch.float64)
            loss = loss + (part.double() * weight.to(part.device)).sum()
    wanted = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    if wanted and isinstance(loss, Tensor) and loss.requires_grad:
        grads = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True)
        grads = [grad if grad is None or grad.layout is torch.strided else grad.to_dense() for grad in grads]
    else:
        grads = [None] * len(wanted)
    return {**found, **{f"grad of {name}": grad for name, grad in zip(wanted, grads, strict=True)}}


# Errors that any result may have, relative by norm: the usual ones for float32 and float64, and four roundings for
# 16-bit dtypes, since layers have as many steps. Other tests check over several problems at once that 16-bit errors are
# at most twice the upstream layer's.
LIMITS = {torch.float32: 1e-5, torch.float64: 1e-10, torch.bfloat16: 2**-5, torch.float16: 2**-8}


def assert_as_exact(have: dict, want: dict, truth: dict, limit: float) -> None:
    """Asserts that our results have upstream's shapes and dtypes, and errors of at most twice upstream's or ``limit``.
    Numbers that are not finite must be the same.

    A gradient whose terms cancel is rounding noise in both; its error is relative to the largest tensor of its call.

    Args:
        have, want: our results and the upstream layer's, in the drawn dtypes.
        truth: the upstream layer's results in float64.
        limit: an error relative by norm.
    """
    assert have.keys() == want.keys()
    largest = max((_size(t[t.isfinite()]) for t in truth.values() if t is not None), default=0.0)
    for name, theirs in want.items():
        ours, exact = have[name], truth[name]
        if ours is None or theirs is None:
            present = theirs if ours is None else ours
            assert present is None or not present.any(), f"{name}: {ours} instead of {theirs}"
            continue
        assert ours.shape == theirs.shape, f"{name}: the shape {ours.shape} instead of {theirs.shape}"
        assert ours.dtype == theirs.dtype, f"{name}: {ours.dtype} instead of {theirs.dtype}"
        if not theirs.is_floating_point():
            assert torch.equal(ours, theirs), f"{name}: other integers"
            continue
        finite = theirs.isfinite()
        assert torch.equal(ours[~finite].nan_to_num(nan=7.0), theirs[~finite].nan_to_num(nan=7.0)), f"{name}: infinite"
        error, stock = (_size((t.double() - exact.double())[finite]) for t in (ours, theirs))
        size = _size(exact[finite])
        allowed = max(2 * stock, limit * size, limit * largest / 4 if "grad" in name else 0.0)
        assert error <= allowed, f"{name}: error {error:.2e} is over {allowed:.2e}, of {size:.2e}; stock {stock:.2e}"


def _size(tensor: Tensor) -> float:
    return float(tensor.double().norm())


# Many calls over time --------------------------------------------------------------------------------------------


class DrawnUse(Drawn):
    """Random actions in turn on layers and graphs that stay alive. Subclasses define graph, call, edit and replace."""

    graph: Callable
    call: Callable
    edit: Callable
    replace: Callable

    def __init__(self, seed: int):
        super().__init__(seed)
        self.log: list[str] = []
        self.graphs = [self.graph() for _ in range(3)]
        self.layers: dict[str, tuple] = {}  # the upstream layer and ours

    def run(self, steps: int = 40) -> None:
        limit = edgeless.cache_info().limit
        actions = (self.call, self.call, self.call, self.edit, self.edit, self.replace, self.train, self.cache)
        try:
            for _ in range(steps):
                self.one_of(actions)()
        finally:
            edgeless.set_cache_limit(limit)

    def layers_of(self, name: str, make: Callable, stock: Any, fused: Any) -> tuple:
        """The upstream layer and ours of this name, made in float64 on first use."""
        if name not in self.layers:
            default = torch.get_default_dtype()
            torch.set_default_dtype(torch.float64)
            try:
                theirs, ours = make(stock), make(fused)
            finally:
                torch.set_default_dtype(default)
            ours.load_state_dict(theirs.state_dict())
            self.layers[name] = theirs, ours
        return self.layers[name]

    def train(self) -> None:
        """Changes the parameters in place, as an optimizer's step does."""
        if not self.layers:
            return
        name = self.one_of(self.layers)
        self.log.append(f"{name}: other parameters")
        with torch.no_grad():
            for theirs, ours in zip(*(layer.parameters() for layer in self.layers[name]), strict=True):
                change = 0.1 * self.randn(*ours.shape)
                ours.add_(change), theirs.add_(change)

    def cache(self) -> None:
        how = self.one_of(("cleared", "small", "none", "large"))
        self.log.append(f"cache: {how}")
        if how == "cleared":
            edgeless.clear_cache()
        else:
            edgeless.set_cache_limit({"small": 3000, "none": 0, "large": 1 << 30}[how])


def assert_alike(
    case: Any, have: Any, want: Any, close: Callable, stands_for_any: Callable[[Any], bool] = lambda error: False
) -> None:
    """Asserts that two results, or the errors in their place, agree.

    Args:
        case: printed if they differ.
        have, want: our result and the upstream layer's.
        close: compares results.
        stands_for_any: whether an error of ours is accepted for any error of the upstream layer.
    """
    if isinstance(want, Exception) or isinstance(have, Exception):
        same = type(have) is type(want) or (isinstance(want, Exception) and stands_for_any(have))
        assert same, f"{case}: {_short(have)} instead of {_short(want)}"
        return
    try:
        close(have, want)
    except AssertionError as error:
        raise AssertionError(f"{case}: {error}") from error


def _short(outcome: Any) -> str:
    return repr(outcome)[:200] if isinstance(outcome, Exception) else "a result"
