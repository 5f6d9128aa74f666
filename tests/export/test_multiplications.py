"""The share of multiplications in int8 counts all that an engine executes, by their sizes."""

import json
from pathlib import Path

import pytest
import torch
from support.deployments import WIDEST_IN_INT8
from support.runs import ROOT
from torch import nn

import quantizer
from quantizer.errors import ModelError


class Experts(nn.Module):
    """Experts by einsum and a GRU, beside two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate = nn.Linear(8, 2, bias=False)
        self.up = nn.Parameter(torch.randn(2, 8, 16))
        self.rnn = nn.GRU(16, 4, batch_first=True)
        self.out = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gates = self.gate(x).softmax(-1)
        hidden = torch.einsum("btd,edh->ebth", x, self.up)
        mixed = torch.einsum("ebth,bte->bth", hidden, gates)
        return self.out(self.rnn(mixed)[0])


# For five samples of six positions
SIZES = {
    "gate": 30 * 8 * 2,
    "first": 30 * 2 * 8 * 16,
    "second": 30 * 2 * 16,
    "gru": 30 * 12 * (16 + 4),
    "out": 30 * 4 * 3,
}


def batches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(5, 6, 8, generator=generator) for _ in range(2)]


@pytest.mark.parametrize(("target", "integer"), [("onnx", 2), ("openvino", 3)])
def test_einsum_and_recurrent_layers_count(target: str, integer: int, tmp_path: Path) -> None:
    if target == "openvino":
        pytest.importorskip("openvino")
    config = json.loads((ROOT / "configs" / "cpu_int8.json").read_text("utf-8"))
    if target == "openvino":
        config["tensor_quantize_config"]["weights"]["bit_width"] = WIDEST_IN_INT8
    made = quantizer.quantize(
        Experts().eval(), batches(), to=target, folder=tmp_path, config=config
    )
    (content,) = json.loads((tmp_path / "export" / "verify.json").read_text("utf-8")).values()
    kernels = content["default_session"]["kernels"]
    assert sorted(kernels["multiply_adds"].values()) == sorted(SIZES.values())
    assert any("gru" in layer for layer in kernels["floating"])
    assert (len(kernels["integer"]), kernels["share"]) == (integer, integer / 5)
    in_integers = sum(kernels["multiply_adds"][name] for name in kernels["integer"])
    assert kernels["multiply_add_share"] == in_integers / sum(SIZES.values())
    assert f"{integer} of 5 multiplications in int8, " in str(made)
    assert "% of the multiply-adds" in str(made)


def test_a_failure_of_a_library_is_a_refusal_with_the_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*args: object, **kwargs: object) -> None:
        raise RuntimeError("Error for node 'node_relu_1' (::Relu)")

    monkeypatch.setattr(torch.onnx, "export", failing)
    network = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU()).eval()
    with pytest.raises(ModelError) as caught:
        quantizer.quantize(network, batches(), to="onnx", folder=tmp_path)
    assert "RuntimeError: Error for node 'node_relu_1' (::Relu)" in caught.value.message
    assert caught.value.message.endswith("that is layer Sequential::Sequential/ReLU[3]/relu")
    assert caught.value.help is not None and "pt2" in caught.value.help
