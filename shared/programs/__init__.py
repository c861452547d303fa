"""Programs: any message function without an edge tensor (see docs/design.md).

The tracer, the passes and the interpreter are imported when the first program is made.
"""

from .cache import ProgramCache
from .front.spaces import DESTINATION, EDGE, FIRST, NODE, PARAMETER, SOURCE, Argument, Refused, Sizes, Space

__all__ = [
    "DESTINATION",
    "EDGE",
    "FIRST",
    "NODE",
    "PARAMETER",
    "SOURCE",
    "Argument",
    "ProgramCache",
    "Refused",
    "Sizes",
    "Space",
]
