"""The interface of a target of `--deploy`, and the new files that take the place of an earlier
export when they are verified. Imports no torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar, cast

from quantizer.export.targets import CHOICES, EXPORTERS
from quantizer.option_words import Sentence
from quantizer.plugins import loaded
from quantizer.storage.files import cannot_write
from quantizer.storage.permission import replacing
from quantizer.storage.replacing import (
    remove_file,
    remove_folder,
    replaced_files,
    replaced_folder,
    require_replaceable_folder,
    require_writable,
)

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

    from quantizer.calibration.solution import Solution
    from quantizer.export.agreement import Verification
    from quantizer.export.deployment import Deployment
    from quantizer.export.layer_choice import LayerChoice
    from quantizer.graph.ir import Graph
    from quantizer.plan.model import Plan, TensorSpecs


Written = TypeVar("Written")
"""What `Exporter.write` hands to `Exporter.verify`."""


Reason = tuple[str, str]
"""Why something is refused, and what to change."""


@dataclass(frozen=True)
class Refusal:
    """Why a target cannot hold a tensor, a whole layer, or the network.

    Attributes:
        why: the end of a sentence, as in "input of conv1 has a dynamic range".
        help: what to change.
        layer: the layer; empty for the whole network.
        role: of the tensor in the layer; empty for the whole layer.
    """

    why: str
    help: str
    layer: str = ""
    role: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "why", Sentence(self.why))
        object.__setattr__(self, "help", Sentence(self.help))


class Exporter(ABC, Generic[Written]):
    """Writes one kind of file. A new target implements `write` and `verify`.

    It gets a row in `quantizer.export.targets.EXPORTERS`, which has its name, suffix, packages
    and options.

    Attributes:
        writes_folder: whether `write` gets an empty folder to fill, and not the path of a file.
    """

    writes_folder: ClassVar[bool] = False

    def __init__(self, choices: Mapping[str, str] | None = None) -> None:
        """Set up an exporter.

        Args:
            choices: values of options, by name; the others have their defaults.
        """
        self.choices = dict(choices or {})

    def choice(self, name: str) -> str:
        """Return the value of one of the target's options."""
        return self.choices.get(name, CHOICES[name].default)

    def refusals(self, graph: Graph, specs: TensorSpecs, opset: int) -> Iterable[Refusal]:
        """Return what the target cannot hold.

        Only the graph and the specs are read, so that this is known before calibration.

        Args:
            opset: the ONNX operator set; -1 to let the exporter choose.
        """
        return ()

    def value_layers(self, graph: Graph, specs: TensorSpecs) -> tuple[str, ...]:
        """Return the layers whose rounded weights files have no codes for: rounding costs
        accuracy, and saves nothing.
        """
        return ()

    def plain_layers(self, graph: Graph) -> tuple[str, ...]:
        """Return the layers that engines build in float for any file."""
        return ()

    def notes(self, graph: Graph, specs: TensorSpecs) -> tuple[str, ...]:
        """Return what users of files have to know, as far as the plan says it."""
        return ()

    @property
    def activation_codes(self) -> str:
        """Return the integer type of 8-bit activations in files; empty for the config's."""
        return ""

    def require_model(self, model: nn.Module) -> None:
        """Check what the target cannot hold of the model itself, before calibration.

        Raises:
            UsageError: why it cannot.
        """

    def file_bytes(self, plan: Plan, model: nn.Module) -> int | None:
        """Return the size of the file of a plan; None if only that of its weights is known."""
        return None

    def as_run(self, graph: Graph, solution: Solution) -> Solution:
        """Return the solution with what the target's runtime rounds in addition."""
        return solution

    def layer_choice(self, deployment: Deployment, path: Path) -> LayerChoice | None:
        """Return which layers stay in float because integers are slower there.

        Test mode then runs the solution of this choice.

        Args:
            deployment: the calibrated network with all its quantizations.
            path: of the file that will be written.

        Returns:
            None if the target does not choose.
        """
        return None

    @abstractmethod
    def write(self, deployment: Deployment, path: Path) -> AbstractContextManager[Written]:
        """Write the file, and yield what `verify` needs.

        Args:
            deployment: what is exported.
            path: of the file, in a new folder. All files that are there at the end are moved to
                the user's folder.

        Raises:
            UsageError: the target cannot express what the config asks for.
            ModelError: the target cannot translate a layer.
            ResultError: the file cannot be written.
        """

    @abstractmethod
    def verify(self, deployment: Deployment, written: Written) -> Verification:
        """Read the file back and compare it with test mode.

        Raises:
            VerificationError: the file does not compute what test mode does.
        """

    def files(self, path: Path) -> tuple[Path, ...]:
        """Return `path` and the files that may be next to it."""
        return path, path.with_name(f"{path.name}.data")

    def remove(self, path: Path) -> None:
        """Remove what an earlier export has written at `path`, as its list says."""
        if self.writes_folder:
            remove_folder(path)
            return
        for file in self.files(path):
            remove_file(file)


def require_place(exporter: Exporter[Any], path: Path) -> None:
    """Check before work begins that what an exporter writes to a path replaces no file of the
    user's.

    Raises:
        UsageError: naming the file.
        ResultError: what is there cannot be read.
    """
    try:
        if exporter.writes_folder:
            require_replaceable_folder(path)
            return
        for file in exporter.files(path):
            require_writable(file)
    except OSError as error:
        raise cannot_write(path, error) from error


@contextmanager
def new_files(exporter: Exporter[Any], path: Path, model: nn.Module | None) -> Iterator[Path]:
    """Yield where an exporter writes. What it has written replaces the earlier export at `path`
    at the end of the `with` block.

    Args:
        exporter: of the target.
        path: of its file or folder.
        model: the float model, whose own folder is never replaced.

    Raises:
        UsageError: what is at `path` is not an earlier export.
        ResultError: it cannot be written.
    """
    # It needs torch
    from quantizer.export.hugging_face_folder import source_folder

    replaced = replaced_files(path, exporter.files(path))
    if exporter.writes_folder:
        replaced = replaced_folder(path)
    source = None if model is None else source_folder(model)
    inputs = [] if source is None else [source]
    try:
        with replacing(inputs=inputs), replaced as new_path:
            yield new_path
    except OSError as error:
        raise cannot_write(path, error) from error


def exporter_of(target: str, choices: Mapping[str, str] | None = None) -> Exporter[Any]:
    """Return the exporter of a target; its module, which needs torch, is imported now.

    Args:
        choices: values of the target's options, by name.
    """
    return cast(Exporter[Any], loaded(EXPORTERS[target].exporter)(choices))
