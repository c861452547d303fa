"""The functions of generated C against those of numpy in a wider type."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from edgeless.programs.c.prelude import prelude
from edgeless.programs.run import c_compiler

FUNCTIONS = ("exp", "tanh", "log", "log1p")
GATES = {
    "sigmoid": lambda x: np.where(x > 0, 1 / (1 + np.exp(-np.abs(x))), np.exp(-np.abs(x)) / (1 + np.exp(-np.abs(x)))),
    "softplus": lambda x: np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x))),
}
ULPS = 3.0
FORMS = ("scalars", 16, 32, 64)  # scalars, or vectors of that many bytes


@pytest.fixture(scope="module", params=FORMS)
def library(request):
    scalars = request.param == "scalars"
    text = prelude(32 if scalars else request.param)
    for kind, suffix in (("float", "f"), ("double", "")):
        for name in FUNCTIONS if scalars else (*FUNCTIONS, *GATES):
            text += f"void v_{name}{suffix}(long n, const {kind} *x, {kind} *y) {{ "
            if scalars:
                text += f'_Pragma("omp simd") for (long i = 0; i < n; ++i) y[i] = el_{name}{suffix}(x[i]); }}\n'
                continue
            vector = f"el_v{kind[0]}"
            text += f"for (long i = 0; i < n; i += (long)(sizeof({vector}) / sizeof({kind}))) "
            text += f"*({vector} *)&y[i] = el_{name}_v{kind[0]}(*(const {vector} *)&x[i]); }}\n"
    try:
        return c_compiler.load(text)
    except c_compiler.NoCompiler as error:
        pytest.skip(str(error))


def computed(library, name: str, x: np.ndarray) -> np.ndarray:
    x, count = np.concatenate([x, np.ones(-x.size % 16, x.dtype)]), x.size
    y = np.empty_like(x)
    pointers = [ctypes.c_void_p(a.ctypes.data) for a in (x, y)]
    getattr(library, f"v_{name}{'f' if x.dtype == np.float32 else ''}")(ctypes.c_long(x.size), *pointers)
    return y[:count]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_few_units_in_the_last_place(library, name, dtype):
    draw = np.random.default_rng(0)
    most = 90 if dtype is np.float32 else 711
    x = np.concatenate(
        [draw.normal(size=50_000) * 10.0 ** draw.integers(-8, 3, 50_000), draw.uniform(-most, most, 50_000)]
    )
    x = np.abs(x) if name == "log" else np.where(x < -1, -x, x) if name == "log1p" else x
    x = x.astype(dtype)
    with np.errstate(over="ignore", under="ignore"):
        expected = getattr(np, name)(x.astype(np.longdouble))
        rounded = expected.astype(dtype)
    found, finite = computed(library, name, x), np.isfinite(rounded)
    assert np.array_equal(found[~finite], rounded[~finite])
    units = np.abs(found[finite] - expected[finite]) / np.spacing(np.abs(rounded[finite])).astype(np.longdouble)
    assert units.max() <= ULPS


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_nan_infinities_and_zeros(library, name, dtype):
    x = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, -1.0, -2.0, 1e-40, 1000.0, -1000.0], dtype=dtype)
    with np.errstate(all="ignore"):
        np.testing.assert_allclose(computed(library, name, x), getattr(np, name)(x), rtol=1e-6)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", GATES)
def test_gates_of_vectors(library, name, dtype, request):
    """Their error is below a unit in the last place of 1, and in the tails a few more of their own."""
    if "scalars" in request.node.callspec.id.split("-"):
        pytest.skip("scalars have no gates of their own")
    x = np.concatenate([np.linspace(-88, 88, 40_001), np.linspace(-3, 3, 40_001), 10.0 ** np.linspace(-30, 1.9, 999)])
    x = x.astype(dtype)
    expected = GATES[name](x.astype(np.longdouble))
    found, unit = computed(library, name, x), np.finfo(dtype).eps
    assert (np.abs(found - expected) / (unit * np.maximum(np.abs(expected), 1))).max() <= 1.0
    assert (np.abs(found - expected) / (unit * expected)).max() <= 2.0 + 0.75 * 88
    assert (np.abs(found - expected) / (unit * expected))[np.abs(x) < 4].max() <= 4.0
    special = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1e30, -1e30, 104.0, -104.0, 1e-40], dtype=dtype)
    with np.errstate(all="ignore"):
        np.testing.assert_allclose(computed(library, name, special), GATES[name](special), rtol=1e-5)
