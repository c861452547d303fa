"""Programs: any message function without an edge tensor (see docs/design.md)."""

from .cache import ProgramCache
from .checking import check
from .program import FIRST, Program
from .spaces import DESTINATION, EDGE, NODE, PARAMETER, SOURCE, Argument, Refused, Sizes, Space

__all__ = [
    "DESTINATION",
    "EDGE",
    "FIRST",
    "NODE",
    "PARAMETER",
    "SOURCE",
    "Argument",
    "Program",
    "ProgramCache",
    "Refused",
    "Sizes",
    "Space",
    "check",
]
