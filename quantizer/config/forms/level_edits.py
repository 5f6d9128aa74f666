"""Change a config's document in the file's own form: one setting at every level that states it,
or entries of single layers, and list the changes in it. Documents have the words of
`Config.document`, in which other spellings are replaced.
"""

import copy
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from quantizer.config.algorithms import SWITCHES, entry_kinds, finds_codes
from quantizer.config.forms.form import ALGORITHM_LISTS, form_of
from quantizer.config.forms.hierarchical_spec import OBSERVER_METHODS, usual_symmetric_scale
from quantizer.config.forms.layered import FIELDS, OPTIONAL
from quantizer.config.forms.types import INTEGERS, dtype_word, integer_word
from quantizer.config.json_types import JsonMapping, JsonObject
from quantizer.config.model import CAST_ONLY, POOLED, ROLES, QuantizationSpec, Role
from quantizer.config.roles import KEY_OF, ROLE_OF
from quantizer.errors import UsageError
from quantizer.tables import RANGE_METHODS

_WEIGHTS: tuple[Role, ...] = ("weights",)
_PER_CHANNEL_OBSERVER = "PerChannelMinMaxObserver"


_LayerSpecs = Mapping[Role, QuantizationSpec]


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
    sizes = {_group_size(spec) for spec in _stated_specs(document, _WEIGHTS)}
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


def with_setting(document: JsonMapping, setting: str, named: str) -> JsonObject:
    """Return the document with a global setting turned on.

    Args:
        document: the content of a config file.
        setting: of the layered form.
        named: what it turns on, for the error.

    Raises:
        UsageError: the form has no word for it.
    """
    if form_of(document) == "hierarchical":
        raise UsageError(f"the hierarchical form has no {named}")
    return {**copy.deepcopy(dict(document)), setting: True}


def with_algorithm(document: JsonMapping, entry: JsonMapping) -> JsonObject:
    """Return the document with an algorithm, which replaces one of its kind.

    An algorithm that rounds weights replaces any other that does, and comes last. The layered
    form has a setting for one that is a pass.

    Args:
        document: the content of a config file.
        entry: the algorithm in the form of the file.
    """
    changed = copy.deepcopy(dict(document))
    name = entry["name"]
    form = form_of(changed)
    if form == "layered" and name in SWITCHES:
        return {**changed, SWITCHES[name]: True}
    kinds = entry_kinds(form)
    kind = kinds[name]
    key = "algorithms"
    if form == "hierarchical":
        key = ALGORITHM_LISTS[int(finds_codes(kind))]
    rounds = kind.stage == "round"
    remaining = []
    for other in _entries(changed, key):
        other_kind = kinds.get(other.get("name", ""))
        both_round = rounds and other_kind is not None and other_kind.stage == "round"
        if other_kind is not kind and not both_round:
            remaining.append(other)
    remaining.insert(len(remaining) if rounds else 0, copy.deepcopy(dict(entry)))
    _set_entries(changed, key, remaining)
    return changed


def _entries(document: JsonMapping, key: str) -> list[JsonObject]:
    """Return the algorithms of a list, for which a file may have a single one."""
    entries: Any = document.get(key) or []
    return [entries] if isinstance(entries, dict) else list(entries)


def _set_entries(document: JsonObject, key: str, entries: list[JsonObject]) -> None:
    """Set the algorithms of a list; in the hierarchical form, a single one has no list."""
    is_single = len(entries) == 1 and key != "algorithms"
    document[key] = entries[0] if is_single else entries


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
    for level in _levels(document):
        for role in roles:
            spec = level.get(KEY_OF[role])
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
    _, schemes = OBSERVER_METHODS.get(str(spec.get("observer_cls")), ("", (None,)))
    return scheme or schemes[0]


def _observer(method: str, scheme: str | None) -> str | None:
    """Return the observer of a method for a granularity; None if there is none."""
    observers = RANGE_METHODS[method].observers.items()
    return next((name for name, row in observers if scheme in row.schemes), None)


def with_float(document: JsonMapping, layers: Collection[str]) -> JsonObject:
    """Return the document with these layers in float, by its `exclude`."""
    changed = copy.deepcopy(dict(document))
    excluded = changed.get("exclude") or []
    added = [name for name in layers if name not in excluded]
    if added:
        changed["exclude"] = [*excluded, *added]
    return changed


def with_layer_entries(document: JsonMapping, layers: Mapping[str, _LayerSpecs]) -> JsonObject:
    """Return the document with an entry for each of `layers`. Comments ("//" keys) stay.

    The layered form needs complete entries, so there the other tensors are repeated; in the
    hierarchical form an entry states the weights' dtype alone.

    Args:
        document: the parsed file.
        layers: for each layer the new spec of "weights", and the specs of its other quantized
            tensors.

    Raises:
        UsageError: the form has no word for a width.
    """
    if layers and form_of(document) == "layered":
        entries = {name: specified(document, specs) for name, specs in layers.items()}
        return with_entries(document, entries)
    changed = copy.deepcopy(dict(document))
    for name, specs in layers.items():
        named = changed.setdefault("layer_quant_config", {})
        # Of equally specific entries the last one holds, so it is moved to the end
        level = named.pop(name, {})
        level["weight"] = _weight(level.get("weight") or {}, specs["weights"])
        named[name] = level
    return changed


def _weight(stated: JsonMapping, spec: QuantizationSpec) -> JsonObject:
    """Return what a level states of a weight, with the dtype of `spec`."""
    if spec.dtype in CAST_ONLY:
        return {"dtype": spec.dtype}
    word = dtype_word(spec)
    if word is None:
        known = ", ".join(INTEGERS)
        raise UsageError(
            f"the hierarchical form has no dtype {integer_word(spec)}",
            help=f"it has {known}: change <--choices>",
        )
    changed = {**stated, "dtype": word, "symmetric": spec.symmetric}
    if spec.symmetric_scale != usual_symmetric_scale(spec):
        changed["symmetric_scale"] = spec.symmetric_scale
    return changed


def with_entries(document: JsonMapping, entries: Mapping[str, JsonMapping]) -> JsonObject:
    """Return a copy of the document with these layer entries, by the name of their layer.

    They replace entries of the same names, whose comments ("//" keys) stay, and come after
    all others.
    """
    changed = copy.deepcopy(dict(document))
    before: list[JsonObject] = changed.get("layer_quantize_config") or []
    layer_entries = [old for old in before if old.get("layer_name") not in entries]
    for name, new in entries.items():
        old = next((old for old in before if old.get("layer_name") == name), {})
        comments = {key: value for key, value in old.items() if key.startswith("//")}
        selector = {"layer_type": None, "layer_name": name}
        layer_entries.append({**comments, **selector, **copy.deepcopy(dict(new))})
    return changed | {"layer_quantize_config": layer_entries}


def specified(document: JsonMapping, specs: _LayerSpecs) -> JsonObject:
    """Return what an entry of this document states to give a layer's tensors these specs,
    with any values in wider blocks.
    """
    explicit = {"datatype"}
    if is_stated(document, "symmetric_scale"):
        explicit.add("symmetric_scale")
    return entry({}, specs, explicit)


def entry(
    selector: JsonMapping,
    specs: Mapping[Role, QuantizationSpec],
    explicit: Collection[str] = (),
) -> JsonObject:
    """Return a complete layer entry: an overall block, and what differs from it for single
    roles; `explicit` as in `parameters`.
    """
    roles = [role for role in ROLES if role in specs]
    by_role = {role: parameters(specs[role], explicit) for role in roles}
    blocks = [*by_role.values()]
    overall = next((block for block in blocks if "bit_width" in block), blocks[0]).copy()
    # The roles that read these words state them themselves
    for word in OPTIONAL:
        overall.pop(word, None)
    if "per_channel" in overall:
        overall["per_channel"] = False
    tensors: JsonObject = {}
    for role, block in by_role.items():
        words = [word for word in block if overall.get(word) != block[word]]
        if words:
            tensors[role] = {word: block[word] for word in words}
    return {
        **selector,
        "quantizable_data_type": roles,
        "overall_quantize_config": overall,
        "tensor_quantize_config": tensors,
    }


def parameters(spec: QuantizationSpec, explicit: Collection[str] = ()) -> JsonObject:
    """Return a complete block that means the same as a spec of integers, or one without a
    scale.

    `explicit` are the words, of "datatype" and "symmetric_scale", that it states even with
    their default, as another block may state something else.
    """
    if spec.dtype in CAST_ONLY:
        return {"datatype": spec.dtype}
    values = spec.to_json()
    values["qscheme"] = spec.qscheme == "per_channel"
    if spec.statistic == POOLED:
        values["statistic"] = "max"
    block = {word: values[name] for word, name in FIELDS.items()}
    if "datatype" not in explicit:
        del block["datatype"]
    if spec.method != "percentile":
        del block["percentage"]
    is_usual = spec.symmetric_scale == "quant_max" and "symmetric_scale" not in explicit
    if is_usual or not spec.has_symmetric_scale:
        del block["symmetric_scale"]
    return block
