"""Where the seconds of `quantizer --quant_mode calib` go, as a process, against what cannot be
done without.

`python benchmarks/bench_end_to_end.py [rounds [job…]]`; two threads. Processes take turns.
"floor" is another process that imports torch, makes the model (which may import more) and its
data, exports it once, and runs it in float over the data. All else is overhead, which is to be
at most 15 %; but for the search of algorithms, and bias correction's pass.
"""

from __future__ import annotations

import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Job:
    """A model's file, its data there, a config, and the size of its groups where that of the
    file does not fit.
    """

    file: str
    data: str
    config: str
    group_size: int | None = None


JOBS = {
    "ResNet-18": Job("benchmarks/workloads.py:resnet18", "images", "cpu_int8"),
    "EfficientNet-Lite0": Job(
        "examples/efficientnet_lite.py:model", "calibration_data", "cpu_int8"
    ),
    "SmolLM2": Job("examples/smollm2.py:model", "calibration_data", "gptq_int4_group", 64),
}


CLOCKS = (
    ("quantizer.cli.session", "open_data", "make the model and the data"),
    ("quantizer.cli.session", "open_model", "make the model and the data"),
    ("quantizer.cli.session", "trace_model", "trace"),
    ("quantizer.cli.calib_mode", "write_results", "write"),
    ("quantizer.cli.calib_mode", "write_report", "report"),
)
"""Functions that the steps do not call, where the command finds them, and the part that their
time is added to.
"""


def main() -> None:
    """Measure and print."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    for name in sys.argv[2:] or JOBS:
        job, totals, shares = JOBS[name], dict[str, list[float]](), dict[str, list[float]]()
        for _ in range(rounds):
            for which in ("floor", "quantizer"):
                took, parts = child(which, job)
                totals.setdefault(which, []).append(took)
                for part, seconds in parts.items():
                    shares.setdefault(f"{which}: {part}", []).append(seconds)
        ratios = [
            whole / floor
            for whole, floor in zip(totals["quantizer"], totals["floor"], strict=True)
        ]
        print(f"\n{name}, {job.config}: seconds, median of {rounds}")
        for part, values in {**totals, **shares}.items():
            print(
                f"  {part:<32} {statistics.median(values):6.2f} [{min(values):.2f} .. "
                f"{max(values):.2f}]"
            )
        print(
            f"  {'quantizer / floor':<32} {statistics.median(ratios):6.2f} [{min(ratios):.2f} "
            f".. {max(ratios):.2f}]"
        )


def child(which: str, job: Job) -> tuple[float, dict[str, float]]:
    """Wall time of a process, and of its parts."""
    with tempfile.TemporaryDirectory() as folder:
        parts = Path(folder) / "parts.json"
        command = [
            sys.executable,
            __file__,
            "--child",
            which,
            str(parts),
            json.dumps(astuple(job)),
        ]
        started = time.perf_counter()
        quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        subprocess.run(command, check=True, cwd=folder, env=environment(), **quiet)
        return time.perf_counter() - started, json.loads(parts.read_text())


def environment() -> dict[str, str]:
    """This one, with sources compiled once, as they are after an installation."""
    return {
        name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"
    }


class Parts(dict[str, float]):
    """Seconds by name, of calls that do not contain each other."""

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, its time added to a part."""

        def call(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self[name] = self.get(name, 0.0) + time.perf_counter() - started

        return call


def run_floor(parts: Parts, job: Job) -> None:
    """What nobody can do without."""
    torch = parts.timed("import torch", __import__)("torch")
    file, _, factory = job.file.partition(":")
    sys.path.insert(0, str((ROOT / file).parent))
    module = parts.timed("make the model and the data", __import__)(Path(file).stem)
    model = parts.timed("make the model and the data", getattr(module, factory))().eval()
    batches = parts.timed(
        "make the model and the data", lambda: list(getattr(module, job.data)())
    )()
    parts.timed("export", export)(torch, model, batches[0])
    with torch.no_grad():
        parts.timed(
            "float pass",
            lambda: [model(**x) if isinstance(x, dict) else model(x) for x in batches],
        )()


def export(torch: Any, model: Any, batch: Any) -> None:
    """torch's own, with an open batch, which takes two samples: a size of one is fixed."""
    named = (
        {key: torch.cat([value, value]) for key, value in batch.items()}
        if isinstance(batch, dict)
        else {}
    )
    args = () if named else (torch.cat([batch, batch]),)
    open_ = {0: torch.export.Dim.AUTO}
    with torch.no_grad():
        shapes = dict.fromkeys(named, open_) if named else (open_,)
        torch.export.export(model, args, dict(named), dynamic_shapes=shapes, strict=False)


def run_quantizer(parts: Parts, job: Job) -> None:
    """The command line, with a clock at its parts."""
    main: Any = importlib.import_module("quantizer.cli.main")
    load = parts.timed("import torch and quantizer", main._load)

    def loaded(target: str) -> Any:
        command = load(target)
        for place, name, part in CLOCKS:
            # By now the command has imported all of them
            module = importlib.import_module(place)
            setattr(module, name, parts.timed(part, getattr(module, name)))
        pipeline: Any = importlib.import_module("quantizer.calibration.steps")
        pipeline.STEPS = tuple(
            replace(step, run=parts.timed(step.run.__name__, step.run))
            for step in pipeline.STEPS
        )
        return command

    main._load = loaded
    file, _, _ = job.file.partition(":")
    arguments = [
        "--quant_mode",
        "calib",
        "--model",
        str(ROOT / job.file),
        "--data",
        f"{ROOT / file}:{job.data}",
    ]
    config = json.loads((ROOT / "configs" / f"{job.config}.json").read_text())
    if job.group_size:
        config["global_quant_config"]["weight"]["group_size"] = job.group_size
    Path("config.json").write_text(json.dumps(config))
    sys.argv = ["quantizer", *arguments, "--config_file", "config.json"]
    try:
        main.main()
    except SystemExit as ended:
        if ended.code:
            raise


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        _, _, which, target, given = sys.argv
        found = Parts()
        {"floor": run_floor, "quantizer": run_quantizer}[which](found, Job(*json.loads(given)))
        Path(target).write_text(json.dumps(found))
    else:
        main()
