"""The results of :func:`edgeless.explain`, and how reports print: as text, and as a table in notebooks."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..plan.steps import Step, table


class Printed:
    """Mixin of reports: their ``repr`` is their text, and notebooks show what :meth:`_rows` returns as a table."""

    def __repr__(self) -> str:
        return str(self)

    def _rows(self) -> tuple[Sequence[str], list[Sequence[str]]]:
        """The names of the columns, and the rows."""
        raise NotImplementedError

    def _repr_html_(self) -> str:
        names, rows = self._rows()
        head = "".join(f"<th>{html.escape(name)}</th>" for name in names)
        body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _cell(text: str) -> str:
    return f'<td style="text-align: left; white-space: pre-wrap">{html.escape(text)}</td>'


@dataclass(frozen=True, repr=False)
class Explanation(Printed):
    """The result of :func:`edgeless.explain`. It is true in a boolean context when the call runs fused.

    Attributes:
        layer: the name of the layer's class.
        fused: whether the upstream code runs no part of the call.
        reasons: the unsupported reasons, empty if the call runs fused.
        plan: the ops of a layer that has kernels of its own.
        how: for a layer whose messages are generated, "generated" or the existing op that computes them.
        levels: for such a layer, the program's two levels: what is computed, and how.
    """

    layer: str
    fused: bool
    reasons: tuple[str, ...]
    plan: tuple[Step, ...] = ()
    how: str = ""
    levels: str = ""

    def __bool__(self) -> bool:
        return self.fused

    def __str__(self) -> str:
        if self.fused and self.how:
            return f"{self.layer} runs fused, {self.how}." + (f"\n{self.levels}" if self.levels else "")
        if self.fused:
            said = f"{self.layer} runs fused."
            return said if not self.plan else said + "\n" + table(self.plan)
        return f"{self.layer} does not run fused, because {'; because '.join(self.reasons)}."

    def _row(self) -> Sequence[str]:
        outcome = "fused" + (f", {self.how}" if self.how else "") if self.fused else "stock"
        return self.layer, outcome, "; ".join(self.reasons) or self.levels or (table(self.plan) if self.plan else "")

    def _rows(self):
        return ("layer", "runs", "details"), [self._row()]


@dataclass(frozen=True, repr=False)
class ModelExplanation(Printed):
    """The result of :func:`edgeless.explain` for a model. It is true when every call of a graph layer runs fused.

    Attributes:
        model: the name of the model's class.
        calls: (name in the model, explanation) of every call of a graph layer in one run, in order; several calls of a
            layer with the same explanation are listed once.
        idle: the names of the graph layers that the run did not call.
    """

    model: str
    calls: tuple[tuple[str, Explanation], ...]
    idle: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return all(explanation.fused for _, explanation in self.calls)

    def __str__(self) -> str:
        fused = sum(explanation.fused for _, explanation in self.calls)
        lines = [f"{self.model}: {fused} of {len(self.calls)} graph layers run fused."]
        lines += [_indented(f"{name}: {explanation}") for name, explanation in self.calls]
        lines += [f"  {name}: was not called." for name in self.idle]
        return "\n".join(lines)

    def _rows(self):
        rows = [(name, *explanation._row()) for name, explanation in self.calls]
        return ("name", "layer", "runs", "details"), rows + [(name, "", "was not called", "") for name in self.idle]


def without_repeats(calls: Iterable[tuple[str, Explanation]]) -> tuple[tuple[str, Explanation], ...]:
    """The calls in their order, equal ones once."""
    return tuple(dict.fromkeys(calls))


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())
