"""The tensors that a call saves for its backward."""

import torch


def saved_by(call) -> list[torch.Tensor]:
    """The tensors that ``call()`` saves, in their order."""
    saved = []

    def pack(tensor):
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        call()
    return saved
