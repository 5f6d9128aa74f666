"""Change one setting of a config's document at every level that states it, in the file's own
form, and list the changes in it. Documents have the words of `Config.document`, in which other
spellings are replaced.
"""

import copy
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from quantizer.config.algorithms import ALGORITHMS, finds_codes
from quantizer.config.forms.form import ALGORITHM_LISTS, form_of
from quantizer.config.forms.hierarchical_spec import OBSERVER_METHODS
from quantizer.config.json_types import JsonMapping, JsonObject
from quantizer.config.model import CAST_ONLY, ROLES, Role
from quantizer.config.roles import KEY_OF, ROLE_OF
from quantizer.errors import UsageError

_WEIGHTS: tuple[Role, ...] = ("weights",)
_EQUALIZATION = "cle"
_PER_CHANNEL_OBSERVER = "PerChannelMinMaxObserver"
_CHANGES_KEY = "// quantizer tune"
_OPTION_KEY = "// calibrate with"
_AFTER = ("$schema", "//")
"""The keys that stay before the comments."""


def is_stated(document: JsonMapping, word: str) -> bool:
    """Return whether a document states a key of a specification, of any tensor at any level.

    >>> is_stated({"global_quant_config": {"weight": {"dtype": "int4"}}}, "dtype")
    True
    >>> is_stated({"// dtype": "in the first entry", "overall_quantize_config": {}}, "dtype")
    False
    """
    return any(word in block for block in _blocks(document))


def with_method(document: JsonMapping, roles: Collection[Role], method: str) -> JsonObject:
    """Return the document in which some roles find their ranges with another method.

    Levels where the tensors have no range, such as those in float, stay as they are.

    Raises:
        UsageError: the form has no word for the method.
    """
    changed = copy.deepcopy(dict(document))
    if form_of(changed) == "layered":
        for level, role in _layered_blocks(changed, roles):
            if _set_layered(level, role, "method", method):
                level["tensor_quantize_config"][role].pop("percentage", None)
        return changed
    has_word = False
    for spec in _stated_specs(changed, roles):
        observer = _observer(method, _scheme(spec))
        if observer is not None:
            has_word = True
            spec["observer_cls"] = observer
            spec.pop("percentage", None)
    if not has_word:
        raise UsageError(f"the hierarchical form has no observer for {method} here")
    return changed


def with_channels(document: JsonMapping) -> JsonObject:
    """Return the document in which weights have a scale per output channel, if all their values
    shared one.
    """
    changed = copy.deepcopy(dict(document))
    if form_of(changed) == "layered":
        for level, role in _layered_blocks(changed, _WEIGHTS):
            _set_layered(level, role, "per_channel", True)
        return changed
    for spec in _stated_specs(changed, _WEIGHTS):
        if _scheme(spec) == "per_tensor":
            spec["qscheme"] = "per_channel"
            spec["ch_axis"] = 0
            spec["observer_cls"] = _PER_CHANNEL_OBSERVER
            spec.pop("percentage", None)
    return changed


def group_sizes(document: JsonMapping) -> list[int]:
    """Return the sizes of groups of weights that a document states, the largest first."""
    if form_of(document) == "layered":
        return []
    sizes = set()
    for spec in _stated_specs(document, _WEIGHTS):
        size = _group_size(spec)
        sizes.add(size)
    return sorted(sizes - {0}, reverse=True)


def with_group_size(document: JsonMapping, largest: int) -> JsonObject:
    """Return the document in which no group of weights is larger than `largest`."""
    changed = copy.deepcopy(dict(document))
    for spec in _stated_specs(changed, _WEIGHTS):
        if _group_size(spec) > largest:
            spec["group_size"] = largest
    return changed


def _group_size(spec: JsonMapping) -> int:
    """Return the size of the groups of a spec, which files may have as 128.0; 0 if there are
    none, or if a group is the whole axis (-1).
    """
    size = int(spec.get("group_size") or 0)
    return max(0, size)


def with_bias_correction(document: JsonMapping) -> JsonObject:
    """Return the document with corrected biases.

    Raises:
        UsageError: the form has no word for it.
    """
    if form_of(document) == "hierarchical":
        raise UsageError("the hierarchical form has no bias correction")
    return {**copy.deepcopy(dict(document)), "include_bias_corr": True}


def with_equalization(document: JsonMapping) -> JsonObject:
    """Return the document with cross-layer equalization."""
    changed = copy.deepcopy(dict(document))
    if form_of(changed) == "layered":
        return {**changed, "include_cle": True}
    key = ALGORITHM_LISTS[0]
    entries = _entries(changed, key)
    names = [entry.get("name") for entry in entries]
    if _EQUALIZATION not in names:
        _set_entries(changed, key, [{"name": _EQUALIZATION}, *entries])
    return changed


def with_algorithm(document: JsonMapping, entry: JsonMapping) -> JsonObject:
    """Return the document with an algorithm, which replaces one of its kind.

    An algorithm that rounds weights replaces any other that does, and comes last.

    Args:
        document: the content of a config file.
        entry: the algorithm in the form of the file.
    """
    changed = copy.deepcopy(dict(document))
    kind = ALGORITHMS[entry["name"]]
    key = "algorithms"
    if form_of(changed) == "hierarchical":
        key = ALGORITHM_LISTS[int(finds_codes(kind))]
    remaining = []
    for other in _entries(changed, key):
        other_kind = ALGORITHMS.get(other.get("name", ""))
        is_replaced = other_kind is kind
        if other_kind is not None and kind.stage == "round":
            is_replaced |= other_kind.stage == "round"
        if not is_replaced:
            remaining.append(other)
    new = copy.deepcopy(dict(entry))
    if kind.stage == "round":
        remaining.append(new)
    else:
        remaining.insert(0, new)
    _set_entries(changed, key, remaining)
    return changed


def with_tuning_comments(
    document: JsonMapping, changes: Sequence[str], fast_finetune: str | None
) -> JsonObject:
    """Return the document with the changes as a comment, and with the option that calibration
    needs besides the config, if any.

    Changes of an earlier search stay in the list.
    """
    earlier = document.get(_CHANGES_KEY) or []
    comments: JsonObject = {}
    if earlier or changes:
        comments[_CHANGES_KEY] = [*earlier, *changes]
    if fast_finetune is not None:
        comments[_OPTION_KEY] = f"--fast_finetune {fast_finetune}"
    before: JsonObject = {}
    after: JsonObject = {}
    for key, value in document.items():
        if key in (_CHANGES_KEY, _OPTION_KEY):
            continue
        if key in _AFTER and not after:
            before[key] = value
        else:
            after[key] = value
    return {**before, **comments, **after}


def _entries(document: JsonMapping, key: str) -> list[JsonObject]:
    """Return the algorithms of a list, for which a file may have a single one."""
    entries: Any = document.get(key) or []
    return [entries] if isinstance(entries, dict) else list(entries)


def _set_entries(document: JsonObject, key: str, entries: list[JsonObject]) -> None:
    """Set the algorithms of a list; in the hierarchical form, a single one has no list."""
    is_single = len(entries) == 1 and key != "algorithms"
    document[key] = entries
    if is_single:
        document[key] = entries[0]


def _layered_blocks(
    document: JsonObject, roles: Collection[Role]
) -> Iterator[tuple[JsonObject, Role]]:
    """Yield the levels that quantize these roles as integers, each with the role."""
    for level in _levels(document):
        stated = level.get("quantizable_data_type")
        quantized = ROLES if stated is None else stated
        for role in roles:
            dtype = _layered_value(level, role, "datatype")
            if role in quantized and dtype not in CAST_ONLY:
                yield level, role


def _blocks(document: JsonMapping) -> Iterator[JsonMapping]:
    """Yield the blocks that state parameters, at all levels: of all tensors, and of one."""
    for level in _levels(document):
        if form_of(document) == "layered":
            tensors = level.get("tensor_quantize_config") or {}
            blocks = [level.get("overall_quantize_config"), *map(tensors.get, ROLES)]
        else:
            blocks = [*map(level.get, ROLE_OF)]
        yield from filter(None, blocks)


def _layered_value(level: JsonMapping, role: Role, word: str) -> Any:
    """Return the value of a key that a level states for a role; None if it states none.

    The block of the role overrides that of all roles.
    """
    tensors = level.get("tensor_quantize_config") or {}
    overall = level.get("overall_quantize_config") or {}
    block = tensors.get(role) or {}
    return block.get(word, overall.get(word))


def _set_layered(level: JsonObject, role: Role, word: str, value: Any) -> bool:
    """Set a key in the block of a role; return whether it had another value before."""
    if _layered_value(level, role, word) == value:
        return False
    blocks = level.get("tensor_quantize_config") or {}
    level["tensor_quantize_config"] = blocks
    blocks.setdefault(role, {})[word] = value
    return True


def _stated_specs(document: JsonMapping, roles: Collection[Role]) -> Iterator[JsonObject]:
    """Yield the specs of these roles that decide a granularity, at all levels.

    The specs are parts of the document, so that callers can change them in it.
    """
    keys = [KEY_OF[role] for role in roles]
    for level in _levels(document):
        for key in keys:
            spec = level.get(key)
            if isinstance(spec, dict) and _scheme(spec) is not None:
                yield spec


def _levels(document: Any) -> Iterator[Any]:
    """Yield the parts of a document that state something of the tensors of some layers."""
    if form_of(document) == "layered":
        yield document
        yield from document.get("layer_quantize_config") or ()
        return
    yield document.get("global_quant_config") or {}
    for block in ("layer_type_quant_config", "layer_quant_config"):
        for text, level in (document.get(block) or {}).items():
            if not text.startswith("//"):
                yield level or {}


def _scheme(spec: JsonMapping) -> str | None:
    """Return the granularity that a spec states or its observer implies; None if neither
    does, or if its ranges are not calibrated.
    """
    if spec.get("is_dynamic") or spec.get("dtype") in CAST_ONLY:
        return None
    scheme: str | None = spec.get("qscheme")
    observer = str(spec.get("observer_cls"))
    if scheme is None and observer in OBSERVER_METHODS:
        _, schemes = OBSERVER_METHODS[observer]
        scheme = schemes[0]
    return scheme


def _observer(method: str, scheme: str | None) -> str | None:
    """Return the observer of a method for a granularity; None if there is none."""
    for name, (other, schemes) in OBSERVER_METHODS.items():
        if other == method and scheme in schemes:
            return name
    return None
