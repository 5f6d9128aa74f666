"""What tables call layers: paths of modules that tell every layer of a graph apart, and that a
config takes.
"""

from __future__ import annotations

import pytest
from support.toys import traced

from quantizer.config.model import Selector, Settings
from quantizer.graph.ir import Graph, Node
from quantizer.graph.names import path_names
from quantizer.graph.passes import run_passes
from quantizer.plan.match import match


def graph_of(*layers: tuple[str, str]) -> Graph:
    """Layers, each of the last part of its name, in the module at a path; those called linear
    have weights.
    """
    nodes = []
    for path, last in layers:
        op, name = (
            last.partition(".")[0],
            "/".join(["Net::Net", *filter(None, path.split(".")), last]),
        )
        params = {
            "linear": {"weight": f"{path}.weight"},
            "bilinear": {"weight": f"{path}.other"},
        }.get(op, {})
        nodes.append(Node(name, op, "", params=params, scope=path))
    return Graph("Net", tuple(nodes), (), {})


CASES = [
    ([("layer1.0.conv1", "conv2d")], ["layer1.0.conv1"]),
    (
        [("layer1.0.relu", "relu"), ("layer1.0.relu", "relu.1")],
        ["layer1.0.relu", "layer1.0.relu.1"],
    ),
    (
        [("block", "add"), ("block", "add.1"), ("block.fc", "linear")],
        ["block.add", "block.add.1", "block.fc"],
    ),
    ([("norm", "pow"), ("norm", "mul")], ["norm.pow", "norm.mul"]),
    ([("fc", "view"), ("fc", "linear"), ("fc", "view.1")], ["fc.view", "fc", "fc.view.1"]),
    ([("fc", "linear"), ("fc", "linear.1"), ("fc", "mul")], ["fc", "fc.1", "fc.mul"]),
    ([("conv", "linear"), ("conv.padding", "pad")], ["conv", "conv.padding"]),
    # A module that reads the weight of one of its parts itself, as Mamba2Mixer does
    ([("mixer.proj", "linear"), ("mixer", "linear")], ["mixer.proj", "mixer.linear"]),
    (
        [("two", "linear"), ("two", "bilinear"), ("two", "mul")],
        ["two.linear", "two.bilinear", "two.mul"],
    ),
    ([("", "flatten"), ("fc", "linear")], ["flatten", "fc"]),
    # Both would be a.add
    ([("a", "add"), ("a.add", "linear")], ["Net::Net/a/add", "Net::Net/a/add/linear"]),
]


@pytest.mark.parametrize(
    ("layers", "names"), CASES, ids=[" ".join(names) for _, names in CASES]
)
def test_a_layer_is_called_by_its_module_and_where_need_be_by_its_operator(
    layers: list[tuple[str, str]], names: list[str]
) -> None:
    assert list(path_names(graph_of(*layers)).values()) == names


@pytest.mark.parametrize("toy", ["residual", "tied"])
def test_a_config_takes_every_name_that_a_table_shows(toy: str) -> None:
    original = traced(toy)
    graph = run_passes(original, Settings())
    names = path_names(graph)
    assert len({*names.values()}) == len(names)
    for name, path in names.items():
        assert name in match(Selector("name", path), graph, original).layers
