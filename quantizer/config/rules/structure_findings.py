"""Explain where a file differs from its schema: what is wrong, and what to write instead, the
likeliest first.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from quantizer.config.algorithms import SWITCHES, entry_kinds, settings_of
from quantizer.config.diagnostics import Diagnostic, Diagnostics, Edit, Fix, related_to
from quantizer.config.document.document import Document, TextSpan, pointer_to, value_at
from quantizer.config.document.fixes import HELP_FOR_MISSING, completions, missing_keys
from quantizer.config.forms.aliases import (
    REPLACED_OBSERVERS,
    instead_of_observer,
    other_spelling,
)
from quantizer.config.forms.form import HIERARCHICAL_KEYS, Form, block_of, form_of
from quantizer.config.json_types import JsonMapping, JsonObject, JsonPath
from quantizer.config.wording import closest_word, listed, misspelt, quoted
from quantizer.plugins import if_command, left_out

if TYPE_CHECKING:
    from jsonschema.exceptions import ValidationError

TYPE_WORDS = {
    "boolean": "true or false",
    "integer": "a whole number",
    "number": "a number",
    "string": "a string",
    "null": "null",
    "array": "a list [ … ]",
    "object": "an object { … }",
}
_BOOLEANS = {
    **dict.fromkeys(("true", "yes", "on", "1"), "true"),
    **dict.fromkeys(("false", "no", "off", "0"), "false"),
}

_BOUNDS = {
    "exclusiveMinimum": "more than",
    "minimum": "at least",
    "exclusiveMaximum": "less than",
    "maximum": "at most",
}

_COUNTERPARTS: Mapping[Form, Mapping[str, str]] = {
    "layered": {"algo_config": "algorithms", "pre_quant_opt_config": "algorithms"},
    "hierarchical": {"algorithms": "algo_config"},
}
"""Keys of the other form that mean something in this one, and its key."""

_BLOCKS: Mapping[Form, Mapping[str, str]] = {
    "layered": {"the top level": "", "overall_quantize_config": "parameters"},
    "hierarchical": {
        "the top level": "",
        "global_quant_config or a layer's configuration": "level",
        "a tensor's specification, such as weight": "spec",
    },
}
"""The blocks whose keys have values of their own, as messages call them, and their names in the
schema.
"""

_ENTRIES = {
    "tensor_quantize_config": "tensor_quantize_config",
    "an entry of layer_quantize_config": "layer_entry",
}
"""The other blocks of the layered form."""

_SYNONYMS = {
    **dict.fromkeys(("minmax", "absmax", "minmaxobserver"), "maxmin"),
    **dict.fromkeys(("kl", "kld", "kldivergence", "calibrateentropy"), "entropy"),
    **dict.fromkeys(("l2", "mseobserver"), "mse"),
    **dict.fromkeys(("bankersrounding", "nearesteven", "roundhalftoeven"), "half_even"),
    **dict.fromkeys(("powerof2", "pot", "pow2"), "poweroftwo"),
}
"""Words of other tools, without case and punctuation, for options of keys."""

_CODES = {"enum": "QZ101", "type": "QZ103"}
"""The codes of keywords; the other keywords have QZ104."""


def bounds(schema: JsonMapping) -> list[str]:
    """Return the range of a number, or how many items a list has, in words.

    >>> bounds({"exclusiveMinimum": 0, "maximum": 1})
    ['more than 0', 'at most 1']
    >>> bounds({"minItems": 2, "maxItems": 2})
    ['2 items']
    """
    if "maxItems" in schema:
        return [f"{schema['maxItems']} items"]
    return [f"{word} {schema[key]}" for key, word in _BOUNDS.items() if key in schema]


def help_for_value(key: str, value: Any, form: Form) -> str:
    """Return which key a wrong value of `key` belongs to, or where the right ones are
    listed.
    """
    switch = _switch(key, value)
    if switch:
        # The layered form has the switch, the other form may list it
        if form == "layered":
            return f'it is the switch "{switch}"'
        for name, setting in SWITCHES.items():
            if setting == switch:
                return f'write "{name}", the switch {switch} of the layered form'
        return f'it is the switch "{switch}" of the layered form'
    owner = _owner(key, value, form)
    if owner:
        return f'{quoted(value)} is a value of "{owner}"'
    if any(key in keys for keys in _keys_by_block(form).values()):
        return f"`quantizer explain {key}` says what it may be"
    return "`quantizer schema` prints all keys"


def _switch(key: str, value: Any) -> str | None:
    """Return our switch, if an algorithm's name is a word of other tools for one: that of a
    pass, or what the schema calls the plug-in of the switch.
    """
    if key != "name" or not isinstance(value, str):
        return None
    switches = {
        entry["plugin"]: name
        for name, entry in block_of("layered")["properties"].items()
        if "plugin" in entry
    }
    return (SWITCHES | switches).get(value)


def value_fixes(document: Document, path: JsonPath, schema: JsonMapping) -> Iterator[Fix]:
    """Yield replacements of the value at `path`: its meaning in another spelling, then
    examples.

    `schema` is the entry of the value in the schema.
    """
    key = last_key(path)
    pointer = pointer_to(*path)
    value = value_at(document.value, path)
    span = document.values[pointer]
    uncovers = pointer if isinstance(value, dict) else None
    for text, edits in _literals(value, span, schema):
        yield Fix(f"write {text}", edits, uncovers=uncovers)
    if isinstance(value, str):
        words = [word for word in schema.get("enum", ()) if isinstance(word, str)]
        if key == "observer_cls" and value in REPLACED_OBSERVERS:
            observer, scale_type = REPLACED_OBSERVERS[value]
            edits = (Edit(*span, json.dumps(observer)),)
            yield Fix(instead_of_observer(value), edits, not scale_type)
            return
        synonym = _SYNONYMS.get("".join(filter(str.isalnum, value.lower())))
        meant = misspelt(value, words) or (synonym if synonym in words else None)
        for word in _distinct(meant, closest_word(value, words)):
            edits = (Edit(*span, json.dumps(word)),)
            yield Fix(f'did you mean "{word}"?', edits, word == meant)
    if _switch(key, value):
        return
    owner = _owner(key, value, form_of(document.value))
    reason = f'{quoted(value)} is a value of "{owner}"; ' if owner else ""
    label = f'"{key}": ' if path[-1:] == (key,) else ""
    examples = (schema.get("default"), *schema.get("examples", ()), *schema.get("enum", ()))
    for example in examples:
        if example not in (None, {}, []):
            text = f"{reason}for example {label}{quoted(example)}"
            yield Fix(text, (Edit(*span, json.dumps(example)),), is_known=False)


def last_key(path: JsonPath) -> str:
    """Return the last key of a path, which the value or the list that it is in belongs to.

    >>> last_key(("exclude", 1))
    'exclude'
    """
    return next((part for part in reversed(path) if isinstance(part, str)), "")


def help_for_key(key: str, known: Collection[str], present: Collection[str], form: Form) -> str:
    """Return the block where a key that is not known here belongs, or the present key that it
    repeats, or all known keys.
    """
    if key in _COUNTERPARTS[form]:
        return f'in this form it is "{_COUNTERPARTS[form][key]}"'
    homes = [block for block, keys in _keys_by_block(form).items() if key in keys]
    if homes:
        return f'"{key}" belongs in {" or ".join(homes)}'
    near = closest_word(key, (name for name in known if name in present))
    if near:
        return f'"{near}" is here already: remove one of the two'
    names = listed(name for name in known if not name.startswith("$"))
    return f"known keys here: {names}"


def key_fixes(document: Document, path: JsonPath, known: Collection[str]) -> Iterator[Fix]:
    """Yield the known key that the one at `path` is, misspelt or in the other form's words."""
    key = str(path[-1])
    form = form_of(document.value)
    span = document.keys[pointer_to(*path)]
    siblings = value_at(document.value, path[:-1])
    free = [word for word in known if word not in siblings]
    counterpart = _COUNTERPARTS[form].get(key)
    if counterpart not in free:
        counterpart = None
    is_elsewhere = any(key in keys for keys in _keys_by_block(form).values())
    if is_elsewhere and not counterpart:
        return
    meant = counterpart or misspelt(key, free)
    for word in _distinct(meant, closest_word(key, free)):
        text = f'in this form it is "{word}"' if counterpart else f'did you mean "{word}"?'
        uncovers = pointer_to(*path[:-1], word) if word == meant else None
        yield Fix(text, (Edit(*span, json.dumps(word)),), word == meant, uncovers)


def _distinct(*words: str | None) -> list[str]:
    return list(dict.fromkeys(word for word in words if word))


def _literals(
    value: Any, span: TextSpan, schema: JsonMapping
) -> Iterator[tuple[str, tuple[Edit, ...]]]:
    """Yield the literal of the wanted type that a value of another type means: the form to
    show, and the form to write.
    """
    types = schema.get("type", ())
    wanted = {types} if isinstance(types, str) else {*types}
    start, end = span
    text = ""
    if isinstance(value, str):
        text = value.strip().lower()
    elif isinstance(value, int):
        text = json.dumps(value)
    if any(option is True for option in schema.get("enum", ())):
        wanted.add("boolean")
    if "boolean" in wanted and text in _BOOLEANS:
        yield _BOOLEANS[text], (Edit(start, end, _BOOLEANS[text]),)
    if wanted & {"integer", "number"} and isinstance(value, str) and _is_number(text):
        yield text, (Edit(start, end, text),)
    if "array" in wanted and isinstance(value, (str, dict)):
        shown = f"[{quoted(value)}]" if isinstance(value, str) else "[ … ] around it"
        yield shown, (Edit(start, start, "["), Edit(end, end, "]"))


def _is_number(text: str) -> bool:
    try:
        return type(json.loads(text, parse_constant=str)) in (int, float)
    except ValueError:
        return False


def _owner(key: str, value: Any, form: Form) -> str | None:
    """Return the other key that a word is an option of."""
    owner = _keys_by_option(form).get(value) if isinstance(value, str) else None
    return owner if owner != key else None


@cache
def _keys_by_option(form: Form) -> Mapping[str, str]:
    """Return each option word, and the key that it is an option of."""
    owners: dict[str, str] = {}
    for block in _BLOCKS[form].values():
        for key, entry in block_of(form, block)["properties"].items():
            for word in entry.get("enum", ()):
                if isinstance(word, str):
                    owners.setdefault(word, key)
    if form == "layered":
        roles = block_of("layered", "quantizable_data_type")["items"]["enum"]
        owners |= dict.fromkeys(roles, "quantizable_data_type")
    return owners


def _keys_by_block(form: Form) -> Mapping[str, Collection[str]]:
    """Return each block of the form and its keys; those of the other form are named as such."""
    blocks = dict(_BLOCKS[form])
    other_form: Form = "layered"
    keys_of_other: Collection[str] = block_of("layered")["properties"].keys() - {
        "target_device",
        "exclude",
    }
    if form == "layered":
        blocks |= _ENTRIES
        other_form = "hierarchical"
        keys_of_other = HIERARCHICAL_KEYS
    homes: dict[str, Collection[str]] = {}
    for home, block in blocks.items():
        homes[home] = block_of(form, block)["properties"]
    for name, kind in entry_kinds(form).items():
        homes[f"the algorithm {name}"] = settings_of(kind)
    homes[f"the {other_form} form, and a file has one form"] = keys_of_other
    return homes


def explained(document: Document, error: ValidationError) -> Diagnostics:
    """Yield the findings that an error of the schema stands for."""
    schema = error.schema if isinstance(error.schema, dict) else {}
    path = tuple(error.absolute_path)
    if "code" in schema:
        yield Diagnostic(
            schema["code"],
            schema["errorMessage"],
            document.place(*path),
            help=schema.get("help") or _selector_help(error.instance),
        )
    elif error.validator == "additionalProperties":
        for key in error.instance if isinstance(error.instance, dict) else ():
            if key not in schema["properties"] and not key.startswith("//"):
                yield _unknown_key(document, (*path, key), schema)
    elif error.validator == "required":
        yield from _missing(document, path, schema)
    elif error.validator == "uniqueItems":
        yield _repeated_item(document, path, error.instance, schema)
    else:
        yield _wrong_value(document, error, schema)


def _wrong_value(document: Document, error: ValidationError, schema: JsonObject) -> Diagnostic:
    """Return the finding on a value of the wrong type or out of range."""
    path = tuple(error.absolute_path)
    key = last_key(path)
    keyword = str(error.validator)
    value = error.instance
    remark = None
    if keyword == "enum":
        message = f"{quoted(value)} is not a {schema.get('title', key)}"
        if left_out():
            message += f", unless the plug-in {left_out()} adds it: validate loads none"
        words = listed(word for word in schema["enum"] if word is not None)
        remark = f"one of: {words}"
    elif keyword == "type":
        types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        name = f'"{key}"' if path[-1:] == (key,) else f'an item of "{key}"'
        wanted = " or ".join(TYPE_WORDS[word] for word in types)
        message = f"{name} is {wanted}, not {_kind(value)}"
    else:
        message = f"{quoted(value)} is out of range for {key}"
        is_empty = keyword in ("minLength", "minItems") and "maxItems" not in schema
        remark = "not empty" if is_empty else ", ".join(bounds(schema))
    code = _CODES.get(keyword, "QZ104")
    place = document.place(*path)
    if "help" in schema:
        return Diagnostic(code, message, place, remark=remark, help=schema["help"])
    fixes = value_fixes(document, path, schema)
    remedy = help_for_value(key, value, form_of(document.value))
    return Diagnostic(code, message, place, remark=remark, help=remedy, fixes=fixes)


def _repeated_item(
    document: Document, path: JsonPath, item: Any, schema: JsonObject
) -> Diagnostic:
    *list_path, index = path
    pointer = pointer_to(*path)
    _, previous_end = document.values[pointer_to(*list_path, int(index) - 1)]
    _, end = document.values[pointer]
    remedy = f"name each {schema['items']['title']} once"
    fixes = (Fix(remedy, (Edit(previous_end, end, ""),)),)
    return Diagnostic(
        "QZ107",
        f"{quoted(item)} is listed twice",
        document.place(*path),
        help=remedy,
        fixes=fixes,
    )


def _unknown_key(document: Document, path: JsonPath, schema: JsonObject) -> Diagnostic:
    *block_path, key = path
    key = str(key)
    form = form_of(document.value)
    siblings = document.at(*block_path)
    place = document.place(*path, key=True)
    word = other_spelling(key, block_path) if form == "hierarchical" else key
    if word != key and word in siblings:
        first = document.place(*block_path, word, key=True)
        return Diagnostic(
            "QZ102",
            f"{quoted(key)} is another spelling of {quoted(word)}, which is here, too",
            place,
            help="remove one of the two",
            related=related_to(first, "the same key"),
        )
    # Keys with a code are accepted and do nothing, so they are not offered
    known = [name for name, entry in schema["properties"].items() if "code" not in entry]
    fixes = key_fixes(document, path, known)
    return Diagnostic(
        "QZ102",
        f"unknown key {quoted(key)}",
        place,
        help=help_for_key(key, known, siblings, form),
        fixes=fixes,
    )


def _missing(document: Document, path: JsonPath, schema: JsonObject) -> Diagnostics:
    missing = missing_keys(document.at(*path), schema)
    if missing:
        count = "a key is" if len(missing) == 1 else f"{len(missing)} keys are"
        fixes = completions(document, path, missing)
        yield Diagnostic(
            "QZ105",
            f"{count} missing here: {listed(missing)}",
            document.place(*path, key=True),
            help=HELP_FOR_MISSING,
            fixes=fixes,
        )
    elif schema["required"] == ["name"]:
        # The name decides which other keys are known, so no other check reports this one
        key = closest_word("name", document.at(*path)) or ""
        fixes = key_fixes(document, (*path, key), ["name"])
        yield Diagnostic(
            "QZ102",
            f"unknown key {quoted(key)}",
            document.place(*path, key, key=True),
            help='did you mean "name"?',
            fixes=fixes,
        )


def _kind(value: Any) -> str:
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "a list"
    return f"the string {quoted(value)}" if isinstance(value, str) else quoted(value)


def _selector_help(entry: Any) -> str:
    if isinstance(entry, str):
        return 'write "layer_name": null, or "layer_type": null to select by name'
    where = if_command("inspect", " that `quantizer inspect` prints")
    return f'write "layer_type": "torch.nn.Conv2d", or a "layer_name"{where}'
