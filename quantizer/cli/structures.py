"""What the algorithms of a config find in a model, for commands that run none of them."""

from __future__ import annotations

from quantizer.cli.session import ReadConfig
from quantizer.config.diagnostics import ConfigError
from quantizer.config.structure_names import Names
from quantizer.graph.find_structure import find_structure
from quantizer.graph.ir import Graph
from quantizer.graph.structure import Structure


def named_structures(read: ReadConfig, graph: Graph) -> dict[str, Structure]:
    """By a title, what each algorithm finds that names parts of the model.

    Raises:
        ConfigError: a name that the model does not have, or that does not fit.
    """
    named = {f"{each.name} ({each.label})": each.names for each in read.config.algorithms if each.names != Names()}
    try:
        return {title: find_structure(graph, names) for title, names in named.items()}
    except ConfigError as error:
        raise ConfigError(error.diagnostics, read.sources) from error
