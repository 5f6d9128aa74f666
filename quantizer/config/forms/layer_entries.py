"""Write entries of single layers into a config's document, in the file's own form, and specs in
the words of the layered form.
"""

import copy
from collections.abc import Collection, Mapping

from quantizer.config.forms.form import form_of
from quantizer.config.forms.hierarchical_spec import usual_symmetric_scale
from quantizer.config.forms.layered import FIELDS, OPTIONAL
from quantizer.config.forms.level_edits import is_stated
from quantizer.config.forms.types import INTEGERS, dtype_word, integer_word
from quantizer.config.json_types import JsonMapping, JsonObject
from quantizer.config.model import CAST_ONLY, POOLED, ROLES, QuantizationSpec, Role
from quantizer.errors import UsageError

_LayerSpecs = Mapping[Role, QuantizationSpec]


def with_float(document: JsonMapping, layers: Collection[str]) -> JsonObject:
    """Return the document with these layers in float: an empty list of types in the layered
    form, `exclude` in the other.
    """
    if layers and form_of(document) == "layered":
        entry = {
            "quantizable_data_type": [],
            # An entry must have these two, though nothing reads them
            "overall_quantize_config": {"datatype": "float32"},
            "tensor_quantize_config": {},
        }
        return with_entries(document, dict.fromkeys(layers, entry))
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
    layer_entries: list[JsonObject] = []
    replaced: dict[str, JsonObject] = {}
    for old in changed.get("layer_quantize_config") or []:
        name = old.get("layer_name")
        if name in entries:
            replaced.setdefault(name, old)
        else:
            layer_entries.append(old)
    for name, new in entries.items():
        old = replaced.get(name, {})
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
