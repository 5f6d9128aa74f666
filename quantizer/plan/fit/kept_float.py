"""Write the layers of `--keep_float` into the config of a run, as entries of `exclude`."""

from collections.abc import Collection, Sequence
from pathlib import Path

from quantizer.config.document.document import Text
from quantizer.config.document.edited import edited_text
from quantizer.config.document.fixes import paste
from quantizer.config.document.read import parse_document, read_text
from quantizer.config.forms.level_edits import with_float
from quantizer.config.load import load_text
from quantizer.config.model import Selector
from quantizer.config.wording import joined
from quantizer.errors import UsageError
from quantizer.graph.ir import Graph
from quantizer.graph.names import path_names
from quantizer.graph.passes import run_passes
from quantizer.plan.match import match
from quantizer.plan.selected import SELECTED_KINDS, closest_layers, how_to_list_layers
from quantizer.storage.replacing import replace_file


def kept_names(names: str | Collection[str], *, has_config: bool) -> list[str]:
    """Return the names of layers to keep in float; a single one may stand without a list.

    Args:
        names: as `exclude` takes them.
        has_config: whether the run has a config of the user, which is never changed.

    Raises:
        UsageError: there are names and a config.
    """
    listed = [names] if isinstance(names, str) else [*names]
    if listed and has_config:
        raise UsageError(
            "<--keep_float> adds layers to a config that this run writes, and the config of "
            "this run is yours",
            help=f"leave <--keep_float> out, and add {_line(listed)} to it",
        )
    return listed


def with_ties(names: Sequence[str], original: Graph) -> list[str]:
    """Return names of layers with those of the layers that share a weight with them.

    Args:
        names: of layers, as `exclude` takes them.
        original: the network as traced.
    """
    kept: set[str] = set()
    for name in names:
        kept.update(match(Selector("exclude", name), original, original).layers)
    weights = {original.by_name[layer].params.get("weight", "") for layer in kept}
    shown = path_names(original)
    tied = [
        shown.get(node.name, node.name)
        for node in original.nodes
        if node.name not in kept and node.params.get("weight") in weights
    ]
    return list(dict.fromkeys([*names, *tied]))


def with_kept(source: Text, names: Sequence[str], original: Graph) -> str:
    """Return the text of a config with names of layers in its `exclude`.

    Args:
        source: the config.
        names: of the layers.
        original: the network as traced.

    Raises:
        UsageError: a name matches no layer.
    """
    if not names:
        return source.text
    document = parse_document(source)
    config = load_text(source).require()
    graph = run_passes(original, config.settings)
    for name in names:
        selector = Selector("exclude", name)
        layers = match(selector, graph, original).layers
        if not layers and name not in SELECTED_KINDS:
            near = [repr(text) for text in closest_layers(selector, original)]
            remedy = f"did you mean {joined(near, 'or')}?" if near else how_to_list_layers()
            text = f"<--keep_float>: {name!r} matches no layer of {original.model}"
            raise UsageError(text, help=remedy)
    return edited_text(document, with_float(document.value, names))


def keep_in_file(path: Path, names: Sequence[str], original: Graph, *, is_sized: bool) -> bool:
    """Add layers to the config of an earlier run. Return whether some were not in it.

    Args:
        path: the config.
        names: of the layers.
        original: the network as traced.
        is_sized: whether the config has widths that were chosen for a size.

    Raises:
        UsageError: a name matches no layer, the user has changed the file, or it `is_sized`.
    """
    source = read_text(path)
    changed = with_kept(source, names, original)
    if changed == source.text:
        return False
    if is_sized:
        raise UsageError(
            f"the widths in {path} were chosen for a size with these layers quantized",
            help="write a new config with <--overwrite>",
        )
    try:
        replace_file(path, changed.encode())
    except UsageError as error:
        remedy = f"leave <--keep_float> out, and add {_line(names)} to it"
        raise UsageError(error.message, help=remedy) from None
    return True


def _line(names: Collection[str]) -> str:
    """Return the line of a config that keeps layers in float.

    >>> _line(["head"])
    '"exclude": ["head"]'
    """
    return paste({"exclude": [*names]})
