"""Write the pages of the config's keys and of the codes from the schemas. `quantizer explain`
prints them, and the site has them.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cache

from quantizer.config.algorithm_schema import algorithm_schema
from quantizer.config.algorithms import SWITCHES, entry_kinds, finds_codes
from quantizer.config.document.fixes import paste
from quantizer.config.forms.form import Form, block_of
from quantizer.config.forms.hierarchical_spec import FIELDS_OF_KEYS
from quantizer.config.forms.layered import FIELDS
from quantizer.config.json_types import JsonMapping
from quantizer.config.resources import load_resource
from quantizer.config.rules.spec_rules import all_codes, spec_rules
from quantizer.config.rules.structure_findings import TYPE_WORDS, bounds
from quantizer.errors import QuantizerError

_FORMS: tuple[Form, ...] = ("layered", "hierarchical")

_PLACES: Mapping[Form, Mapping[str, str]] = {
    "layered": {
        "the top level": "",
        "an overall block, or a tensor's block": "parameters",
        "an entry of layer_quantize_config": "layer_entry",
    },
    "hierarchical": {
        "the top level": "",
        "global_quant_config, or the configuration of a type or a layer": "level",
        "a tensor's specification": "spec",
    },
}
"""The places of keys: the block in words, and its definition in the schema ("" is the file
itself).
"""

_FIELDS: Mapping[Form, Mapping[str, str]] = {"layered": FIELDS, "hierarchical": FIELDS_OF_KEYS}

_WIDEST_COMMAND = 96
"""The characters of a line that a page of the site shows without a scroll bar."""

_RULES_INTRO = (
    "# Codes\n\nEvery finding has a code: QZ0xx syntax, QZ1xx values, QZ2xx device "
    "restrictions, QZ3xx conflicts, "
    "QZ4xx selectors.\n`quantizer explain QZ301` prints a section of this page.\n\n"
    "`quantizer validate --fix` fixes errors with one known remedy: misspelt keys and "
    "words, quoted numbers, "
    "`True` and `False`, trailing\ncommas, missing keys. Each fix is tried first. The help "
    "line offers it, and `--fix` writes it, only if it leaves fewer errors in\nthe file. "
    "`--diff` shows the changes and writes nothing."
)


def key_names() -> tuple[str, ...]:
    """Return every key that has a page, those of the layered form first; then the
    algorithms.
    """
    keys = dict.fromkeys((*_keys("layered"), *_keys("hierarchical")))
    return (*keys, *entry_kinds("hierarchical"))


def setting_names() -> tuple[str, ...]:
    """Return every setting of an algorithm, and every word that a key takes, that is not a key
    elsewhere.
    """
    keys = key_names()
    names: dict[str, None] = {}
    for algorithm in entry_kinds("hierarchical"):
        names |= dict.fromkeys(_settings(algorithm))
    names |= dict.fromkeys(_meanings())
    return tuple(name for name in names if name not in keys)


@cache
def _meanings() -> Mapping[str, Sequence[str]]:
    """Return the lines on each word that a key takes: the key, and what the word means."""
    meanings: dict[str, list[str]] = {}
    for form in _FORMS:
        for key, (entry, _) in _keys(form).items():
            words = zip(entry.get("enum", ()), entry.get("enumDescriptions", ()), strict=False)
            for word, meaning in words:
                line = f"- {meaning} (`quantizer explain {key}`, {form} form)"
                if isinstance(word, str):
                    meanings.setdefault(word, []).append(line)
    return meanings


def setting_page(key: str) -> str:
    """Return the page of a setting or a word: its meaning in each algorithm or key that has
    it.
    """
    rows: list[str] = []
    commands: list[str] = []
    for algorithm in entry_kinds("hierarchical"):
        settings = _settings(algorithm)
        if key in settings:
            rows.append(f"- {algorithm}: {settings[key]['description']}")
            commands.append(f"`quantizer explain {algorithm}`")
    if not rows:
        return _page(f"# {key}", "A word that keys take.", "\n".join(_meanings()[key]))
    intro = f"A setting of algorithms; more is in {' and '.join(commands)}."
    return _page(f"# {key}", intro, "\n".join(rows))


def key_page(key: str) -> str:
    """Return the page of a config key in Markdown: what it does, options, default, example,
    conflicts; for each form.

    Raises:
        QuantizerError: the schema lacks something that a page needs.
    """
    title = f"# {key}"
    if key in entry_kinds("hierarchical"):
        return _page(title, *_algorithm_sections(key))
    forms = [form for form in _FORMS if key in _keys(form)]
    if len(forms) == 1:
        return _page(title, *_key_sections(key, forms[0]))
    sections = [title, "Both file forms have this key."]
    for form in forms:
        sections += [f"## In the {form} form", *_key_sections(key, form)]
    return _page(*sections)


def _page(*sections: str) -> str:
    return "\n\n".join(sections) + "\n"


def example_names() -> tuple[str, ...]:
    """Return the name of every worked example that there has to be."""
    names: list[str] = []
    for form in _FORMS:
        names += [_example_name(key, form) for key in _keys(form)]
    return (*names, *entry_kinds("hierarchical"))


def _example_name(key: str, form: Form) -> str:
    """Return the name of the key's worked example; a key of both forms has two."""
    is_second = form == "hierarchical" and key in _keys("layered")
    return f"{key} {form}" if is_second else key


def _key_sections(key: str, form: Form) -> Iterator[str]:
    """Yield the sections of the page of a key: meaning, options, example and rules."""
    entry, place = _keys(form)[key]
    yield entry["description"]
    yield entry["markdownDescription"]
    yield f"Where: {place}."
    if "enum" in entry and "enumDescriptions" in entry:
        yield "\n".join(_options(key, form, entry))
    elif "boolean" in entry.get("type", ""):
        yield "Options: `true`, `false`."
    if "default" in entry:
        yield f"Default: `{json.dumps(entry['default'])}`."
    yield f"Example:\n\n```json\n{_example(key, entry)}\n```"
    rules = ["Restrictions and conflicts:\n"]
    for code, rule in _rules_of(key, form).items():
        rules.append(f"- [{code}](../rules.md#{code.lower()}): {rule['title']}")
    if len(rules) > 1:
        yield "\n".join(rules)
    yield from _worked_example(_example_name(key, form))


def _options(key: str, form: Form, entry: JsonMapping) -> Iterator[str]:
    """Yield a line for each option of a key, with its description."""
    options = entry["enum"]
    descriptions = entry["enumDescriptions"]
    if len(options) != len(descriptions):
        raise QuantizerError(
            f"schemas/{form}.schema.json: the key {key} has {len(options)} options and "
            f"{len(descriptions)} descriptions",
            help="enumDescriptions has a line for each word of enum, in the same order",
        )
    for option, description in zip(options, descriptions, strict=True):
        yield f"- `{json.dumps(option)}`: {description}"


def _example(key: str, entry: JsonMapping) -> str:
    """Return the first example of a key as a member of a file, without the braces."""
    text = json.dumps({key: entry["examples"][0]}, indent=2, ensure_ascii=False)
    return text[2:-2].replace("\n  ", "\n").strip()


def _algorithm_sections(name: str) -> Iterator[str]:
    """Yield the sections of the page of an algorithm: meaning, settings and an example."""
    kind = entry_kinds("hierarchical")[name]
    settings = _settings(name)
    yield algorithm_schema(kind)["description"]
    lists = "`algo_config`" if finds_codes(kind) else "`algo_config` or `pre_quant_opt_config`"
    layered = "an entry of `algorithms`"
    if name in SWITCHES:
        layered = f"the switch `{SWITCHES[name]}`"
    yield f"Where: an entry of {lists}; in the layered form, {layered}."
    if not settings:
        yield "It has no keys but its name."
        yield from _worked_example(name)
        return
    rows = ["| key | values | default | meaning |", "|---|---|---|---|"]
    for key, entry in settings.items():
        default = json.dumps(entry["default"])
        rows.append(f"| `{key}` | {_values(entry)} | `{default}` | {entry['description']} |")
    yield "\n".join(rows)
    if "scaling_layers" in settings:
        yield "An entry of `scaling_layers`:"
        members = block_of("hierarchical", "scaling_layer")["properties"]
        lines = [f"- `{key}`: {member['description']}" for key, member in members.items()]
        yield "\n".join(lines)
    yield from _worked_example(name)


def _settings(name: str) -> JsonMapping:
    settings = dict(algorithm_schema(entry_kinds("hierarchical")[name])["properties"])
    del settings["name"]
    return settings


def _values(entry: JsonMapping) -> str:
    """Return the types of a setting in words, or its options, and its range; the one value that
    is supported.
    """
    if "code" in entry:
        return json.dumps(entry["default"])
    types = entry["type"] if isinstance(entry["type"], list) else [entry["type"]]
    options = entry.get("enum", entry.get("then", {}).get("enum", ()))
    words = [TYPE_WORDS[kind] for kind in types if kind != "string" or not options]
    words += map(json.dumps, options)
    return ", ".join([" or ".join(words), *bounds(entry)])


def code_page(code: str) -> str:
    """Return the page of a code in Markdown."""
    return _page(_code_section(code).removeprefix("#"))


def contents() -> str:
    """Return every code and every key, a line each, with its title or description."""
    rows = {code: entry["title"] for code, entry in all_codes().items()}
    for form in _FORMS:
        for key, (entry, _) in _keys(form).items():
            rows.setdefault(key, entry["description"])
    for name, kind in entry_kinds("hierarchical").items():
        rows[name] = algorithm_schema(kind)["description"]
    width = max(map(len, rows))
    return "".join(f"{name:<{width}}  {meaning}\n" for name, meaning in rows.items())


def rules_page() -> str:
    """Return all codes in one page."""
    return _page(_RULES_INTRO, *map(_code_section, all_codes()))


def _worked_example(name: str) -> Iterator[str]:
    """Yield a change of one ready config, the commands that show its effect, and what they
    print before and after it.
    """
    example = load_resource("schemas", "worked_examples.json").get(name)
    if example is None:
        return
    both = f" with `{paste(example['both'])}`" if "both" in example else ""
    change = "the last change" if both else "the change"
    yield "## Worked example"
    yield f"A copy of `{example['config']}`{both}, as `changed.json`, in which is set"
    yield _block("json", [paste(example["change"])])
    commands = []
    for command in example["commands"]:
        commands += _command_lines(f"$ {command}")
    yield _block("", commands)
    yield "Among the lines printed are"
    yield _block("", example["after"])
    yield f"and without {change}"
    yield _block("", example["before"])
    if "note" in example:
        yield example["note"]


def _command_lines(command: str) -> list[str]:
    """Return a command in two lines if it is too long for one.

    >>> _command_lines("$ quantizer --model " + "a" * 70 + " --overwrite")[1]
    '    --overwrite'
    """
    if len(command) <= _WIDEST_COMMAND:
        return [command]
    end = command.rindex(" --", 0, _WIDEST_COMMAND - 2)
    return [f"{command[:end]} \\", f"    {command[end + 1 :]}"]


def _block(language: str, lines: Sequence[str]) -> str:
    return "\n".join([f"```{language}", *lines, "```"])


def _code_section(code: str) -> str:
    entry = all_codes()[code]
    sections = [f"## {code}", f"**{entry['title']}.** {entry['description']}"]
    if code in spec_rules():
        subject = next(iter(entry["then"]["properties"].values()))
        sections += [f"> {subject['errorMessage']}", f"To do: {entry['help']}."]
    else:
        sections.append(entry["help"])
    return "\n\n".join(sections)


def _rules_of(key: str, form: Form) -> Mapping[str, JsonMapping]:
    """Return the rules that are about a key; a rule next to another is about no device."""
    field = _FIELDS[form].get(key, key)
    rules: dict[str, JsonMapping] = {}
    for code, rule in spec_rules().items():
        fields = rule["then"]["properties"] | rule["if"]["properties"]
        is_of_form = rule.get("form", form) == form
        is_aside = field == "target_device" and "beside" in rule
        if is_of_form and field in fields and not is_aside:
            rules[code] = rule
    return rules


@cache
def _keys(form: Form) -> Mapping[str, tuple[JsonMapping, str]]:
    """Return the keys of a form that have a page: each with its entry in the schema, and in
    words where it may stand.
    """
    definitions = block_of(form)["definitions"]
    keys: dict[str, tuple[JsonMapping, str]] = {}
    for place, block in _PLACES[form].items():
        for key, entry in block_of(form, block)["properties"].items():
            definition = entry.get("$ref", "").rpartition("/")[2]
            resolved = {**definitions.get(definition, {}), **entry}
            if key in keys:
                first, first_place = keys[key]
                keys[key] = (first, f"{first_place}, or {place}")
            elif "markdownDescription" in resolved:
                keys[key] = (resolved, place)
    return keys
