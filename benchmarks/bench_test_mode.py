"""Processor time of `quantizer --quant_mode test` as a process, for this checkout and for
another one.

`python benchmarks/bench_test_mode.py [--mode calib] [--rounds N] [--old CHECKOUT] [JOB...]`;
one thread. Each checkout calibrates once, then the processes take turns. `--mode calib`
measures the calibrations instead. Both checkouts use the models and the data of this one.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Job:
    """A model's file, a config, and options of both modes."""

    model: str
    config: str
    options: tuple[str, ...] = ()
    group_size: int | None = None


WORKLOADS = "benchmarks/workloads.py"
JOBS = {
    "digits": Job("examples/digits.py", "example"),
    "ResNet-18": Job(
        f"{WORKLOADS}:resnet18",
        "cpu_int8",
        ("--data", str(ROOT / f"{WORKLOADS}:images"), "--subset_len", "20"),
    ),
    "EfficientNet-Lite0": Job("examples/efficientnet_lite.py", "cpu_int8"),
    "SmolLM2": Job("examples/smollm2.py:model", "weight_int8", ("--subset_len", "2")),
    "SmolLM2 in 4 bits": Job(
        "examples/smollm2.py:model", "weight_int4_group", ("--subset_len", "2"), 64
    ),
}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", choices=("calib", "test"), default="test")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--old", type=Path)
    parser.add_argument("jobs", nargs="*", default=list(JOBS))
    options = parser.parse_args()
    checkouts = {"new": ROOT}
    if options.old is not None:
        checkouts = {"old": options.old.resolve(), "new": ROOT}
    print(f"--quant_mode {options.mode}: seconds of processor time, median of {options.rounds}")
    for name in options.jobs:
        seconds = measured(JOBS[name], options.mode, options.rounds, checkouts)
        medians = {which: statistics.median(values) for which, values in seconds.items()}
        words = [f"{which} {median:6.2f}" for which, median in medians.items()]
        if "old" in medians:
            words.append(f"ratio {medians['new'] / medians['old']:.2f}")
        print(f"  {name:<20} {'   '.join(words)}", flush=True)


def measured(
    job: Job, mode: str, rounds: int, checkouts: dict[str, Path]
) -> dict[str, list[float]]:
    """The seconds of each round, by checkout."""
    seconds: dict[str, list[float]] = {which: [] for which in checkouts}
    with tempfile.TemporaryDirectory() as folder:
        for which, checkout in checkouts.items():
            place = Path(folder) / which
            place.mkdir()
            (place / "config.json").write_text(config_of(job, checkout))
            processor_seconds(job, "calib", checkout, place)
        for _ in range(rounds):
            for which, checkout in checkouts.items():
                place = Path(folder) / which
                seconds[which].append(processor_seconds(job, mode, checkout, place))
    return seconds


def config_of(job: Job, checkout: Path) -> str:
    """The text of the job's config, as the checkout has it."""
    config = json.loads((checkout / "configs" / f"{job.config}.json").read_text())
    if job.group_size is not None:
        config["global_quant_config"]["weight"]["group_size"] = job.group_size
    return json.dumps(config)


def processor_seconds(job: Job, mode: str, checkout: Path, place: Path) -> float:
    """The seconds of one process and its children, user and system together."""
    command = [sys.executable, "-m", "quantizer", "--quant_mode", mode]
    command += ["--model", str(ROOT / job.model), *job.options]
    if mode == "calib":
        command += ["--config_file", "config.json"]
    variables = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    variables.pop("PYTHONDONTWRITEBYTECODE", None)
    with (place / "output.txt").open("w") as output:
        process = subprocess.Popen(
            command, cwd=place, env=variables, stdout=output, stderr=subprocess.STDOUT
        )
        _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit((place / "output.txt").read_text())
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    main()
