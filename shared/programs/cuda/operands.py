"""The registers of a pass on CUDA: the statements that fill them, and loads from memory."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Optional

import numpy as np
import torch

from ..front.rules import name_of, value_of
from ..lowering.items import Folded, Item, NotLowered, Operand
from .lane_tables import runs_of
from .parts import EDGE, MOST_KEPT, ONCE, ROW, SHARED_BYTES, STORE, VIEWS, Stage, Value, stored_type


class TooManyKept(NotLowered):
    """Raised if a pass has more values of parameters than a thread keeps in registers."""


class TooMuchShared(NotLowered):
    """Raised if the parameters and results of a block exceed its shared memory."""


class Registers:
    """Registers by item and table, with the statements that run once, per row, per edge or after a row.

    Args:
        stage: the computation of the pass.
        lanes, per: the number of lanes that a row fills, and of consecutive elements per lane.
        keep: whether a thread keeps values of parameters in registers from edge to edge.
        share: whether the parameters that no thread keeps are copied into the block's shared memory.
    """

    def __init__(self, stage: Stage, lanes: int, per: int, keep: bool, share: bool):
        self.stage, self.lanes, self.per, self.keep, self.share = stage, lanes, per, keep, share
        self.fills: list[str] = []  # statements that copy parameters to shared memory
        self.copies: dict[tuple, int] = {}  # offsets of the copies in shared memory
        self.members: list[str] = []
        self.arrays = self.members  # declarations of the registers that are loaded for several edges
        self.lines: list[list[str]] = [[], [], [], []]  # by when they run: ONCE, ROW, EDGE, STORE
        self.load: list[str] = []
        self.reads: list[Item] = []
        self.starts: list[str] = []  # offsets of lanes, computed before the loads that use them
        self.tables: list[str] = []
        self.memo: dict = {}
        self.bases: dict = {}  # view of a parameter -> its base
        self.parameters: dict = {}  # registers by parameter and element
        self.kept: list[Item] = []  # keeps the items alive whose id() is a key of the memo
        self.counter = itertools.count()
        self.done: dict[int, tuple[np.ndarray, list[str]]] = {}  # folds of this pass, while results are written
        self.uses_id = False
        self.phase: Optional[int] = None  # the phase of the statements (``products.py``); None: the last
        self.words = self.kept_values = self.extra = self.shared_bytes = 0

    def name(self, letter: str) -> str:
        return f"{letter}{next(self.counter)}"

    def let(self, when: int, kind: str, texts: Sequence[str]) -> Value:
        """Declares registers, one for each text, which is its initial value."""
        if when >= EDGE:
            names = []
            for text in texts:
                names.append(self.name("t"))
                self.lines[when].append(f"const {kind} {names[-1]} = {text};")
            return Value(names, when)
        name = self.name("m")
        self.members.append(f"{kind} {name}[{len(texts)}];")
        self.lines[when].extend(f"{name}[{i}] = {text};" for i, text in enumerate(texts))
        return Value([f"{name}[{i}]" for i in range(len(texts))], when)

    # Operands --------------------------------------------------------------------------------------------------------

    def pointer(self, item: Item) -> str:
        """The text of the pointer to a tensor."""
        if not any(item is other for other in self.reads):
            self.reads.append(item)
        place = next(i for i, other in enumerate(self.reads) if item is other)
        return f"read<{stored_type(item.dtype)}>({place})"

    def _folded(self, item: Folded, table: np.ndarray) -> Value:
        """A fold of an earlier pass or, while results are written, of this pass."""
        if id(item) in self.done:
            return Value(self.columns_of(*self.done[id(item)], table), STORE)
        if any(item is fold for fold in self.stage.folds):
            raise NotLowered("a result that depends on another of the same pass")
        return self._own(item, table)

    def _own(self, item: Item, table: np.ndarray) -> Value:
        """Elements of the row's own tensor. In a phase before the last, edges of several rows are computed together."""
        if self.phase is not None:
            return self.loaded(item, table, EDGE, "own_[u]")
        return self.loaded(item, table, ROW, "own_row")

    def columns_of(self, known: np.ndarray, names: list[str], table: np.ndarray) -> list[str]:
        """The registers, known at the table ``known``, that hold the elements of ``table``."""
        found = []
        for c in range(table.shape[1]):
            same = [i for i in range(known.shape[1]) if (known[:, i] == table[:, c]).all()]
            if not same:
                raise NotLowered("a result of the row that another lane has")
            found.append(names[same[0]])
        return found

    def _operand(self, item: Operand, table: np.ndarray) -> Value:
        if item.kind == "param":
            return self.parameter(item, table)
        if item.kind == "own":
            return self._own(item, table)
        if item.kind == "edge":
            self.uses_id = True
            return self.loaded(item, table, EDGE, "id_[u]", once=True)
        return self.loaded(item, table, EDGE, "near")

    def base_of(self, item: Operand) -> tuple[Operand, np.ndarray]:
        """The parameter that an operand is a view of, and the indices of its elements there, since both share one
        tensor.
        """
        if item.node not in self.bases:
            node, views = item.node, []
            while node.op == "call_function" and name_of(node) in VIEWS:
                views.append(node)
                node = node.args[0]
            shape = tuple(int(n) for n in value_of(node).shape)
            places = torch.arange(math.prod(shape)).view(shape)
            for view in reversed(views):
                places = view.target(places, *view.args[1:])
            base = next((b for b, _ in self.bases.values() if b.node is node), None)
            if base is None:
                base = item if not views else Operand(shape, item.dtype, node, "param")
            self.bases[item.node] = base, places.reshape(-1).numpy()
        return self.bases[item.node]

    def parameter(self, item: Operand, table: np.ndarray) -> Value:
        """Elements of a parameter, among them those that the thread has kept in registers."""
        item, places = self.base_of(item)
        table = places[table]
        if self.share:  # loaded for every use, since keeping them between uses would spill registers
            self.kept_values += table.shape[1]
            order = np.argsort(table[0], kind="stable")  # neighbours in memory are one load
            names = self.loaded(item, table[:, order], EDGE, "0").names
            return Value([names[i] for i in np.argsort(order)], EDGE)
        when = ONCE if self.keep else EDGE
        of = None if self.keep else self.phase
        keys = [(id(item), of, table[:, c].tobytes()) for c in range(table.shape[1])]
        missing = [c for c, key in enumerate(keys) if key not in self.parameters]
        missing.sort(key=lambda c: int(table[0, c]))  # neighbours in memory are one load
        if missing:
            self.kept_values += len(missing)
            if self.keep and self.kept_values > MOST_KEPT:
                raise TooManyKept
            names = self.loaded(item, table[:, missing], when, "0").names
            self.parameters.update((keys[c], name) for c, name in zip(missing, names))
        return Value([self.parameters[key] for key in keys], when)

    def loaded(self, item: Item, table: np.ndarray, when: int, row: str, once: bool = False) -> Value:
        """Loads elements of a row, contiguous ones by one vector load."""
        kind, pointer, names = stored_type(item.dtype), self.pointer(item), []
        base = pointer if row == "0" else f"{pointer} + {row} * int64_t({item.numel})"
        # A parameter that must not stay in registers, so the compiler must not keep it either.
        free = row == "0" and when == EDGE
        anew = self.name("anew") if free and self.share else ""
        if anew:
            self.lines[EDGE].append(f"const int {anew} = afresh(0);")
        for first, count in runs_of(table, item.numel if row != "0" else 0):
            name = self.name("g")
            if free and self.share:
                at = self.copied(base, kind, table[:, first : first + 1], count * item.dtype.itemsize, count)
                self.lines[EDGE].append(f"Loaded<{kind}, {count}> {name}; {name}.spread(shared + {anew} + {at});")
                names += self.texts_of(item, f"{name}", count)
                continue
            place = self.place(table[:, first : first + 1], count)
            how = "once" if once or when == ROW else "gather"
            index = ""
            if free:
                self.lines[EDGE].append(f"Loaded<{kind}, {count}> {name}; {name}.gather(afresh({base}) + {place});")
            elif when == EDGE:
                index = "[u]"
                self.arrays.append(f"Loaded<{kind}, {count}> {name}[kBatch];")
                self.load.append(f"{name}[u].{how}({base} + {place});")
                self.words += max(count * item.dtype.itemsize // 4, 1)
            else:
                self.members.append(f"Loaded<{kind}, {count}> {name};")
                self.lines[when].append(f"{name}.{how}({base} + {place});")
            names += self.texts_of(item, f"{name}{index}", count)
        return Value(names, when)

    @staticmethod
    def texts_of(item: Item, name: str, count: int) -> list[str]:
        """The texts of loaded values, converted to the type of arithmetic."""
        texts = [f"value_of({name}[{i}])" for i in range(count)]
        return [f"({text} != 0)" for text in texts] if item.dtype is torch.bool else texts

    def copied(self, base: str, kind: str, column: np.ndarray, size: int, count: int) -> str:
        """The text of the address of a lane's values of a parameter in shared memory. There the values of neighbouring
        lanes are contiguous; in the parameter they are often a row apart, so that each lane would read another cache
        line.
        """
        one = column.shape[0] == 1 or bool((column == column[0]).all())
        lanes, text = 1 if one else self.lanes, self.place_text(column)
        key = base, kind, count, lanes, text
        if key not in self.copies:
            at = self.copies[key] = self.shared_bytes
            self.shared_bytes += (size * lanes + 15) // 16 * 16
            if self.shared_bytes > SHARED_BYTES:
                raise TooMuchShared("parameters that shared memory has no room for")
            self.fills.append(
                f"copy_spread<{kind}, {count}, {lanes}>({base}, shared + {at}, [](int some) {{ return {text}; }});"
            )
        return f"{self.copies[key]}, {lanes}, {'0' if one else 'some'}"

    def place(self, column: np.ndarray, count: int) -> str:
        """The text of a number that depends on the lane, computed outside of the loop over edges if it is expensive."""
        text = self.place_text(column)
        if not text.endswith("[some]"):
            return text
        member = self.name("m")
        self.members.append(f"int {member};")
        self.starts.append(f"{member} = {text};")
        return member

    def place_text(self, column: np.ndarray) -> str:
        """The text of a number that depends on the lane, as an expression of the lane."""
        lanes = column[:, 0]
        if len(lanes) == 1 or (lanes == lanes[0]).all():
            return str(int(lanes[0]))
        step, numbers = int(lanes[1] - lanes[0]), np.arange(len(lanes))
        if (lanes == lanes[0] + step * numbers).all():
            return f"({int(lanes[0])} + some * {step})"
        group = int(np.argmax(lanes != lanes[0]))
        step = int(lanes[group] - lanes[0])
        if (lanes == lanes[0] + numbers // group * step).all():
            return f"({int(lanes[0])} + some / {group} * {step})"
        name = self.name("table")
        self.tables.append(f"__device__ const int {name}[{len(lanes)}] = {{{', '.join(map(str, lanes))}}};")
        return f"{name}[some]"

    def snapshot(self):
        lists = (self.members, self.arrays, *self.lines, self.load, self.reads, self.tables, self.starts, self.fills)
        numbers = (self.uses_id, self.words, self.kept_values, self.extra, self.shared_bytes)
        return [len(x) for x in lists], dict(self.memo), dict(self.parameters), dict(self.copies), numbers

    def restore(self, saved) -> None:
        lengths, memo, parameters, copies, numbers = saved
        self.uses_id, self.words, self.kept_values, self.extra, self.shared_bytes = numbers
        self.memo, self.parameters, self.copies = dict(memo), dict(parameters), dict(copies)
        lists = (self.members, self.arrays, *self.lines, self.load, self.reads, self.tables, self.starts, self.fills)
        for x, n in zip(lists, lengths):
            del x[n:]
