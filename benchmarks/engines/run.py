"""Runs what the quantizer writes in the engines that read it, and keeps the figures as JSON.

`python benchmarks/engines/run.py [--engine NAME ...] [--network NAME ...]` calibrates each
network, exports it for each engine and runs the file there. `results/ENGINE.json` gets a row
for each network; rows of other networks stay. Environments that are missing are made. Engines
whose files this environment cannot write are left out: ExecuTorch and LiteRT have environments
of their own (docs/executorch.md, docs/litert.md), whose Python runs this program for them.
"""

from __future__ import annotations

import argparse
import sys
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
from engines.table import ENGINES, NETWORKS, Engine
from quantizer.errors import QuantizerError
from quantizer.export.targets import EXPORTERS

ROOT = Path(__file__).parents[2]


def main() -> None:
    """Run the chosen engines on the chosen networks."""
    options = parsed()
    engines = [row for row in ENGINES if row.name in options.engine and can_export(row)]
    machine = Machine.current(is_quiet=options.quiet)
    with TemporaryDirectory() as temporary:
        work = Path(options.work or temporary)
        for name in options.network:
            for engine in engines:
                row = figures_for(engine, name, work, options)
                stored = EngineResults.stored(engine, options.results)
                stored.with_row(row, machine).store(options.results)
                print(f"{engine.name:<20} {name:<20} {row.line}", flush=True)
            prepared_networks.clear()


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
        "--environments", default=str(ROOT), help="the folder of environments of engines"
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


def figures_for(engine: Engine, name: str, work: Path, options: argparse.Namespace) -> Row:
    """Return what one engine makes of one network; a failure is a row, too."""
    if name in engine.cannot_hold:
        return Row(name, cannot_hold=engine.cannot_hold[name])
    if name not in prepared_networks:
        prepared_networks[name] = Prepared.of(name, work)
    prepared = prepared_networks[name]
    config = prepared.config_for(engine)
    try:
        python = python_of(engine, Path(options.environments))
        folder = prepared.folder_for(engine, options.rounds)
    except (QuantizerError, RuntimeError) as error:
        return Row(name, config, failure=f"not exported: {error}")
    return figures_of(name, config, engine, folder, python)


if __name__ == "__main__":
    main()
