"""A config's document with single layers left in float, in the file's own form. No tensors."""

import copy
from collections.abc import Collection, Mapping
from typing import Any

from quantizer.config.form import form_of


def with_float(document: Mapping[str, Any], layers: Collection[str]) -> dict[str, Any]:
    """The document with these layers in float: an empty list of types in the layered form, `exclude` in the other."""
    changed = copy.deepcopy(dict(document))
    if not layers:
        return changed
    if form_of(document) == "hierarchical":
        known = changed.get("exclude") or []
        return changed | {"exclude": [*known, *(name for name in layers if name not in known)]}
    entries = [each for each in changed.get("layer_quantize_config") or [] if each.get("layer_name") not in layers]
    block = {"overall_quantize_config": {"datatype": "float32"}, "tensor_quantize_config": {}}  # which nothing reads
    for name in layers:
        said: dict[str, Any] = {"layer_type": None, "layer_name": name, "quantizable_data_type": []}
        entries.append(said | copy.deepcopy(block))
    return changed | {"layer_quantize_config": entries}
