"""What decides whether two calls of a captured model are equal, field by field: each alone makes them another call."""

import contextlib
import threading

import pytest
import torch

import edgeless
from edgeless import _C
from edgeless.capture import keys as capture_keys

# Settings ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def changed(get, put, value):
    before = get()
    put(value)
    try:
        yield
    finally:
        put(before)


def autocast_of_cuda():
    return torch.is_autocast_enabled(), torch.get_autocast_gpu_dtype()


def autocast_on_cuda(to):
    torch.set_autocast_enabled(to[0])
    torch.set_autocast_gpu_dtype(to[1])


# In the order of the fields; None is the thread, which no block changes.
SETTINGS = [
    None,
    lambda: torch.no_grad(),
    lambda: contextlib.ExitStack(),
    lambda: changed(autocast_of_cuda, autocast_on_cuda, (True, torch.bfloat16)),
    lambda: edgeless.backend("reference"),
    lambda: edgeless.engine("rowsplit"),
    lambda: changed(torch.get_default_dtype, torch.set_default_dtype, torch.float64),
    lambda: changed(torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True),
    lambda: changed(
        torch._C._get_cublas_allow_tf32, torch._C._set_cublas_allow_tf32, not torch._C._get_cublas_allow_tf32()
    ),
]


def differing(one, other):
    return [place for place, (a, b) in enumerate(zip(one, other, strict=True)) if a != b]


def test_every_setting_is_a_field():
    before = capture_keys.settings()
    assert len(before) == len(SETTINGS)
    for place, setting in enumerate(SETTINGS):
        if setting is None or place == 2:
            continue
        with setting():
            assert differing(capture_keys.settings(), before) == [place]
    with torch.no_grad():  # inference mode turns gradients off as well
        before = capture_keys.settings()
        with torch.inference_mode():
            assert differing(capture_keys.settings(), before) == [2]


def test_two_threads_make_two_calls():
    found = []
    other = threading.Thread(target=lambda: found.append(capture_keys.settings()))
    other.start()
    other.join()
    assert differing(found[0], capture_keys.settings()) == [0]


def test_the_two_dtypes_of_autocast_are_two_settings():
    found = set()
    for to in ((False, torch.float16), (True, torch.float16), (True, torch.bfloat16)):
        with changed(autocast_of_cuda, autocast_on_cuda, to):
            found.add(capture_keys.settings())
    assert len(found) == 3


# Arguments ---------------------------------------------------------------------------------------------------------

FLOATS = torch.arange(12.0).view(3, 4)
INTEGERS = torch.arange(6)
GRAPH = edgeless.Graph.from_edge_index(torch.tensor([[0, 1], [1, 0]]))


def edited():
    """The tensor of integers itself, with another version."""
    other = INTEGERS.clone()
    one = capture_keys.leaf_key(other, -1), _C.call_key((other,), {}, -1)
    other[0] = 0
    return one, (capture_keys.leaf_key(other, -1), _C.call_key((other,), {}, -1))


EQUAL = {
    "other values": (FLOATS, FLOATS + 1),
    "the same integers": (INTEGERS, INTEGERS),
    "the same graph": (GRAPH, GRAPH),
    "numbers": (2, 2),
}
DIFFERENT = {
    "shape": (FLOATS, FLOATS[:2]),
    "strides": (FLOATS, FLOATS.t().contiguous().t()),
    "dtype": (FLOATS, FLOATS.double()),
    "a gradient is wanted": (FLOATS, FLOATS.clone().requires_grad_()),
    "another tensor of integers": (INTEGERS, INTEGERS.clone()),
    "another graph": (GRAPH, edgeless.Graph.from_edge_index(torch.tensor([[0, 1], [1, 0]]))),
    "a number": (2, 3),
    "the type of a number": (1, True),
    "the type of a float": (1, 1.0),
    "text": ("a", "b"),
    "None": (None, 0),
    "a dtype": (torch.float32, torch.float64),
}


def leaf_keys(value):
    """By Python, and by C++ where it answers."""
    fast = None if isinstance(value, edgeless.Graph) else _C.call_key((value,), {}, -1)[:2]
    return (capture_keys.leaf_key(value, -1), fast)


@pytest.mark.parametrize("case", EQUAL)
def test_equal_arguments(case):
    one, other = map(leaf_keys, EQUAL[case])
    assert one == other


@pytest.mark.parametrize("case", DIFFERENT)
def test_arguments_that_differ_in_one_field(case):
    one, other = DIFFERENT[case]
    slow, fast = zip(leaf_keys(one), leaf_keys(other), strict=True)
    assert slow[0] != slow[1]
    assert fast[0] is None or fast[0] != fast[1]


def test_an_edited_tensor_of_integers_is_another_argument():
    one, other = edited()
    assert one[0] != other[0] and one[1][:2] != other[1][:2]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (((1, 2), {}), (([1, 2],), {})),
        (((1, 2), {}), ((1,), {"x": 2})),
        (((), {"x": 1}), ((), {"y": 1})),
        (((1, (2,)), {}), (((1, 2),), {})),
    ],
)
def test_how_arguments_are_nested_is_part_of_the_key(one, other):
    assert _C.call_key(*one, -1)[:2] != _C.call_key(*other, -1)[:2]
    nested = [capture_keys.flatten(call, []) for call in (one, other)]
    assert nested[0] != nested[1]
