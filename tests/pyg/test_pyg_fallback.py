"""What the kernels do not cover takes the stock path: the stock result, and words that say why."""

import pytest
import torch
import torch_geometric.nn as stock
from pyg_cases import GRAPHS, IN, LAYERS, edge_features, layer_pair, node_features
from torch_geometric.nn.aggr import MaxAggregation, SumAggregation

import edgeless
import edgeless.pyg.nn as fused

GRAPH = GRAPHS["random"]
LINEAR = {"GATv2Conv": "lin_l", "GATConv": "lin", "TransformerConv": "lin_value"}


def assert_falls_back(theirs, ours, reason, *inputs, **kwargs):
    """Both layers give the same, explain says ``reason``, and backend("fused") raises with the same words."""
    explanation = edgeless.explain(ours, *inputs, **kwargs)
    assert not explanation.fused and any(reason in r for r in explanation.reasons), str(explanation)
    with edgeless.backend("fused"), pytest.raises(edgeless.NotFusedError) as error:
        ours(*inputs, **kwargs)
    assert str(error.value) == str(explanation)
    have, want = ours(*inputs, **kwargs), theirs(*inputs, **kwargs)
    torch.testing.assert_close(have, want)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("aggr", ("mean", "max", "min", "mul", "median", ["sum", "mean"], "softmax"))
def test_other_aggregations(name, aggr):
    if isinstance(aggr, list):
        pytest.skip("the stock layers cannot reshape the output of several aggregations")
    theirs, ours = layer_pair(name, aggr=aggr)
    reason = f"aggr_module is {ours.aggr_module} and the kernels only sum"
    assert_falls_back(theirs, ours, reason, node_features(GRAPH), GRAPH[0])


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("aggr", ("sum", "add", SumAggregation()))
def test_sums_are_covered(name, aggr):
    _, ours = layer_pair(name, aggr=aggr)
    assert edgeless.explain(ours, node_features(GRAPH), GRAPH[0])


@pytest.mark.parametrize("name", LAYERS)
def test_an_aggregation_put_in_by_hand(name):
    """The attribute ``aggr`` still says what the layer was made with."""
    theirs, ours = layer_pair(name)
    theirs.aggr_module = ours.aggr_module = MaxAggregation()
    reason = "aggr_module is MaxAggregation() and the kernels only sum"
    assert_falls_back(theirs, ours, reason, node_features(GRAPH), GRAPH[0])
    assert edgeless.explain(ours, node_features(GRAPH), GRAPH[0]).reasons == (reason,)


@pytest.mark.parametrize("option", ("negative_slope", "dropout"))
@pytest.mark.parametrize("value", (None, "a"))
@pytest.mark.parametrize("name", LAYERS)
def test_options_that_are_no_numbers(name, option, value):
    """The stock layer's own error."""
    if name == "TransformerConv" and option == "negative_slope":
        pytest.skip("no option of the layer")
    theirs, ours = layer_pair(name, **{option: value})
    inputs = (node_features(GRAPH), GRAPH[0])
    with pytest.raises(TypeError) as error:
        theirs(*inputs)
    with pytest.raises(TypeError) as ours_error:
        ours(*inputs)
    assert str(ours_error.value).startswith(f"{error.value}\nedgeless: ")
    assert f"{option} is {value!r} and not an int or float" in str(edgeless.explain(ours, *inputs))


def test_aggr_kwargs():
    theirs, ours = layer_pair("GATv2Conv", aggr="softmax", aggr_kwargs={"t": 0.5, "learn": True})
    assert_falls_back(theirs, ours, "aggr_module is", node_features(GRAPH), GRAPH[0])


@pytest.mark.parametrize("name", LAYERS)
def test_a_hook_on_the_aggregation(name):
    theirs, ours = layer_pair(name)
    for layer in (theirs, ours):
        layer.aggr_module.register_forward_hook(lambda module, inputs, output: output * 2)
    assert_falls_back(theirs, ours, "aggr_module has hooks or another forward", node_features(GRAPH), GRAPH[0])


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize(
    "hook", ("propagate_forward_pre", "propagate_forward", "message_forward_pre", "message_forward",
             "aggregate_forward_pre", "aggregate_forward", "edge_update_forward_pre", "edge_update_forward",
             "message_and_aggregate_forward_pre", "message_and_aggregate_forward")
)  # fmt: skip
def test_message_passing_hooks(name, hook):
    theirs, ours = layer_pair(name)
    calls, handles = [], []
    for layer in (theirs, ours):
        handles.append(getattr(layer, f"register_{hook}_hook")(lambda *args: calls.append(type(args[0]))))
    inputs = (node_features(GRAPH), GRAPH[0])
    assert_falls_back(theirs, ours, "a message passing hook is registered", *inputs)
    assert calls.count(type(ours)) == calls.count(type(theirs))
    for handle in handles:
        handle.remove()
    assert edgeless.explain(ours, *inputs)


def test_a_hook_can_change_messages():
    theirs, ours = layer_pair("GATConv")
    for layer in (theirs, ours):
        layer.register_message_forward_hook(lambda module, inputs, output: output.relu())
    assert_falls_back(theirs, ours, "hook", node_features(GRAPH), GRAPH[0])


@pytest.mark.parametrize("name", LAYERS)
def test_module_hooks_stay_fused(name):
    theirs, ours = layer_pair(name)
    seen = []
    for layer in (theirs, ours):
        layer.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 2, *inputs[1:]))
        layer.register_forward_hook(lambda module, inputs, output: seen.append(output) or output + 1)
        layer.register_full_backward_hook(lambda module, grad_in, grad_out: seen.append(grad_out[0]))
        layer.get_submodule(LINEAR[name]).register_forward_hook(lambda module, inputs, output: output * 2)
    x = node_features(GRAPH).requires_grad_()
    with edgeless.backend("fused"):
        have = ours(x, GRAPH[0])
    have.sum().backward()
    theirs(x, GRAPH[0]).sum().backward()
    torch.testing.assert_close(seen[0], seen[2])
    torch.testing.assert_close(seen[1], seen[3])


@pytest.mark.parametrize("name", LAYERS)
def test_hooks_and_parametrizations_of_lin_edge(name):
    inputs = (node_features(GRAPH), GRAPH[0], edge_features(GRAPH))
    theirs, ours = layer_pair(name, edge_dim=2)
    for layer in (theirs, ours):
        layer.lin_edge.register_forward_hook(lambda module, inputs, output: output * 3)
    assert_falls_back(theirs, ours, "lin_edge is not a plain linear map, or has hooks or another forward", *inputs)

    class Double(torch.nn.Module):
        def forward(self, weight):
            return 2 * weight

    theirs, ours = layer_pair(name, edge_dim=2)
    for layer in (theirs, ours):
        torch.nn.utils.parametrize.register_parametrization(layer.lin_edge, "weight", Double())
    assert_falls_back(theirs, ours, "lin_edge is not a plain linear map, or has hooks or another forward", *inputs)


@pytest.mark.parametrize("name", LAYERS)
def test_parametrized_layer_stays_right(name):
    class Double(torch.nn.Module):
        def forward(self, weight):
            return 2 * weight

    theirs, ours = layer_pair(name)
    for layer in (theirs, ours):
        if name != "TransformerConv":
            parameter = "att" if name == "GATv2Conv" else "att_src"
            torch.nn.utils.parametrize.register_parametrization(layer, parameter, Double())
        torch.nn.utils.parametrize.register_parametrization(layer.get_submodule(LINEAR[name]), "weight", Double())
    torch.testing.assert_close(ours(node_features(GRAPH), GRAPH[0]), theirs(node_features(GRAPH), GRAPH[0]))


@pytest.mark.parametrize("name", LAYERS)
def test_explain_mode(name):
    theirs, ours = layer_pair(name, **({} if name == "TransformerConv" else {"add_self_loops": False}))
    inputs = (node_features(GRAPH), GRAPH[0])
    for layer in (theirs, ours):
        layer.explain = True
        layer._edge_mask = torch.linspace(-2, 2, GRAPH[0].size(1))
        layer._loop_mask = GRAPH[0][0] != GRAPH[0][1]
        layer._apply_sigmoid = True
    assert_falls_back(theirs, ours, "explain mode is on", *inputs)
    for layer in (theirs, ours):
        layer.explain = None
    assert edgeless.explain(ours, *inputs)
    torch.testing.assert_close(ours(*inputs), theirs(*inputs))


@pytest.mark.parametrize("name", LAYERS)
def test_decomposed_layers(name):
    outcomes = []
    for package in (stock, fused):
        layer = getattr(package, name)(IN, 4, 2, decomposed_layers=2)
        if package is fused:
            assert "decomposed_layers is 2" in edgeless.explain(layer, node_features(GRAPH), GRAPH[0]).reasons
        try:
            outcomes.append(layer(node_features(GRAPH), GRAPH[0]).shape)
        except Exception as error:  # the stock attention layers cannot be decomposed: the same error then
            outcomes.append(type(error))
        layer.decomposed_layers = 1
        outcomes.append(layer(node_features(GRAPH), GRAPH[0]).shape)
    assert outcomes[:2] == outcomes[2:]


def _renamed(cls):
    """PyG keys the code that it generates by class name: classes of one test module need different ones."""
    cls.__name__ = f"{cls.__name__}_{len(_renamed.classes)}"
    _renamed.classes.append(cls)
    return cls


_renamed.classes = []


def _subclass(base, method):
    if method == "message" and base.__name__ == "TransformerConv":

        class Changed(base):
            def message(self, query_i, key_j, value_j, edge_attr, index, ptr, size_i):
                return 2 * super().message(query_i, key_j, value_j, edge_attr, index, ptr, size_i)
    elif method == "message":

        class Changed(base):
            def message(self, x_j, alpha):
                return 2 * super().message(x_j, alpha)
    elif method == "aggregate":

        class Changed(base):
            def aggregate(self, inputs, index, ptr=None, dim_size=None):
                return super().aggregate(inputs, index, ptr, dim_size) + 1
    else:

        class Changed(base):
            def update(self, inputs):
                return inputs.relu()

    return _renamed(Changed)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("method", ("message", "aggregate", "update"))
def test_overridden_methods(name, method):
    theirs, ours = (_subclass(getattr(package, name), method)(IN, 4, 2) for package in (stock, fused))
    ours.load_state_dict(theirs.state_dict())
    assert_falls_back(theirs, ours, f"{method}() is overridden", node_features(GRAPH), GRAPH[0])


def test_overridden_edge_update():
    def own(base):
        class Changed(base):
            def edge_update(self, x_j, x_i, edge_attr, index, ptr, dim_size):
                return (x_j * x_i).sum(-1)

        return _renamed(Changed)(IN, 4, 2)

    theirs, ours = own(stock.GATv2Conv), own(fused.GATv2Conv)
    ours.load_state_dict(theirs.state_dict())
    assert_falls_back(theirs, ours, "edge_update() is overridden", node_features(GRAPH), GRAPH[0])


def test_overridden_on_the_instance_and_on_the_stock_class(monkeypatch):
    theirs, ours = layer_pair("GATConv")
    inputs = (node_features(GRAPH), GRAPH[0])
    for layer in (theirs, ours):
        layer.message = lambda x_j, alpha: x_j
    assert_falls_back(theirs, ours, "message() is overridden", *inputs)

    theirs, ours = layer_pair("GATConv")
    monkeypatch.setattr(stock.GATConv, "message", lambda self, x_j, alpha: x_j)
    assert_falls_back(theirs, ours, "message() is overridden", *inputs)


def test_overridden_propagate():
    calls = []

    @_renamed
    class Changed(fused.GATConv):
        def propagate(self, *args, **kwargs):
            calls.append(1)
            return super().propagate(*args, **kwargs)

    layer = Changed(IN, 4, 2)
    assert (
        "propagate() or edge_updater() is overridden" in edgeless.explain(layer, node_features(GRAPH), GRAPH[0]).reasons
    )
    layer(node_features(GRAPH), GRAPH[0])
    assert calls


@pytest.mark.parametrize("name,step", [*((name, "propagate") for name in LAYERS), ("GATConv", "edge_updater")])
def test_another_propagate_of_the_instance(name, step):
    theirs, ours = layer_pair(name)
    inputs = (node_features(GRAPH), GRAPH[0])
    for layer in (theirs, ours):
        own = getattr(layer, step)
        setattr(layer, step, lambda *args, own=own, **kwargs: 2 * own(*args, **kwargs))
    assert_falls_back(theirs, ours, "propagate() or edge_updater() is overridden", *inputs)


@pytest.mark.parametrize("name", LAYERS)
def test_a_subclass_that_only_wraps_forward_stays_fused(name):
    @_renamed
    class Wrapped(getattr(fused, name)):
        def __init__(self, width):
            super().__init__(width, 4, 2)
            self.norm = torch.nn.LayerNorm(8)

        def forward(self, x, edge_index):
            return self.norm(super().forward(x, edge_index))

    layer = Wrapped(IN)
    with edgeless.backend("fused"):
        assert layer(node_features(GRAPH), GRAPH[0]).shape == (40, 8)
    with edgeless.backend("reference"):
        assert layer(node_features(GRAPH), GRAPH[0]).shape == (40, 8)


def test_a_subclass_with_its_own_propagate_arguments():
    """PyG reads the signature from comments in the user's class: ours must not come before them."""

    def own(base):
        class Weighted(base):
            def forward(self, x, edge_index, weight):
                x = self.lin_l(x).view(-1, self.heads, self.out_channels)
                # propagate_type: (x: Tensor, weight: Tensor)
                return self.propagate(edge_index, x=x, weight=weight)

            def message(self, x_j, weight):
                return x_j * weight.view(-1, 1, 1)

        return _renamed(Weighted)(IN, 4, 2)

    theirs, ours = own(stock.GATv2Conv), own(fused.GATv2Conv)
    ours.load_state_dict(theirs.state_dict())
    inputs = (node_features(GRAPH), GRAPH[0], torch.rand(GRAPH[0].size(1)))
    torch.testing.assert_close(ours(*inputs), theirs(*inputs))


@pytest.mark.parametrize("name", LAYERS)
def test_forward_mode_and_functional_transforms(name):
    """jvp, vmap and grad of torch.func see the stock layer where the kernels cannot follow."""
    theirs, ours = layer_pair(name, dtype=torch.float64)
    x = node_features(GRAPH, torch.float64)
    tangent = torch.randn_like(x)
    for transform in (
        lambda layer: torch.func.jvp(lambda x: layer(x, GRAPH[0]), (x,), (tangent,))[1],
        lambda layer: torch.func.grad(lambda x: layer(x, GRAPH[0]).square().sum())(x),
        lambda layer: torch.func.vmap(lambda x: layer(x, GRAPH[0]))(torch.stack((x, tangent))),
        lambda layer: torch.func.jacrev(lambda x: layer(x, GRAPH[0])[0])(x),
    ):
        torch.testing.assert_close(transform(ours), transform(theirs))


@pytest.mark.parametrize("name", LAYERS)
def test_bipartite_target_to_source(name):
    """PyG's output has the sources' number of rows here; the ids must fit both sides."""
    edge_index = GRAPHS["bipartite_more_targets"][0].flip(0) % 6
    theirs, ours = layer_pair(name, flow="target_to_source")
    x = (torch.randn(9, IN), torch.randn(6, IN))
    assert_falls_back(theirs, ours, "flow 'target_to_source' is combined with", x, edge_index)
