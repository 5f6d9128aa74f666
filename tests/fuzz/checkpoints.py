"""`python tests/fuzz/checkpoints.py SECONDS [SEED]`: edits checkpoints of stopped runs, and
goes on from them.

A run ends with what an undisturbed one finds, or with a sentence; anything else is a finding.
Half of the edits make the checksum right again; those may change what is found, and must not
end in an internal error either.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
import shutil
import sys
import tempfile
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from fuzz.edits import edit_tensors, edited
from fuzz.results import CONFIGS, MODEL, quietly
from fuzz.search import search
from support.crashes import killed_at_each

from quantizer.results import checkpoint

WEIGHT = {"dtype": "int4", "qscheme": "per_channel", "ch_axis": 0}
GPTQ = json.dumps({"global_quant_config": {"weight": WEIGHT}, "algo_config": {"name": "gptq"}})
RUNS = {
    "static": (CONFIGS["cpu"], []),
    "gptq": (GPTQ, []),
    "finetuned": (CONFIGS["cpu"], ["--fast_finetune"]),
}


def prepared(place: Path, step: int = 7) -> dict[str, tuple[list[str], Path, bytes]]:
    """By kind of run: its command, a folder with a checkpoint, and what an undisturbed run
    writes.
    """
    (place / "net.py").write_text(MODEL)

    found = {}
    for name, (text, more) in RUNS.items():
        (place / f"{name}.json").write_text(text)
        command = ["--quant_mode", "calib", "--model", str(place / "net.py"), "-q"]
        command += ["--config_file", str(place / f"{name}.json"), *more, "--output_dir"]
        code, said = quietly([*command, str(place / f"{name}.whole")])
        assert code == 0, said
        stopped, kept = place / name, place / f"{name}.kept"
        for _ in killed_at_each(
            [*command, str(stopped)], partial(shutil.rmtree, stopped, True), step
        ):
            if len([*stopped.glob("checkpoint.*.json")]):
                shutil.rmtree(kept, ignore_errors=True)
                shutil.copytree(stopped, kept)
        found[name] = (
            command,
            kept,
            (place / f"{name}.whole" / "quant_info.json").read_bytes(),
        )
    return found


def one(
    seed: int, runs: dict[str, tuple[list[str], Path, bytes]], place: Path
) -> tuple[str, int, str, bool]:
    """One edit: what was done, the exit code of the run, what was printed, and whether it found
    what it should.
    """
    draw = random.Random(seed)
    name = draw.choice(sorted(runs))
    command, kept, expected = runs[name]
    copy = place / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(kept, copy)
    seals = draw.random() < 0.5
    index = draw.choice(sorted(copy.glob("checkpoint.*.json")))
    file = draw.choice([index, *sorted(copy.glob(f"{index.stem}.*.safetensors"))])
    if file.suffix == ".json":
        value, done = edited(json.loads(file.read_text()), draw)
    else:
        done = edit_tensors(file, draw)
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        stage, old = file.name.removesuffix(".safetensors").rsplit(".", 1)
        if seals:
            file.rename(file.with_name(f"{stage}.{digest}.safetensors"))
        file = copy / f"{stage}.json"
        value = json.loads(file.read_text().replace(old, digest) if seals else file.read_text())
    with contextlib.suppress(TypeError, KeyError):
        if seals:
            rest = {key: value[key] for key in ("key", "state", "tensors")}
            value["checksum"] = hashlib.sha256(
                json.dumps(rest, sort_keys=True).encode()
            ).hexdigest()
    file.write_text(json.dumps(value))
    code, said = quietly([*command, str(copy), "--resume", "--overwrite"])
    info = copy / "quant_info.json"
    return (
        f"{name}, {file.name}, {done}",
        code,
        said,
        seals or code != 0 or info.read_bytes() == expected,
    )


def main() -> None:
    """Edited checkpoints, for so many seconds."""
    checkpoint.SAVE_INTERVAL_S = 0.0
    torch.set_num_threads(1)  # as in the search, since results say how many there were
    with tempfile.TemporaryDirectory() as folder:
        runs = prepared(Path(folder))

        def ended(seed: int) -> tuple[str, list[str]]:
            done, code, said, is_right = one(seed, runs, Path(folder))
            found = (
                f"exit {code}, {'right' if is_right else 'other results'}: {done}\n    "
                f"{said[-300:]}"
            )
            return f"exit {code}", [] if code in (0, 5) and is_right else [found]

        search(ended)


if __name__ == "__main__":
    main()
