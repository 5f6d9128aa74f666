"""Write the layers of `--keep_float` into the config of a run, as entries of `exclude`."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
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
from quantizer.graph.passes import run_passes
from quantizer.plan.match import match
from quantizer.plan.selected import SELECTED_KINDS, closest_layers, how_to_list_layers
from quantizer.storage.replacing import replace_file


def require_no_config(names: Collection[str], *, has_config: bool) -> None:
    """Check that no layers are named for a config of the user, which is never changed.

    Raises:
        UsageError: there are both.
    """
    if names and has_config:
        raise UsageError(
            "<--keep_float> adds layers to a config that this run writes, and the config of "
            "this run is yours",
            help=f"leave <--keep_float> out, and add {_line(names)} to it",
        )


@dataclass(frozen=True)
class KeptFloat:
    """Layers to keep in float, and the network that has them.

    Attributes:
        names: as `exclude` takes them.
        original: the network as traced.
    """

    names: Sequence[str]
    original: Graph

    def added_to(self, source: Text) -> str:
        """Return the text of a config with the layers in its `exclude`.

        Raises:
            UsageError: a name matches no layer.
        """
        if not self.names:
            return source.text
        document = parse_document(source)
        config = load_text(source).require()
        graph = run_passes(self.original, config.settings)
        for name in self.names:
            selector = Selector("exclude", name)
            result = match(selector, graph, self.original)
            if not result.layers and name not in SELECTED_KINDS:
                near = [repr(text) for text in closest_layers(selector, self.original)]
                remedy = how_to_list_layers()
                if near:
                    remedy = f"did you mean {joined(near, 'or')}?"
                text = f"<--keep_float>: {name!r} matches no layer of {self.original.model}"
                raise UsageError(text, help=remedy)
        return edited_text(document, with_float(document.value, self.names))

    def add_to_file(self, path: Path, *, sized: bool) -> bool:
        """Add the layers to the config of an earlier run. Return whether some were not in it.

        Args:
            path: the config.
            sized: whether it has widths that were chosen for a size.

        Raises:
            UsageError: a name matches no layer, or the file has another owner or is `sized`.
        """
        source = read_text(path)
        changed = self.added_to(source)
        if changed == source.text:
            return False
        if sized:
            raise UsageError(
                f"the widths in {path} were chosen for a size with these layers quantized",
                help="write a new config with <--overwrite>",
            )
        try:
            replace_file(path, changed.encode())
        except UsageError as error:
            remedy = f"leave <--keep_float> out, and add {_line(self.names)} to it"
            raise UsageError(error.message, help=remedy) from None
        return True


def _line(names: Collection[str]) -> str:
    """Return the line of a config that keeps layers in float.

    >>> _line(["head"])
    '"exclude": ["head"]'
    """
    return paste({"exclude": [*names]})
