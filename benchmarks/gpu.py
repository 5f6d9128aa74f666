"""Test and measure the package on a machine with a GPU, in at most eight minutes.

`make gpu`, or `python3 benchmarks/gpu.py [--seconds 480] [--wheels FOLDER] [--json FILE] [--log
FILE] [--only PART …]`. The machine needs torch 2.11 or later for CUDA, transformers,
safetensors, click, rich, numpy, pytest and hypothesis. jsonschema and the three packages it
needs may be wheels in FOLDER. They are unpacked, and nothing is installed.

The parts run in order and print what they find. A part that has no time left is named.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
BENCH = [sys.executable, str(ROOT / "benchmarks" / "bench_device.py")]
TESTS = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "addopts="]
# Warnings of the machine's own packages are not ours
TESTS += ["-o", "filterwarnings=", "--tb=short", "tests/calibration/test_cuda.py"]
SHORTEST_S = 10
STOPPING_S = 8


@dataclass(frozen=True)
class Part:
    """One command, and the seconds that it may take."""

    name: str
    command: list[str]
    limit_s: float


def main() -> None:
    """Run the parts, print a table and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=480)
    parser.add_argument("--wheels", type=Path, default=ROOT / ".whl")
    parser.add_argument("--json", type=Path, default=Path("gpu.json"))
    parser.add_argument("--log", type=Path, default=Path("gpu.log"))
    parser.add_argument("--only", nargs="*")
    options = parser.parse_args()
    end = time.monotonic() + options.seconds
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        environment = paths(options.wheels, work / "packages")
        require_device(environment)
        for part in parts(work / "models"):
            if options.only and not any(part.name.startswith(name) for name in options.only):
                continue
            left = end - time.monotonic()
            if left < SHORTEST_S:
                found[part.name] = {"dropped": "no time left"}
            else:
                found[part.name], text = run(part, min(left, part.limit_s), environment)
                with options.log.open("a", encoding="utf-8") as log:
                    log.write(f"== {part.name}\n{text}\n")
            print(f"== {part.name}: {json.dumps(found[part.name])}", flush=True)
            options.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    print("\n" + table(found))
    if any("failed" in figures for figures in found.values()):
        raise SystemExit(1)


def require_device(environment: dict[str, str]) -> None:
    """End with a sentence and exit code 1 if torch is missing or finds no GPU."""
    command = [sys.executable, "-c", "import torch; assert torch.cuda.is_available()"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise SystemExit(f"no part has run: {sys.executable} finds no GPU ({reason})")


def parts(models: Path) -> list[Part]:
    """Return what is run, in order."""
    big, small = str(models / "3b"), str(models / "1b")
    return [
        Part("tests", TESTS, 100),
        Part("ranks", [*BENCH, "ranks"], 60),
        Part("rates", [*BENCH, "rates"], 40),
        Part("make 3b", [*BENCH, "models", "3b", str(models)], 60),
        Part("rtn 3b", [*BENCH, "calibrate", big, "rtn"], 60),
        Part("gptq 3b", [*BENCH, "calibrate", big, "gptq"], 112),
        Part("vit_b", [*BENCH, "static", "vit_b"], 60),
        Part("resnet50", [*BENCH, "static", "resnet50"], 60),
        Part("make 1b", [*BENCH, "models", "1b", str(models)], 30),
        Part("test 1b", [*BENCH, "measure", small], 150),
        Part("peer 3b", [*BENCH, "peer", big], 180),
        Part("awq 3b", [*BENCH, "calibrate", big, "awq"], 180),
        Part("qronos 3b", [*BENCH, "calibrate", big, "qronos"], 180),
        Part("searched 3b", [*BENCH, "calibrate", big, "searched"], 180),
        Part("codes of resnet50", [*BENCH, "same", "resnet50"], 60),
        Part("make slice", [*BENCH, "models", "slice", str(models)], 30),
        Part("codes of a llama", [*BENCH, "same", str(models / "slice")], 60),
        Part("kernels", [*BENCH, "profile", "layer", "gptq"], 60),
        *(
            Part(f"{name} 1b", [*BENCH, "calibrate", small, name], 120)
            for name in ("gptq", "qronos", "awq", "rtn")
        ),
    ]


def run(part: Part, limit_s: float, environment: dict[str, str]) -> tuple[dict[str, Any], str]:
    """Return what a part prints last, if that is JSON, with its time; and all its output."""
    started = time.monotonic()
    found: dict[str, Any] = {}
    with tempfile.TemporaryFile("w+", encoding="utf-8") as output:
        process = subprocess.Popen(
            part.command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            code = process.wait(limit_s)
            if code:
                found["failed"] = f"exit {code}"
        except subprocess.TimeoutExpired:
            found["failed"] = f"not done after {limit_s:.0f} s"
            stop(process)
        output.seek(0)
        text = output.read()
    lines = text.strip().splitlines() or [""]
    if lines[-1].startswith("{"):
        found |= json.loads(lines[-1])
    else:
        found["last line"] = lines[-1]
    if "failed" in found:
        print(text[-3000:])
    return found | {"wall_s": round(time.monotonic() - started, 1)}, text


def stop(process: subprocess.Popen[bytes]) -> None:
    """Let a process print what it has found, and end it."""
    process.terminate()
    try:
        process.wait(STOPPING_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def paths(wheels: Path, packages: Path) -> dict[str, str]:
    """Return the environment of the parts, with the wheels unpacked where Python finds them."""
    for wheel in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(packages)
    own = (packages, ROOT, ROOT / "benchmarks", ROOT / "tests")
    found = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, own))}
    # Later processes start in half the time where the machine's packages are not compiled
    found.pop("PYTHONDONTWRITEBYTECODE", None)
    return found | {"PYTHONPYCACHEPREFIX": str(packages / "compiled"), "PYTHONUNBUFFERED": "1"}


def table(found: dict[str, Any]) -> str:
    """Return a row for each part."""
    rows = []
    for name, figures in found.items():
        texts = [f"{key} {shown(value)}" for key, value in figures.items()]
        rows.append(f"{name:18} {', '.join(texts)}")
    return "\n".join(rows)


def shown(value: Any) -> str:
    """Return a figure with three digits."""
    return f"{value:.3g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
