"""Layers that keep their plain scales where pair_safe would cost too much, or nothing gains."""

import json
from pathlib import Path
from typing import Any

import torch
from support.configs import document
from torch import Tensor, nn

import quantizer

ACTIVATIONS = {"symmetry": False, "signed": False, "method": "auto"}
SAFE = {"per_channel": True, "method": "pair_safe"}
PLAIN = {"per_channel": True}


class Heads(nn.Module):
    """Weights that `pair_safe` rounds twice as coarsely, in the middle and at the output."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.depthwise = nn.Conv2d(16, 16, 3, groups=16)
        self.hidden = nn.Linear(16, 64)
        self.head = nn.Linear(64, 10)
        for layer in self.children():
            nn.init.uniform_(layer.weight, -1, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.depthwise(x).mean((2, 3))
        return self.head(torch.sigmoid(self.hidden(x)))


def weights(folder: Path, method: str, *layers: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What quant_info.json says of the weights of each layer."""
    tensor = {"weights": {"per_channel": True, "method": method}, "activation": ACTIVATIONS}
    data = [torch.randn(32, 16, 8, 8, generator=torch.Generator().manual_seed(1))]
    result = quantizer.calibrate(Heads().eval(), document(*layers, tensor=tensor), data)
    result.save(folder / method)
    info = json.loads((folder / method / "quant_info.json").read_text())
    found = {}
    for layer, roles in info["tensors"].items():
        if "weights" in roles:
            found[layer.rpartition("[")[2].partition("]")[0]] = roles["weights"]
    return found


def test_only_a_layer_that_loses_little_gets_other_scales(tmp_path: Path) -> None:
    plain, safe = weights(tmp_path, "maxmin"), weights(tmp_path, "pair_safe")
    # Kernels for depthwise convolutions add no pairs
    assert safe["depthwise"]["scale"] == plain["depthwise"]["scale"]
    assert safe["depthwise"]["spec"]["method"] == "maxmin"
    ratios = [
        new / old
        for new, old in zip(safe["hidden"]["scale"], plain["hidden"]["scale"], strict=True)
    ]
    assert min(ratios) >= 1 and 1.3 < max(ratios) <= 2.0
    # The error of the last layer is that of the network
    assert safe["head"]["scale"] == plain["head"]["scale"]
    (note,) = safe["head"]["notes"]
    assert note.startswith("not pair_safe, which would cost ")
    assert "notes" not in safe["hidden"]


def test_a_layer_with_float_inputs_keeps_its_scales(tmp_path: Path) -> None:
    scales = []
    for method in ("maxmin", "pair_safe"):
        entry = {
            "layer_type": None,
            "overall_quantize_config": {
                **document()["overall_quantize_config"],
                "per_channel": True,
                "method": method,
            },
        }
        weights_only = {"layer_name": "hidden", "quantizable_data_type": ["weights"]}
        float_input = {"layer_name": "Heads::Heads/mean", "quantizable_data_type": []}
        found = weights(tmp_path, method, entry | weights_only, entry | float_input)
        assert found["hidden"]["spec"]["method"] == method
        scales.append(found["hidden"]["scale"])
    assert scales[0] == scales[1]
