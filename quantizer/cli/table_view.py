"""Chooses names and rows of tables of layers: few rows by default, for readers of terminals
and logs alike.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase

from quantizer.cli import session
from quantizer.cli.options import Options
from quantizer.config.load import default_config
from quantizer.config.model import Selector, Settings
from quantizer.errors import UsageError
from quantizer.graph.ir import Graph
from quantizer.graph.names import path_names
from quantizer.plan.match import advice, match
from quantizer.report.tables import layer_table
from quantizer.report.view import TableView

_DEFAULT_ROWS = 15
"""Rows of a table of layers without `--top`."""


def table_view(options: Options, graph: Graph) -> TableView:
    """Return the view of a graph's layers that `--names` and `--top` ask for."""
    return view_of(options, path_names(graph))


def view_of(options: Options, paths: Mapping[str, str]) -> TableView:
    """Return the view that `--names` and `--top` ask for; `paths` are module paths by name."""
    rows: int | None = _DEFAULT_ROWS
    if isinstance(options.top, int):
        rows = options.top
    elif options.top == "all":
        rows = None
    if options.names == "exact":
        paths = {}
    return TableView(paths, rows)


def filtered_view(options: Options, graph: Graph, original: Graph) -> TableView:
    """Return the view of a graph's layers, only those of `--filter` if it is given.

    Raises:
        UsageError: `--filter` matches no layer.
    """
    view = table_view(options, graph)
    if options.filter is None:
        return replace(view, remedy=f"{view.remedy}, --filter GLOB those of some layers")
    selector = Selector("name", options.filter)
    layers = set(match(selector, graph, original).layers)
    for name, path in path_names(graph).items():
        if fnmatchcase(path, options.filter):
            layers.add(name)
    if not layers:
        raise UsageError(
            f"--filter {options.filter!r} matches no layer", help=advice(selector, original)
        )
    top = view.top if options.top else None
    return replace(view, layers=frozenset(layers), top=top)


def config_to_look(path: str | None) -> session.ReadConfig:
    """Return the config of `--config_file`, or one that quantizes all that can be quantized.

    Raises:
        ConfigError: with all findings, when it cannot be used.
    """
    if path is None:
        config = replace(default_config(), settings=Settings())
        return session.ReadConfig(config, (), {})
    return session.read_config_file(path)


def show_layers(
    options: Options,
    graph: Graph,
    tensors: Iterable[tuple[str, str]],
    floats: Mapping[str, str],
) -> None:
    """Print the table of all layers, for `--inspect`."""
    view = table_view(options, graph)
    table = layer_table(graph, tensors, floats, view)
    session.console(exact=view.is_exact).print(table)
