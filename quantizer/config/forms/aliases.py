"""Replace older and newer spellings of the hierarchical form's words, with a note for each."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from quantizer.config.algorithms import ALIASES
from quantizer.config.diagnostics import Diagnostic
from quantizer.config.document.document import Document, pointer_to
from quantizer.config.forms.hierarchical_spec import OBSERVER_METHODS
from quantizer.config.json_types import JsonObject, JsonPath
from quantizer.config.roles import ROLE_OF
from quantizer.config.wording import quoted

_T = TypeVar("_T")

KEY_ALIASES: Mapping[str, str] = {"dynamic": "is_dynamic", "axis": "ch_axis"}
"""Other spellings of a spec's keys."""

VALUE_ALIASES: Mapping[str, Mapping[str, str]] = {
    "observer_cls": {
        **{
            name.removesuffix("Observer"): name
            for name in (*OBSERVER_METHODS, "PlaceholderObserver")
        },
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

REPLACED_OBSERVERS: Mapping[str, tuple[str, str]] = {
    "PerTensorHistogramObserver": ("PerTensorMSEObserver", ""),
    "PerTensorHistogramObserverPro": ("PerTensorMSEObserver", ""),
    "LSQObserver": ("PerTensorMSEObserver", ""),
    "TQTObserver": ("PerTensorMSEObserver", ""),
    "PerTensorPowOf2MinMaxObserver": ("PerTensorMinMaxObserver", "pof2"),
    "PerTensorPowOf2MinMSEObserver": ("PerTensorMSEObserver", "pof2"),
    "PerChannelPowOf2MinMaxObserver": ("PerChannelMinMaxObserver", "pof2"),
    "PerChannelPowOf2MinMSEObserver": ("PerChannelMinMaxObserver", "pof2"),
}
"""The observer and the scale_type to write instead of one of AMD Quark. Ranges differ, so these
are not other spellings.
"""


def instead_of_observer(name: str) -> str:
    """Return what to write instead of an observer of AMD Quark; empty if that is not known.

    >>> instead_of_observer("PerTensorPowOf2MinMaxObserver")
    'use PerTensorMinMaxObserver with "scale_type": "pof2"'
    """
    if name not in REPLACED_OBSERVERS:
        return ""
    observer, scale_type = REPLACED_OBSERVERS[name]
    with_type = f' with "scale_type": "{scale_type}"' if scale_type else ""
    return f"use {observer}{with_type}"


TYPE_ALIASES: Mapping[str, str] = {
    "Conv2D": "Conv2d",
    "Conv3D": "Conv3d",
    "Conv2DTranspose": "ConvTranspose2d",
    "Dense": "Linear",
}
"""Layer types in the words of other frameworks. (`Conv1D` is a class of its own in
transformers, so it stays.)
"""


def other_spelling(key: str, path: Sequence[str | int]) -> str:
    """Return the form's word for a key of the block at `path`; the key itself, if it is no
    other spelling.

    >>> other_spelling("dynamic", ("global_quant_config", "weight"))
    'is_dynamic'
    >>> other_spelling("dynamic", ())
    'dynamic'
    """
    if path and path[-1] in ROLE_OF:
        return KEY_ALIASES.get(key, key)
    if tuple(path) == ("layer_type_quant_config",):
        return TYPE_ALIASES.get(key, key)
    return key


def canonical(document: Document) -> tuple[Document, tuple[Diagnostic, ...]]:
    """Return the document in the form's own words, every value still at its place, and a note
    for each word replaced.
    """
    copy = _CanonicalCopy(document)
    value = copy.value(document.value, (), ())
    canonical_document = replace(
        document,
        value=value,
        values=copy.moved(document.values),
        keys=copy.moved(document.keys),
        dotted=copy.moved(document.dotted),
    )
    return canonical_document, tuple(copy.notes)


class _CanonicalCopy:
    """A copy of a document in the form's own words, which notes each word that it replaces."""

    def __init__(self, document: Document) -> None:
        self._document = document
        self._old_pointers: dict[str, str] = {}
        self.notes: list[Diagnostic] = []

    def value(self, value: Any, old: JsonPath, new: JsonPath) -> Any:
        """Return a copy of the value at the path `old`; its path in the copy is `new`."""
        self._old_pointers[pointer_to(*new)] = pointer_to(*old)
        if isinstance(value, dict):
            return self._object(value, old, new)
        if _is_two_stages(value, old):
            spec = self.value(value[0], (*old, 0), new)
            second = (*old, 1, "dtype")
            self._old_pointers[pointer_to(*new, "scale_format")] = pointer_to(*second)
            text = "a second specification, of scales, is read as scale_format"
            self._note(text, second, 'write "scale_format": "e4m3"')
            return {**spec, "scale_format": "e4m3"}
        if isinstance(value, list):
            items = enumerate(value)
            return [self.value(item, (*old, index), (*new, index)) for index, item in items]
        if old and isinstance(value, str):
            spellings = VALUE_ALIASES.get(str(old[-1]), {})
            return self._replaced(value, spellings.get(value, value), old)
        return value

    def moved(self, by_pointer: Mapping[str, _T]) -> dict[str, _T]:
        """Return what a mapping has for old pointers by the new ones."""
        pointers = self._old_pointers.items()
        return {new: by_pointer[old] for new, old in pointers if old in by_pointer}

    def _object(self, value: JsonObject, old: JsonPath, new: JsonPath) -> JsonObject:
        members: JsonObject = {}
        for key, item in value.items():
            word = other_spelling(key, new)
            # With both spellings, each stays
            if word in value:
                word = key
            self._replaced(key, word, (*old, key), is_key=True)
            members[word] = self.value(item, (*old, key), (*new, word))
        return members

    def _replaced(
        self, spelling: str, word: str, path: JsonPath, *, is_key: bool = False
    ) -> str:
        if spelling != word:
            text = f"{quoted(spelling)} is read as {quoted(word)}"
            self._note(text, path, f"write {quoted(word)}", is_key=is_key)
        return word

    def _note(self, text: str, path: JsonPath, help_: str, *, is_key: bool = False) -> None:
        place = self._document.place(*path, key=is_key)
        self.notes.append(Diagnostic("QZ116", text, place, "note", help=help_))


def _is_two_stages(value: Any, path: JsonPath) -> bool:
    """Return whether a value is the spec of a tensor in groups, and a spec of its scales that
    is a `scale_format`.
    """
    is_tensor = bool(path) and path[-1] in ROLE_OF
    if not is_tensor or not isinstance(value, list) or len(value) != 2:
        return False
    first, second = value
    if not isinstance(first, dict) or not isinstance(second, dict):
        return False
    if second.get("is_scale_quant") is not True:
        return False
    dtype = second.get("dtype")
    qscheme = second.get("qscheme") or "per_tensor"
    return dtype in ("fp8_e4m3", "float8_e4m3") and qscheme == "per_tensor"
