"""The functions of generated C against those of numpy in a wider type."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from edgeless.programs.c.prelude import prelude
from edgeless.programs.run import c_compiler

FUNCTIONS = ("exp", "tanh", "log", "log1p")
ULPS = 3.0


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    text = prelude()
    for kind, suffix in (("float", "f"), ("double", "")):
        for name in FUNCTIONS:
            text += f"void v_{name}{suffix}(long n, const {kind} *x, {kind} *y) {{ "
            text += f'_Pragma("omp simd") for (long i = 0; i < n; ++i) y[i] = el_{name}{suffix}(x[i]); }}\n'
    try:
        return c_compiler.load(text)
    except c_compiler.NoCompiler as error:
        pytest.skip(str(error))


def computed(library, name: str, x: np.ndarray) -> np.ndarray:
    y = np.empty_like(x)
    pointers = [ctypes.c_void_p(a.ctypes.data) for a in (x, y)]
    getattr(library, f"v_{name}{'f' if x.dtype == np.float32 else ''}")(ctypes.c_long(x.size), *pointers)
    return y


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
