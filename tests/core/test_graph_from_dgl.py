"""Graph.from_dgl: homogeneous graphs, edge types, blocks, and every sparse format that DGL may hold."""

import pytest
import torch

from edgeless import Graph

dgl = pytest.importorskip("dgl", reason="needs DGL")

SRC, DST = torch.tensor([0, 4, 1, 0, 2, 4]), torch.tensor([1, 1, 3, 1, 2, 0])  # with a multi-edge and a self loop


@pytest.mark.parametrize("formats", [["coo"], ["csr"], ["csc"], ["coo", "csr", "csc"]])
@pytest.mark.parametrize("idtype", [torch.int32, torch.int64])
def test_every_format(formats, idtype):
    g = dgl.graph((SRC, DST), num_nodes=6, idtype=idtype).formats(formats)
    graph = Graph.from_dgl(g)
    assert (graph.num_src, graph.num_dst) == (6, 6)
    assert graph.index_dtype == torch.int32
    assert torch.equal(graph.edge_index(), torch.stack((SRC, DST)))


def test_edges_in_row_order_have_no_ids_in_dgl():
    g = dgl.graph((torch.tensor([2, 0, 1]), torch.tensor([0, 1, 2])), idtype=torch.int32)
    g.create_formats_()
    indptr, indices, ids = g.adj_tensors("csc")
    graph = Graph.from_dgl(g)
    if ids.numel() == 0:
        assert graph.csr.edge_ids is None
    assert graph.csr.indices.data_ptr() == indices.data_ptr()  # shared, not copied
    assert graph.edge_index().tolist() == [[2, 0, 1], [0, 1, 2]]


def test_reads_without_making_dgl_keep_more():
    g = dgl.graph((SRC, DST))
    Graph.from_dgl(g)
    assert g.formats()["created"] == ["coo"]


def test_edge_types():
    g = dgl.heterograph(
        {
            ("user", "rates", "film"): (torch.tensor([0, 1, 1]), torch.tensor([2, 0, 2])),
            ("user", "knows", "user"): (torch.tensor([1]), torch.tensor([0])),
        },
        num_nodes_dict={"user": 3, "film": 4},
    )
    rates = Graph.from_dgl(g, "rates")
    assert (rates.num_src, rates.num_dst) == (3, 4)
    assert rates.edge_index().tolist() == [[0, 1, 1], [2, 0, 2]]
    knows = Graph.from_dgl(g, ("user", "knows", "user"))
    assert (knows.num_src, knows.num_dst, knows.num_edges) == (3, 3, 1)
    assert Graph.from_dgl(g["rates"]).num_dst == 4
    with pytest.raises(ValueError, match="etype must be one of .*rates.*, got None"):
        Graph.from_dgl(g)


def test_blocks():
    g = dgl.graph((SRC, DST), num_nodes=6)
    block = dgl.to_block(dgl.in_subgraph(g, [1, 3]), torch.tensor([1, 3, 5]))
    graph = Graph.from_dgl(block)
    assert (graph.num_src, graph.num_dst) == (block.num_src_nodes(), 3)
    assert torch.equal(graph.edge_index(), torch.stack(block.edges(order="eid")))
    assert graph.in_degrees().tolist() == block.in_degrees().tolist() == [3, 1, 0]


def test_empty():
    graph = Graph.from_dgl(dgl.graph(([], []), num_nodes=3))
    assert (graph.num_src, graph.num_dst, graph.num_edges) == (3, 3, 0)
    assert Graph.from_dgl(dgl.graph(([], []), num_nodes=3).formats("csc")).edge_index().shape == (2, 0)


def test_arrays_that_dgl_does_not_check():
    with pytest.raises(ValueError, match="indptr must run from 0 to E = 3, got 0 to 1"):
        Graph.from_dgl(dgl.graph(("csc", ([0, 2, 1], [1, 1, 0], []))))
    with pytest.raises(IndexError, match="edge_ids has id 9 at position 2, expected 0 <= id < E = 3"):
        Graph.from_dgl(dgl.graph(("csc", ([0, 2, 3], [1, 1, 0], [0, 1, 9]))))
    with pytest.raises(ValueError, match="edge_ids must be a permutation of 0 to E - 1, but 1 is missing"):
        Graph.from_dgl(dgl.graph(("csr", ([0, 2, 3], [1, 1, 0], [0, 0, 2]))))
