"""Loads the compiled part, whose import registers the ops in ``torch.ops.edgeless``, or says how to get it."""

import importlib

import torch  # the extension links to its libraries

try:
    importlib.import_module("edgeless._C")
except ImportError as error:
    raise ImportError(
        f"edgeless._C, the compiled part of edgeless, does not load with torch {torch.__version__} ({error}): build it "
        "against this torch with `pip install --no-build-isolation .` in a checkout of edgeless."
    ) from error
