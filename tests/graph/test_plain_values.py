"""Keys, names and constants of foreign classes: written as plain values, or refused before
anything is calibrated. The generated file runs no text of theirs.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from quantizer.errors import ModelError
from quantizer.graph.emit import emit
from quantizer.graph.names import check_names
from quantizer.graph.output_names import leaf_names, plain_output
from quantizer.graph.stored import graph_from_json, graph_to_json
from quantizer.graph.tracing.trace import trace

X = torch.linspace(-1, 1, 12).reshape(4, 3)


class Kind(enum.Enum):
    A = "a"


class Text(str, enum.Enum):
    A = "a"


class Number(enum.IntEnum):
    A = 1


class Hostile(str):
    def __repr__(self) -> str:
        return "__import__('os').abort()"


class Foreign:
    def __repr__(self) -> str:
        raise AssertionError


class Net(nn.Module):
    """Computes what it is given, on a tensor or on the item of a dict."""

    def __init__(self, compute: Callable[[Tensor], Any], key: Any = None) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.compute = compute
        self.key = key

    def forward(self, x: Any) -> Any:
        return self.compute(self.linear(x if self.key is None else x[self.key]))


@pytest.mark.parametrize("key", ["a", Text.A, numpy.str_("a"), Hostile("a"), 3, Number.A])
def test_keys_are_written_as_plain_ones(key: Any) -> None:
    graph = trace(Net(torch.relu, key), ({key: X},))
    [path] = graph.input_paths
    assert [type(step) for step in path] == [int, int, int if key in (1, 3) else str]
    assert f"input=args[0][{'1' if key == 1 else '3' if key == 3 else repr('a')}])" in emit(
        graph
    )


@pytest.mark.parametrize(
    "key",
    [Kind.A, Foreign(), True, 1.5, b"a", (1, 2), numpy.int64(3), frozenset([1]), int, "\ud800"],
    ids=lambda key: type(key).__name__,
)
def test_other_keys_are_refused(key: Any) -> None:
    with pytest.raises(ModelError, match=rf"has a key of the class {type(key).__name__},"):
        trace(Net(torch.relu, key), ({key: X},))


@pytest.mark.parametrize(
    ("output", "names"),
    [
        ({1: X, "1": X, None: X, "None": X}, ("1", "1.1", "None", "None.1")),
        ({"a": {"b": X}, "a.b": X}, ("a.b", "a.b.1")),
        ({Foreign(): X, Kind.A: X, (1, "a"): X}, ("Foreign", "Kind.A", "(1, a)")),
        ({1.5: X, True: X}, ("1.5", "True")),
    ],
)
def test_each_output_has_a_name_of_its_own(output: Any, names: tuple[str, ...]) -> None:
    assert leaf_names(output) == names
    assert len(plain_output(output)) == len(output)


@pytest.mark.parametrize(
    ("compute", "text"),
    [
        (lambda y: torch.view_as_real(y + 0j) * numpy.float64(0.5), "other=0.5"),
        (lambda y: torch.cat([y] * 2, dim=Number.A), "dim=1"),
        (lambda y: torch.view_as_real((y + 0j) ** 2j), "exponent=complex(0.0, 2.0)"),
        (lambda y: (y * complex(-0.0, 1)).abs(), "complex(-0.0, 1.0)"),
        (lambda y: y * torch.full((1,), complex(1, float("inf"))).real, "float('inf'))"),
        (lambda y: y + torch.empty_like(y).random_(0, 5) * 0, "**{'from': 0, 'to': 5}"),
    ],
)
def test_constants_are_written_as_plain_ones(compute: Any, text: str) -> None:
    graph = trace(Net(compute), (X,))
    source = emit(graph)
    assert text in source
    compile(source, "net.py", "exec")
    stored = graph_from_json(graph_to_json(graph)).graph
    assert [node.attrs for node in stored.nodes] == [node.attrs for node in graph.nodes]


def test_a_text_that_no_file_can_contain_is_refused() -> None:
    with pytest.raises(ModelError, match="has a constant of the class str, which no file"):
        trace(Net(lambda y: (y, "\ud800")), (X,))


@pytest.mark.parametrize(
    "name", ["float", "super", "complex", "torch", "__file__", "__debug__", "None", "N" * 200]
)
def test_names_that_the_generated_file_uses_are_refused(name: str) -> None:
    with pytest.raises(ModelError, match="unsupported class name"):
        check_names(type(name, (nn.Module,), {})())
