"""Find what to write for the keys that a file lacks. Try proposed fixes on a copy of the file:
a fix is offered only if it leaves fewer errors.
"""

import json
import re
from collections import ChainMap
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from quantizer.config.algorithms import ALGORITHMS, entry_kinds, finds_codes
from quantizer.config.diagnostics import ConfigError, Diagnostic, Edit, Fix, Place, is_syntax
from quantizer.config.document.document import Document, Text, value_at
from quantizer.config.document.edited import insertion
from quantizer.config.forms.form import ALGORITHM_LISTS, block_of, form_of
from quantizer.config.json_types import JsonMapping, JsonObject, JsonPath
from quantizer.config.model import CAST_ONLY, ROLES, Role
from quantizer.config.resources import load_resource
from quantizer.config.wording import closest_word, listed

FileCheck = Callable[[Text], Sequence[Diagnostic]]
"""A function from a file's text to all findings on it."""

MAX_TRIALS = 200
MAX_TRIED_CHARACTERS = 1_000_000
"""All trials of one file check at most so many characters."""

HELP_FOR_MISSING = (
    "no default fits the rest of the file; `quantizer explain KEY` lists the values of a key"
)

_MARK = re.compile(r'^(?P<indent>[ \t]*)|"(?:[^"\\\n]|\\.)*"|[{}\[\]]', re.MULTILINE)
"""The indentation of a line, a string, or a bracket."""
_OVERALL = "overall_quantize_config"
_TENSOR = "tensor_quantize_config"

_DEFAULTS_TURN = 1
_ENTRIES_TURN = 2
"""Missing keys are filled in after other fixes, and those of an entry after those of the
top.
"""


def with_sound_fixes(
    source: Text, findings: Sequence[Diagnostic], check: FileCheck
) -> tuple[Diagnostic, ...]:
    """Return the findings, each with its known fix if that leaves fewer errors in the file.

    The help of a finding offers this fix. Without one it offers the first example that leaves
    fewer errors.
    """
    max_trials = min(MAX_TRIALS, MAX_TRIED_CHARACTERS // (len(source.text) + 1))
    candidates: list[tuple[int, Fix]] = []
    for index, finding in enumerate(findings):
        # Those of syntax need no trial: JSON has one reading
        fixes = [] if is_syntax(finding) else list(finding.fixes)
        first_known = next((fix for fix in fixes if fix.is_known), None)
        tried = [fix for fix in fixes if fix is first_known or not fix.is_known]
        candidates += [(index, fix) for fix in tried]
    # Examples come last: `--fix` does not write them, so the other fixes must do without them
    candidates.sort(key=lambda row: (not row[1].is_known, row[1].turn, row[1].edits[0].start))
    checked = [replace(finding, fixes=()) for finding in findings]
    helped: set[int] = set()
    accepted: list[Fix] = []
    errors = _count_errors(findings)
    for index, fix in candidates[:max_trials]:
        if index in helped:
            continue
        tried = [*accepted, fix]
        try:
            findings_left = check(apply_fixes(source, tried))
        except ConfigError:
            continue
        errors_left = _count_errors(findings_left, tried)
        if errors_left >= errors or _has_error_at(findings[index].place, findings_left):
            continue
        helped.add(index)
        checked[index] = replace(checked[index], help=fix.help)
        if fix.is_known:
            checked[index] = replace(checked[index], fixes=(fix,))
            accepted = tried
            errors = errors_left
    return tuple(checked)


def unclosed_bracket(source: Text, start: int) -> tuple[int, str]:
    """Return where the bracket begins that is not closed, and a remedy.

    The first line that is indented no more than the line of the innermost bracket shows it.

    Args:
        source: the file.
        start: of the bracket that is open at the end, which it is if no line shows it.

    >>> unclosed_bracket(Text("a.json", '{\\n  "a": {\\n    "b": 1,\\n  "c": 2\\n}'), 0)
    (9, 'as lines are indented, it is missing before line 4')
    """
    brackets: list[tuple[int, int]] = []
    indent = line_begin = 0
    for mark in _MARK.finditer(source.text):
        begin = mark.start()
        if mark["indent"] is not None:
            indent = len(mark["indent"])
            line_begin = mark.end()
        elif mark[0] in "}]":
            del brackets[-1:]
        elif begin == line_begin and indent and brackets and indent <= brackets[-1][1]:
            line = source.place((begin, begin)).line
            return brackets[-1][0], f"as lines are indented, it is missing before line {line}"
        elif mark[0] in "{[":
            brackets.append((begin, indent))
    return start, "is the file cut off?"


def apply_fixes(source: Text, fixes: Iterable[Fix]) -> Text:
    """Return the text with all the fixes in it; nothing else of it changes."""
    text = source.text
    edits = [edit for fix in fixes for edit in fix.edits]
    edits.sort(key=lambda edit: (edit.start, edit.end))
    # From the end on, so that places before it stay
    for edit in reversed(edits):
        text = text[: edit.start] + edit.text + text[edit.end :]
    return replace(source, text=text)


def _has_error_at(place: Place | None, findings: Sequence[Diagnostic]) -> bool:
    """Return whether the value that a fix writes breaks another rule."""
    wrong: set[str] = set()
    for finding in findings:
        if finding.place and finding.severity == "error" and not is_syntax(finding):
            wrong.add(finding.place.pointer)
    return place is not None and place.pointer in wrong


def _count_errors(
    findings: Iterable[Diagnostic], applied: Iterable[Fix] = ()
) -> tuple[int, int]:
    """Return the numbers of errors of syntax and of others that the file had before the fixes,
    as far as they are left, or has because of them.

    An error of syntax may hide others, so it counts first.
    """
    members = {fix.uncovers for fix in applied if fix.uncovers is not None}
    errors = [finding for finding in findings if finding.severity == "error"]
    syntax = sum(map(is_syntax, errors))
    return syntax, sum(not _is_uncovered(finding, members) for finding in errors)


def _is_uncovered(finding: Diagnostic, members: Collection[str]) -> bool:
    """Return whether an error is inside a member that a fix made readable, or is its value."""
    places = [finding.place, *(place for place, _ in finding.related)]
    pointers = [place.pointer for place in places if place]
    if finding.code.startswith("QZ10") and pointers and pointers[0] in members:
        return True
    inside = tuple(f"{member}/" for member in members)
    return any(pointer.startswith(inside) for pointer in pointers)


def missing_keys(members: JsonMapping, schema: JsonMapping) -> list[str]:
    """Return the keys that an object lacks and its block of the schema requires.

    A misspelt key counts as present: it is reported as unknown.
    """
    missing = [key for key in schema["required"] if key not in members]
    # Conditions that require keys of a layer entry or of an overall block do not list them all
    known = schema.get("properties")
    if known is None:
        name = "layer_entry" if _OVERALL in schema["required"] else "parameters"
        known = block_of("layered", name)["properties"]
    unknown = [key for key in members if key not in known and not key.startswith("//")]
    misspelt = {closest_word(key, missing) for key in unknown}
    return [key for key in missing if key not in misspelt]


def completions(document: Document, path: JsonPath, missing: Sequence[str]) -> Iterator[Fix]:
    """Yield what to write for the keys that the object at `path` lacks, the likeliest first."""
    form = form_of(document.value)
    if form == "layered" and path[:1] != ("algorithms",):
        yield _layered_completion(document, path, missing)
        return
    for members, is_known in _examples(document.value, path, missing[0]):
        verb = "paste" if is_known else "for example"
        text = f"{verb} {paste(members)}"
        if "name" in members:
            text += f"; the algorithms are {listed(entry_kinds(form))}"
        edits = _insertions(document, path, members)
        yield Fix(text, edits, is_known, turn=_DEFAULTS_TURN)


def paste(members: JsonMapping) -> str:
    """Return members as they are written inside an object.

    >>> paste({"signed": True, "bit_width": 8})
    '"signed": true, "bit_width": 8'
    """
    return json.dumps(members, ensure_ascii=False)[1:-1]


def _layered_completion(document: Document, path: JsonPath, missing: Sequence[str]) -> Fix:
    """Return what completes the top, a layer entry or an overall block of the layered form."""
    value = document.value
    is_overall = path[-1:] == (_OVERALL,)
    level_path = path[:-1] if is_overall else path
    level = value_at(value, level_path)
    members: JsonObject = {}
    if is_overall:
        members = _parameters(value, level, missing)
        text = paste(members[_OVERALL])
        if _TENSOR in members:
            text += f", and in {_TENSOR} {paste(members[_TENSOR])}"
    else:
        preset = _preset(value)
        for key in missing:
            if key != _OVERALL:
                members[key] = value.get(key, preset[key])
        if _OVERALL in missing:
            _, integers = block_of("layered", "complete_parameters")["allOf"]
            members |= _parameters(value, level, integers["then"]["required"])
        text = paste(members)
    edits = _insertions(document, level_path, members)
    turn = _ENTRIES_TURN if level_path else _DEFAULTS_TURN
    return Fix(f"paste {text}", edits, turn=turn)


def _preset(value: JsonMapping) -> JsonMapping:
    """Return the ready config of the device that the file names."""
    is_dpu = str(value.get("target_device")).upper() == "DPU"
    name = "dpu.json" if is_dpu else "default.json"
    preset: JsonMapping = load_resource("configs", name)
    return preset


def _parameters(value: JsonMapping, level: JsonMapping, missing: Sequence[str]) -> JsonObject:
    """Return the keys to add to `level`, the file or one of its layer entries, so that its
    overall block is complete.

    The values are those in effect: a layer entry takes them from the top of the file, and the
    top from the preset. A tensor role with other values gets its own block.
    """
    wider = [_preset(value)] if level is value else [value, _preset(value)]
    sources = list(map(_blocks, wider))
    overalls = [overall for overall, _ in sources]
    wide = ChainMap({}, *overalls, {"datatype": "int"})
    by_role: dict[Role, JsonMapping] = {}
    roles = level.get("quantizable_data_type", value.get("quantizable_data_type"))
    for role in ROLES:
        if not isinstance(roles, list) or role in roles:
            parts: list[JsonObject] = []
            for overall, tensors in sources:
                parts += [tensors.get(role, {}), overall]
            by_role[role] = ChainMap({}, *parts, wide)

    stated, stated_tensors = _blocks(level)
    datatypes = [words["datatype"] for words in by_role.values()]
    added = _overall(missing, stated, wide, datatypes)
    tensors_are_symmetric = any(block.get("symmetry") for block in stated_tensors.values())
    if stated.get("symmetry") is False and not tensors_are_symmetric:
        # Asymmetric quantization reads neither
        added |= dict.fromkeys({"signed", "narrow_range"} & added.keys(), False)
    added_tensors: dict[str, JsonObject] = {}
    for role, words in by_role.items():
        stated_words = stated_tensors.get(role, {})
        block = _tensor_block(added, words, wide, stated_words)
        if block:
            added_tensors[role] = block
    if added_tensors:
        return {_OVERALL: added, _TENSOR: added_tensors}
    return {_OVERALL: added}


def _overall(
    missing: Sequence[str], stated: JsonObject, wide: JsonMapping, datatypes: Sequence[Any]
) -> JsonObject:
    """Return the members that complete an overall block.

    Under a floating-point datatype of the top an empty block repeats that datatype, and one
    with parameters of integers has to state "int".
    """
    if _is_cast(wide["datatype"]) and not stated:
        return {"datatype": wide["datatype"]}
    has_datatype = "datatype" in stated or not any(map(_is_cast, datatypes))
    members: JsonObject = {} if has_datatype else {"datatype": "int"}
    return members | {word: wide[word] for word in missing}


def _is_cast(datatype: Any) -> bool:
    """Return whether a datatype, which may be any JSON value, is a format without a scale."""
    return isinstance(datatype, str) and datatype in CAST_ONLY


def _tensor_block(
    overall: JsonObject, words: JsonMapping, wide: JsonMapping, stated: JsonObject
) -> JsonObject:
    """Return the keys that a role's block needs, so that the values of `overall` do not replace
    those in effect for the role.
    """
    read = overall if words["datatype"] == "int" else ["datatype"]
    unstated = [word for word in overall if word in read and word not in stated]
    return {word: words[word] for word in unstated if words[word] != wide[word]}


def _blocks(level: JsonMapping) -> tuple[JsonObject, dict[str, JsonObject]]:
    """Return the overall block, and the blocks of tensor roles, as far as they are there."""
    tensors = _object(level.get(_TENSOR))
    return _object(level.get(_OVERALL)), {role: _object(tensors[role]) for role in tensors}


def _object(value: Any) -> JsonObject:
    """Return a JSON value if it is an object, else an empty one."""
    return value if isinstance(value, dict) else {}


def _is_usual_in(listing: str, name: str) -> bool:
    """Return whether to offer an algorithm before others for this list of algorithms."""
    kind = ALGORITHMS[name]
    if listing in ALGORITHM_LISTS:
        return ALGORITHM_LISTS[int(finds_codes(kind))] == listing
    return kind.stage == "round"


def _examples(
    value: JsonMapping, path: JsonPath, key: str
) -> Iterator[tuple[JsonObject, bool]]:
    """Yield values for a key of the hierarchical form or of an algorithm, and whether each is
    known to be meant, as all wider levels state it.
    """
    if key == "name":
        for name in sorted(ALGORITHMS, key=lambda name: not _is_usual_in(str(path[0]), name)):
            yield {key: name}, False
    elif key == "dtype":
        wider = _wider_dtypes(value, path)
        for dtype in wider:
            yield {key: dtype}, len(wider) == 1
        for dtype in ("int8", *block_of("hierarchical", "spec")["properties"][key]["enum"]):
            yield {key: dtype}, False
    elif key == "layers":
        yield {key: ["self_attn.o_proj"]}, False
    else:
        yield {key: {"weight": {"dtype": "int8"}}}, False


def _wider_dtypes(value: JsonMapping, path: JsonPath) -> tuple[str, ...]:
    """Return the dtypes that wider levels state for the tensor at `path`: the global level,
    and for a name all types.
    """
    level, tensor = path[0], str(path[-1])
    wider: list[Any] = []
    if level != "global_quant_config":
        wider.append(value.get("global_quant_config"))
    if level == "layer_quant_config":
        wider += _object(value.get("layer_type_quant_config")).values()
    dtypes = [_object(_object(block).get(tensor)).get("dtype") for block in wider]
    return tuple(dict.fromkeys(dtype for dtype in dtypes if isinstance(dtype, str)))


def _insertions(document: Document, path: JsonPath, members: JsonMapping) -> tuple[Edit, ...]:
    """Return the edits that add members to the object at `path` and to blocks in it."""
    present = value_at(document.value, path)
    new = {key: member for key, member in members.items() if key not in present}
    edits = [insertion(document, path, new)] if new else []
    for key, member in members.items():
        if key not in new and isinstance(present[key], dict):
            edits += _insertions(document, (*path, key), member)
    return tuple(edits)
