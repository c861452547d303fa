"""Walks whose edges matter only where they have a row's extremum, as those of an extremum's gradients do.

A row has as many such edges as it has channels, at most, so most edges of long rows are passed over, and of those that
are left most channels have a share of 0. Both are skipped only if all operands are finite: 0 times infinity is NaN.
"""

from __future__ import annotations

from typing import Union

import torch

from ..lowering.items import Operand
from .loops import Arranged, Buffer, DrawLoop, Let, Loop, Statement

_WINS = """
EL_INLINE int el_wins(const long *argument, long id, int n) {
  int wins = 0, several = 0;
  _Pragma("omp simd reduction(|:wins, several)")
  for (int k = 0; k < n; ++k) wins |= argument[k] == id, several |= argument[k] < 0;
  return wins | several << 1;
}
"""
_FINITE = """static int el_finite_{mark}(const {kind} *x, long n) {{
  {kind} bad = 0;
  _Pragma("omp simd reduction(+:bad)")
  for (long k = 0; k < n; ++k) bad += x[k] - x[k];
  return bad == 0;
}}
"""
TEXT = _WINS + _FINITE.format(mark="f", kind="float") + _FINITE.format(mark="d", kind="double")


def finite_text(arranged: Arranged, names: dict[Operand, str], places: dict[str, int]) -> list[str]:
    """A function that says whether all operands are finite.

    Args:
        names: of the operands.
        places: of the names among the pointers.
    """
    rows = {"own": "N[0] * ", "near": "(N[1] + N[2] - N[0]) * ", "param": ""}
    tests = []
    for operand, name in names.items():
        if operand.dtype.is_floating_point:
            suffix = "f" if operand.dtype is torch.float32 else "d"
            tests.append(f"el_finite_{suffix}(P[{places[name]}], {rows[operand.kind]}{operand.numel})")
    return ["static int el_finite(void **P, const long *N) {", f"  return {' && '.join(tests) or '1'};", "}"]


def is_for_equals(into: Buffer, statements: list[Statement], winners: list[Operand]) -> bool:
    """Whether an array is read only for rows with equal extrema, whose argument is negative."""
    loops = [s for s in statements if isinstance(s, Loop)]
    loads = [(loop, let) for loop in loops for let in loop.body if let.op == "load" and let.args[0] is into]
    return bool(loads) and all(_ends_in_choice(loop, let.name, winners) for loop, let in loads)


def _ends_in_choice(loop: Loop, name: str, winners: list[Operand]) -> bool:
    lets = {let.name: let for let in loop.body}
    stack = [name]
    while stack:
        each = stack.pop()
        if any(end.value == each for end in loop.ends) or each == loop.value:
            return False
        for user in loop.body:
            if each not in user.args:
                continue
            chosen = user.op == "where" and each == user.args[2] and each not in user.args[:2]
            if not (chosen and _is_single(lets[user.args[0]], lets, winners)):
                stack.append(user.name)
    return True


def _is_single(test: Let, lets: dict[str, Let], winners: list[Operand]) -> bool:
    """Whether a let says that an argument is not negative."""
    if test.op != "ge":
        return False
    argument, bound = (lets[a] for a in test.args)
    return argument.op == "load" and argument.args[0] in winners and bound.op == "number" and bound.args == (0, None)


def list_text(into: Buffer) -> list[str]:
    """Which elements of a sparse array are not 0, for each edge of a tile."""
    name = into.name
    return [
        "for (int s = 0; s < u; ++s) {",
        "  int n = 0;",
        f"  for (int k = 0; k < {into.numel}; ++k) {{ {name}_k[s][n] = k; n += dense | ({name}[s][k] != 0); }}",
        f"  {name}_n[s] = n;",
        "}",
    ]


def written(statement: Union[Loop, DrawLoop]) -> list[Buffer]:
    """The arrays of an edge that a statement stores."""
    ends = statement.ends if isinstance(statement, Loop) else []
    return [end.into for end in ends if isinstance(getattr(end, "into", None), Buffer)]
