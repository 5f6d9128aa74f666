"""`python tests/fuzz/results.py SECONDS [SEED]`: edits result folders, makes their checksums
right, and runs commands.

Each must do its work or end with a sentence; an internal error, a traceback or a hang is a
finding, printed with the seed that replays it.
"""

from __future__ import annotations

import contextlib
import io
import json
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from fuzz.edits import edit_tensors, edited, sealed
from fuzz.search import search

from quantizer.calibration import fingerprint
from quantizer.cli.main import run_command
from quantizer.graph.stored import graph_from_json

MODEL = """
import torch
from torch import nn

def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5)).eval()

def calibration_data():
    return [torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(n)) for n in range(2)]
"""
ROOT = Path(__file__).parents[2]
GROUPS = {
    "dtype": "int4",
    "qscheme": "per_group",
    "ch_axis": 1,
    "group_size": 16,
    "symmetric": False,
}
CONFIGS = {
    "cpu": (ROOT / "configs" / "cpu_int8.json")
    .read_text()
    .replace("../schemas", str(ROOT / "schemas")),
    "dpu": (ROOT / "configs" / "dpu.json")
    .read_text()
    .replace("../schemas", str(ROOT / "schemas")),
    "groups": json.dumps(
        {
            "global_quant_config": {
                "input_tensors": {"dtype": "int8", "qscheme": "per_tensor"}
            },
            "layer_type_quant_config": {"nn.Linear": {"weight": GROUPS}},
            "pre_quant_opt_config": {"name": "smoothquant"},
        }
    ),
}
ALLOWED = (0, 1, 2, 5)


def prepared(place: Path) -> dict[str, Path]:
    """Result folders of several configs."""
    (place / "net.py").write_text(MODEL)
    found = {}
    for name, text in CONFIGS.items():
        (place / f"{name}.json").write_text(text)
        found[name] = place / name
        given = [
            "--model",
            str(place / "net.py"),
            "--config_file",
            str(place / f"{name}.json"),
            "-q",
        ]
        code, said = quietly(
            ["--quant_mode", "calib", *given, "--output_dir", str(found[name])]
        )
        assert code == 0, said
        code, said = quietly(commands(place, found[name])["test"])
        assert code == 0, said
    return found


def commands(place: Path, folder: Path) -> dict[str, list[str]]:
    """What reads a result folder."""
    model = ["--model", str(place / "net.py")]
    return {
        "test": ["--quant_mode", "test", *model, "--output_dir", str(folder), "-q"],
        "report": ["report", str(folder)],
        "retune": [
            "retune",
            str(folder),
            "--method",
            "maxmin",
            "--output_dir",
            str(place / "retuned"),
            "--overwrite",
        ],
        "merge": [
            "merge",
            str(folder),
            str(folder),
            *model,
            "--output",
            str(place / "merged"),
            "-q",
            "--overwrite",
        ],
        "diff": ["diff", str(folder), str(place / "cpu")],
    }


def quietly(arguments: list[str]) -> tuple[int, str]:
    """A command's exit code, and what it prints."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = run_command(arguments)
    return code, said.getvalue()


def one(seed: int, folders: dict[str, Path], place: Path) -> tuple[str, int, str, str]:
    """One edit and one command: what was done, the exit code, what was printed, and the
    command.
    """
    draw = random.Random(seed)
    name = draw.choice(sorted(folders))
    copy = place / "copy"
    for each in (copy, place / "retuned", place / "merged"):
        shutil.rmtree(each, ignore_errors=True)
    shutil.copytree(folders[name], copy)
    file = draw.choice(
        sorted(path for path in copy.iterdir() if path.suffix in (".json", ".safetensors"))
    )
    often = draw.random()
    if often < 0.7:
        file = copy / ("quant_info.json" if often < 0.4 else "graph.json")
    if file.suffix == ".json":
        value, done = edited(json.loads(file.read_text()), draw)
        file.write_text(json.dumps(value))
        if file.name == "graph.json" and draw.random() < 0.7:
            agree_with_graph(copy)
    else:
        done = edit_tensors(file, draw)
    with contextlib.suppress(AttributeError, TypeError, LookupError, json.JSONDecodeError):
        sealed(copy)
    command = draw.choice(["test", "test", "test", "report", "retune", "merge", "diff"])
    code, said = quietly(commands(place, copy)[command])
    return f"{name}, {file.name}, {done}", code, said, command


def agree_with_graph(folder: Path) -> None:
    """Make quant_info.json say of its layers what an edited graph says, if that is a graph."""
    path = folder / "quant_info.json"
    info = json.loads(path.read_text())
    with contextlib.suppress(Exception):
        graph = graph_from_json(json.loads((folder / "graph.json").read_text())).graph
        info["header"]["layers"] = fingerprint.layer_digests(graph)
        info["header"]["inputs"] = fingerprint.input_shapes(graph)
        path.write_text(json.dumps(info))


def main() -> None:
    """Edited results, for so many seconds."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        folders = prepared(place)

        def ended(seed: int) -> tuple[str, list[str]]:
            began = time.monotonic()
            done, code, said, command = one(seed, folders, place)
            is_right = (
                code in ALLOWED and time.monotonic() - began <= 30 and "Traceback" not in said
            )
            return f"exit {code}", [] if is_right else [
                f"{command}, exit {code}: {done}\n    {said.strip()[-400:]}"
            ]

        search(ended)


if __name__ == "__main__":
    main()
