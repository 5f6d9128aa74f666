"""Heights, widths and lengths that a trace leaves open on request: the sizes that it accepts are
those that the model takes, and what fixes one is named.
"""

from __future__ import annotations

import pytest
import torch
from support.extended import extended
from support.maps import (
    Flat,
    Joined,
    Placed,
    Pooled,
    Resized,
    Sound,
    Square,
    Viewed,
    Windowed,
    images,
)
from torch import nn

from quantizer.errors import DataError, ModelError
from quantizer.graph.ir import Graph
from quantizer.graph.tracing.trace import trace
from quantizer.nn.network import Network

BOTH = ("height", "width")


def traced(model: nn.Module, *sizes: str) -> Graph:
    return trace(model.eval(), (images(),), {}, sizes)


@torch.no_grad()
def test_sizes_in_steps_are_those_that_the_model_takes() -> None:
    model = Joined().eval()
    graph = traced(model, *BOTH)
    assert [str(length) for length in graph.lengths] == ["8 or more in steps of 4"] * 2
    network = Network(graph)
    for size in (8, 12, 36):
        torch.testing.assert_close(network(images(size, 16)), model(images(size, 16)))
    for size in (9, 18):
        with pytest.raises(RuntimeError):
            model(images(size, 16))
        with pytest.raises(DataError, match="takes a height of 8 or more in steps of 4, got"):
            network(images(size, 16))


@torch.no_grad()
def test_one_size_opens_alone() -> None:
    model = Pooled().eval()
    for name, axis in (("height", 2), ("width", 3)):
        graph = traced(model, name)
        assert [(length.name, length.axes) for length in graph.lengths] == [
            (name, ((0, axis),))
        ]
        shape = [3, 3, 16, 16]
        shape[axis] = 29
        image = torch.rand(shape)
        assert torch.equal(Network(graph)(image), model(image))
        with pytest.raises(DataError, match="expected"):
            Network(graph)(image.transpose(2, 3))


@torch.no_grad()
def test_sounds_have_a_length() -> None:
    model = Sound().eval()
    graph = trace(model, (images()[:, :, 0],), {}, ("length",))
    sound = images(5, 31)[:, :, 0]
    assert torch.equal(Network(graph)(sound), model(sound))


def test_sizes_that_have_to_be_equal_are_one() -> None:
    graph = traced(Square(), *BOTH)
    assert [length.axes for length in graph.lengths] == [((0, 2), (0, 3))]
    assert Network(graph)(images(20, 20)).shape == (2, 4, 10, 10)
    with pytest.raises(DataError, match="the inputs have a different height each"):
        Network(graph)(images(16, 20))


@pytest.mark.parametrize(
    ("model", "cause", "remedy"),
    [
        (Flat(), "head (Linear) takes 256 values", "pool the map to a constant size before"),
        (Placed(), "Placed.forward() computes with the size as", "compute sizes from x.shape"),
        (Resized(), "Resized.forward() computes with the size", "compute sizes from x.shape"),
        (Viewed(), "Viewed.forward() computes with the size as", "compute sizes from x.shape"),
        *extended((Windowed(), "pool (AvgPool2d) computes with", "compute sizes from x.shape")),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_what_fixes_a_size_is_named(model: nn.Module, cause: str, remedy: str) -> None:
    forward = type(model).forward
    with pytest.raises(ModelError) as caught:
        traced(model, *BOTH)
    message = caught.value.message
    assert message.startswith(f"{type(model).__name__} fixes its height and width at 16: ")
    assert cause in message
    assert " of maps.py: return " in message
    assert caught.value.help is not None
    assert caught.value.help.startswith(remedy)
    # The trace leaves nothing in the module
    assert "forward" not in vars(model)
    assert type(model).forward is forward
    assert not any(part._forward_hooks for part in model.modules())


def test_inputs_without_the_size_are_an_error() -> None:
    with pytest.raises(ModelError, match="Joined has no input with length"):
        traced(Joined(), "length")
    with pytest.raises(ModelError, match="torch takes a size of 1 for a constant"):
        trace(Pooled().eval(), (images(1, 16),), {}, ("height",))
