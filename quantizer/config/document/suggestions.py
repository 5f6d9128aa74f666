"""What to write instead of a wrong key or value, the likeliest first. Reads the schema; finds
no errors itself.
"""

import json
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from typing import Any

from quantizer.config.algorithm_settings import settings_of
from quantizer.config.algorithms import SWITCHES, entry_kinds
from quantizer.config.diagnostics import Edit, Fix
from quantizer.config.document.document import Document, pointer_to, value_at
from quantizer.config.forms.form import HIERARCHICAL_KEYS, Form, block_of, form_of
from quantizer.config.wording import closest, listed, misspelt, quoted

Path = tuple[str | int, ...]

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


def bounds(schema: Mapping[str, Any]) -> list[str]:
    """The range of a number in words.

    >>> bounds({"exclusiveMinimum": 0, "maximum": 1})
    ['more than 0', 'at most 1']
    """
    words = {
        "exclusiveMinimum": "more than",
        "minimum": "at least",
        "exclusiveMaximum": "less than",
    }
    return [
        f"{word} {schema[key]}"
        for key, word in {**words, "maximum": "at most"}.items()
        if key in schema
    ]


def help_for_value(key: str, value: Any, form: Form) -> str:
    """Whose word a wrong value of `key` is, or else where the right ones are listed."""
    if _is_switch(key, value):
        switch = _SWITCHES[value]
        listed_as = [
            name
            for name, kind in SWITCHES.items()
            if kind.switch == switch and form == "hierarchical"
        ]
        if listed_as:
            return f'write "{listed_as[0]}", the switch {switch} of the layered form'
        return f'it is the switch "{switch}"' + (
            " of the layered form" if form == "hierarchical" else ""
        )
    if owner := _owner(key, value, form):
        return f'{quoted(value)} is a value of "{owner}"'
    is_explained = any(key in keys for keys in _homes(form).values())
    return (
        f"`quantizer explain {key}` says what it may be"
        if is_explained
        else "`quantizer schema` prints all keys"
    )


def _is_switch(key: str, value: Any) -> bool:
    """Whether the name of an algorithm is a word of other tools for one of our switches."""
    return key == "name" and isinstance(value, str) and value in _SWITCHES


def value_fixes(document: Document, path: Path, schema: Mapping[str, Any]) -> Iterator[Fix]:
    """What to write for the value at `path`, whose entry in the schema is `schema`: what it
    means, then examples.
    """
    key = next((part for part in reversed(path) if isinstance(part, str)), "")
    pointer, value, form = (
        pointer_to(*path),
        value_at(document.value, path),
        form_of(document.value),
    )
    span = document.values[pointer]
    for text, edits in _literals(document, path, schema):
        yield Fix(
            f"write {text}",
            edits,
            (pointer,),
            uncovers=pointer if isinstance(value, dict) else None,
        )
    if isinstance(value, str):
        words = [word for word in schema.get("enum", ()) if isinstance(word, str)]
        meant = misspelt(value, words) or _synonym(value, words)
        for word in dict.fromkeys(filter(None, (meant, closest(value, words)))):
            yield Fix(
                f'did you mean "{word}"?',
                (Edit(*span, json.dumps(word)),),
                (pointer,),
                word == meant,
            )
    reason = (
        f'{quoted(value)} is a value of "{owner}"; '
        if (owner := _owner(key, value, form))
        else ""
    )
    if _is_switch(key, value):
        return
    for example in (
        schema.get("default"),
        *schema.get("examples", ()),
        *schema.get("enum", ()),
    ):
        if example not in (None, {}, []):
            text = quoted(example) if path[-1:] != (key,) else f'"{key}": {quoted(example)}'
            yield Fix(
                f"{reason}for example {text}",
                (Edit(*span, json.dumps(example)),),
                (pointer,),
                is_known=False,
            )


def help_for_key(key: str, known: Collection[str], here: Collection[str], form: Form) -> str:
    """The block where a key that is not known here belongs, or the key in `here` that it
    repeats, or all known keys.
    """
    if key in _COUNTERPARTS[form]:
        return f'in this form it is "{_COUNTERPARTS[form][key]}"'
    homes = [home for home, keys in _homes(form).items() if key in keys]
    if homes:
        return f'"{key}" belongs in {" or ".join(homes)}'
    if near := closest(key, (name for name in known if name in here)):
        return f'"{near}" is here already: remove one of the two'
    return f"known keys here: {listed(name for name in known if not name.startswith('$'))}"


def key_fixes(document: Document, path: Path, known: Collection[str]) -> Iterator[Fix]:
    """The known key that the one at `path` is, misspelt or in the other form's words."""
    key, form = str(path[-1]), form_of(document.value)
    span = document.keys[pointer_to(*path)]
    here = value_at(document.value, path[:-1])
    free = [word for word in known if word not in here]
    counterpart = next((word for word in free if word == _COUNTERPARTS[form].get(key)), None)
    if not counterpart and any(key in keys for keys in _homes(form).values()):
        return
    meant = counterpart or misspelt(key, free)
    for word in dict.fromkeys(filter(None, (meant, closest(key, free)))):
        pointer = pointer_to(*path[:-1], word)
        text = f'in this form it is "{word}"' if counterpart else f'did you mean "{word}"?'
        uncovers = pointer if word == meant else None
        yield Fix(text, (Edit(*span, json.dumps(word)),), (pointer,), word == meant, uncovers)


def _synonym(value: str, words: Collection[str]) -> str | None:
    """The option that other tools have this word for."""
    word = _SYNONYMS.get("".join(filter(str.isalnum, value.lower())))
    return word if word in words else None


def _literals(
    document: Document, path: Path, schema: Mapping[str, Any]
) -> Iterator[tuple[str, tuple[Edit, ...]]]:
    """The literal of the wanted type that a value of another type means, as it is shown and as
    it is written.
    """
    value, types = value_at(document.value, path), schema.get("type", ())
    wanted = {types} if isinstance(types, str) else {*types}
    start, end = document.values[pointer_to(*path)]
    text = (
        value.strip().lower()
        if isinstance(value, str)
        else json.dumps(value)
        if isinstance(value, int)
        else ""
    )
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
    """The other key that a word is an option of."""
    owner = _owners(form).get(value) if isinstance(value, str) else None
    return owner if owner != key else None


@cache
def _owners(form: Form) -> Mapping[str, str]:
    """Each option word, and the key that it is an option of."""
    owners: dict[str, str] = {}
    for block in _BLOCKS[form].values():
        for key, entry in block_of(form, block)["properties"].items():
            for word in entry.get("enum", ()):
                if isinstance(word, str):
                    owners.setdefault(word, key)
    roles = (
        block_of("layered", "quantizable_data_type")["items"]["enum"]
        if form == "layered"
        else ()
    )
    return {**owners, **dict.fromkeys(roles, "quantizable_data_type")}


def _homes(form: Form) -> Mapping[str, frozenset[str]]:
    """Each block of the form, and its keys; those of the other form are named as such."""
    homes = {
        home: frozenset(block_of(form, block)["properties"])
        for home, block in _BLOCKS[form].items()
    }
    homes |= {
        f"the algorithm {name}": frozenset(settings_of(kind))
        for name, kind in entry_kinds(form).items()
    }
    if form == "hierarchical":
        layered = frozenset(block_of("layered")["properties"]) - {"target_device"}
        return homes | {"the layered form, and a file has one form": layered}
    homes |= {
        home: frozenset(block_of(form, block)["properties"]) for home, block in _ENTRIES.items()
    }
    return homes | {"the hierarchical form, and a file has one form": HIERARCHICAL_KEYS}
