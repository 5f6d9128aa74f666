"""Older and newer spellings of the hierarchical form's words, turned into its own, with a note
for each.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from quantizer.config.algorithm_settings import ALIASES
from quantizer.config.diagnostics import Diagnostic
from quantizer.config.document.document import Document, pointer_to
from quantizer.config.forms.hierarchical import ROLE_OF
from quantizer.config.forms.hierarchical_spec import METHODS
from quantizer.config.wording import quoted

T = TypeVar("T")
Path = tuple[str | int, ...]

KEYS: Mapping[str, str] = {"dynamic": "is_dynamic", "axis": "ch_axis"}
"""Other spellings of a spec's keys."""

VALUES: Mapping[str, Mapping[str, str]] = {
    "observer_cls": {
        **{name.removesuffix("Observer"): name for name in (*METHODS, "PlaceholderObserver")},
        "min_max": "PerTensorMinMaxObserver",
        "percentile": "PerTensorPercentileObserver",
        "MSE": "PerTensorMSEObserver",
    },
    "scale_type": {"power_of_2": "pof2", "poweroftwo": "pof2", "float32": "float"},
    "round_method": {"std_round": "round"},
    "target_device": {"cpu": "CPU", "gpu": "GPU", "cuda": "GPU", "ipu": "IPU"},
    "dtype": {"float8_e4m3": "fp8_e4m3", "float8_e5m2": "fp8_e5m2", "fp4_e2m1": "fp4"},
    "name": ALIASES,
}
"""Other spellings of a key's values."""

TYPES: Mapping[str, str] = {
    "Conv2D": "Conv2d",
    "Conv3D": "Conv3d",
    "Conv2DTranspose": "ConvTranspose2d",
    "Dense": "Linear",
}
"""Layer types in the words of other frameworks. (`Conv1D` is a class of its own in
transformers, so it stays.)
"""


def other_spelling(key: str, path: Sequence[str | int]) -> str:
    """The form's word for a key of the block at `path`; the key itself, if it is no other
    spelling.

    >>> (
    ...     other_spelling("dynamic", ("global_quant_config", "weight")),
    ...     other_spelling("dynamic", ()),
    ... )
    ('is_dynamic', 'dynamic')
    """
    table = (
        KEYS
        if path and path[-1] in ROLE_OF
        else TYPES
        if tuple(path) == ("layer_type_quant_config",)
        else {}
    )
    return table.get(key, key)


def _is_two_stages(value: Any, path: Path) -> bool:
    """Whether it is the spec of a tensor in groups, and a spec of its scales that is a
    `scale_format`.
    """
    if not (path and path[-1] in ROLE_OF and isinstance(value, list) and len(value) == 2):
        return False
    first, second = value
    if (
        not isinstance(first, dict)
        or not isinstance(second, dict)
        or second.get("is_scale_quant") is not True
    ):
        return False
    stated = second.get("dtype"), second.get("qscheme") or "per_tensor"
    return stated in (("fp8_e4m3", "per_tensor"), ("float8_e4m3", "per_tensor"))


def canonical(document: Document) -> tuple[Document, tuple[Diagnostic, ...]]:
    """The document in the form's own words, every value still at its place, and a note for each
    word replaced.
    """
    notes: list[Diagnostic] = []
    moved: dict[str, str] = {}

    def replaced(spelling: str, word: str, *path: str | int, key: bool = False) -> str:
        if spelling != word:
            text, place = (
                f"{quoted(spelling)} is read as {quoted(word)}",
                document.place(pointer_to(*path), key=key),
            )
            notes.append(Diagnostic("QZ116", text, place, "note", help=f"write {quoted(word)}"))
        return word

    def copy(value: Any, old: Path, new: Path) -> Any:
        """A copy of the value at the path `old`, which is at the path `new` afterwards."""
        moved[pointer_to(*new)] = pointer_to(*old)
        if isinstance(value, dict):
            words = {key: other_spelling(key, new) for key in value}
            # With both, each stays
            words = {key: key if word in value else word for key, word in words.items()}
            return {
                replaced(key, word, *old, key, key=True): copy(
                    value[key], (*old, key), (*new, word)
                )
                for key, word in words.items()
            }
        if _is_two_stages(value, old):
            spec = copy(value[0], (*old, 0), new)
            moved[pointer_to(*new, "scale_format")] = second = pointer_to(*old, 1, "dtype")
            text, help_ = (
                "a second specification, of scales, is read as scale_format",
                'write "scale_format": "e4m3"',
            )
            notes.append(Diagnostic("QZ116", text, document.place(second), "note", help=help_))
            return spec | {"scale_format": "e4m3"}
        if isinstance(value, list):
            return [copy(item, (*old, at), (*new, at)) for at, item in enumerate(value)]
        spellings = VALUES.get(str(old[-1]), {}) if old and isinstance(value, str) else {}
        return replaced(value, spellings.get(value, value), *old)

    def at_new(spans: Mapping[str, T]) -> dict[str, T]:
        return {new: spans[old] for new, old in moved.items() if old in spans}

    value = copy(document.value, (), ())
    parts = (at_new(document.values), at_new(document.keys), at_new(document.dotted))
    return Document(document.source, value, *parts), tuple(notes)
