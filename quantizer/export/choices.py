"""What the targets of `--deploy` leave open. Imports no torch, so that the command line can
list it.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from quantizer.errors import UsageError


@dataclass(frozen=True)
class Choice:
    """What a target leaves open; the first of the values is what it does if nothing is said.

    With `is_file` any path is a value, too.
    """

    target: str
    values: tuple[str, ...]
    is_file: bool = False


CHOICES: dict[str, Choice] = {
    "pt2_activations": Choice("pt2", ("uint8", "int8")),
    "onnx_profile": Choice("onnx", ("exact", "fast")),
    "onnx_weights": Choice("onnx", ("uint8", "int8")),
    "gguf_template": Choice("gguf", ("",), is_file=True),
}
"""By the name that it has on the command line and in Python: the integers of activations in a
.pt2; whether an .onnx rounds as the config says, or as fast kernels do; the integers of its
8-bit weights; a file of the same model, whose keys a .gguf keeps.
"""


def require_choices(given: Mapping[str, str], targets: Collection[str]) -> None:
    """Refuse values that there are not, and choices for a target that is not written.

    Raises:
        UsageError: naming the choice.
    """
    for name, value in given.items():
        choice = CHOICES[name]
        if value not in choice.values and not choice.is_file:
            raise UsageError(
                f"{name} is {value!r}", help=f"known are {', '.join(choice.values)}"
            )
        if value != choice.values[0] and choice.target not in targets:
            raise UsageError(
                f"--{name} goes with --deploy {choice.target}: no other target reads it"
            )
