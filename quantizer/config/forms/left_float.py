"""Leave single layers in float in a config's document, in the file's own form."""

import copy
from collections.abc import Collection

from quantizer.config.forms.form import form_of
from quantizer.config.forms.layered import with_entries
from quantizer.config.json_types import JsonMapping, JsonObject


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
