"""`python tests/fuzz/configs.py SECONDS [SEED]`: draws configs of both forms, edits most, and
runs commands on them.

Each must do its work or end with a sentence; an internal error, a traceback or a hang is a
finding, printed with the seed that replays it.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from fuzz.edits import HOSTILE, edited
from fuzz.results import quietly
from fuzz.search import search
from support import drawn_configs

MODEL = """
from support.toys import built

def model():
    return built("residual").module

def calibration_data():
    return [built("residual").args[0]]
"""
ALLOWED = (0, 1, 2)
NESTED = (
    *(
        {"name": True},
        {"name": "gptq", "desc_act": None},
        {"weights": {}},
        {"weight": []},
        [["weights"]],
    ),
    *(
        {"dtype": "mx"},
        {"dtype": ["int8"]},
        [True, "weights"],
        [{"layer_name": 1}],
        {"layers": True},
    ),
    *(
        "re:(",
        "re:(a+)+$",
        "**",
        "[",
        "Residual::",
        "//",
        "kind:",
        "int4",
        "per_group",
        "awq",
        128,
        -1,
        0.99,
    ),
)
"""More values that someone may write into a config."""


def prepared(place: Path) -> Path:
    """A model in a file, to plan with."""
    path = place / "net.py"
    path.write_text(MODEL)
    return path


def drawn(seed: int) -> tuple[str, str]:
    """A config as its file has it, and what was done to it."""
    draw = random.Random(seed)
    form = draw.choice(["layered", "hierarchical"])
    value = (
        drawn_configs.layered(draw) if form == "layered" else drawn_configs.hierarchical(draw)
    )
    if draw.random() < 0.3:
        entries = drawn_configs.algorithms(draw)
        key = (
            "algorithms"
            if form == "layered"
            else draw.choice(["algo_config", "pre_quant_opt_config"])
        )
        value[key] = entries if form == "layered" or draw.random() < 0.7 else entries[0]
    done: list[str] = []
    edits = draw.choice([0, 1, 1, 1, 2, 3])
    while value and len(done) < edits:
        value, what = edited(value, draw, HOSTILE + NESTED)
        done.append(what)
    return json.dumps(value, indent=2), f"{form}: {'; '.join(done)}"


def one(seed: int, model: Path) -> tuple[str, int, str, str]:
    """One config and one command: what was done, the exit code, what was printed, and the
    command.
    """
    text, done = drawn(seed)
    path = model.parent / "config.json"
    path.write_text(text)
    planned = ["--config_file", str(path), "--model", str(model)]
    commands = {
        "plan": ["plan", *planned],
        "validate": ["validate", str(path), "--format", "json"],
        "fix": ["validate", str(path), "--fix", "--diff"],
        "convert": ["convert", str(path)],
        "explain": ["explain", *planned, "conv1"],
    }
    command = random.Random(seed).choice(["plan", "plan", "plan", *commands])
    code, said = quietly(commands[command])
    return done, code, said, command


def main() -> None:
    """Edited configs, for so many seconds."""
    with tempfile.TemporaryDirectory() as folder:
        model = prepared(Path(folder))

        def ended(seed: int) -> tuple[str, list[str]]:
            began = time.monotonic()
            done, code, said, command = one(seed, model)
            is_right = (
                code in ALLOWED and time.monotonic() - began <= 10 and "Traceback" not in said
            )
            return f"exit {code}", [] if is_right else [
                f"{command}, exit {code}: {done}\n    {said.strip()[-400:]}"
            ]

        search(ended)


if __name__ == "__main__":
    main()
