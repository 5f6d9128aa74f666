"""Runs small models of 24 families in the engines of language models, and keeps what they give.

`python benchmarks/engines/families/run.py [--consumer NAME ...] [--family NAME ...]
[--scheme NAME ...]` writes each family in each scheme, and runs it in the consumers that read
it. `results/NAME.json` gets a row for each; other rows stay. Environments that are missing are
made.
"""

from __future__ import annotations

import argparse
import datetime
import json
import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

# Modules of benchmarks/ are imported by their names.
sys.path.append(str(Path(__file__).parents[2]))
sys.path.append(str(Path(__file__).parents[3] / "tests"))

from support.shared_traces import SharedTraces

from engines.environments import python_of
from engines.families.cases import Case, written_case
from engines.families.consumers import CONSUMERS, Consumer
from engines.families.models import FAMILIES
from engines.families.outcomes import row_of
from engines.families.schemes import SCHEMES
from engines.figures import CONSUMERS as PROGRAMS
from quantizer.graph.tracing import trace

ROOT = Path(__file__).parents[3]
RESULTS = Path(__file__).with_name("results")
Row = dict[str, Any]


def main() -> None:
    """Run the chosen consumers on the chosen families."""
    options = parsed()
    warnings.filterwarnings("ignore")
    logging.getLogger("quantizer").setLevel(logging.ERROR)
    # The schemes of a family share a trace
    trace._export = SharedTraces(trace._export)
    with TemporaryDirectory() as temporary:
        work = Path(options.work or temporary)
        cases: dict[tuple[str, str], Case] = {}
        for name in options.consumer:
            consumer = CONSUMERS[name]
            pairs = chosen_pairs(consumer, options.family, options.scheme)
            for pair in pairs:
                if pair not in cases:
                    cases[pair] = prepared(pair, work)
            written = [pair for pair in pairs if cases[pair].is_written]
            if consumer.reference:
                run_consumer(CONSUMERS[consumer.reference], written, work, options.environments)
            if not consumer.is_exporters:
                run_consumer(consumer, written, work, options.environments)
            rows = [row_of(consumer, cases[pair], work.joinpath(*pair)) for pair in pairs]
            store(options.results / f"{name}.json", rows)


def parsed() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--consumer", nargs="+", choices=[*CONSUMERS], default=[*CONSUMERS])
    parser.add_argument("--family", nargs="+", choices=[*FAMILIES], default=[*FAMILIES])
    parser.add_argument("--scheme", nargs="+", choices=[*SCHEMES], default=[*SCHEMES])
    parser.add_argument("--results", type=Path, default=RESULTS, help="where JSON is written")
    parser.add_argument("--work", help="a folder that keeps what consumers read and write")
    parser.add_argument("--environments", type=Path, default=ROOT, help="of the consumers")
    return parser.parse_args()


def chosen_pairs(
    consumer: Consumer, families: Sequence[str], schemes: Sequence[str]
) -> list[tuple[str, str]]:
    """Return the families and schemes that a consumer is given, in the order of tables."""
    pairs: list[tuple[str, str]] = []
    for family in FAMILIES:
        for scheme in consumer.schemes_of(family):
            if family in families and scheme in schemes:
                pairs.append((family, scheme))
    return pairs


def prepared(pair: tuple[str, str], work: Path) -> Case:
    """Write a case, or read what an earlier call wrote about it."""
    folder = work.joinpath(*pair)
    note = folder / "case.json"
    if note.exists():
        return Case(**json.loads(note.read_text("utf-8")))
    case = written_case(*pair, folder)
    note.write_text(json.dumps(vars(case)), "utf-8")
    print(*pair, case.refusal or case.failure or f"{case.share:.1%}", flush=True)
    return case


def run_consumer(
    consumer: Consumer, pairs: Sequence[tuple[str, str]], work: Path, environments: Path
) -> None:
    """Run a consumer on all folders that it has not run yet."""
    folders: list[str] = []
    for pair in pairs:
        folder = work.joinpath(*pair)
        if not (folder / f"{consumer.name}.npz").exists():
            folders.append(str(folder))
    if folders:
        command = [str(python_of(consumer, environments)), str(PROGRAMS / consumer.program)]
        # Programs import packages of their environment, and the quantizer where it is the same
        path = "" if consumer.environment else str(ROOT)
        done = subprocess.run(
            [*command, *folders],
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
        (work / f"{consumer.name}.log").write_text(done.stdout + done.stderr, "utf-8")


def store(path: Path, rows: Sequence[Row]) -> None:
    """Write rows in place of earlier ones of the same families and schemes."""
    stored: dict[tuple[str, str], Row] = {}
    if path.exists():
        for row in json.loads(path.read_text("utf-8"))["rows"]:
            stored[row["family"], row["scheme"]] = row
    today = datetime.date.today().isoformat()
    for row in rows:
        stored[row["family"], row["scheme"]] = {**row, "date": today}
    consumer = CONSUMERS[path.stem]
    pairs = chosen_pairs(consumer, [*FAMILIES], [*SCHEMES])
    ordered = [stored[pair] for pair in pairs if pair in stored]
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"rows": ordered}, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
