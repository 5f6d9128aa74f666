"""Layer names follow from the model's structure alone; hostile names never reach torch's
tracer.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.toys import TOYS, Residual, built, traced
from torch import nn

from quantizer.errors import ModelError
from quantizer.graph.ir import Graph
from quantizer.graph.tracing.trace import trace

BLOCK = "Residual::Residual/Sequential[layer1]/Block[{}]/"
EXPECTED = {
    "residual": [
        "Residual::input_0",
        "Residual::Residual/Conv2d[conv1]/conv2d",
        "Residual::Residual/BatchNorm2d[bn1]/batch_norm",
        "Residual::Residual/relu",
        *(
            BLOCK.format(index) + suffix
            for index in (0, 1)
            for suffix in (
                "Conv2d[conv1]/conv2d",
                "BatchNorm2d[bn1]/batch_norm",
                "ReLU[relu]/relu",
                "Conv2d[conv2]/conv2d",
                "add",
                "ReLU[relu]/relu.1",
            )
        ),
        "Residual::Residual/AdaptiveAvgPool2d[pool]/adaptive_avg_pool2d",
        "Residual::Residual/flatten",
        "Residual::Residual/Linear[fc]/linear",
    ],
    "containers": [
        "Containers::input_0",
        "Containers::Containers/ModuleList[l]/Linear[0]/linear",
        "Containers::Containers/relu",
        "Containers::Containers/ModuleList[l]/Linear[1]/linear",
        "Containers::Containers/relu.1",
        "Containers::Containers/ModuleDict[d]/Linear[a]/linear",
        "Containers::Containers/ModuleList[l]/Linear[0]/linear.1",
    ],
    "reused": [
        "Reused::input_0",
        "Reused::Reused/ReLU[act]/relu",
        "Reused::Reused/Block[block]/Conv2d[conv1]/conv2d",
        "Reused::Reused/Block[block]/BatchNorm2d[bn1]/batch_norm",
        "Reused::Reused/Block[block]/ReLU[relu]/relu",
        "Reused::Reused/Block[block]/Conv2d[conv2]/conv2d",
        "Reused::Reused/Block[block]/add",
        "Reused::Reused/Block[block]/ReLU[relu]/relu.1",
        "Reused::Reused/ReLU[act]/relu.1",
        "Reused::Reused/Block[block]/Conv2d[conv1]/conv2d.1",
        "Reused::Reused/Block[block]/BatchNorm2d[bn1]/batch_norm.1",
        "Reused::Reused/Block[block]/ReLU[relu]/relu.2",
        "Reused::Reused/Block[block]/Conv2d[conv2]/conv2d.1",
        "Reused::Reused/Block[block]/add.1",
        "Reused::Reused/Block[block]/ReLU[relu]/relu.3",
        "Reused::Reused/ReLU[act]/relu.2",
    ],
    "in_place": [
        "InPlace::input_0",
        "InPlace::InPlace/Linear[fc]/linear",
        "InPlace::InPlace/mul",
        "InPlace::InPlace/relu",
        "InPlace::InPlace/add",
        "InPlace::InPlace/relu.1",
        "InPlace::InPlace/add.1",
        "InPlace::InPlace/mul.1",
        "InPlace::InPlace/sub",
    ],
    "free_tensors": [
        "FreeTensors::input_0",
        "FreeTensors::FreeTensors/factor",
        "FreeTensors::FreeTensors/mul",
        "FreeTensors::FreeTensors/shift",
        "FreeTensors::FreeTensors/add",
        "FreeTensors::FreeTensors/linear",
        "FreeTensors::FreeTensors/lifted_tensor_0",
        "FreeTensors::FreeTensors/add.1",
        "FreeTensors::FreeTensors/add.2",
    ],
}


@pytest.mark.parametrize("name", EXPECTED)
def test_exact_names(name: str) -> None:
    assert [node.name for node in traced(name).nodes] == EXPECTED[name]


@pytest.mark.parametrize("name", TOYS)
def test_names_are_unique_and_do_not_depend_on_the_batch(name: str) -> None:
    toy = built(name)
    names = [node.name for node in traced(name).nodes]
    assert len(set(names)) == len(names)
    args, kwargs = toy.call(4 if toy.batched else 2)
    assert [node.name for node in trace(toy.module, args, kwargs).nodes] == names


@pytest.mark.parametrize("name", TOYS)
def test_every_reference_is_to_an_earlier_layer(name: str) -> None:
    seen: set[str] = set()
    for node in traced(name).nodes:
        assert set(node.refs()) <= seen
        seen.add(node.name)


def test_names_do_not_depend_on_layers_elsewhere() -> None:
    class Wider(Residual):
        def __init__(self) -> None:
            super().__init__()
            self.extra = nn.Linear(5, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.extra(super().forward(x))

    Wider.__name__ = "Residual"
    names = [node.name for node in trace(Wider().eval(), (torch.randn(2, 3, 8, 8),)).nodes]
    assert names[:-1] == EXPECTED["residual"]


@pytest.mark.parametrize("name", ["tied", "containers"])
def test_a_shared_tensor_is_held_once(name: str) -> None:
    graph = traced(name)
    weights = [node.params["weight"] for node in graph.nodes if "weight" in node.params]
    assert len(set(weights)) < len(weights)
    assert len({tensor.data_ptr() for tensor in graph.tensors.values()}) == len(graph.tensors)


class Holder(nn.Module):
    """Calls children whatever they are called."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for child in self.children():
            x = child(x)
        return x


def holding(name: str) -> nn.Module:
    model = Holder()
    model._modules[name] = nn.Linear(3, 3)
    return model


@pytest.mark.parametrize(
    "name", ["a\nb", "<script>alert(1)</script>", "é", "a b", '"', "a'b", "x#y"]
)
def test_hostile_module_names_are_refused(name: str) -> None:
    with pytest.raises(ModelError, match="unsupported module or parameter name"):
        trace(holding(name), (torch.randn(2, 3),))


def test_code_in_a_module_name_does_not_run(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    name = f'x") or open({str(marker)!r}, "w") or ("'
    with pytest.raises(ModelError, match="unsupported"):
        trace(holding(name), (torch.randn(2, 3),))
    assert not marker.exists()


@pytest.mark.parametrize("kind", ["parameter", "buffer"])
def test_hostile_tensor_names_are_refused(kind: str) -> None:
    model = Holder()
    if kind == "parameter":
        model._parameters['a"b'] = nn.Parameter(torch.ones(1))
    else:
        model._buffers['a"b'] = torch.ones(1)
    with pytest.raises(ModelError, match="unsupported module or parameter name"):
        trace(model, (torch.randn(2, 3),))


@pytest.mark.parametrize(
    "name", ["A(B)", "A\nimport os", "<b>", "class", "1A", "torch", "quantizer"]
)
def test_class_names_that_generated_code_cannot_hold_are_refused(name: str) -> None:
    with pytest.raises(ModelError, match="unsupported class name"):
        trace(type(name, (Holder,), {})(), (torch.randn(2, 3),))


def test_hostile_classes_inside_the_model_are_refused() -> None:
    inner = type("Linear]\n", (nn.Linear,), {})
    with pytest.raises(ModelError, match="unsupported class name"):
        trace(nn.Sequential(inner(3, 3)), (torch.randn(2, 3),))


def test_names_that_are_python_words_are_fine() -> None:
    graph: Graph = trace(holding("class"), (torch.randn(2, 3),))
    assert graph.nodes[-1].name == "Holder::Holder/Linear[class]/linear"
