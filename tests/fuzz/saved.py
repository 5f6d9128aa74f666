"""`python tests/fuzz/saved.py SECONDS [SEED]`: edits what ModelQuantizer.save has written,
makes its checksums right, and loads it.

Loading ends with an error of quantizer, or with a model that runs; anything else is a finding.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
import shutil
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from fuzz.edits import edit_tensors, edited
from fuzz.search import search
from torch import nn

from quantizer import Config, ModelQuantizer
from quantizer.errors import QuantizerError
from quantizer.storage.opened_files import json_digest

GROUPS = {
    "dtype": "int4",
    "qscheme": "per_group",
    "ch_axis": 1,
    "group_size": 4,
    "symmetric": False,
}
CONFIGS = {
    "static": {
        "weight": {"dtype": "int8", "qscheme": "per_channel", "ch_axis": 0},
        "input_tensors": {"dtype": "int8"},
    },
    "groups": {"weight": GROUPS},
    "blocks": {"weight": {"dtype": "fp4", "scale_format": "e8m0", "ch_axis": -1}},
}


def built() -> nn.Module:
    """The float model."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4)).eval()


def prepared(place: Path) -> dict[str, Path]:
    """A saved model for each config."""
    for name, config in CONFIGS.items():
        found = ModelQuantizer(
            Config.from_dict({"global_quant_config": config})
        ).quantize_model(built(), [torch.ones(2, 8)])
        ModelQuantizer.save(found, place / name)
    return {name: place / name for name in CONFIGS}


def one(seed: int, folders: dict[str, Path], place: Path) -> tuple[str, str, str]:
    """One edit: what was done, how loading ended ("ok", "refused" or "broken"), and what was
    said.
    """
    draw = random.Random(seed)
    name = draw.choice(sorted(folders))
    copy = place / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(folders[name], copy)
    description, tensors = copy / "quantizer.json", copy / "model.safetensors"
    value, done = json.loads(description.read_text()), ""
    if draw.random() < 0.6:
        value, done = edited(value, draw)
    else:
        done = edit_tensors(tensors, draw)
    with contextlib.suppress(TypeError):
        if "files" in value:
            digest = hashlib.sha256(tensors.read_bytes()).hexdigest()
            value["files"]["model.safetensors"] = digest
        rest = {key: each for key, each in value.items() if key != "checksum"}
        value["checksum"] = json_digest(rest)
    description.write_text(json.dumps(value))
    model = built()
    try:
        ModelQuantizer.load(model, copy)
    except QuantizerError as error:
        return f"{name}, {done}", "refused", str(error)
    except Exception as error:  # noqa: BLE001 - it is what is looked for
        return f"{name}, {done}", "broken", f"{type(error).__name__}: {error}"
    try:
        output = model(torch.ones(2, 8))
    except Exception as error:  # noqa: BLE001
        return f"{name}, {done}", "broken", f"later: {type(error).__name__}: {error}"
    return (
        f"{name}, {done}",
        "ok" if bool(output.isfinite().all()) else "broken",
        "the output is not finite",
    )


def main() -> None:
    """Edited models, for so many seconds."""
    with tempfile.TemporaryDirectory() as folder:
        folders = prepared(Path(folder))

        def ended(seed: int) -> tuple[str, list[str]]:
            done, end, said = one(seed, folders, Path(folder))
            return end, [f"{done}\n    {said[:300]}"] if end == "broken" else []

        search(ended)


if __name__ == "__main__":
    main()
