"""The text in front of a walk in C: vector types, random numbers, and functions of scalars and of vectors.

The functions have no branches and no calls, so any compiler vectorises loops over them, and the commonest functions
need no library. They are right for NaN, infinities and subnormal results; ``tests/core/test_scalar_functions.py``
bounds their errors to a few units in the last place. Scalars and vectors have functions of the same text: ``el_expf``
and ``el_exp``, ``el_exp_vf`` and ``el_exp_vd``.
"""

from __future__ import annotations

import math

_TYPES = """
#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
typedef float el_vf __attribute__((vector_size({bytes}), aligned(4), may_alias));
typedef double el_vd __attribute__((vector_size({bytes}), aligned(8), may_alias));
typedef int el_vi __attribute__((vector_size({bytes}), aligned(4), may_alias));
typedef long el_vl __attribute__((vector_size({bytes}), aligned(8), may_alias));
#define EL_INLINE static inline __attribute__((always_inline))
#if {bytes} == 64 && defined(__AVX512F__) && defined(__AVX512DQ__)
#define EL_AVX512
#endif
"""
# Results larger than the caches are written past them, whole lines at a time: they need not be read for that.
_STREAMS = """
#if defined(EL_AVX512) && !defined(__clang__)
#define EL_STREAM(at, value) __builtin_ia32_movntps512((float *)(at), (el_vf)(value))
#define EL_FENCE() __builtin_ia32_sfence()
EL_INLINE int el_streams(const void *at, long bytes) { return ((unsigned long)at & 63) == 0 && bytes > 32l << 20; }
#else
#define EL_STREAM(at, value)
#define EL_FENCE()
EL_INLINE int el_streams(const void *at, long bytes) { return 0; }
#endif
"""
_PHILOX = """
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

_SCALARS = """
EL_INLINE {I} el_bits{m}({T} x) {{ {I} i; memcpy(&i, &x, sizeof i); return i; }}
EL_INLINE {T} el_from{m}({I} i) {{ {T} x; memcpy(&x, &i, sizeof x); return x; }}
EL_INLINE {T} el_all{m}({T} x) {{ return x; }}
EL_INLINE {T} el_number{m}({I} x) {{ return ({T})x; }}
EL_INLINE {T} el_where{m}(int c, {T} a, {T} b) {{
  const {I} mask = -({I})c;
  return el_from{m}((el_bits{m}(a) & mask) | (el_bits{m}(b) & ~mask));
}}
"""

# Comparisons of vectors are -1 where they hold, and choices by bits become moves under a mask.
_VECTORS = """
EL_INLINE {I} el_bits{m}({T} x) {{ return ({I})x; }}
EL_INLINE {T} el_from{m}({I} i) {{ return ({T})i; }}
EL_INLINE {T} el_all{m}({S} x) {{ return x - ({T}){{0}}; }}
EL_INLINE {C} el_mask{m}(int c) {{ return ({C}){{0}} - c; }}
EL_INLINE {T} el_number{m}({I} x) {{ return __builtin_convertvector(x, {T}); }}
EL_INLINE {T} el_where{m}({C} c, {T} a, {T} b) {{ return ({T})((({I})a & c) | (({I})b & ~c)); }}
EL_INLINE {T} fabs{m}({T} x) {{ return ({T})(({I})x & ~({I})(-({T}){{0}})); }}
EL_INLINE {T} copysign{m}({T} x, {T} y) {{
  const {I} sign = ({I})(-({T}){{0}});
  return ({T})((({I})x & ~sign) | (({I})y & sign));
}}
EL_INLINE {T} sqrt{m}({T} x) {{
  {T} y;
  for (int k = 0; k < (int)(sizeof x / sizeof x[0]); ++k) y[k] = sqrt{s}(x[k]);
  return y;
}}
"""

# exp: x = n log 2 + r, and the Taylor series of exp(r) - 1. 2^n is applied in two factors, so that results may be
# subnormal. Adding 1.5 * 2^23 rounds to an integer, which then stands in the low bits.
_EXP = """
EL_INLINE {T} el_expm1_part{m}({T} x, {T} *two, {T} *rest) {{
  {T} k = x * {log2e}, big = k + {magic}, n = big - {magic}, half = (n * {half} + {magic}) - {magic};
  {T} r = (x - n * {high}) - n * {low};
  *two = el_from{m}((el_bits{m}(half + {magic}) - {magic_bits} + {bias}) << {shift});
  *rest = el_from{m}((el_bits{m}((n - half) + {magic}) - {magic_bits} + {bias}) << {shift});
  return {series};
}}
EL_INLINE {T} el_exp{m}({T} x) {{
  {T} two, rest;
{scaled}  x = el_where{m}(x < {least}, el_all{m}({least}), x);
  x = el_where{m}(x > {most}, el_all{m}({most}), x);
  {T} part = el_expm1_part{m}(x, &two, &rest);
  return (part + {one}) * two * rest;
{end}}}
EL_INLINE {T} el_tanh{m}({T} x) {{
  {T} two, rest, y = fabs{m}(x) * {minus2};
  y = el_where{m}(y < {tanh_least}, el_all{m}({tanh_least}), y);
  {T} part = el_expm1_part{m}(y, &two, &rest), scale = two * rest, e = part * scale + (scale - {one});
  return copysign{m}(-e / (e + {twice}), x);
}}
"""

# log: x = 2^n f with f in [sqrt(1/2), sqrt(2)), and log f = 2 artanh(s), s = (f - 1) / (f + 1).
_LOG = """
EL_INLINE {T} el_log{m}({T} x) {{
  {C} small = x < {least_normal};
  {T} y = el_where{m}(small, x * {scale}, x);
  {I} i = el_bits{m}(y) - {root_bits};
  {I} n = i >> {shift};
  {T} f = el_from{m}(i - (n << {shift}) + {root_bits});
  {T} e = el_number{m}(n) - el_where{m}(small, el_all{m}({scale_log}), el_all{m}({zero}));
  {T} s = (f - {one}) / (f + {one}), t = s * s, odd = {artanh};
  {T} out = e * {ln2_high} + (e * {ln2_low} + {twice} * (s + s * (t * odd)));
  out = el_where{m}(x < {infinity}, out, x);
  out = el_where{m}(x == {zero}, el_all{m}(-{infinity}), out);
  return el_where{m}(x < {zero}, el_all{m}({nan}), out);
}}
EL_INLINE {T} el_log1p{m}({T} x) {{
  {T} u = x + {one}, c = x - (u - {one}), l = el_log{m}(u);
  {T} out = el_where{m}(u == {zero}, l, l + c / u);
  return el_where{m}(u < {infinity}, out, l);
}}
"""

# Of vectors of doubles; those of floats stand below.
_GATES = """
EL_INLINE {T} el_sigmoid{m}({T} x) {{ return {one} / ({one} + el_exp{m}(-x)); }}
EL_INLINE {T} el_softplus{m}({T} x) {{
  return el_where{m}(x > {zero}, x, el_all{m}({zero})) + el_log1p{m}(el_exp{m}(-fabs{m}(x)));
}}
"""

# AVX-512 has instructions for 2^n x, which saturates, and for a bound that NaN passes.
_SCALED_EXP = """#ifdef EL_AVX512
  const el_vf none = {{0}};
  x = el_bound(el_all_vf({least}), x, 1);
  x = el_bound(el_all_vf({most}), x, 0);
  const el_vf n = (x * {log2e} + {magic}) - {magic}, r = (x - n * {high}) - n * {low};
  return (el_vf)__builtin_ia32_scalefps512_mask({power_e}, n, none, (unsigned short)-1, 4);
#else
"""
_BOUND = """
#ifdef EL_AVX512
EL_INLINE el_vf el_bound(el_vf bound, el_vf x, int below) {
#ifdef __clang__
  return el_where_vf(below ? bound > x : bound < x, bound, x);
#else
  return below ? (el_vf)__builtin_ia32_maxps512_mask(bound, x, x, (unsigned short)-1, 4)
               : (el_vf)__builtin_ia32_minps512_mask(bound, x, x, (unsigned short)-1, 4);
#endif
}
#endif
"""

# Sigmoid and softplus take an exp whose error grows with its argument, to 60 units in the last place at 88, where the
# function is tiny or constant: their error stays below a unit of 1. With AVX-512 it is 2^floor(y) p(y - floor(y)):
# the fraction of an infinity is 0 there and a scaling saturates, so it takes no bounds.
_FLOAT_GATES = """
EL_INLINE el_vf el_near_exp(el_vf x) {{
#ifdef EL_AVX512
  const el_vf y = x * {log2e}, none = {{0}};
  const el_vf r = (el_vf)__builtin_ia32_reduceps512_mask(y, 9, none, (unsigned short)-1);
  return (el_vf)__builtin_ia32_scalefps512_mask({power}, y, none, (unsigned short)-1, 4);
#else
  return el_exp_vf(x);
#endif
}}
EL_INLINE el_vf el_sigmoid_vf(el_vf x) {{ return {one} / ({one} + el_near_exp(-x)); }}
EL_INLINE el_vf el_softplus_vf(el_vf x) {{
  const el_vf e = el_near_exp(-fabs_vf(x));
  return el_where_vf(x > {zero}, x, el_all_vf({zero})) + e * {log1p};
}}
"""
# 2^x on [0, 1], exp(x) on [-0.348, 0.348] and log(1 + x) / x on [0, 1], all 1 at 0; relative errors of 2e-9, 1e-9 and
# 3e-8.
_POWER = (
    *("0x1p0", "0x1.62e42cp-1", "0x1.ebfd58p-3", "0x1.c68912p-5", "0x1.3d0b92p-7", "0x1.46d64ap-10", "0x1.c5417cp-13"),
)
_POWER_E = (*("0x1p0", "0x1p0", "0x1.fffffcp-2", "0x1.555414p-3", "0x1.55582ep-5", "0x1.126a4cp-7", "0x1.6ae498p-10"),)
_LOG1P = (
    *("0x1p0", "-0x1.ffff14p-2", "0x1.5535dap-2", "-0x1.fd132p-3", "0x1.884450p-3", "-0x1.19ad88p-3"),
    *("0x1.446bf8p-4", "-0x1.ec990ep-6", "0x1.5f96ccp-8"),
)


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
        "S": "float" if single else "double",
        "s": "f" if single else "",
        "bias": "127" if single else "1023L",
        "shift": "23" if single else "52",
        "magic_bits": "0x4b400000" if single else "0x4338000000000000L",
        "root_bits": "0x3f3504f3" if single else "0x3fe6a09e667f3bcdL",
        "infinity": f"__builtin_inf{'f' if single else ''}()",
        "nan": f'__builtin_nan{"f" if single else ""}("")',
        "series": f"({_horner(series, 'r', literal)} * r)",
        "artanh": _horner([1 / (2 * k + 1) for k in range(1, odd)], "t", literal),
        "power": _horner([float.fromhex(c) for c in _POWER], "r", literal),
        "power_e": _horner([float.fromhex(c) for c in _POWER_E], "r", literal),
        "log1p": _horner([float.fromhex(c) for c in _LOG1P], "e", literal),
    }
    scalars = {"T": names["S"], "m": names["s"], "I": "int" if single else "long", "C": "int"}
    vectors = {"T": "el_vf", "m": "_vf", "I": "el_vi", "C": "el_vi"}
    if not single:
        vectors = {"T": "el_vd", "m": "_vd", "I": "el_vl", "C": "el_vl"}
    scalars |= {"scaled": "", "end": ""}
    vectors |= {"scaled": _SCALED_EXP.format(**names), "end": "#endif\n"} if single else {"scaled": "", "end": ""}
    text = "".join(each.format(**names, **scalars) for each in (_SCALARS, _EXP, _LOG))
    text += _VECTORS.format(**names, **vectors) + (_BOUND if single else "")
    return text + "".join(each.format(**names, **vectors) for each in (_EXP, _LOG, _FLOAT_GATES if single else _GATES))


def prelude(vector: int) -> str:
    """The text.

    Args:
        vector: the bytes of a vector.
    """
    return _TYPES.format(bytes=vector) + _STREAMS + _PHILOX + _functions(True) + _functions(False)
