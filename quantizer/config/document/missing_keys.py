"""The keys that a file lacks, and what to write for them, after the members that are there and
laid out like them.
"""

import itertools
import json
from collections import ChainMap
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from quantizer.config.algorithms import ALGORITHMS, entry_kinds
from quantizer.config.diagnostics import Edit, Fix
from quantizer.config.document.document import Document, pointer_to, value_at
from quantizer.config.forms.form import block_of, form_of
from quantizer.config.model import CAST_ONLY, ROLES
from quantizer.config.resources import load_resource
from quantizer.config.wording import closest, listed

OVERALL, TENSOR = "overall_quantize_config", "tensor_quantize_config"
HELP_FOR_MISSING = (
    "no default fits the rest of the file; `quantizer explain KEY` lists the values of a key"
)

_ALGORITHMS = {
    "algo_config": "awq",
    "pre_quant_opt_config": "smoothquant",
    "algorithms": "gptq",
}
"""The keys that list algorithms, and the name to offer first where an entry has none."""

_DEFAULTS_TURN, _ENTRIES_TURN = 1, 2
"""What is missing is looked up when the rest is right, and for an entry when the top has it."""

CHANGES = 2
"""At most so many values differ from what a wider block says, to fit what the file states."""

Path = tuple[str | int, ...]
Members = dict[str, Any]


def missing_keys(value: Mapping[str, Any], path: Path) -> tuple[str, ...]:
    """The required keys that the object at `path` lacks. A misspelt key is there: it is
    reported as unknown.
    """
    here, (required, known) = value_at(value, path), _keys(value, path)
    missing = [key for key in required if key not in here]
    misspelt = {
        closest(key, missing) for key in here if key not in known and not key.startswith("//")
    }
    return tuple(key for key in missing if key not in misspelt)


def completions(document: Document, path: Path) -> Iterator[Fix]:
    """What to write for the keys that the object at `path` lacks, the likeliest first."""
    missing = missing_keys(document.value, path)
    if form_of(document.value) == "hierarchical" or path[:1] == ("algorithms",):
        for members, is_known in _examples(document.value, path, missing[0]):
            known = entry_kinds(form_of(document.value))
            others = f"; the algorithms are {listed(known)}" if "name" in members else ""
            text = f"{'paste' if is_known else 'for example'} {paste(members)}{others}"
            yield Fix(
                text, *_insertions(document, path, members), is_known, turn=_DEFAULTS_TURN
            )
        return
    inside = path[-1:] == (OVERALL,)
    level = path[:-1] if inside else path
    for members in _members(document.value, level, missing, inside):
        aside = (
            f", and in {TENSOR} {paste(members[TENSOR])}"
            if inside and TENSOR in members
            else ""
        )
        text = paste(members[OVERALL] if inside else members) + aside
        turn = _ENTRIES_TURN if level else _DEFAULTS_TURN
        yield Fix(f"paste {text}", *_insertions(document, level, members), turn=turn)


def paste(members: Mapping[str, Any]) -> str:
    """Members as they are written inside an object.

    >>> paste({"signed": True, "bit_width": 8})
    '"signed": true, "bit_width": 8'
    """
    return json.dumps(members, ensure_ascii=False)[1:-1]


def _keys(value: Mapping[str, Any], path: Path) -> tuple[Sequence[str], Collection[str]]:
    """The keys that an object has to have, and all that it may have."""
    schema = block_of(form_of(value))
    blocks = schema["definitions"]
    if path and path[0] in _ALGORITHMS:
        block = blocks["scaling_layer" if "scaling_layers" in path else "algorithm"]
        names = ("scaling_layer", *entry_kinds(form_of(value)))
        return block["required"], {key for name in names for key in blocks[name]["properties"]}
    if path[-1:] == (OVERALL,):
        return blocks["complete_parameters"]["allOf"][1]["then"]["required"], blocks[
            "parameters"
        ]["properties"]
    block = schema if not path else blocks.get("layer_entry") or blocks["spec"]
    return block["required"], block["properties"]


def _members(
    value: Mapping[str, Any], level: Path, missing: Sequence[str], inside: bool
) -> Iterator[Members]:
    """The members to add to the top or to a layer entry of the layered form."""
    here = value_at(value, level)
    settings = {
        key: value.get(key, _preset(value)[key])
        for key in missing
        if not inside and key != OVERALL
    }
    if not inside and OVERALL not in missing:
        yield settings
    else:
        words = missing if inside else _keys(value, (OVERALL,))[0]
        yield from (settings | members for members in _parameters(value, here, words))


def _preset(value: Mapping[str, Any]) -> Mapping[str, Any]:
    """The ready config of the device that the file names."""
    name = "dpu.json" if str(value.get("target_device")).upper() == "DPU" else "default.json"
    found: Mapping[str, Any] = load_resource("configs", name)
    return found


def _parameters(
    value: Mapping[str, Any], level: Mapping[str, Any], missing: Sequence[str]
) -> Iterator[Members]:
    """What to add to `level`, the file or one of its layer entries, so that its overall block
    states what is missing.

    First what holds there anyway, of each tensor role by itself: for a layer entry what the top
    of the file says, for the top what the ready config does. What follows differs from it in
    one value, then in two.
    """
    blocks = [
        _blocks(source)
        for source in ([_preset(value)] if level is value else [value, _preset(value)])
    ]
    own, own_tensors = _blocks(level)
    wide = ChainMap({}, *(overall for overall, _ in blocks), {"datatype": "int"})
    roles = level.get("quantizable_data_type", value.get("quantizable_data_type"))
    by_role = {
        role: ChainMap(
            {},
            *(part for overall, tensors in blocks for part in (tensors.get(role, {}), overall)),
            wide,
        )
        for role in ROLES
        if not isinstance(roles, list) or role in roles
    }
    first = _overall(missing, own, wide, [found["datatype"] for found in by_role.values()])
    if own.get("symmetry") is False and not any(
        block.get("symmetry") for block in own_tensors.values()
    ):
        # Asymmetric quantization reads neither.
        first |= dict.fromkeys({"signed", "narrow_range"} & first.keys(), False)
    aside = {
        role: _aside(first, found, wide, own_tensors.get(role, {}))
        for role, found in by_role.items()
    }
    tensors = {role: block for role, block in aside.items() if block}
    for changes in _changes(first):
        yield {OVERALL: first | changes, **({TENSOR: tensors} if tensors else {})}


def _overall(
    missing: Sequence[str], own: Members, wide: Mapping[str, Any], datatypes: Sequence[Any]
) -> Members:
    """Under a floating-point datatype of the top an empty block has that, and one about
    integers has to say so.
    """
    if _is_cast(wide["datatype"]) and not own:
        return {"datatype": wide["datatype"]}
    is_said = "datatype" in own or not any(map(_is_cast, datatypes))
    return ({} if is_said else {"datatype": "int"}) | {word: wide[word] for word in missing}


def _is_cast(datatype: Any) -> bool:
    """Whether a datatype, which may be any value of JSON, is a format without a scale."""
    return isinstance(datatype, str) and datatype in CAST_ONLY


def _aside(
    first: Members, found: Mapping[str, Any], wide: Mapping[str, Any], own: Members
) -> Members:
    """What a role's block has to state, so that the overall values `first` do not replace what
    holds for the role.
    """
    read = first.keys() if found["datatype"] == "int" else first.keys() & {"datatype"}
    return {
        word: found[word]
        for word in first
        if word in read - own.keys() and found[word] != wide[word]
    }


def _changes(first: Members) -> Iterator[Members]:
    """None, then each change of one value to another option, then each of two."""
    choices = [
        (word, option) for word in first for option in _options(word) if option != first[word]
    ]
    for count in range(CHANGES + 1):
        yield from map(dict, itertools.combinations(choices, count))


def _options(word: str) -> list[Any]:
    """The values that may stand for a wider block's; how precise and what kind of numbers is
    not for us to change.
    """
    if word in ("datatype", "bit_width"):
        return []
    options: list[Any] = block_of("layered", "parameters")["properties"][word].get(
        "enum", [True, False]
    )
    return options


def _blocks(level: Mapping[str, Any]) -> tuple[Members, dict[str, Members]]:
    """The overall block, and the blocks of tensor roles, as far as they are there."""
    overall, tensors = (
        found if isinstance(found := level.get(key), dict) else {} for key in (OVERALL, TENSOR)
    )
    return overall, {role: block for role, block in tensors.items() if isinstance(block, dict)}


def _examples(value: Mapping[str, Any], path: Path, key: str) -> Iterator[tuple[Members, bool]]:
    """Values for a key of the hierarchical form or of an algorithm; the one that all wider
    levels state is known.
    """
    if key == "name":
        yield from (
            ({key: name}, False)
            for name in dict.fromkeys((_ALGORITHMS[str(path[0])], *ALGORITHMS))
        )
    elif key == "dtype":
        wider = _wider_dtypes(value, path)
        yield from (({key: dtype}, len(wider) == 1) for dtype in wider)
        options = block_of("hierarchical", "spec")["properties"][key]["enum"]
        yield from (({key: dtype}, False) for dtype in ("int8", *options))
    else:
        yield (
            {key: ["self_attn.o_proj"] if key == "layers" else {"weight": {"dtype": "int8"}}},
            False,
        )


def _wider_dtypes(value: Mapping[str, Any], path: Path) -> tuple[str, ...]:
    """The dtypes that the levels above a spec state for the same tensor: the global one, and
    for a name all types.
    """
    level, tensor = path[0], path[-1]
    types = value.get("layer_type_quant_config") if level == "layer_quant_config" else {}
    above = [value.get("global_quant_config") if level != "global_quant_config" else {}]
    above += types.values() if isinstance(types, dict) else ()
    specs = [block.get(tensor) for block in above if isinstance(block, dict)]
    dtypes = [spec.get("dtype") for spec in specs if isinstance(spec, dict)]
    return tuple(dict.fromkeys(dtype for dtype in dtypes if isinstance(dtype, str)))


def _insertions(
    document: Document, path: Path, members: Mapping[str, Any]
) -> tuple[tuple[Edit, ...], tuple[str, ...]]:
    """The edits that add members to the object at `path` and to blocks in it, and the pointers
    of what is new.
    """
    here = value_at(document.value, path)
    new = {key: member for key, member in members.items() if key not in here}
    edits = [_insertion(document, path, new)] if new else []
    touched = [pointer_to(*path, key) for key in new]
    for key, member in members.items():
        if key not in new and isinstance(here[key], dict):
            inner, pointers = _insertions(document, (*path, key), member)
            edits, touched = [*edits, *inner], [*touched, *pointers]
    return tuple(edits), tuple(touched)


def _insertion(document: Document, path: Path, members: Mapping[str, Any]) -> Edit:
    """New members after the last one, laid out as it is."""
    text, pointer = document.source.text, pointer_to(*path)
    newline = "\r\n" if "\r\n" in text else "\n"
    start, _ = document.values[pointer]
    inside = [key for key in document.keys if key.rpartition("/")[0] == pointer]
    if not inside:
        indent = newline + _indent(text, start) + "  "
        added = (
            indent
            + ("," + indent).join(_written(members, indent))
            + newline
            + _indent(text, start)
        )
        return Edit(start + 1, start + 1, added)
    last = max(inside, key=lambda key: document.values[key])
    key_start, end = document.keys[last][0], document.values[last][1]
    own_line = not text[text.rfind("\n", 0, key_start) + 1 : key_start].strip()
    indent = newline + _indent(text, key_start) if own_line else ""
    return Edit(
        end, end, "".join(f",{indent or ' '}{member}" for member in _written(members, indent))
    )


def _written(members: Mapping[str, Any], indent: str) -> list[str]:
    return [f"{json.dumps(key)}: {_dumped(value, indent)}" for key, value in members.items()]


def _dumped(value: Any, indent: str) -> str:
    if not isinstance(value, dict) or not indent:
        return json.dumps(value, ensure_ascii=False)
    members = [
        f"{indent}  {json.dumps(key)}: {json.dumps(item)}" for key, item in value.items()
    ]
    return "{" + ",".join(members) + indent + "}"


def _indent(text: str, at: int) -> str:
    line = text[text.rfind("\n", 0, at) + 1 : at]
    return line[: len(line) - len(line.lstrip())]
