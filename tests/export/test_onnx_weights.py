"""`--onnx_weights`: which integers hold 8-bit weights, so that a default session is right on
any processor.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.configs import document
from support.extended import extended
from support.runs import ROOT
from torch import Tensor, nn

import quantizer
from quantizer.errors import VerificationError

onnx = pytest.importorskip("onnx", reason="files are read with it (extra: onnx)")
pytest.importorskip("onnxruntime", reason="files are verified with it (extra: onnx)")
pytest.importorskip("onnxscript", reason="torch.onnx needs it (extra: onnx)")

from quantizer.numerics.integer import largest_pair_sums

INT8, UINT8 = onnx.TensorProto.INT8, onnx.TensorProto.UINT8


class Extremes(nn.Module):
    """Products whose neighbours add up to more than 16 bits hold: all weights and all inputs
    are large.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(4, 8, 3), nn.Linear(8, 4)
        with torch.no_grad():
            for layer in (self.first, self.second):
                layer.weight.uniform_(0.9, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).mean((2, 3)))


def weights_of(path: Path) -> set[int]:
    return {
        t.data_type
        for t in onnx.load(path).graph.initializer
        if t.name.endswith(".weights.codes")
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bits", "expected"), [(8, {UINT8}), (7, {INT8}), *extended((4, {INT8}))]
)
def test_products_that_could_overflow_have_unsigned_weights(
    bits: int, expected: set[int], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    data = torch.rand(4, 4, 6, 6) * 0.1 + 0.9
    config = document(
        tensor={
            "weights": {"bit_width": bits},
            "activation": {"symmetry": False, "signed": False},
        }
    )
    found = quantizer.calibrate(Extremes().eval(), config, [data]).export(
        "onnx", tmp_path / "net.onnx", [data]
    )
    assert weights_of(tmp_path / "net.onnx") == expected
    assert found.default_session is not None
    assert found.default_session.first_differing is None
    assert any('onnx_weights="int8"' in text for text in found.remarks) == (bits == 8)


class Pairs(nn.Module):
    """Layers with weights of 127 whose neighbours decide whether 16 bits can hold a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(4, 4, 3, groups=4)
        self.grouped = nn.Conv2d(4, 8, 1, groups=4)
        self.opposite, self.small, self.odd = (
            nn.Conv2d(8, 8, 3),
            nn.Conv2d(8, 3, 1),
            nn.Conv2d(3, 4, 3),
        )
        self.head = nn.Linear(4, 4)
        with torch.no_grad():
            for layer in self.children():
                layer.weight.fill_(1.0)
            self.opposite.weight[:, 1::2] = -1.0
            # 127 and 1 are 128; 127 and 2 were too much
            self.small.weight[:, 1::2] = 1 / 127
            self.odd.weight[:, :, 1::2] = -1.0
            self.head.weight[:, 1::2] = 2 / 127

    def forward(self, x: Tensor) -> Tensor:
        x = self.opposite(self.grouped(self.depthwise(x)))
        return self.head(self.odd(self.small(x)).mean((2, 3)))


@pytest.mark.slow
def test_auto_writes_int8_where_no_pair_of_products_leaves_16_bits(tmp_path: Path) -> None:
    data = torch.rand(2, 4, 9, 9)
    path = tmp_path / "net.onnx"
    found = quantizer.calibrate(Pairs().eval(), document(), [data]).export("onnx", path, [data])
    signed: dict[str, bool] = {}
    for tensor in onnx.load(path).graph.initializer:
        if tensor.name.endswith(".weights.codes"):
            name = re.findall(r"\[(\w+)\]", tensor.name)[0]
            signed[name] = tensor.data_type == INT8
    assert signed == {
        "depthwise": True,
        "grouped": True,
        "opposite": True,
        "small": True,
        "odd": False,
        "head": False,
    }
    assert "8-bit weights of 2 of 6 layers are stored as uint8" in found.remarks[0]


def saturated(codes: Tensor, inputs: Tensor) -> bool:
    """Return whether the instruction vpmaddubsw saturates in a product with these inputs."""
    products = inputs.to(torch.int32) * codes.to(torch.int32)
    sums = products[..., 0::2] + products[..., 1::2]
    return bool(((sums > 32767) | (sums < -32768)).any())


@given(
    st.lists(st.integers(-128, 127), min_size=2, max_size=12).filter(
        lambda row: len(row) % 2 == 0
    )
)
def test_the_largest_sum_decides_whether_the_worst_inputs_saturate(row: list[int]) -> None:
    codes = torch.tensor([row])
    worst = [torch.where(codes * sign > 0, 255, 0) for sign in (1, -1)]
    wrong = any(saturated(codes, inputs) for inputs in worst)
    assert wrong == (int(largest_pair_sums(codes)) > 128)


def rows_as_multiplied(codes: Tensor) -> Tensor:
    """Codes of each output in the order of the kernels, with a zero after an odd number.

    Args:
        codes: [inputs, outputs] of a product of matrices, or those of a convolution.
    """
    rows = codes.flatten(2).transpose(1, 2).flatten(1) if codes.dim() > 2 else codes.T
    return nn.functional.pad(rows, (0, rows.shape[1] % 2))


def saturating_weights(path: Path) -> tuple[list[str], set[int]]:
    """The int8 weights of a file with which vpmaddubsw saturates on its worst inputs, and the
    types of all weights.
    """
    model = onnx.load(path)
    found: list[str] = []
    for tensor in model.graph.initializer:
        if tensor.name.endswith(".weights.codes") and tensor.data_type == INT8:
            codes = torch.from_numpy(onnx.numpy_helper.to_array(tensor).copy())
            if codes.dim() > 2 and codes.shape[1] == 1:
                continue  # Kernels of depthwise convolutions add no pairs
            rows = rows_as_multiplied(codes)
            worst = [torch.where(rows * sign > 0, 255, 0) for sign in (1, -1)]
            if any(saturated(rows, inputs) for inputs in worst):
                found.append(tensor.name)
    return found, weights_of(path)


@pytest.mark.parametrize("preset", ["onnx_int8", "cpu_int8"])
@pytest.mark.parametrize("model", [Extremes, Pairs])
def test_no_file_of_a_preset_can_saturate(
    model: type[nn.Module], preset: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    data = [torch.rand(8, 4, 9, 9)]
    path = tmp_path / "net.onnx"
    config = ROOT / "configs" / f"{preset}.json"
    result = quantizer.calibrate(model().eval(), config, data)
    result.export("onnx", path, data)
    found, types = saturating_weights(path)
    assert not found
    assert (UINT8 in types) == (preset == "cpu_int8")


@pytest.mark.parametrize(("zero_points", "is_int8"), [("one", True), ("several", False)])
def test_depthwise_weights_with_several_zero_points_count_their_pairs(
    zero_points: str, is_int8: bool, tmp_path: Path
) -> None:
    """ONNX Runtime 1.31 computes them as matrix products, in pairs: without VNNI 34 steps wrong."""
    torch.manual_seed(0)
    layer = nn.Conv2d(8, 8, 3, groups=8)
    with torch.no_grad():
        layer.weight.uniform_(-1, 1)
        if zero_points == "one":
            layer.weight[:, 0, 0, 0], layer.weight[:, 0, 1, 1] = -1.0, 1.0
        else:
            layer.weight += torch.linspace(-0.5, 0.5, 8).view(8, 1, 1, 1)
    data = torch.rand(2, 8, 6, 6)
    weights = {"symmetry": False, "per_channel": True, "method": "maxmin"}
    config = document(tensor={"weights": weights})
    path = tmp_path / "net.onnx"
    result = quantizer.calibrate(nn.Sequential(layer).eval(), config, [data])
    result.export("onnx", path, [data])
    assert (INT8 in weights_of(path)) == is_int8


@pytest.mark.slow
def test_int8_is_written_where_this_processor_is_right_with_it(tmp_path: Path) -> None:
    data = torch.rand(4, 4, 6, 6) * 0.1 + 0.9
    path, result = (
        tmp_path / "net.onnx",
        quantizer.calibrate(Extremes().eval(), document(), [data]),
    )
    try:
        found = result.export("onnx", path, [data], onnx_weights="int8")
    except VerificationError as refused:
        assert not torch.cpu._is_vnni_supported()
        assert refused.help is not None and 'onnx_weights="auto"' in refused.help
        assert not path.exists()
    else:
        assert weights_of(path) == {INT8}
        assert "x86 CPUs without VNNI" in found.remarks[0]


class First(nn.Module):
    """A first convolution with three input channels, and weights of the largest size.

    Args:
        like: whether two neighbours at one position have the same sign.
    """

    def __init__(self, *, like: bool) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3)
        with torch.no_grad():
            # Within each position, and from each position to the next, signs alternate
            signs = torch.tensor([1.0, -1.0]).repeat(14)[:27].view(9, 3)
            if like:
                signs[1] = torch.tensor([1.0, 1.0, -1.0])
                signs[0, 2] = -1.0
            self.conv.weight.copy_(signs.T.reshape(3, 3, 3).expand(16, 3, 3, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x)  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("like", "weights", "channels"), [(False, "auto", 4), (True, "auto", 3), (True, "int8", 4)]
)
def test_int8_weights_of_first_convolutions_have_four_input_channels(
    like: bool, weights: str, channels: int, tmp_path: Path
) -> None:
    """Padding moves weights to other pairs. Those of one position then meet each other."""
    data = torch.rand(2, 3, 9, 9) - 0.4
    path = tmp_path / "net.onnx"
    model = First(like=like).eval()
    result = quantizer.calibrate(model, document(), [data])
    if weights == "int8" and not torch.cpu._is_vnni_supported():
        with pytest.raises(VerificationError, match="default ONNX Runtime session"):
            result.export("onnx", path, [data], onnx_weights=weights)
        return
    verified = result.export("onnx", path, [data], onnx_weights=weights)
    file = onnx.load(path)
    shapes = {tuple(tensor.dims) for tensor in file.graph.initializer}
    assert (16, channels, 3, 3) in shapes
    assert verified.max_difference == 0
