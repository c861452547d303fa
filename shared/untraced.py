"""What torch.compile runs as it is, without an import of Dynamo, which takes as long as that of the rest of torch."""

import torch

# torch's own decorator in place of torch.compiler.disable, which imports Dynamo where it stands. This one does at the
# first call.
untraced = getattr(torch, "_disable_dynamo", torch.compiler.disable)


def constant(function):
    """``torch.compiler.assume_constant_result`` without its import: Dynamo calls the function while it traces."""
    function._dynamo_marked_constant = True
    return function
