"""Values for quantization parameters that a file of the layered form has to state and does not. Knows no text."""

from __future__ import annotations

import itertools
from collections import ChainMap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from quantizer.config.model import CAST_ONLY, ROLES
from quantizer.config.resources import load_resource

OVERALL, TENSOR = "overall_quantize_config", "tensor_quantize_config"
CHANGES = 2
"""At most so many values differ from what a wider block says, to fit what the file states."""

Members = dict[str, Any]


def preset(value: Mapping[str, Any]) -> Mapping[str, Any]:
    """The ready config of the device that the file names."""
    name = "dpu.json" if str(value.get("target_device")).upper() == "DPU" else "default.json"
    found: Mapping[str, Any] = load_resource("configs", name)
    return found


def parameters(value: Mapping[str, Any], level: Mapping[str, Any], missing: Sequence[str]) -> Iterator[Members]:
    """What to add to `level`, the file or one of its layer entries, so that its overall block states what is missing.

    First what holds there anyway, of each tensor role by itself: for a layer entry what the top of the file says, for
    the top what the ready config does. What follows differs from it in one value, then in two.
    """
    blocks = [_blocks(source) for source in ([preset(value)] if level is value else [value, preset(value)])]
    own, own_tensors = _blocks(level)
    wide = ChainMap({}, *(overall for overall, _ in blocks), {"datatype": "int"})
    roles = level.get("quantizable_data_type", value.get("quantizable_data_type"))
    by_role = {
        role: ChainMap({}, *(part for overall, tensors in blocks for part in (tensors.get(role, {}), overall)), wide)
        for role in ROLES
        if not isinstance(roles, list) or role in roles
    }
    first = _overall(missing, own, wide, [found["datatype"] for found in by_role.values()])
    if own.get("symmetry") is False and not any(block.get("symmetry") for block in own_tensors.values()):
        first |= dict.fromkeys(
            {"signed", "narrow_range"} & first.keys(), False
        )  # asymmetric quantization reads neither
    aside = {role: _aside(first, found, wide, own_tensors.get(role, {})) for role, found in by_role.items()}
    tensors = {role: block for role, block in aside.items() if block}
    for changes in _changes(first):
        yield {OVERALL: first | changes, **({TENSOR: tensors} if tensors else {})}


def _overall(missing: Sequence[str], own: Members, wide: Mapping[str, Any], datatypes: Sequence[str]) -> Members:
    """Under a floating-point datatype of the top an empty block has that, and one about integers has to say so."""
    if wide["datatype"] in CAST_ONLY and not own:
        return {"datatype": wide["datatype"]}
    is_said = "datatype" in own or CAST_ONLY.isdisjoint(datatypes)
    return ({} if is_said else {"datatype": "int"}) | {word: wide[word] for word in missing}


def _aside(first: Members, found: Mapping[str, Any], wide: Mapping[str, Any], own: Members) -> Members:
    """What a role's block has to state, so that the overall values `first` do not replace what holds for the role."""
    read = first.keys() if found["datatype"] == "int" else first.keys() & {"datatype"}
    return {word: found[word] for word in first if word in read - own.keys() and found[word] != wide[word]}


def _changes(first: Members) -> Iterator[Members]:
    """None, then each change of one value to another option, then each of two."""
    choices = [(word, option) for word in first for option in _options(word) if option != first[word]]
    for count in range(CHANGES + 1):
        yield from map(dict, itertools.combinations(choices, count))


def _options(word: str) -> list[Any]:
    """The values that may stand for a wider block's; how precise and what kind of numbers is not for us to change."""
    if word in ("datatype", "bit_width"):
        return []
    entry = load_resource("schemas", "layered.schema.json")["definitions"]["parameters"]["properties"][word]
    options: list[Any] = entry.get("enum", [True, False])
    return options


def _blocks(level: Mapping[str, Any]) -> tuple[Members, dict[str, Members]]:
    """The overall block, and the blocks of tensor roles, as far as they are there."""
    overall, tensors = (found if isinstance(found := level.get(key), dict) else {} for key in (OVERALL, TENSOR))
    return overall, {role: block for role, block in tensors.items() if isinstance(block, dict)}
