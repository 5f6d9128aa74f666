"""A config file's document with other widths for the weights of single layers, in the file's
own form. No tensors.
"""

import copy
from collections.abc import Mapping
from typing import Any

from quantizer.config.forms.dtypes import INTEGERS, dtype_word
from quantizer.config.forms.form import form_of
from quantizer.config.forms.hierarchical_spec import usual_symmetric_scale
from quantizer.config.forms.layered import specified, with_entries
from quantizer.config.model import CAST_ONLY, QuantizationSpec, Role
from quantizer.errors import UsageError

Specs = Mapping[Role, QuantizationSpec]


def patched(document: Mapping[str, Any], layers: Mapping[str, Specs]) -> dict[str, Any]:
    """The document with an entry for each of `layers`, which maps a layer's name to the specs
    of all its tensors that are quantized, that of "weights" as it shall be.

    The layered form needs complete entries, so there the other tensors are said again; in the
    hierarchical form an entry says the weights' dtype alone. Comments ("//" keys) stay.

    Raises:
        UsageError: the form has no word for a width.
    """
    if not layers or form_of(document) == "hierarchical":
        changed = copy.deepcopy(dict(document))
        for name, specs in layers.items():
            named = changed.setdefault("layer_quant_config", {})
            # And to the end: of equally specific entries the last one holds
            own = named.pop(name, {})
            named[name] = {**own, "weight": _weight(own.get("weight") or {}, specs["weights"])}
        return changed
    return with_entries(
        document, {name: specified(document, specs) for name, specs in layers.items()}
    )


def _weight(own: Mapping[str, Any], spec: QuantizationSpec) -> dict[str, Any]:
    """What a level says of a weight already, with another dtype."""
    if spec.dtype in CAST_ONLY:
        return {"dtype": spec.dtype}
    word = dtype_word(spec)
    if word is None:
        wanted = f"{'' if spec.signed and spec.symmetric else 'u'}int{spec.bit_width}"
        known = ", ".join(INTEGERS)
        raise UsageError(
            f"the hierarchical form has no dtype {wanted}",
            help=f"it has {known}: change --choices",
        )
    changed = {**own, "dtype": word, "symmetric": spec.symmetric}
    usual = spec.symmetric_scale == usual_symmetric_scale(spec)
    return changed if usual else {**changed, "symmetric_scale": spec.symmetric_scale}
