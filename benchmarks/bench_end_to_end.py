"""Where the processor time of a command goes, beside what no command can do without.

    python benchmarks/bench_end_to_end.py [rounds [job…]]
    python benchmarks/bench_end_to_end.py --mode test [--against CHECKOUT] [rounds [job…]]

Processes take turns. All times are processor time, of the user and the system, with one thread:
threads that wait for each other take processor time, too.

"floor" is another process. It imports torch, and makes the model, which may import more, and
its data. For calibration it exports the model once and runs it in float over the data. For test
mode it runs the model twice, because the command runs the float and the quantized network.

`--against` also measures another checkout of the project, with a folder that this checkout has
calibrated, and prints the ratio of both.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


CALIBRATION_DATA = "calibration_data"
"""The name of data that a command finds itself."""


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
        "examples/efficientnet_lite.py:model", CALIBRATION_DATA, "cpu_int8"
    ),
    "SmolLM2": Job("examples/smollm2.py:model", CALIBRATION_DATA, "gptq_int4_group", 64),
}


COMMON_CLOCKS = (
    ("quantizer.cli.session", "open_data", "make the model and the data"),
    ("quantizer.cli.session", "open_model", "make the model and the data"),
)
CLOCKS = {
    "calib": (
        *COMMON_CLOCKS,
        ("quantizer.cli.session", "trace_model", "trace"),
        ("quantizer.cli.run_folder", "write_results", "write"),
        ("quantizer.cli.run_folder", "write_report", "report"),
    ),
    "test": (
        *COMMON_CLOCKS,
        ("quantizer.cli.modes.test_mode", "read_info", "open the results"),
        ("quantizer.cli.session", "recall_graph", "compare with the stored graph"),
        ("quantizer.cli.modes.test_mode", "reopen_calibration", "make the quantized network"),
        ("quantizer.cli.session", "resolved_plan", "plan"),
        ("quantizer.cli.modes.test_mode", "score", "run both networks"),
        ("quantizer.cli.modes.test_mode", "write_report", "report"),
    ),
}
"""Functions that the steps do not call, where each mode finds them, and the part that their
time is added to.
"""


def main() -> None:
    """Measure and print."""
    options = arguments()
    for name in options.jobs or JOBS:
        if options.mode == "calib":
            measure(name, ("floor", "quantizer"), options, {})
            continue
        checkouts = {"quantizer": ROOT}
        if options.against:
            checkouts["quantizer of the other checkout"] = options.against.resolve()
        with tempfile.TemporaryDirectory() as folder:
            folders: dict[str, Path] = {}
            for which, checkout in checkouts.items():
                folders[which] = Path(folder) / which
                folders[which].mkdir()
                run_command("calib", JOBS[name], checkout, folders[which])
            measure(name, ("floor", *checkouts), options, folders)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("rounds", nargs="?", type=int, default=3)
    parser.add_argument("jobs", nargs="*", metavar="job", help=", ".join(JOBS))
    parser.add_argument("--mode", choices=("calib", "test"), default="calib")
    parser.add_argument("--against", type=Path, help="another checkout, for --mode test")
    return parser.parse_args()


def measure(
    name: str, processes: tuple[str, ...], options: argparse.Namespace, folders: dict[str, Path]
) -> None:
    """Run the processes in turns, and print the medians of their times and parts."""
    totals: dict[str, list[float]] = {which: [] for which in processes}
    shares: dict[str, list[float]] = {}
    for _ in range(options.rounds):
        for which in processes:
            if which == "quantizer of the other checkout":
                seconds = run_command("test", JOBS[name], options.against, folders[which])
                totals[which].append(seconds)
                continue
            seconds, parts = child(which, options.mode, JOBS[name], folders.get(which))
            totals[which].append(seconds)
            for part, share in parts.items():
                shares.setdefault(f"{which}: {part}", []).append(share)
    print(f"\n{name}, {JOBS[name].config}, {options.mode}: processor time in seconds, median")
    for part, values in {**totals, **shares}.items():
        print(f"  {part:<42} {spread(values)}")
    for which in processes:
        if which == "quantizer":
            continue
        pairs = zip(totals["quantizer"], totals[which], strict=True)
        print(
            f"  {'quantizer / ' + which:<42} {spread([ours / other for ours, other in pairs])}"
        )


def spread(values: list[float]) -> str:
    """The median, and the smallest and the largest value."""
    return f"{statistics.median(values):6.2f} [{min(values):.2f} .. {max(values):.2f}]"


def child(
    which: str, mode: str, job: Job, folder: Path | None
) -> tuple[float, dict[str, float]]:
    """Processor time of a process, and of its parts. It runs in the folder, or in a temporary
    one.
    """
    with tempfile.TemporaryDirectory() as temporary:
        parts = Path(temporary) / "parts.json"
        command = [sys.executable, __file__, "--child", which, mode, str(parts)]
        command.append(json.dumps(astuple(job)))
        seconds = timed_process(command, folder or Path(temporary), environment())
        return seconds, json.loads(parts.read_text())


def run_command(mode: str, job: Job, checkout: Path, folder: Path) -> float:
    """Run the command line of a checkout in a folder. Return its processor time."""
    write_config(job, checkout, folder)
    command = [sys.executable, "-m", "quantizer", *command_line(mode, job, checkout)]
    return timed_process(command, folder, environment() | {"PYTHONPATH": str(checkout)})


def timed_process(command: list[str], folder: Path, variables: dict[str, str]) -> float:
    """Run a process, and return its processor time in seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        command,
        check=True,
        cwd=folder,
        env=variables,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def environment() -> dict[str, str]:
    """This one with one thread, and with sources compiled once, as they are after an
    installation.
    """
    variables = dict(os.environ)
    variables.pop("PYTHONDONTWRITEBYTECODE", None)
    variables["OMP_NUM_THREADS"] = "1"
    return variables


def write_config(job: Job, checkout: Path, folder: Path) -> None:
    """Write the config of a job as config.json, with the preset of a checkout."""
    config = json.loads((checkout / "configs" / f"{job.config}.json").read_text())
    if job.group_size:
        config["global_quant_config"]["weight"]["group_size"] = job.group_size
    (folder / "config.json").write_text(json.dumps(config))


def command_line(mode: str, job: Job, checkout: Path) -> list[str]:
    """The arguments of a command."""
    arguments = ["--quant_mode", mode, "--config_file", "config.json"]
    arguments += ["--model", str(checkout / job.file)]
    if job.data != CALIBRATION_DATA:
        file, _, _ = job.file.partition(":")
        arguments += ["--data", f"{checkout / file}:{job.data}"]
    return arguments


class Parts(dict[str, float]):
    """Seconds of processor time by name, of calls that do not contain each other."""

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, its time added to a part."""

        def call(*args: Any, **kwargs: Any) -> Any:
            with self.clock(name):
                return function(*args, **kwargs)

        return call

    @contextmanager
    def clock(self, name: str) -> Iterator[None]:
        """Add the time of the `with` block to a part."""
        started = time.process_time()
        try:
            yield
        finally:
            self[name] = self.get(name, 0.0) + time.process_time() - started


def run_floor(parts: Parts, mode: str, job: Job) -> None:
    """What nobody can do without."""
    with parts.clock("import torch"):
        torch = importlib.import_module("torch")
    file, _, factory = job.file.partition(":")
    sys.path.insert(0, str((ROOT / file).parent))
    with parts.clock("make the model and the data"):
        module = importlib.import_module(Path(file).stem)
        model = getattr(module, factory)().eval()
        data = getattr(module, job.data)
        if mode == "test" and job.data == CALIBRATION_DATA:
            data = getattr(module, "evaluation_data", data)
        batches = [inputs_of(batch) for batch in data()]
    if mode == "calib":
        with parts.clock("export"):
            export(torch, model, batches[0])
    passes = {"calib": 1, "test": 2}[mode]
    with parts.clock("float passes"), torch.no_grad():
        for _ in range(passes):
            for batch in batches:
                model(**batch) if isinstance(batch, dict) else model(batch)


def inputs_of(batch: Any) -> Any:
    """A batch without its targets."""
    is_pair = isinstance(batch, (tuple, list))
    return batch[0] if is_pair else batch


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


def run_quantizer(parts: Parts, mode: str, job: Job) -> None:
    """The command line, with a clock at its parts."""
    main: Any = importlib.import_module("quantizer.cli.main")
    load = parts.timed("import torch and quantizer", main._load)

    def loaded(target: str) -> Any:
        command = load(target)
        with parts.clock("import torch and quantizer"):
            places = {place: importlib.import_module(place) for place, _, _ in CLOCKS[mode]}
        for place, name, part in CLOCKS[mode]:
            timed = parts.timed(part, getattr(places[place], name))
            setattr(places[place], name, timed)
        if mode == "calib":
            pipeline: Any = importlib.import_module("quantizer.calibration.steps")
            pipeline.STEPS = tuple(
                replace(step, run=parts.timed(step.run.__name__, step.run))
                for step in pipeline.STEPS
            )
        return command

    main._load = loaded
    write_config(job, ROOT, Path())
    sys.argv = ["quantizer", *command_line(mode, job, ROOT)]
    try:
        main.main()
    except SystemExit as ended:
        if ended.code:
            raise


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        _, _, process, its_mode, target, fields = sys.argv
        its_parts = Parts()
        run = {"floor": run_floor, "quantizer": run_quantizer}[process]
        run(its_parts, its_mode, Job(*json.loads(fields)))
        Path(target).write_text(json.dumps(its_parts))
    else:
        main()
