"""The kernels of sums over relations of float32 rows, compiled by g++ for the host: no GPU, but the same text."""

from __future__ import annotations

import ctypes
import functools
import tempfile
from pathlib import Path

import on_host as host
from torch import Tensor

_FLAGS = ("-fno-strict-aliasing", "-D__CUDA_ARCH__=900", f"-I{Path(__file__).parent}")
_DYNAMIC = ("extern __shared__ uint4 two_weights[];", "extern __shared__ float4 memory[];")
_R = "relational/cuda"
# Instructions of PTX, and declarations of CUDA, in the headers that the kernels include, and calls in their place.
_REPLACED = {
    **host.REPLACED,
    "common/words.cuh": [
        (
            'asm("mad.wide.u32 %0, %1, %2, %3;" : "=l"(address) : "r"(index), "r"(stride), "l"(base));',
            "address = base + static_cast<uint64_t>(index) * stride;",
        )
    ],
    "projection/cuda/tiles.cuh": [
        ("return static_cast<uint32_t>(__cvta_generic_to_shared(at));", "return on_host::shared_address(at);")
    ],
    f"{_R}/shared_access.cuh": [
        (
            'asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from));',
            "on_host::copy(to, from, true);",
        ),
        (
            'asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there ? 16 : 0));',
            "on_host::copy(to, from, there);",
        ),
    ],
    f"{_R}/short_segments.cuh": [(_DYNAMIC[0], "uint4* const two_weights = on_host::dynamic;")],
    f"{_R}/short_gradients.cuh": [(_DYNAMIC[1], "float4* const memory = reinterpret_cast<float4*>(on_host::dynamic);")],
    f"{_R}/short_rows.cuh": [("__shared__ alignas(16) float bias", "alignas(16) __shared__ float bias")],
}
_SOURCE = """
#include "on_host.h"
#include "segments_on_host.h"
#include "relational/cuda/short_gradients.cuh"
#include "relational/cuda/short_segments.cuh"
#include "relational/cuda/short_rows.cuh"

namespace edgeless::cuda::relational {

struct Products {
  SegmentProductsArgs args;
  ShortScratch scratch;
  int chunks;
};
struct Gradients {
  SegmentGradientsArgs args;
  uint4* parts;
};
void prepare_products(Products c) { prepare_products_kernel<WIDTH>(c.args, c.scratch, c.chunks); }
void products(Products c) { short_products_kernel<WIDTH, WEIGHTS, FULL>(c.args, c.scratch, c.chunks); }
void prepare_gradients(Gradients c) { prepare_gradients_kernel(c.args, c.parts); }
void gradients(Gradients c) { short_gradients_kernel<WEIGHTS, FULL>(c.args, c.parts); }
void rows(RowSumsArgs args) { short_rows_kernel<STORED, TRANSPOSED, FULL && WIDTH == 64>(args); }

template <class Args>
void launch(void (*kernel)(Args), const Args& args, unsigned blocks, unsigned threads, int bytes = 0) {
  on_host::grid_ = {blocks, 1, 1}, on_host::threads_ = {threads, 1, 1};
  on_host::launch(kernel, reinterpret_cast<const char*>(&args), blocks, 1, threads, bytes);
}

// Blocks: how many take the chunks of products from their queue, or loop over the rows.
extern "C" void run_products(const SegmentProductsArgs* args, void* memory, int blocks) {
  const int chunks = num_tiles(args->segments.count, args->segments.types, args->share);
  const Products call{*args, short_scratch(memory, args->segments.types, WIDTH, chunks), chunks};
  launch(prepare_products, call, args->segments.types + chunks / kPartThreads + 1, kPartThreads);
  launch(products, call, min(blocks, chunks), ShortProducts::kThreads, short_products_bytes(WIDTH));
}
extern "C" void run_gradients(const SegmentGradientsArgs* args, void* memory, int) {
  const int chunks = num_tiles(args->segments.count, args->segments.types, args->share);
  const Gradients call{*args, static_cast<uint4*>(memory)};
  if (args->out) launch(prepare_gradients, call, args->segments.types, kPartThreads);
  launch(gradients, call, chunks, ShortGradients::kThreads, kShortGradientsBytes);
}
extern "C" void run_rows(const RowSumsArgs* args, int blocks) { launch(rows, *args, blocks, ShortRows::kThreads); }

}  // namespace edgeless::cuda::relational
"""


class Segments(ctypes.Structure):
    """``SegmentTiles`` of core_cuda/relational/cuda/segment_tiles.h."""

    _fields_ = [
        ("type_tiles", ctypes.c_void_p), ("tiles", ctypes.c_void_p), ("count", ctypes.c_int64), ("types", ctypes.c_int),
        ("ptr", ctypes.c_void_p), ("rows", ctypes.c_void_p),
    ]  # fmt: skip


class Neighbors(ctypes.Structure):
    _fields_ = [
        ("indices", ctypes.c_void_p), ("weights", ctypes.c_void_p), ("ids", ctypes.c_void_p), ("rows", ctypes.c_void_p),
        ("row_bytes", ctypes.c_uint32), ("vectors", ctypes.c_int), ("sub_warp_log2", ctypes.c_int),
        ("of_segments", ctypes.c_void_p),
    ]  # fmt: skip


class Rows(ctypes.Structure):
    _fields_ = [("numbers", ctypes.c_void_p), ("row_numbers", ctypes.c_int64)]

    @classmethod
    def of(cls, t: Tensor) -> Rows:
        return cls(t.data_ptr(), t.stride(-2))


class ProductsArgs(ctypes.Structure):
    """``SegmentProductsArgs``."""

    _fields_ = [
        ("segments", Segments), ("neighbors", Neighbors), ("weight", Rows), ("weight_type", ctypes.c_int64),
        ("out", ctypes.c_void_p), ("in_width", ctypes.c_int), ("out_width", ctypes.c_int), ("share", ctypes.c_int),
        ("few", ctypes.c_bool),
    ]  # fmt: skip


class GradientsArgs(ctypes.Structure):
    """``SegmentGradientsArgs``."""

    _fields_ = [
        ("segments", Segments), ("neighbors", Neighbors), ("weight", Rows), ("x", Rows),
        ("weight_type", ctypes.c_int64), ("out", ctypes.c_void_p), ("partial", ctypes.c_void_p),
        ("in_width", ctypes.c_int), ("out_width", ctypes.c_int), ("share", ctypes.c_int), ("few", ctypes.c_bool),
    ]  # fmt: skip


class RowSumsArgs(ctypes.Structure):
    _fields_ = [
        ("tiles", ctypes.c_void_p), ("ptr", ctypes.c_void_p), ("neighbors", Neighbors), ("num_tiles", ctypes.c_int),
        ("num_rows", ctypes.c_int64), ("own_rows", ctypes.c_int64), ("own", Rows), ("root", Rows),
        ("transposed", ctypes.c_bool), ("bias", ctypes.c_void_p), ("out", ctypes.c_void_p), ("wide", ctypes.c_bool),
        ("own_width", ctypes.c_int), ("width", ctypes.c_int), ("share", ctypes.c_int), ("few", ctypes.c_bool),
        ("little", ctypes.c_bool),
    ]  # fmt: skip


def neighbors(rows: Tensor, indices: Tensor, weights=None, ids=None, of_segments=None) -> Neighbors:
    size = rows.element_size()
    of = (None if t is None else t.data_ptr() for t in (weights, ids))
    return Neighbors(
        indices.data_ptr(), *of, rows.data_ptr(), rows.stride(0) * size, rows.size(1) * size // 16, 2,
        None if of_segments is None else of_segments.data_ptr(),
    )  # fmt: skip


@functools.cache
def _folder() -> tempfile.TemporaryDirectory:
    made = host.headers(_REPLACED)
    for path in Path(made.name).rglob("*.cuh"):
        text = path.read_text()
        path.write_text(text.replace("asm volatile(", "asm(").replace("__noinline__ ", ""))
    return made


@functools.cache
def library(width: int, weights: str, full: bool, stored: str = "float", transposed: bool = False) -> ctypes.CDLL:
    """``run_products``, ``run_gradients`` and ``run_rows`` of the kernels with these template arguments."""
    defined = {
        "WIDTH": width, "WEIGHTS": f"Weights::{weights}", "FULL": str(full).lower(), "STORED": stored,
        "TRANSPOSED": str(transposed).lower(),
    }  # fmt: skip
    macros = [f"-D{name}={value}" for name, value in defined.items()]
    return host.library_of(_SOURCE, _folder(), *_FLAGS, *macros)
