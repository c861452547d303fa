"""Decorators that keep functions out of torch.compile's traces without importing Dynamo, which doubles import time."""

import torch

# torch's internal decorator imports Dynamo at the first call; torch.compiler.disable imports it when it decorates.
untraced = getattr(torch, "_disable_dynamo", torch.compiler.disable)


def constant(function):
    """``torch.compiler.assume_constant_result`` without its import: Dynamo calls the function while it traces."""
    function._dynamo_marked_constant = True
    return function
