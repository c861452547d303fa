"""PyG's batches as arguments of a captured step: :func:`edgeless.capture_step` takes them apart into tensors."""

from __future__ import annotations

import copy
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data.data import BaseData

from edgeless.capture.batches import register_batch

# The attributes by which PyG splits a batch into graphs again, on the CPU, which a captured step cannot do.
_OF_PARTS = ("_slice_dict", "_inc_dict")
_KEPT = (Tensor, bool, int, float, type(None), torch.dtype, torch.Size)


def take_apart(batch: BaseData) -> tuple[Hashable, list[Any]]:
    """The names and the values of a batch's tensors and numbers. Text and lists, such as SMILES, are left out."""
    names, values = [], []
    for store in batch.stores:
        for name, value in store._mapping.items():
            if type(value) in _KEPT:
                names.append((store._key, name))
                values.append(value)
    names.append((None, "_num_graphs"))
    values.append(_private(batch).get("_num_graphs"))
    return tuple(names), values


def put_together(batch: BaseData, names: Hashable, values: list[Any]) -> BaseData:
    """A copy of a batch with nothing but the given tensors and numbers."""
    found = copy.copy(batch)
    private = _private(found)
    for name in _OF_PARTS:
        private.pop(name, None)
    stores = {store._key: store._mapping for store in found.stores}
    for mapping in stores.values():
        mapping.clear()
    for (key, name), value in zip(names[:-1], values[:-1], strict=True):
        stores[key][name] = value
    if values[-1] is not None:
        private["_num_graphs"] = values[-1]
    return found


def _private(batch: BaseData) -> dict[str, Any]:
    """PyG's private state of a batch, beside its attributes."""
    return vars(batch.__dict__["_store" if "_store" in batch.__dict__ else "_global_store"])


register_batch(BaseData, take_apart, put_together)
