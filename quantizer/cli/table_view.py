"""How a command shows its tables of layers: for eyes on a terminal, for programs everywhere
else.
"""

import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase

from quantizer.cli import session
from quantizer.cli.options import Options
from quantizer.config.load import default_config
from quantizer.config.model import Selector, Settings
from quantizer.errors import UsageError
from quantizer.graph.ir import Graph
from quantizer.graph.module_names import path_names
from quantizer.plan.match import advice, match
from quantizer.report.tables import layer_table
from quantizer.report.view import View

ROWS = 15
"""How many rows a table of layers has on a terminal, unless `--top` says otherwise."""


def table_view(options: Options, graph: Graph, *, stderr: bool = False) -> View:
    """What `--names` and `--top` ask for, of the layers of a graph."""
    return view_of(options, path_names(graph), stderr=stderr)


def view_of(options: Options, paths: Mapping[str, str], *, stderr: bool = False) -> View:
    """What `--names` and `--top` ask for: by default module paths and few rows on a terminal.

    A pipe or a file gets every row under its exact name, so that nothing is lost.
    """
    terminal = (sys.stderr if stderr else sys.stdout).isatty()
    by_path = options.names == "path" if options.names else terminal
    top = options.top or (ROWS if terminal else "all")
    return View(paths if by_path else {}, None if isinstance(top, str) else top)


def filtered_view(options: Options, graph: Graph, original: Graph) -> View:
    """The same with `--filter`, which shows all rows of the layers that it finds.

    Raises:
        UsageError: it finds none.
    """
    view = table_view(options, graph)
    if options.filter is None:
        return replace(view, remedy=f"{view.remedy}, --filter GLOB those of some layers")
    selector = Selector("name", options.filter)
    by_path = {
        name for name, path in path_names(graph).items() if fnmatchcase(path, options.filter)
    }
    layers = by_path.union(match(selector, graph, original).layers)
    if not layers:
        raise UsageError(
            f"--filter {options.filter!r} matches no layer", help=advice(selector, original)
        )
    return replace(view, layers=frozenset(layers), top=view.top if options.top else None)


def config_to_look(path: str | None) -> session.ReadConfig:
    """The config of `--config_file`; without one, all that can be quantized in the network as
    it is.

    Raises:
        ConfigError: with all findings, when it cannot be used.
    """
    if path is None:
        return session.ReadConfig(replace(default_config(), settings=Settings()), (), {})
    return session.read_config(path)


def show_layers(
    options: Options,
    graph: Graph,
    tensors: Iterable[tuple[str, str]],
    floats: Mapping[str, str],
) -> None:
    """Print the table of all layers, for `--inspect`."""
    session.console().print(layer_table(graph, tensors, floats, table_view(options, graph)))
