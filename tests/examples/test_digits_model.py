"""The digits example: its shipped weights are right, and they are what its training script
saves.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quantizer.sources.data import load_batches
from quantizer.sources.models import load_model

pytest.importorskip(
    "sklearn", reason="the digits come from scikit-learn; needs quantizer-torch[examples]"
)

DIGITS = Path(__file__).parents[2] / "examples" / "digits.py"


def test_it_reads_held_out_digits() -> None:
    loaded = load_model(str(DIGITS))
    assert loaded.name == "ResNet"
    assert loaded.evaluate is not None
    batches = load_batches(loaded.evaluation_data or [], module=loaded.module)
    with torch.no_grad():
        metrics = loaded.evaluate(loaded.module, (batch.raw for batch in batches))
    assert metrics["top1"] >= 0.99
    assert batches.fingerprint is not None
    assert batches.fingerprint["samples"] == 500


def test_calibration_and_evaluation_share_no_image() -> None:
    loaded = load_model(str(DIGITS))
    seen = [
        {
            bytes(image.to(torch.uint8).flatten().tolist())
            for batch in load_batches(data or [])
            for image in batch.args[0] * 16
        }
        for data in (loaded.calibration_data, loaded.evaluation_data)
    ]
    assert [len(images) for images in seen] == [256, 500]
    assert not seen[0] & seen[1]


def test_the_weights_are_small() -> None:
    assert DIGITS.with_suffix(".safetensors").stat().st_size < 400_000
