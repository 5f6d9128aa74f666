"""Find what to write instead of a wrong key or value, the likeliest first, with the help of the
schema.
"""

import json
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from typing import Any

from quantizer.config.algorithms import SWITCHES, entry_kinds, settings_of
from quantizer.config.diagnostics import Edit, Fix
from quantizer.config.document.document import Document, pointer_to, value_at
from quantizer.config.forms.form import HIERARCHICAL_KEYS, Form, block_of, form_of
from quantizer.config.json_types import JsonMapping, JsonPath
from quantizer.config.wording import closest_word, listed, misspelt, quoted

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

_SWITCHES = {
    "equalization": "include_cle",
    "cle": "include_cle",
    "bias_correction": "include_bias_corr",
}
"""What other tools list among their algorithms."""


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
    """Return our switch, if an algorithm's name is a word of other tools for one."""
    return _SWITCHES.get(value) if key == "name" and isinstance(value, str) else None


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
    for text, edits in _literals(document, path, schema):
        yield Fix(f"write {text}", edits, uncovers=uncovers)
    if isinstance(value, str):
        words = [word for word in schema.get("enum", ()) if isinstance(word, str)]
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
    document: Document, path: JsonPath, schema: JsonMapping
) -> Iterator[tuple[str, tuple[Edit, ...]]]:
    """Yield the literal of the wanted type that a value of another type means: the form to
    show, and the form to write.
    """
    value = value_at(document.value, path)
    types = schema.get("type", ())
    wanted = {types} if isinstance(types, str) else {*types}
    start, end = document.values[pointer_to(*path)]
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
        "target_device"
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
