"""The text in C that runs the parts of a walk on threads, and adds their sums over edges in the order of the parts."""

from __future__ import annotations

from .loops import TotalArray
from .types import bytes_of, memory_type

_PARTS, _MOST_WORKSPACE = 64, 64 << 20


def parts_of(size: int) -> int:
    """The number of parts into which rows are cut if each part has a workspace of ``size`` bytes."""
    parts = _PARTS
    while parts > 1 and parts * size > _MOST_WORKSPACE:
        parts //= 2
    return parts


def driver_text(offsets: dict[TotalArray, int], size: int, place: int, dense: str = "1") -> list[str]:
    """The text behind ``el_part``.

    Args:
        offsets: the offset of each total in a part's workspace; the sums of many edges follow it.
        size: the bytes of a part's workspace.
        place: the index of the first total among the pointers; the workspace follows the last total.
        dense: the C expression that is true if a part may skip nothing.
    """
    workspace, parts = place + len(offsets), parts_of(size)
    lines = [_DRIVER.format(parts=parts, workspace=workspace, size=size, dense=dense)]
    for i, (total, offset) in enumerate(offsets.items()):
        kind, n = memory_type(total.array.dtype), total.array.numel
        step = (n * bytes_of(total.array.dtype) + 63) // 64 * 64
        lines += [
            f"  {{ {kind} *out = P[{place + i}];",
            f"    memset(out, 0, sizeof({kind}) * {n});",
            f"    for (long part = 0; part < {parts}; ++part) {{",
            f"      const char *from = (const char *)P[{workspace}] + part * {size};",
            f"      const {kind} *in = (const {kind} *)(from + {offset + step});",
            f"      for (long k = 0; k < {n}; ++k) out[k] += in[k]; }} }}",
        ]
    return [*lines, "  return work.bad;", "}"]


_DRIVER = """struct el_work {{ void **P; const long *N; long next; int bad, dense; }};
static long el_cut(const long *ptr, long rows, long part) {{
  const long want = (ptr[rows] + rows) / {parts} * part + (ptr[rows] + rows) % {parts} * part / {parts};
  long low = 0, high = rows;
  if (part == {parts}) return rows;
  while (low < high) {{
    const long middle = (low + high) / 2;
    if (ptr[middle] + middle < want) low = middle + 1; else high = middle;
  }}
  return low;
}}
static void *el_thread(void *given) {{
  struct el_work *work = given;
  for (;;) {{
    const long part = __atomic_fetch_add(&work->next, 1, __ATOMIC_RELAXED);
    if (part >= {parts}) return 0;
    const long first = el_cut(work->P[0], work->N[0], part), last = el_cut(work->P[0], work->N[0], part + 1);
    char *W = (char *)work->P[{workspace}] + part * {size};
    const int bad = el_part(work->P, work->N, first, last, W, work->dense);
    if (bad) __atomic_store_n(&work->bad, 1, __ATOMIC_RELAXED);
  }}
}}
int walk(void **P, const long *N) {{
  struct el_work work = {{P, N, 0, 0, {dense}}};
  pthread_t threads[256];
  int started = 0;
  for (; started < N[4] - 1 && started < 256; ++started)
    if (pthread_create(&threads[started], 0, el_thread, &work)) break;
  el_thread(&work);
  for (int t = 0; t < started; ++t) pthread_join(threads[t], 0);"""
