"""The primitives of generated code, each with its text, which C and CUDA share."""

from __future__ import annotations

# The text of a primitive in C and in CUDA. {0} and so on are names of scalars; {m} is "f" for float32 and "" for
# float64, as math.h names functions. Functions that begin with el_ are defined in the prelude of each language.
TEXTS: dict[str, str] = {
    "add": "{0} + {1}",
    "sub": "{0} - {1}",
    "mul": "{0} * {1}",
    "div": "{0} / {1}",
    "neg": "-{0}",
    "abs": "fabs{m}({0})",
    "iabs": "({0} < 0 ? -{0} : {0})",
    "max": "({0} > {1} || {0} != {0} ? {0} : {1})",  # NaN if an operand is NaN
    "min": "({0} < {1} || {0} != {0} ? {0} : {1})",
    "lt": "{0} < {1}",
    "le": "{0} <= {1}",
    "gt": "{0} > {1}",
    "ge": "{0} >= {1}",
    "eq": "{0} == {1}",
    "ne": "{0} != {1}",
    "and": "{0} & {1}",
    "or": "{0} | {1}",
    "xor": "{0} ^ {1}",
    "not": "!{0}",
    "where": "({0} ? {1} : {2})",
    "cast": "({type}){0}",
    "rounded": "value_of(stored<{stored}>({0}))",  # rounds to the 16-bit dtype; used in CUDA only
    "exp": "el_exp{m}({0})",
    "log": "el_log{m}({0})",
    "log1p": "el_log1p{m}({0})",
    "tanh": "el_tanh{m}({0})",
    "sqrt": "sqrt{m}({0})",
    "pow": "pow{m}({0}, {1})",
    "fmod": "fmod{m}({0}, {1})",
    "atan2": "atan2{m}({0}, {1})",
    "hypot": "hypot{m}({0}, {1})",
    "round": "rint{m}({0})",
    **{name: name + "{m}({0})" for name in ("expm1", "exp2", "log2", "log10", "erf", "erfc", "floor", "ceil", "trunc")},
    **{name: name + "{m}({0})" for name in ("sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh")},
}
