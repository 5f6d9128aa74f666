"""Change the bit widths of single layers' weights in a config's document, in the file's own
form.
"""

import copy
from collections.abc import Mapping

from quantizer.config.forms.dtypes import INTEGERS, dtype_word, integer_word
from quantizer.config.forms.form import form_of
from quantizer.config.forms.hierarchical_spec import usual_symmetric_scale
from quantizer.config.forms.layered import specified, with_entries
from quantizer.config.json_types import JsonMapping, JsonObject
from quantizer.config.model import CAST_ONLY, QuantizationSpec, Role
from quantizer.errors import UsageError

_LayerSpecs = Mapping[Role, QuantizationSpec]


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
