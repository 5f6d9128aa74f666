"""`output_tensors` means the same in place as in a traced network: the output after the ReLU
that follows a layer.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from api.specs import quantized, same, spec
from torch import Tensor, nn
from torch.nn import functional as F

import quantizer
from quantizer import Config, ModelQuantizer, QuantizationConfig, QuantizationSpec
from quantizer.errors import DataError, UsageError

# Images with their channels last, as traced networks hold them: both convolve by one kernel, on
# every processor.
X = [
    torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(n)).to(
        memory_format=torch.channels_last
    )
    for n in range(3)
]


def head() -> tuple[nn.Module, ...]:
    return nn.Flatten(), nn.Linear(144, 5)


class Functional(nn.Module):
    """The ReLU is a function, behind a reshape; the head's output is read as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 4, 3), nn.Linear(144, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(F.relu(self.conv(x).flatten(1)))  # type: ignore[no-any-return]


class Twice(nn.Module):
    """A ReLU follows the first call of the layer and not the second."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.relu(self.conv(x))).sigmoid()


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "convolution and ReLU": lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), *head()),
    "a function": Functional,
    "linear and GELU": lambda: nn.Sequential(
        nn.Flatten(), nn.Linear(192, 16), nn.GELU(), nn.Linear(16, 5)
    ),
    "read twice": lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.Sigmoid(), *head()),
}
SPECS = {
    "static": spec(),
    "asymmetric": spec(symmetric=False),
    "dynamic": spec(is_dynamic=True),
}


def built(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make().eval().requires_grad_(False)


def config(outputs: QuantizationSpec) -> Config:
    return Config(
        QuantizationConfig(weight=spec(), input_tensors=spec(), output_tensors=outputs)
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", SPECS)
@pytest.mark.parametrize("name", NETWORKS)
def test_a_model_in_place_computes_what_a_traced_one_does(name: str, kind: str) -> None:
    traced = quantizer.calibrate(built(NETWORKS[name]), config(SPECS[kind]), X).network
    model = ModelQuantizer(config(SPECS[kind])).quantize_model(
        built(NETWORKS[name]), (x for x in X)
    )
    for x in X:
        assert same(model(x), traced(x))


def test_the_range_is_that_after_the_relu() -> None:
    model = quantized(
        built(NETWORKS["convolution and ReLU"]), X, output_tensors=spec(symmetric=False)
    )
    largest = max(float(built(NETWORKS["convolution and ReLU"])[:2](x).max()) for x in X)  # type: ignore[index]
    assert float(model[0].quantizers["activation"].scale) * 255 == pytest.approx(
        largest, rel=1e-5
    )
    assert float(model[0](X[0]).min()) == 0.0


@pytest.mark.parametrize("kind", SPECS)
def test_saved_models_and_copies_do_the_same(kind: str, tmp_path: Path) -> None:
    make = NETWORKS["convolution and ReLU"]
    model = ModelQuantizer(config(SPECS[kind])).quantize_model(built(make), X)
    ModelQuantizer.save(model, tmp_path / "saved")
    loaded = ModelQuantizer.load(built(make), tmp_path / "saved")
    assert same(loaded(X[0]), model(X[0]))
    assert same(copy.deepcopy(model)(X[0]), model(X[0]))
    assert torch.equal(loaded.get_submodule("0")(X[0]), model.get_submodule("0")(X[0]))


REFUSED: dict[str, tuple[Any, str]] = {
    "a norm": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), *head()),
        r"Conv2d\[0\]/conv2d is quantized after .*BatchNorm2d\[1\].*\n.*fold the norm into "
        r"the layer first",
    ),
    "another activation": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU6(), *head()),
        r"quantized after .*ReLU6\[1\]/relu6, which its module does not compute\n.*use "
        r"quantizer\.calibrate or the shell",
    ),
    "two calls": (
        Twice,
        r"Conv2d\[conv\]/conv2d runs more than once, and a ReLU does not always follow",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_module_cannot_do_is_refused_before_anything_changes(name: str) -> None:
    make, message = REFUSED[name]
    model = built(make)
    with pytest.raises(UsageError, match=message) as caught:
        quantized(model, X, weight=spec(), output_tensors=spec())
    assert caught.value.message.startswith("Config.global_quant_config.output_tensors.dtype: ")
    assert same(model(X[0]), built(make)(X[0]))


def test_where_the_norm_is_folded_first_both_compute_the_same() -> None:
    conv, norm, *others = built(REFUSED["a norm"][0]).children()
    fused = nn.utils.fusion.fuse_conv_bn_eval(conv, norm)  # type: ignore[type-var]
    found = quantized(nn.Sequential(fused, *others), X, weight=spec(), output_tensors=spec())
    settings = Config(QuantizationConfig(weight=spec(), output_tensors=spec()))
    traced = quantizer.calibrate(built(REFUSED["a norm"][0]), settings, X).network
    torch.testing.assert_close(found(X[0]), traced(X[0]), rtol=1e-4, atol=1e-5)


def test_a_batch_shows_what_follows_a_layer() -> None:
    with pytest.raises(
        DataError, match=r"no dataloader, but the output of .*Conv2d\[0\].*\n.*one batch"
    ):
        quantized(built(NETWORKS["convolution and ReLU"]), output_tensors=spec(is_dynamic=True))
