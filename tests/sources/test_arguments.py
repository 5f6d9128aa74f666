"""Which arguments of `forward` a batch fills: pairs are (input, target) only where that is what
they must be.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import save_file
from support.configs import document
from torch import Tensor, nn

import quantizer
from quantizer.cli.main import run_command
from quantizer.errors import DataError
from quantizer.sources.data import load_batches

IMAGES, TOKENS, FLAGS = (
    torch.randn(4, 3, 2, 2),
    torch.arange(12).view(4, 3),
    torch.ones(4, 3, dtype=torch.long),
)
CLASSES, VALUES, MAPS = (
    torch.arange(4),
    torch.randn(4, 1),
    torch.zeros(4, 2, 2, dtype=torch.long),
)


class One(nn.Module):
    def forward(self, x: Any) -> Any: ...


class Masked(nn.Module):
    def forward(self, x: Any, mask: Any = None) -> Any: ...


class Switched(nn.Module):
    def forward(self, x: Any, hard: bool = False, scale: float | None = None) -> Any: ...


class Usual(nn.Module):
    def forward(self, x: Any = IMAGES) -> Any: ...


class Two(nn.Module):
    def forward(self, image: Any, text: Any) -> Any: ...


class Supervised(nn.Module):
    def forward(self, x: Any, y: Any) -> Any: ...


class Clip(nn.Module):
    def forward(
        self, input_ids: Any = None, pixel_values: Any = None, return_loss: bool | None = None
    ) -> Any: ...


class Vision(nn.Module):
    def forward(
        self, pixel_values: Any = None, bool_masked_pos: Any = None, output: bool = False
    ) -> Any: ...


class Tagger(nn.Module):
    def forward(
        self, input_ids: Any = None, mask: Any = None, types: Any = None, labels: Any = None
    ) -> Any: ...


class Segmenter(nn.Module):
    def forward(
        self, pixel_values: Any = None, labels: Any = None, output: bool | None = None
    ) -> Any: ...


class Several(nn.Module):
    def forward(self, *xs: Any) -> Any: ...


CASES: dict[str, tuple[type[nn.Module], Any, tuple[str, ...], bool, str]] = {
    "a class for each": (One, (IMAGES, CLASSES), ("x",), True, ""),
    "a map for each": (One, (IMAGES, MAPS), ("x",), True, ""),
    "a class, and an optional mask": (
        Masked,
        (IMAGES, CLASSES),
        ("x",),
        True,
        "batches fill x of forward(), not mask",
    ),
    "perhaps a mask": (
        Masked,
        (TOKENS, FLAGS),
        ("x",),
        True,
        "not mask, and have a target; if the target is an input",
    ),
    "a mask and a class": (
        Masked,
        (TOKENS, FLAGS, CLASSES),
        ("x", "mask"),
        True,
        "fill x, mask of forward(), and have",
    ),
    "switches": (Switched, (IMAGES, MAPS), ("x",), True, ""),
    "one that has a default": (Usual, [IMAGES], ("x",), False, ""),
    "one that has a default, and a class": (Usual, (IMAGES, CLASSES), ("x",), True, ""),
    "two that are needed": (
        Two,
        (IMAGES, TOKENS),
        ("image", "text"),
        False,
        "batches fill image, text of forward()",
    ),
    "and a target": (
        Two,
        (IMAGES, TOKENS, CLASSES),
        ("image", "text"),
        True,
        "and have a target",
    ),
    "CLIP": (
        Clip,
        (TOKENS, IMAGES),
        ("input_ids", "pixel_values"),
        False,
        "fill input_ids, pixel_values of forward()",
    ),
    "CLIP with classes": (
        Clip,
        (TOKENS, IMAGES, CLASSES),
        ("input_ids", "pixel_values"),
        True,
        "and have a target",
    ),
    "CLIP with one": (Clip, (TOKENS,), ("input_ids",), False, ""),
    "a ViT with classes": (
        Vision,
        (IMAGES, CLASSES),
        ("pixel_values",),
        True,
        "not bool_masked_pos",
    ),
    "a ViT with values": (
        Vision,
        (IMAGES, VALUES),
        ("pixel_values",),
        True,
        "not bool_masked_pos",
    ),
    "a ViT with patches": (
        Vision,
        (IMAGES, FLAGS.bool()),
        ("pixel_values", "bool_masked_pos"),
        False,
        "fill pixel",
    ),
    "tags": (Tagger, (TOKENS, TOKENS), ("input_ids",), True, "not mask"),
    "a mask and tags": (
        Tagger,
        (TOKENS, FLAGS, TOKENS),
        ("input_ids", "mask"),
        True,
        "and have a target",
    ),
    "a mask and classes": (
        Tagger,
        (TOKENS, FLAGS, CLASSES),
        ("input_ids", "mask"),
        True,
        "not types",
    ),
    "a map where labels are": (Segmenter, (IMAGES, MAPS), ("pixel_values",), True, ""),
    "a dict": (
        Clip,
        {"pixel_values": IMAGES, "input_ids": TOKENS},
        ("pixel_values", "input_ids"),
        False,
        "batches",
    ),
    "a dict and classes": (Clip, ({"input_ids": TOKENS}, CLASSES), ("input_ids",), True, ""),
    "a dict and tags": (Tagger, ({"input_ids": TOKENS}, TOKENS), ("input_ids",), True, ""),
    "a dict with labels": (
        Masked,
        {"x": IMAGES, "mask": FLAGS, "labels": CLASSES},
        ("x", "mask"),
        True,
        "fill x, mask",
    ),
    "a dict with a y that is needed": (
        Supervised,
        {"x": IMAGES, "y": MAPS},
        ("x", "y"),
        False,
        "batches fill x, y",
    ),
    "any number": (Several, (IMAGES, CLASSES), ("argument 0",), True, ""),
}


@pytest.mark.parametrize("name", CASES)
def test_what_a_batch_fills(name: str, caplog: pytest.LogCaptureFixture) -> None:
    module, item, names, has_target, said = CASES[name]
    with caplog.at_level(logging.INFO):
        batches = load_batches([item, item], module=module())
        batch, _ = batches
    assert batches.filled is not None
    assert (batches.filled.arguments, batch.target is not None) == (names, has_target)
    assert len(batch.args) + len(batch.kwargs) == len(names)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == bool(said)
    assert all(said in message for message in messages)


@pytest.mark.parametrize(
    ("name", "level"),
    [("perhaps a mask", "WARNING"), ("a class, and an optional mask", "INFO")],
)
def test_what_may_be_an_input_is_a_warning(
    name: str, level: str, caplog: pytest.LogCaptureFixture
) -> None:
    module, item, *_ = CASES[name]
    with caplog.at_level(logging.INFO):
        next(iter(load_batches([item], module=module())))
    assert [record.levelname for record in caplog.records] == [level]
    assert ("give dicts: their keys name the arguments" in caplog.text) is (level == "WARNING")


def test_more_than_there_is_room_for() -> None:
    with pytest.raises(DataError, match="has 5 elements, but the model takes 1 to 3 inputs"):
        list(load_batches([(IMAGES, CLASSES, MAPS, MAPS, MAPS)], module=Switched()))
    with pytest.raises(
        DataError, match="has 0 elements, but the model takes at least 1 input "
    ):
        list(load_batches([()], module=Several()))


FILES: dict[
    str, tuple[type[nn.Module], dict[str, Tensor], tuple[str, ...], tuple[str, ...]]
] = {
    "by name": (
        Clip,
        {"input_ids": TOKENS, "pixel_values": IMAGES},
        ("input_ids", "pixel_values"),
        (),
    ),
    "beside the input": (Masked, {"x": IMAGES, "mask": FLAGS}, ("mask", "x"), ()),
    "beside another name of it": (Masked, {"images": IMAGES, "mask": FLAGS}, ("x", "mask"), ()),
    "that nothing takes": (One, {"data": IMAGES, "weights": VALUES}, ("x",), ("weights",)),
    "a y that is needed": (Supervised, {"x": IMAGES, "y": MAPS}, ("x", "y"), ()),
}


@pytest.mark.parametrize("name", FILES)
def test_tensors_of_files_fill_what_has_their_name(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    module, tensors, names, left_out = FILES[name]
    save_file(tensors, tmp_path / "data.safetensors")
    with caplog.at_level(logging.INFO):
        batches = load_batches(str(tmp_path), module=module())
        next(iter(batches))
    assert batches.filled is not None
    assert ({*batches.filled.arguments}, batches.filled.left_out) == ({*names}, left_out)
    assert all(f"not {left}" in caplog.text for left in left_out)


CODE = """import torch
class Both(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.image, self.text = torch.nn.Linear(4, 3), torch.nn.Embedding(9, 3)
    def forward(self, image=None, text=None):
        return self.image(image) @ self.text(text).mean(1).T
def model():
    torch.manual_seed(0)
    return Both()
def calibration_data():
    return [(torch.randn(2, 4), torch.arange(6).view(2, 3))]
"""


def test_runs_and_plans_say_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "both.py").write_text(CODE)
    (tmp_path / "config.json").write_text(json.dumps(document()))
    given = [
        "--config_file",
        str(tmp_path / "config.json"),
        "--model",
        str(tmp_path / "both.py"),
    ]
    expected = {
        "arguments": ["image", "text"],
        "target": False,
        "passed_over": "",
        "left_out": [],
    }
    for _ in range(2):  # the second plan is of a trace that was kept
        assert run_command(["plan", *given, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["data"] == expected
    assert (
        run_command(["--quant_mode", "calib", *given, "--output_dir", str(tmp_path / "out")])
        == 0
    )
    assert "batches fill image, text of forward()" in capsys.readouterr().err
    assert json.loads((tmp_path / "out" / "run.json").read_text())["data"] == expected


@pytest.mark.slow
def test_a_clip_model_reads_both(caplog: pytest.LogCaptureFixture) -> None:
    transformers = pytest.importorskip("transformers", reason="its models (extra: llm)")
    torch.manual_seed(0)
    size = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    text = size | {
        "vocab_size": 20,
        "max_position_embeddings": 8,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    vision = size | {"image_size": 8, "patch_size": 4}
    config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=4)
    pair = torch.randint(2, 20, (2, 5)), torch.randn(2, 3, 8, 8)
    with caplog.at_level(logging.INFO):
        result = quantizer.calibrate(transformers.CLIPModel(config).eval(), document(), [pair])
    assert "batches fill input_ids, pixel_values of forward()" in caplog.text
    named = {node.name for node in result.plan.plan.graph.nodes if node.op == "input"}
    assert named == {"CLIPModel::input_0", "CLIPModel::input_1"}
    with torch.no_grad():
        assert cast(Any, result.network(*pair)).logits_per_image.shape == (2, 2)
