"""Keys of programs, field by field: users that differ in one field, alone and after each other."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from itertools import combinations
from typing import Optional

import torch
from torch import Tensor

from edgeless.programs import ProgramCache, Space


def flat(key, depths) -> dict[str, object]:
    """The fields of a key by their places.

    Args:
        depths: of each part of the key, how many tuples within each other are fields one by one.
    """

    def within(part, depth: int, place: str) -> dict[str, object]:
        if depth and type(part) is tuple and part:
            return {k: v for i, p in enumerate(part) for k, v in within(p, depth - 1, f"{place}.{i}").items()}
        return {place: part}

    parts = enumerate(zip(key, depths, strict=True))
    return {k: v for i, (part, depth) in parts for k, v in within(part, depth, str(i)).items()}


class Keys:
    """The keys that are looked up in a cache of programs."""

    def __init__(self, monkeypatch, depths):
        self.found: list[dict[str, object]] = []
        plain = ProgramCache.get

        def get(cache, key, *args, **kwargs):
            self.found.append(flat(key, depths))
            return plain(cache, key, *args, **kwargs)

        monkeypatch.setattr(ProgramCache, "get", get)

    def never_alone(self) -> dict[str, object]:
        """The fields in which no two keys differ alone, but the device and spaces.

        There is one device, and spaces follow from the other fields.
        """
        differ: set[str] = set()
        for one, other in combinations(self.found, 2):
            if one.keys() == other.keys():
                places = [place for place in one if one[place] != other[place]]
                differ.update(places if len(places) == 1 else ())
        last = self.found[-1]
        return {k: v for k, v in last.items() if k not in differ and not isinstance(v, (Space, torch.device))}


def described(out: Tensor, inputs: list[Tensor]) -> list[Optional[Tensor]]:
    """A result and its gradients, of which None says that there is none."""
    wanted = [t for t in inputs if t.requires_grad] if out.requires_grad else []
    found = iter(torch.autograd.grad(out.square().sum(), wanted, allow_unused=True) if wanted else ())
    return [out.detach(), *(next(found) if wanted and t.requires_grad else None for t in inputs)]


def assert_nobody_gets_anothers(users: dict[str, Callable[[bool], list]], programs: ProgramCache) -> None:
    """Asserts that users get by programs what they get without.

    Args:
        users: by name; each returns its results, by a program if its argument is true. The last one differs from each
            of the others in one field, and wants all that a program can compute: it would miss what the program of
            another one does not compute.
        programs: is emptied first.
    """
    programs.clear()
    for name, user in users.items():
        for ours, theirs in zip(user(True), user(False), strict=True):
            message = f"{name} gets what another user's program computes"
            assert (ours is None) == (theirs is None) and (ours is None or ours.dtype == theirs.dtype), message
            if ours is not None:
                tolerance = 2e-2 if ours.dtype == torch.bfloat16 else 1e-4
                torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance, msg=message)


OPTIONS = {
    "the dtype": ("dtype", torch.float64, torch.float32),
    "the width": ("width", 1, 3),
    "no gradient": ("grad", False, True),
}


def of_sides(user: Callable, first: str, second: str) -> dict[str, Callable]:
    """Users whose rows of one of two sides have another dtype or width, or no gradient."""
    return {
        f"{what} of the {side}": user(**{f"{field}s": values[::order]})
        for side, order in ((first, 1), (second, -1))
        for what, (field, *values) in OPTIONS.items()
    }


def of_tensors(user: Callable, kind: str, names: Iterable[str]) -> dict[str, Callable]:
    """Users of a module with another tensor of a name, in its dtype or width, or without a gradient."""
    return {
        f"{what} of the {kind} {name}": user(name, **{field: value})
        for name in names
        for what, (field, value, _) in OPTIONS.items()
    }


# Blocks of code -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def set_to(holder, name, value):
    """Sets an attribute in a block."""
    before = getattr(holder, name)
    setattr(holder, name, value)
    try:
        yield
    finally:
        setattr(holder, name, before)


@contextlib.contextmanager
def default_dtype(dtype):
    """Sets the default dtype in a block."""
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def within(*blocks):
    """A block of code within several."""

    @contextlib.contextmanager
    def inner():
        with contextlib.ExitStack() as stack:
            for make, *given in blocks:
                stack.enter_context(make(*given))
            yield

    return inner
