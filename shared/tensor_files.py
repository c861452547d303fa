"""The library that keeps tensors in files."""

from __future__ import annotations


def safetensors(call: str, extra: str):
    """The module; ImportError says what to install.

    Args:
        call: who needs it, for the message.
        extra: of edgeless, that brings it.
    """
    try:
        import safetensors.torch
    except ImportError as error:
        raise ImportError(
            f"{call} keeps tensors as safetensors; install them with: pip install 'edgeless[{extra}]'"
        ) from error
    return safetensors
