"""The peak of memory of calib and test mode over the import of torch, and what each layer adds
to it, as a share of its bytes: LLaMAs of width 1024 in Hugging Face folders, bfloat16, and
SmolLM2-135M out of a Python file.

`python benchmarks/bench_memory.py [layers …]`: 2 8 32. With 2 and 8 alone, SmolLM2 is left out:
two minutes.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from large_llama import make

MODES = ("calib", "test")
DATA = """
import torch

def data():
    draw = torch.Generator().manual_seed(0)
    return [{"input_ids": torch.randint(0, 32000, (1, 256), generator=draw)} for _ in range(4)]
"""
FLOAT = ["kind:embedding", "kind:head"]
INT4 = {
    "dtype": "int4",
    "qscheme": "per_group",
    "ch_axis": 1,
    "group_size": 64,
    "symmetric": True,
}
INT8 = {"dtype": "int8", "qscheme": "per_channel", "ch_axis": 0}
STATIC = {"weight": INT8, "input_tensors": {"dtype": "int8", "qscheme": "per_tensor"}}
CONFIGS: dict[str, dict[str, Any]] = {
    "RTN": {"global_quant_config": {"weight": INT4}, "exclude": FLOAT},
    "static": {"global_quant_config": STATIC, "exclude": FLOAT},
    "GPTQ": {
        "global_quant_config": {"weight": INT4},
        "exclude": FLOAT,
        "algo_config": {"name": "gptq"},
    },
    "AWQ": {
        "global_quant_config": {"weight": INT4},
        "exclude": FLOAT,
        "algo_config": {"name": "awq"},
    },
}
TARGETS = {name: 0.1 if name == "RTN" else 1.1 for name in CONFIGS}
SMOLLM = Path(__file__).parents[1] / "examples" / "smollm2.py"


def main() -> None:
    """Measure, one process after the other, and print."""
    counts = [int(text) for text in sys.argv[1:]] or [2, 8, 32]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "data.py").write_text(DATA)
        for count in counts:
            make(folder / str(count), count, 1024, 2816)
        models: dict[str, tuple[str, ...]] = {
            str(count): (str(folder / str(count)), "--data", f"{folder / 'data.py'}:data")
            for count in counts
        }
        if max(counts) > 8:
            models["SmolLM2"] = (str(SMOLLM),)
        sizes = [
            sum(each.stat().st_size for each in (folder / str(count)).glob("*.safetensors"))
            for count in counts
        ]
        layer = (sizes[-1] - sizes[0]) / max(1, counts[-1] - counts[0])
        print(f"peak memory over the import of torch, MB; a layer has {layer / 1e6:.1f} MB")
        print(
            f"{'':14}"
            + "".join(f"{name:>9}" for name in models)
            + "   MB a layer  share  target"
        )
        for name, config in CONFIGS.items():
            (folder / "config.json").write_text(json.dumps(config))
            peaks = {model: peaks_of(folder, given) for model, given in models.items()}
            for number, mode in enumerate(MODES):
                row = "".join(f"{found[number] / 1e6:9.0f}" for found in peaks.values())
                ends = [peaks[str(counts[at])][number] for at in (0, -1)]
                slope = (ends[1] - ends[0]) / max(1, counts[-1] - counts[0])
                columns = f"{slope / 1e6:13.2f}{slope / layer:7.2f}{TARGETS[name]:8.1f}"
                print(f"{name:8}{mode:6}{row}{columns}", flush=True)


def peaks_of(folder: Path, model: tuple[str, ...]) -> list[int]:
    """Of both modes, in their order."""
    found = []
    for mode in MODES:
        results = ["--output_dir", str(folder / "results"), "--overwrite", "--quiet"]
        config = ["--config_file", str(folder / "config.json")] if mode == "calib" else []
        command = [
            sys.executable,
            "-m",
            "quantizer",
            "--quant_mode",
            mode,
            "--model",
            *model,
            *config,
            *results,
        ]
        subprocess.run(
            command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        run = json.loads((folder / "results" / "run.json").read_text())
        found.append(int(run["peak_memory_over_imports_bytes"]))
    return found


if __name__ == "__main__":
    main()
