"""Every fused layer of DGL on the parts of a graph, in two and three processes, against one process."""

import pytest
import torch.distributed as dist
from dgl_part_cases import all_layers
from part_cases import spawn, write_partitions

pytest.importorskip("safetensors")
pytest.importorskip("pymetis")
pytestmark = [
    pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="needs gloo"),
    pytest.mark.slow,
]


@pytest.mark.parametrize("world", (2, 3))
def test_parts_give_what_the_whole_graph_gives(tmp_path, world):
    write_partitions(tmp_path, world)
    assert not spawn(all_layers, world, tmp_path)
