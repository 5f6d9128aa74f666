"""Runs what the quantizer writes in the engines that read it, and keeps the figures as JSON.

`python benchmarks/engines/run.py [--engine NAME ...] [--network NAME ...]` calibrates each
network, exports it for each engine and runs the file there. `results/ENGINE.json` gets a row
for each network; rows of other networks stay. Environments that are missing are made. If one
cannot be made, its engines are left out, their results stay, and the exit code is 1. Where an
engine's environment also writes the files, its Python runs this program for that engine.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

# Modules of benchmarks/ are imported by their names, and a helper in tests/ writes templates.
sys.path.append(str(Path(__file__).parents[1]))
sys.path.append(str(Path(__file__).parents[2] / "tests"))

from engines.environments import python_of
from engines.figures import figures_of
from engines.preparation import Prepared
from engines.results import FOLDER, EngineResults, Machine, Row
from engines.table import ENGINES, ENVIRONMENTS, NETWORKS, Engine
from quantizer.errors import QuantizerError
from quantizer.export.targets import EXPORTERS

ROOT = Path(__file__).parents[2]


def main() -> None:
    """Run the chosen engines on the chosen networks."""
    options = parsed()
    here: dict[str, Path] = {}
    are_all_run = True
    for engine in ENGINES:
        if engine.name not in options.engine:
            continue
        try:
            python = python_of(engine, options.environments.absolute())
        except RuntimeError as error:
            print(f"{engine.name:<20} left out, its results stay: {error}", flush=True)
            are_all_run = False
            continue
        if writes_apart(engine, python):
            are_all_run &= run_apart(engine, python)
        elif can_export(engine):
            here[engine.name] = python
        else:
            are_all_run = False
    run_here(here, options)
    if not are_all_run:
        sys.exit(1)


def run_here(pythons: Mapping[str, Path], options: argparse.Namespace) -> None:
    """Run engines, each by its Python, on the chosen networks, whose files are written here."""
    engines = [engine for engine in ENGINES if engine.name in pythons]
    machine = Machine.current(is_quiet=options.quiet)
    with TemporaryDirectory() as temporary:
        work = Path(options.work or temporary)
        for name in options.network:
            for engine in engines:
                row = figures_for(engine, name, work, options, python=pythons[engine.name])
                stored = EngineResults.stored(engine, options.results)
                stored.with_row(row, machine).store(options.results)
                print(f"{engine.name:<20} {name:<20} {row.line}", flush=True)
            prepared_networks.clear()


def writes_apart(engine: Engine, python: Path) -> bool:
    """Return whether another Python than this one writes an engine's files."""
    row = ENVIRONMENTS.get(engine.environment)
    return row is not None and row.has_quantizer and python != Path(sys.executable)


def run_apart(engine: Engine, python: Path) -> bool:
    """Run this program by an engine's Python for that engine; return whether it ended well."""
    command = [str(python), *sys.argv, "--engine", engine.name]
    return subprocess.run(command).returncode == 0


def parsed() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    names = [engine.name for engine in ENGINES]
    parser.add_argument("--engine", nargs="+", choices=names, default=names)
    parser.add_argument("--network", nargs="+", choices=[*NETWORKS], default=[*NETWORKS])
    parser.add_argument("--rounds", type=int, default=9, help="of the measurement of speed")
    parser.add_argument(
        "--quiet", action="store_true", help="nothing else runs on this machine: mark no speed"
    )
    parser.add_argument("--results", type=Path, default=FOLDER, help="where JSON is written")
    parser.add_argument("--work", help="a folder that keeps what consumers read and write")
    parser.add_argument(
        "--environments", type=Path, default=ROOT, help="the folder of environments of engines"
    )
    return parser.parse_args()


def can_export(engine: Engine) -> bool:
    """Return whether this environment can write what an engine reads; print what is missing.

    Results of an engine that is left out stay as they are.
    """
    target = EXPORTERS[engine.target]
    missing = [package for package in target.needs if find_spec(package) is None]
    if missing:
        print(f"{engine.name:<20} left out: {', '.join(missing)} is not installed here")
    return not missing


prepared_networks: dict[str, Prepared] = {}
"""The network that engines run now."""


def figures_for(
    engine: Engine, name: str, work: Path, options: argparse.Namespace, *, python: Path
) -> Row:
    """Return what one engine makes of one network; a failure is a row, too."""
    if name in engine.cannot_hold:
        return Row(name, cannot_hold=engine.cannot_hold[name])
    if name not in prepared_networks:
        prepared_networks[name] = Prepared.of(name, work)
    prepared = prepared_networks[name]
    config = prepared.config_for(engine)
    try:
        folder = prepared.folder_for(engine, options.rounds)
    except QuantizerError as error:
        return Row(name, config, failure=f"not exported: {error}")
    return figures_of(name, config, engine, folder, python)


if __name__ == "__main__":
    main()
