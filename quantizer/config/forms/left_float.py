"""A config's document with single layers left in float, in the file's own form. No tensors."""

import copy
from collections.abc import Collection, Mapping
from typing import Any

from quantizer.config.forms.form import form_of
from quantizer.config.forms.layered import with_entries


def with_float(document: Mapping[str, Any], layers: Collection[str]) -> dict[str, Any]:
    """The document with these layers in float: an empty list of types in the layered form,
    `exclude` in the other.
    """
    if not layers or form_of(document) == "hierarchical":
        changed = copy.deepcopy(dict(document))
        known = changed.get("exclude") or []
        added = [name for name in layers if name not in known]
        return changed | ({"exclude": [*known, *added]} if added else {})
    # Which nothing reads
    block = {"overall_quantize_config": {"datatype": "float32"}, "tensor_quantize_config": {}}
    return with_entries(
        document, {name: {"quantizable_data_type": [], **block} for name in layers}
    )
