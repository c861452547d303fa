"""Sets of options of the ``bench`` command: each makes one set of figures of the documents."""

from __future__ import annotations

from edgeless.tools.cli.layers import GENERATED, LAYERS

from . import engines, scaleout, training
from .baseline import H200, H200_RELATIONS
from .graphs import MOLECULES

OPS = ("gatv2_H2_D64", "gatv2_H8_D128", "gt_H4_D128")
ATTENTION = ("gatv2", "gat", "transformer")
RELATIONAL = tuple(name for name, layer in LAYERS.items() if layer.types is not None)
ONE_HEAD = {"features": 64, "heads": 1, "channels": 64}
NEW_GRAPHS = {
    "graph": [name for name, count in MOLECULES.items() if count <= 64],
    "new_graphs": tuple(name for name in LAYERS if name != "gcn-cached"),  # gcn-cached needs one fixed graph
    "features": 64,
    "heads": 4,
    "channels": 16,
}
SUITES = {
    "cpu": {
        "graph": ["cora", "tolokers", "arxiv", "pattern"],
        "layer": (*ATTENTION, "agnn"),
    },
    "cpu-sums": {
        "graph": ["cora", "tolokers", "arxiv", "pattern"],
        "layer": ("gcn", "graphconv", "sage-mean", "sage-max"),
    },
    "overhead": {
        "graph": ["tiny"],
        "layer": (*ATTENTION, "agnn", "gcn", "graphconv", "sage-mean", "sage-max"),
        "peers": ["pyg", "dgl", "edgeless-pyg", "edgeless-dgl"],
    },
    "minibatch": {
        "graph": ["arxiv"],
        "minibatch": ("sage-mean", "sage-max", "gatv2"),
    },
    "molecules": {**NEW_GRAPHS, "threads": 1},
    "threads": {
        "graph": ["tolokers", "star"],
        "op": ["gatv2_H4_D32", "gat_H4_D32", "gt_H4_D32"],
        "peers": ["edgeless"],
        "compare_threads": [1, 2],
    },
    "h200": {
        "graph": ["tolokers", "arxiv", "city-roads-L", "twitch", "hm", "pokec"],
        "op": OPS,
        "dtype": ["fp32", "bf16"],
        "peers": ["edgeless"],
        "baseline": H200,
    },
    "h200-sums": {
        "graph": ["tolokers", "arxiv", "city-roads-L", "twitch", "hm", "pokec"],
        "op": ["min_F512", "spmm_none_F512", "spmm_both_F512"],
        "dtype": ["fp32", "bf16"],
        "peers": ["torch-csr", "edgeless", "edgeless-cusparse"],
        "baseline": H200,
    },
    "engines": {
        "graph": [*engines.GRAPHS, *(f"{name}:community" for name in engines.GRAPHS)],
        "op": engines.OPS,
        "dtype": ["fp32", "bf16"],
        "peers": [*engines.PEERS, engines.CHOSEN],
        "mode": ["forward_backward"],
        "rounds": 1,
        "warmup": 3,
        "runs": 5,
        "no_memory": True,
    },
    "shapes": {
        "graph": ["artnet", "city-reviews", "avazu"],
        "shapes": True,
    },
    "scale-out": {
        "graph": ["arxiv"],
        "scale_out": scaleout.MODELS,
    },
    "ddp": {
        "graph": ["arxiv"],
        "ddp": scaleout.MODELS,
    },
    "h200-scale-out": {
        "graph": ["products", "pokec"],
        "scale_out": scaleout.MODELS,
        "dtype": ["fp32", "bf16"],
        "carrier": ["all_to_all", "symmetric"],
    },
    "h200-layers": {
        "graph": ["tolokers", "arxiv", "cora", "pattern"],
        "layer": (*ATTENTION, "gcn", "sage-max", "graphconv"),
        "dtype": ["fp32", "bf16"],
        "peers": ["pyg", "pyg-compiled", "edgeless-pyg", "edgeless-pyg-graphed"],
        "mode": ["forward_backward"],
        "baseline": H200,
    },
    "small": {"graph": ["tiny"], "training": training.ON_A_GRAPH, "dtype": ["fp32", "bf16"]},
    "small-molecules": {
        "graph": list(training.DATASETS),
        "training": training.ON_MOLECULES,
        "molecules": [32, 128, 512],
    },
    "h200-molecules": {**NEW_GRAPHS, "peers": ["pyg", "edgeless-pyg"]},
    "generator": {
        "graph": ["hm", "pokec", "arxiv", "city-roads-L", "molecules-4096"],
        "layer": tuple(GENERATED),
        "width": [64, 128],
        "dtype": ["fp32", "bf16"],
        "peers": ["pyg", "pyg-compiled", "edgeless-pyg", "edgeless-pyg-graphed"],
        "rounds": 2,
        "warmup": 3,
        "runs": 5,
    },
    "generator-cpu": {
        "graph": ["tolokers"],
        "layer": tuple(GENERATED),
        "width": [64],
        "peers": ["pyg", "pyg-compiled", "edgeless-pyg"],
        "rounds": 3,
    },
    "relations": {
        "graph": ["aifb", "fb15k"],
        "layer": RELATIONAL,
        **ONE_HEAD,
        "peers": ["pyg", "dgl", "edgeless-pyg", "edgeless-dgl"],
        "rounds": 3,
        "limit": 180.0,
    },
    "h200-relations": {
        "graph": ["aifb", "mutag", "bgs", "am", "fb15k", "biokg", "mag", "wikikg2"],
        "layer": RELATIONAL,
        **ONE_HEAD,
        "dtype": ["fp32", "bf16"],
        "peers": ["pyg", "edgeless-pyg", "edgeless-pyg-graphed"],
        "baseline": H200_RELATIONS,
    },
}
