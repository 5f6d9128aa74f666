"""The pages of the config's keys and of the codes, made from the schemas; docs/config and docs/rules.md hold them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from quantizer.config.codes import CODES, all_codes
from quantizer.config.layered import FIELDS
from quantizer.config.resources import load_resource
from quantizer.config.rules import spec_rules


def key_names() -> tuple[str, ...]:
    """Every key of the layered form that has a page."""
    return tuple(_keys())


def key_page(key: str) -> str:
    """The page of a config key in Markdown: what it does, options, default, example, conflicts."""
    entry, where = _keys()[key]
    parts = [f"# {key}", entry["description"], entry["markdownDescription"], f"Where: {where}."]
    if "enum" in entry and "enumDescriptions" in entry:
        rows = zip(entry["enum"], entry["enumDescriptions"], strict=True)
        parts.append("\n".join(f"- `{json.dumps(option)}`: {meaning}" for option, meaning in rows))
    elif entry.get("type") == "boolean":
        parts.append("Options: `true`, `false`.")
    if "default" in entry:
        parts.append(f"Default: `{json.dumps(entry['default'])}`.")
    example = json.dumps({key: entry["examples"][0]}, indent=2, ensure_ascii=False)[2:-2].replace("\n  ", "\n").strip()
    parts.append(f"Example:\n\n```json\n{example}\n```")
    rules = [f"- [{code}](../rules.md#{code.lower()}): {rule['title']}" for code, rule in _rules_of(key).items()]
    if rules:
        parts.append("Restrictions and conflicts:\n\n" + "\n".join(rules))
    return "\n\n".join([*parts, *_worked_example(key)]) + "\n"


def code_page(code: str) -> str:
    """The page of a diagnostic code in Markdown."""
    return _code_section(code).replace("## ", "# ", 1) + "\n"


def contents() -> str:
    """Every code and every key, a line each, with its title or description."""
    rows = {code: entry.title for code, entry in all_codes().items()}
    rows |= {key: entry["description"] for key, (entry, _) in _keys().items()}
    width = max(map(len, rows))
    return "".join(f"{name:<{width}}  {meaning}\n" for name, meaning in rows.items())


def rules_page() -> str:
    """All codes in one page."""
    intro = (
        "# Codes\n\nEvery finding has a code: QZ0xx syntax, QZ1xx values, QZ2xx device restrictions, QZ3xx conflicts, "
        "QZ4xx selectors.\n`quantizer explain QZ301` prints a section of this page."
    )
    return "\n\n".join([intro, *map(_code_section, all_codes())]) + "\n"


def _worked_example(key: str) -> Iterator[str]:
    """A change of one ready config, the commands to see its effect, and what they print before and after it."""
    example = load_resource("schemas", "worked_examples.json")[key]
    both = f" with `{_inner(example['both'])}`" if "both" in example else ""
    yield "## Worked example"
    yield f"A copy of `{example['config']}`{both}, as `changed.json`, in which is set"
    yield _block("json", [_inner(example["change"])])
    yield _block("", [f"$ {command}" for command in example["commands"]])
    yield "Among the lines printed are"
    yield _block("", example["after"])
    yield f"and without {'the last change' if both else 'the change'}"
    yield _block("", example["before"])
    if "note" in example:
        yield example["note"]


def _inner(block: Mapping[str, Any]) -> str:
    """The keys of an object on one line, without its braces."""
    return json.dumps(block, ensure_ascii=False)[1:-1]


def _block(language: str, lines: Sequence[str]) -> str:
    return "\n".join([f"```{language}", *lines, "```"])


def _code_section(code: str) -> str:
    entry = all_codes()[code]
    remedy = entry.remedy if code in CODES else f"To do: {entry.remedy}."
    sentence = [f"> {message}"] if (message := _message(code)) else []
    return "\n\n".join([f"## {code}", f"**{entry.title}.** {entry.why}", *sentence, remedy])


def _message(code: str) -> str | None:
    rule = spec_rules().get(code)
    return next(iter(rule["then"]["properties"].values()))["errorMessage"] if rule else None


def _rules_of(key: str) -> Mapping[str, Mapping[str, Any]]:
    field = FIELDS.get(key, key)
    return {
        code: rule
        for code, rule in spec_rules().items()
        if rule.get("form") != "hierarchical"
        and (field in rule["then"]["properties"] or field in rule["if"]["properties"])
    }


@cache
def _keys() -> Mapping[str, tuple[Mapping[str, Any], str]]:
    schema = load_resource("schemas", "layered.schema.json")
    definitions = schema["definitions"]
    places = {
        "the top level": schema["properties"],
        "an overall block, or a tensor's block": definitions["parameters"]["properties"],
        "an entry of layer_quantize_config": definitions["layer_entry"]["properties"],
    }
    found: dict[str, tuple[Mapping[str, Any], str]] = {}
    for where, keys in places.items():
        for key, entry in keys.items():
            resolved = {**definitions.get(entry.get("$ref", "").rpartition("/")[2], {}), **entry}
            if key in found:
                found[key] = (found[key][0], f"{found[key][1]}, or {where}")
            elif "markdownDescription" in resolved:
                found[key] = (resolved, where)
    return found
