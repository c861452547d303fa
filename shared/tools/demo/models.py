"""The two-layer network of the demo: only where its layers are imported from differs between the sides."""

from __future__ import annotations

from typing import Optional

import torch
import torch.nn.functional as F
from torch import Tensor

from edgeless.tools.cli.layers import EVERY_LAYER, call_layer, make_layer
from edgeless.tools.cli.relations import Relations


class Net(torch.nn.Module):
    """layer -> ELU -> layer, dropout before each and on the attention, in either framework.

    Both sides draw the same parameters from the same seed. A layer that has no linear map (AGNN) gets one in front.
    """

    def __init__(
        self,
        framework: str,
        side: str,
        layer: str,
        features: int,
        hidden: int,
        classes: int,
        heads: int,
        dropout: float,
        relations: Optional[Relations] = None,
    ):
        super().__init__()
        wide = heads * hidden
        self.map1, self.map2 = torch.nn.Identity(), torch.nn.Identity()
        if not EVERY_LAYER[layer].maps:
            self.map1, self.map2 = torch.nn.Linear(features, wide), torch.nn.Linear(wide, classes)
        self.conv1 = make_layer(layer, framework, side, features, heads, hidden, dropout, relations)
        self.conv2 = make_layer(layer, framework, side, wide, 1, classes, dropout, relations)
        self.framework, self.dropout = framework, dropout

    def forward(self, x: Tensor, graph) -> Tensor:
        x = self.map1(F.dropout(x, self.dropout, self.training))
        x = F.elu(call_layer(self.framework, self.conv1, x, graph))
        x = self.map2(F.dropout(x, self.dropout, self.training))
        return call_layer(self.framework, self.conv2, x, graph)
