"""Convolutions run with their channels last in memory; nobody who reads what they make can
tell.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from quantizer.config.model import Settings
from quantizer.graph.passes import run_passes
from quantizer.graph.tracing.parameters import set_parameter
from quantizer.graph.tracing.trace import trace
from quantizer.nn.layer import weights_last
from quantizer.nn.network import Network
from quantizer.storage.deferred_tensor import DeferredTensor, move_to_disk

READERS: dict[str, Callable[[Tensor], Tensor]] = {
    "view": lambda x: x.view(x.shape[0], -1),
    "view of a part": lambda x: (
        x[:, 2:6].view(x.shape[0], 2, 2, 6, 6) if x.is_contiguous() else x[:, 2:6]
    ),
    "flatten, then view": lambda x: x.flatten(2).view(x.shape[0], 2, 4, 36),
    "unflatten": lambda x: x.unflatten(1, (2, 4)).transpose(1, 2).flatten(1, 2),
    "permute, then view": lambda x: x.permute(0, 2, 3, 1).view(x.shape[0], 36, 8),
    "halves": lambda x: torch.cat(x.chunk(2, 1)[::-1], 1).flatten(1),
    "pooled": lambda x: nn.functional.max_pool2d(x, 2).mean((2, 3)),
    "padded": lambda x: nn.functional.pad(x, (1, 1, 1, 1)).softmax(-1),
    "size": lambda x: x.reshape(x.shape[0], -1),
    "as it is": lambda x: x,
}
KEEPERS: dict[str, Callable[[Tensor], Tensor]] = {
    "pad": lambda x: nn.functional.pad(x, (1, 2, 1, 2)),
    "pad of an edge": lambda x: nn.functional.pad(x, (1, 2, 1, 2), mode="reflect"),
    "pixel_shuffle": lambda x: nn.functional.pixel_shuffle(x, 2),
    "pixel_unshuffle": lambda x: nn.functional.pixel_unshuffle(x, 2),
    "channel_shuffle": lambda x: nn.functional.channel_shuffle(x, 4),
    "group_norm": lambda x: nn.functional.group_norm(x, 2),
    "glu": lambda x: nn.functional.glu(x, 1),
    "flip": lambda x: x.flip(3),
    "roll": lambda x: x.roll(1, 2),
    "max_pool": lambda x: nn.functional.max_pool2d(x, 2),
    "norm over channels": lambda x: x - x.pow(2).mean(1, keepdim=True).sqrt(),
    "extremes": lambda x: x + x.amax((2, 3), keepdim=True) + x.max(1, keepdim=True)[0],
    "sum": lambda x: x * x.sum((2, 3), keepdim=True),
    "exp": lambda x: x.exp().log1p(),
}
"""What stands between convolutions in real networks, and leaves images of eight channels in the
order they have.
"""


class Net(nn.Module):
    """A convolution, an activation, and what reads it."""

    def __init__(self, read: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.conv, self.read = nn.Conv2d(3, 8, 3, padding=1), read

    def forward(self, x: Tensor) -> Tensor:
        """As a user writes it."""
        return self.read(self.conv(x).relu())


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_what_follows_a_convolution_gives_what_the_model_gives(
    read: Callable[[Tensor], Tensor],
) -> None:
    torch.manual_seed(0)
    model, x = Net(read).eval(), torch.randn(2, 3, 6, 6)
    network = Network(run_passes(trace(model, (x,)), Settings()))
    with torch.no_grad():
        wanted, found = model(x), network(x)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    assert found.stride() == wanted.contiguous().stride()


@pytest.mark.parametrize("keep", KEEPERS.values(), ids=KEEPERS)
def test_convolutions_and_what_computes_alike_have_their_channels_last(
    keep: Callable[[Tensor], Tensor],
) -> None:
    model, x, seen = Net(keep).eval(), torch.randn(2, 3, 6, 6), dict[str, Tensor]()
    network = Network(run_passes(trace(model, (x,)), Settings()))
    images = [
        node.name
        for node in network.graph.nodes
        if node.op != "input" and len(node.shape or ()) == 4
    ]
    with torch.no_grad():
        network.observe(
            (x,),
            {},
            {name: lambda value, name=name: seen.update({name: value}) for name in images},
        )
        torch.testing.assert_close(network(x), model(x), rtol=1e-5, atol=1e-6)
    assert len(seen) == len(images) > 2
    assert all(
        value.is_contiguous(memory_format=torch.channels_last) for value in seen.values()
    )


def test_weights_may_have_their_channels_last_too() -> None:
    """The same bits come out; a kernel of one pixel has both orders, and weights in files stay
    there.
    """
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 3, groups=8)
    ).eval()
    x = torch.randn(2, 3, 9, 9)
    graph = run_passes(trace(model, (x,)), Settings())
    plain, network = Network(graph), Network(graph)
    assert weights_last(network) is network
    weights = [
        layer.get_parameter("weight")
        for layer in network.layers.values()
        if hasattr(layer, "weight")
    ]
    assert [weight.is_contiguous(memory_format=torch.channels_last) for weight in weights] == [
        True
    ] * 3
    assert weights[1].data_ptr() == model[1].weight.data_ptr()
    with torch.no_grad():
        assert torch.equal(network(x), plain(x))
    first = next(name for name, layer in plain.layers.items() if hasattr(layer, "weight"))
    set_parameter(plain.layers[first], "weight", move_to_disk(model[0].weight.detach()))
    assert isinstance(weights_last(plain).layers[first].get_parameter("weight"), DeferredTensor)
