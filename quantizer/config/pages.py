"""The pages of the config's keys and of the codes, made from the schemas; docs/config and
docs/rules.md hold them.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from quantizer.config.algorithm_schema import algorithm_schema
from quantizer.config.algorithm_settings import finds_codes
from quantizer.config.algorithms import entry_kinds
from quantizer.config.document.missing_keys import paste
from quantizer.config.document.suggestions import TYPE_WORDS, bounds
from quantizer.config.forms.form import Form, block_of
from quantizer.config.forms.hierarchical_spec import FIELDS_OF_KEYS
from quantizer.config.forms.layered import FIELDS
from quantizer.config.resources import load_resource
from quantizer.config.rules.spec_rules import all_codes, spec_rules

FORMS: tuple[Form, ...] = ("layered", "hierarchical")

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
"""Where keys stand: the block in words, and its definition in the schema ("" is the file
itself).
"""

_FIELDS: Mapping[Form, Mapping[str, str]] = {"layered": FIELDS, "hierarchical": FIELDS_OF_KEYS}


def key_names() -> tuple[str, ...]:
    """Every key that has a page, those of the layered form first; then the algorithms."""
    return (
        *dict.fromkeys(key for form in FORMS for key in _keys(form)),
        *entry_kinds("hierarchical"),
    )


def setting_names() -> tuple[str, ...]:
    """Every setting of an algorithm that is no key elsewhere."""
    names = dict.fromkeys(
        key for name in entry_kinds("hierarchical") for key in _settings(name)
    )
    return tuple(key for key in names if key not in key_names())


def setting_page(key: str) -> str:
    """What a setting is in each algorithm that has it."""
    having = [name for name in entry_kinds("hierarchical") if key in _settings(name)]
    rows = [f"- {name}: {_settings(name)[key]['description']}" for name in having]
    pages = " and ".join(f"`quantizer explain {name}`" for name in having)
    return (
        f"# {key}\n\nA setting of algorithms; more is in {pages}.\n\n" + "\n".join(rows) + "\n"
    )


def key_page(key: str) -> str:
    """The page of a config key in Markdown: what it does, options, default, example, conflicts;
    for each form.
    """
    if key in entry_kinds("hierarchical"):
        return "\n\n".join([f"# {key}", *_algorithm_sections(key)]) + "\n"
    pages = {form: list(_key_sections(key, form)) for form in FORMS if key in _keys(form)}
    title = f"# {key}"
    if len(pages) == 1:
        return "\n\n".join([title, *next(iter(pages.values()))]) + "\n"
    both = [
        section
        for form, sections in pages.items()
        for section in (f"## In the {form} form", *sections)
    ]
    return "\n\n".join([title, "Both file forms have this key.", *both]) + "\n"


def example_name(key: str, form: Form) -> str:
    """The name of the key's worked example; a key of both forms has two."""
    return f"{key} {form}" if form == "hierarchical" and key in _keys("layered") else key


def example_names() -> tuple[str, ...]:
    """Every worked example that there has to be."""
    return (
        *(example_name(key, form) for form in FORMS for key in _keys(form)),
        *entry_kinds("hierarchical"),
    )


def _key_sections(key: str, form: Form) -> Iterator[str]:
    entry, where = _keys(form)[key]
    yield entry["description"]
    yield entry["markdownDescription"]
    yield f"Where: {where}."
    if "enum" in entry and "enumDescriptions" in entry:
        rows = zip(entry["enum"], entry["enumDescriptions"], strict=True)
        yield "\n".join(f"- `{json.dumps(option)}`: {meaning}" for option, meaning in rows)
    elif "boolean" in entry.get("type", ""):
        yield "Options: `true`, `false`."
    if "default" in entry:
        yield f"Default: `{json.dumps(entry['default'])}`."
    example = (
        json.dumps({key: entry["examples"][0]}, indent=2, ensure_ascii=False)[2:-2]
        .replace("\n  ", "\n")
        .strip()
    )
    yield f"Example:\n\n```json\n{example}\n```"
    rules = [
        f"- [{code}](../rules.md#{code.lower()}): {rule['title']}"
        for code, rule in _rules_of(key, form).items()
    ]
    if rules:
        yield "Restrictions and conflicts:\n\n" + "\n".join(rules)
    yield from _worked_example(example_name(key, form))


def _algorithm_sections(name: str) -> Iterator[str]:
    kind = entry_kinds("hierarchical")[name]
    yield algorithm_schema(kind)["description"]
    lists = "`algo_config`" if finds_codes(kind) else "`algo_config` or `pre_quant_opt_config`"
    other = f"the switch `{kind.switch}`" if kind.switch else "an entry of `algorithms`"
    yield f"Where: an entry of {lists}; in the layered form, {other}."
    rows = ["| key | values | default | meaning |", "|---|---|---|---|"]
    for key, entry in _settings(name).items():
        rows.append(
            f"| `{key}` | {_values(entry)} | `{json.dumps(entry['default'])}` | "
            f"{entry['description']} |"
        )
    yield "\n".join(rows)
    if "scaling_layers" in _settings(name):
        groups = block_of("hierarchical", "scaling_layer")["properties"]
        yield "An entry of `scaling_layers`:"
        rows = [f"- `{key}`: {entry['description']}" for key, entry in groups.items()]
        yield "\n".join(rows)
    yield from _worked_example(name)


def _settings(name: str) -> Mapping[str, Any]:
    return {
        key: entry
        for key, entry in algorithm_schema(entry_kinds("hierarchical")[name])[
            "properties"
        ].items()
        if key != "name"
    }


def _values(entry: Mapping[str, Any]) -> str:
    """The types of a setting in words, or its options, and its range; the one value that is
    supported.
    """
    if "code" in entry:
        return json.dumps(entry["default"])
    types = entry["type"] if isinstance(entry["type"], list) else [entry["type"]]
    options = [
        json.dumps(option)
        for option in entry.get("enum", entry.get("then", {}).get("enum", ()))
    ]
    words = [TYPE_WORDS[kind] for kind in types if kind != "string" or not options]
    return ", ".join([" or ".join([*words, *options]), *bounds(entry)])


def code_page(code: str) -> str:
    """The page of a diagnostic code in Markdown."""
    return _code_section(code).replace("## ", "# ", 1) + "\n"


def contents() -> str:
    """Every code and every key, a line each, with its title or description."""
    rows = {code: entry["title"] for code, entry in all_codes().items()}
    for form in FORMS:
        rows |= {
            key: entry["description"]
            for key, (entry, _) in _keys(form).items()
            if key not in rows
        }
    rows |= {
        name: algorithm_schema(kind)["description"]
        for name, kind in entry_kinds("hierarchical").items()
    }
    width = max(map(len, rows))
    return "".join(f"{name:<{width}}  {meaning}\n" for name, meaning in rows.items())


def rules_page() -> str:
    """All codes in one page."""
    intro = (
        "# Codes\n\nEvery finding has a code: QZ0xx syntax, QZ1xx values, QZ2xx device "
        "restrictions, QZ3xx conflicts, "
        "QZ4xx selectors.\n`quantizer explain QZ301` prints a section of this page.\n\n"
        "`quantizer validate --fix` writes what has one known answer: misspelt keys and "
        "words, quoted numbers, "
        "`True` and `False`, trailing\ncommas, missing keys. Fixes are tried first: the help "
        "line offers, and `--fix` "
        "writes, only what removes its finding and breaks\nno rule together with the rest of "
        "the file. `--diff` shows "
        "the changes and writes nothing."
    )
    return "\n\n".join([intro, *map(_code_section, all_codes())]) + "\n"


def _worked_example(name: str) -> Iterator[str]:
    """A change of one ready config, the commands to see its effect, and what they print before
    and after it.
    """
    example = load_resource("schemas", "worked_examples.json").get(name)
    if example is None:
        return
    both = f" with `{paste(example['both'])}`" if "both" in example else ""
    yield "## Worked example"
    yield f"A copy of `{example['config']}`{both}, as `changed.json`, in which is set"
    yield _block("json", [paste(example["change"])])
    yield _block("", [f"$ {command}" for command in example["commands"]])
    yield "Among the lines printed are"
    yield _block("", example["after"])
    yield f"and without {'the last change' if both else 'the change'}"
    yield _block("", example["before"])
    if "note" in example:
        yield example["note"]


def _block(language: str, lines: Sequence[str]) -> str:
    return "\n".join([f"```{language}", *lines, "```"])


def _code_section(code: str) -> str:
    entry = all_codes()[code]
    sections = [f"## {code}", f"**{entry['title']}.** {entry['description']}"]
    if code not in spec_rules():
        return "\n\n".join([*sections, entry["help"]])
    sentence = next(iter(entry["then"]["properties"].values()))["errorMessage"]
    return "\n\n".join([*sections, f"> {sentence}", f"To do: {entry['help']}."])


def _rules_of(key: str, form: Form) -> Mapping[str, Mapping[str, Any]]:
    """The rules that are about a key; one beside another is about no device."""
    field = _FIELDS[form].get(key, key)
    return {
        code: rule
        for code, rule in spec_rules().items()
        if rule.get("form", form) == form
        and (field in rule["then"]["properties"] or field in rule["if"]["properties"])
        and not (field == "target_device" and "beside" in rule)
    }


@cache
def _keys(form: Form) -> Mapping[str, tuple[Mapping[str, Any], str]]:
    """The keys of a form that have a page: each with its entry in the schema, and in words
    where it may stand.
    """
    definitions = block_of(form)["definitions"]
    found: dict[str, tuple[Mapping[str, Any], str]] = {}
    for where, block in _PLACES[form].items():
        for key, entry in block_of(form, block)["properties"].items():
            resolved = {
                **definitions.get(entry.get("$ref", "").rpartition("/")[2], {}),
                **entry,
            }
            if key in found:
                found[key] = (found[key][0], f"{found[key][1]}, or {where}")
            elif "markdownDescription" in resolved:
                found[key] = (resolved, where)
    return found
