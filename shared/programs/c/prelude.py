"""The text in front of a walk in C: vector types, random numbers, and functions that compilers can vectorise.

The functions have no branches and no calls, so any compiler vectorises loops over them, and the commonest functions
need no library. They are right for NaN, infinities and subnormal results; ``tests/core/test_scalar_functions.py``
bounds their errors to a few units in the last place.
"""

from __future__ import annotations

import math

_TYPES = """
#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
typedef float el_vf __attribute__((vector_size(32), aligned(4), may_alias));
typedef double el_vd __attribute__((vector_size(32), aligned(8), may_alias));
#define EL_INLINE static inline __attribute__((always_inline))
EL_INLINE int el_bits(float x) { int i; memcpy(&i, &x, 4); return i; }
EL_INLINE float el_float(int i) { float x; memcpy(&x, &i, 4); return x; }
EL_INLINE long el_bitsd(double x) { long i; memcpy(&i, &x, 8); return i; }
EL_INLINE double el_double(long i) { double x; memcpy(&x, &i, 8); return x; }
EL_INLINE float el_wheref(int c, float a, float b) { return el_float((el_bits(a) & -c) | (el_bits(b) & ~-c)); }
EL_INLINE double el_where(int c, double a, double b) {
  const long mask = -(long)c;
  return el_double((el_bitsd(a) & mask) | (el_bitsd(b) & ~mask));
}
static void el_philox(unsigned long seed, unsigned long id, unsigned long group, unsigned long *out) {
  const unsigned long mask = 0xFFFFFFFFul;
  unsigned long c0 = id & mask, c1 = id >> 32, c2 = group, c3 = 0, k0 = seed & mask, k1 = seed >> 32;
  for (int round = 0; round < 7; ++round) {
    unsigned long p0 = c0 * 0xD2511F53ul, p1 = c2 * 0xCD9E8D57ul;
    c0 = (p1 >> 32) ^ c1 ^ k0; c2 = (p0 >> 32) ^ c3 ^ k1;
    c1 = p1 & mask; c3 = p0 & mask;
    k0 = (k0 + 0x9E3779B9ul) & mask; k1 = (k1 + 0xBB67AE85ul) & mask;
  }
  out[0] = c0; out[1] = c1; out[2] = c2; out[3] = c3;
}
"""

# exp: x = n log 2 + r, and the Taylor series of exp(r) - 1. 2^n is applied in two factors, so that results may be
# subnormal. Adding 1.5 * 2^23 rounds to an integer, which then stands in the low bits.
_EXP = """
EL_INLINE {T} el_expm1_part{m}({T} x, {T} *two, {T} *rest) {{
  {T} k = x * {log2e}, big = k + {magic}, n = big - {magic}, half = (n * {half} + {magic}) - {magic};
  {T} r = (x - n * {high}) - n * {low};
  *two = {asfloat}(({bits}(half + {magic}) - {bits}({magic}) + {bias}) << {shift});
  *rest = {asfloat}(({bits}((n - half) + {magic}) - {bits}({magic}) + {bias}) << {shift});
  return {series};
}}
EL_INLINE {T} el_exp{m}({T} x) {{
  {T} two, rest;
  x = el_where{m}(x < {least}, {least}, x);
  x = el_where{m}(x > {most}, {most}, x);
  {T} part = el_expm1_part{m}(x, &two, &rest);
  return (part + {one}) * two * rest;
}}
EL_INLINE {T} el_tanh{m}({T} x) {{
  {T} two, rest, y = fabs{m}(x) * {minus2};
  y = el_where{m}(y < {tanh_least}, {tanh_least}, y);
  {T} part = el_expm1_part{m}(y, &two, &rest), scale = two * rest, e = part * scale + (scale - {one});
  return copysign{m}(-e / (e + {twice}), x);
}}
"""

# log: x = 2^n f with f in [sqrt(1/2), sqrt(2)), and log f = 2 artanh(s), s = (f - 1) / (f + 1).
_LOG = """
EL_INLINE {T} el_log{m}({T} x) {{
  int small = x < {least_normal};
  {T} y = small ? x * {scale} : x;
  {I} i = {bits}(y) - {root_bits};
  {I} n = i >> {shift};
  {T} f = {asfloat}(i - (n << {shift}) + {root_bits});
  {T} e = ({T})n - (small ? {scale_log} : {zero});
  {T} s = (f - {one}) / (f + {one}), t = s * s, odd = {artanh};
  {T} out = e * {ln2_high} + (e * {ln2_low} + {twice} * (s + s * (t * odd)));
  out = x < {infinity} ? out : x;
  out = x == {zero} ? -{infinity} : out;
  return x < {zero} ? {nan} : out;
}}
EL_INLINE {T} el_log1p{m}({T} x) {{
  {T} u = x + {one}, c = x - (u - {one}), l = el_log{m}(u);
  {T} out = u == {zero} ? l : l + c / u;
  return u < {infinity} ? out : l;
}}
"""


def _horner(coefficients: list[float], variable: str, literal) -> str:
    text = literal(coefficients[-1])
    for c in coefficients[-2::-1]:
        text = f"({text} * {variable} + {literal(c)})"
    return text


def _functions(single: bool) -> str:
    def literal(x: float) -> str:
        return float(x).hex() + ("f" if single else "")

    terms, odd = (7, 5) if single else (13, 11)
    series = [1 / math.factorial(k) for k in range(1, terms + 1)]
    high = float.fromhex("0x1.62ep-1") if single else float.fromhex("0x1.62e42feep-1")
    low = math.log(2) - high if single else float.fromhex("0x1.a39ef35793c76p-33")
    values = {
        "one": 1, "twice": 2, "minus2": -2, "half": 0.5, "zero": 0, "log2e": 1 / math.log(2), "high": high, "low": low,
        "ln2_high": high, "ln2_low": low,
        "magic": 1.5 * 2**23 if single else 1.5 * 2**52,
        "least": -104.5 if single else -746.5, "most": 89.5 if single else 710.5,
        "tanh_least": -40 if single else -80,
        "least_normal": 2.0**-126 if single else 2.0**-1022, "scale": 2.0**25 if single else 2.0**54,
        "scale_log": 25 if single else 54,
    }  # fmt: skip
    names = {name: literal(value) for name, value in values.items()}
    names |= {
        "T": "float" if single else "double",
        "I": "int" if single else "long",
        "m": "f" if single else "",
        "bits": "el_bits" if single else "el_bitsd",
        "asfloat": "el_float" if single else "el_double",
        "bias": "127" if single else "1023L",
        "shift": "23" if single else "52",
        "root_bits": "0x3f3504f3" if single else "0x3fe6a09e667f3bcdL",
        "infinity": f"__builtin_inf{'f' if single else ''}()",
        "nan": f'__builtin_nan{"f" if single else ""}("")',
        "series": f"({_horner(series, 'r', literal)} * r)",
        "artanh": _horner([1 / (2 * k + 1) for k in range(1, odd)], "t", literal),
    }
    return _EXP.format(**names) + _LOG.format(**names)


def prelude() -> str:
    """The text."""
    return _TYPES + _functions(True) + _functions(False)
