"""Every key of the config has a worked example, and each prints what its page says."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
from support.printed import is_printed

from quantizer.config.pages import example_names

ROOT = Path(__file__).parents[2]
PROGRAM = runpy.run_path(str(ROOT / "docs" / "worked_examples.py"))
EXAMPLES: dict[str, Any] = json.loads(PROGRAM["EXAMPLES"].read_text("utf-8"))


def test_every_key_has_one() -> None:
    assert sorted(EXAMPLES) == sorted(example_names())


@pytest.mark.parametrize("key", EXAMPLES)
def test_it_changes_its_key_and_shows_an_effect(key: str) -> None:
    example = EXAMPLES[key]
    assert f'"{key.split()[0]}"' in json.dumps(example["change"])
    assert example["before"] != example["after"]
    assert example["before"]
    assert example["after"]


@pytest.mark.real
@pytest.mark.parametrize("key", EXAMPLES)
def test_it_prints_what_its_page_says(key: str) -> None:
    """Words are equal; numbers may differ a little from machine to machine."""
    pytest.importorskip(
        "sklearn", reason="the digits come from scikit-learn; needs quantizer-torch[examples]"
    )
    example = EXAMPLES[key]
    if any("--to onnx" in command for command in example["commands"]):
        pytest.importorskip("onnxruntime", reason="--to onnx needs quantizer-torch[onnx]")
    lines = PROGRAM["printed"](example, PROGRAM["configs"](example)["after"])
    pairs = zip(example["after"], lines, strict=True)
    assert [(line, found) for line, found in pairs if not is_printed(line, found)] == []
