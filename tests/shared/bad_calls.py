"""Calls of layers with one argument that does not fit, and what their errors must say."""

import re

import torch

# What an error of our own checks says of what was expected.
OWN = re.compile(r"expected|must (have|be|run)|has id")


def _floats(t):
    return t.is_floating_point()


def _ids(t):
    return not t.is_floating_point()


# Name -> (what becomes of a tensor, which tensors it is tried on).
FAULTS = {
    "transposed ids": (lambda t: t.t(), lambda t: _ids(t) and t.dim() == 2),
    "float ids": (lambda t: t.float(), _ids),
    "ids out of range": (lambda t: t + 1000, _ids),
    "another device": (lambda t: t.to("meta"), lambda t: True),
    "another width": (lambda t: torch.cat((t, t[:, :1]), 1), lambda t: _floats(t) and t.dim() == 2),
    "too few rows": (lambda t: t[:-1], lambda t: _floats(t) or t.dim() == 1),
    "another dtype": (lambda t: t.half(), _floats),
}


def bad_calls(inputs, fault):
    """(position, the changed tensor, inputs) for every argument that a fault applies to; of a pair or a dictionary the
    first tensor is changed.
    """
    change, applies = FAULTS[fault]
    for place, value in enumerate(inputs):
        for changed, tensor in _changed(value, change, applies):
            yield place, tensor, (*inputs[:place], changed, *inputs[place + 1 :])


def _changed(value, change, applies):
    if isinstance(value, torch.Tensor):
        if applies(value):
            tensor = change(value)
            yield tensor, tensor
    elif isinstance(value, tuple) and value:
        for changed, tensor in _changed(value[0], change, applies):
            yield (changed, *value[1:]), tensor
    elif isinstance(value, dict):
        key = next(iter(value))
        for changed, tensor in _changed(value[key], change, applies):
            yield {**value, key: changed}, tensor


def assert_errors_say_what_came(theirs, ours, inputs, fault):
    """Every bad call gives the stock layer's result, or an error that names what was expected or describes the tensor.

    Returns the number of errors.
    """
    errors = 0
    for place, tensor, given in bad_calls(inputs, fault):
        try:
            ours(*given)
        except Exception as error:
            errors += 1
            message, where = str(error), f"argument {place}, {fault}: {type(error).__name__}: {error}"
            described = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} on {tensor.device}"
            assert ("edgeless: " in message and described in message) or OWN.search(message), where
        else:
            if fault != "another dtype":  # ours accept more of them on the CPU
                theirs(*given)
    return errors
