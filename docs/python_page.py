"""Write reference.md of the site: every public name, from docstrings and schemas."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import textwrap
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any

import quantizer
from quantizer.api.comparison import Comparison, Report
from quantizer.api.config import OBSERVERS
from quantizer.api.result import Result
from quantizer.config.algorithms import AlgoConfig, settings_of
from quantizer.config.forms.form import block_of
from quantizer.config.pages import key_names
from quantizer.export.agreement import Verification

_TITLE = """# Python: every name

This page is written from the docstrings, which `help(quantizer.NAME)` prints. The
[Python API](api.md) shows how the names are used together. All of them are imported from
`quantizer`, except the classes under "What calls return": their objects come from other calls.

"""
_RETURNED: Mapping[str, Any] = {
    "Result": Result,
    "Comparison": Comparison,
    "Report": Report,
    "Verification": Verification,
}
_GROUPS: Mapping[str, tuple[str, ...]] = {
    "Calls": ("quantize", "calibrate", "load"),
    "What calls return": ("Quantized", *_RETURNED),
    "In place": ("ModelQuantizer",),
    "Configs": ("Config", "QuantizationConfig", "QuantizationSpec"),
    "Algorithms": (
        "SmoothQuantConfig",
        "RotationConfig",
        "AWQConfig",
        "GPTQConfig",
        "GPTAQConfig",
        "QronosConfig",
        "IMatrixConfig",
        "CLEConfig",
        "AlgoConfig",
        "PreQuantOptConfig",
    ),
    "Observers": (*OBSERVERS, "ObserverBase"),
    "Enumerations": ("Dtype", "QSchemeType", "RoundType", "ScaleType", "DeviceType"),
}
"""The sections of the page. Each public name is in one of them."""
_ENUM_KEYS = {
    "Dtype": "dtype",
    "QSchemeType": "qscheme",
    "RoundType": "round_method",
    "ScaleType": "scale_type",
}
"""The keys of a spec whose values are the members of an enumeration."""
_TYPES = {
    "os.PathLike[str]": "Path",
    "nn.Module": "Module",
    "AnyConfig": "str | Path | Mapping | Config",
    "CalibrationData": "str | Iterable | Callable",
}
"""Short forms of types, and what aliases stand for."""
_SECTION = re.compile(r"^(Args|Attributes|Returns|Raises|Source)[^:\n]*:(.*)$", re.MULTILINE)
_ENTRY = re.compile(r"^ {4}(\w[\w, ]*):\s+", re.MULTILINE)
_DOCTEST = re.compile(r"^>>> .*?(?=\n\n|\Z)", re.MULTILINE | re.DOTALL)


def python_page() -> str:
    """Return the text of reference.md.

    Raises:
        ValueError: a public name is in no section.
    """
    listed = {name for names in _GROUPS.values() for name in names}
    missing = set(quantizer.__all__) - listed
    if missing:
        raise ValueError(f"docs/python_page.py has no section for {sorted(missing)}")
    overview = "| section | names |\n|---|---|\n"
    sections = ""
    for title, names in _GROUPS.items():
        links = [f"[`{name}`](#{name.lower()})" for name in names]
        overview += f"| {title} | {', '.join(links)} |\n"
        sections += f"\n## {title}\n"
        for name in names:
            value = _RETURNED.get(name)
            if value is None:
                value = getattr(quantizer, name)
            sections += _part(name, value)
    page = f"{_TITLE}{overview}{sections}"
    return re.sub(r"\n{3,}", "\n\n", page).rstrip() + "\n"


def _part(name: str, value: Any) -> str:
    """Return the section of one name."""
    if not inspect.isclass(value):
        return f"\n### {name}\n\n{_signature(name, value)}{_described(value)}"
    text = f"\n### {name}\n\n"
    if "\nArgs:" in inspect.cleandoc(value.__doc__ or ""):
        text += _signature(name, value.__init__)
    text += _described(value)
    if issubclass(value, Enum):
        return text + _members(name, value)
    if issubclass(value, AlgoConfig):
        return text + _settings(value)
    if dataclasses.is_dataclass(value) and name not in _GROUPS["What calls return"]:
        text += _fields(value)
    for method, member in vars(value).items():
        if method.startswith("_"):
            continue
        function = getattr(member, "func", getattr(member, "__func__", member))
        if not inspect.isfunction(function):
            continue
        title = f"{name}.{method}"
        text += f"\n#### {title}\n\n"
        if function is member or isinstance(member, (staticmethod, classmethod)):
            text += _signature(title, function)
        text += _described(function)
    return text


def _signature(title: str, function: Any) -> str:
    """Return a block with the call: its arguments and their defaults."""
    pieces = []
    for name, parameter in inspect.signature(function).parameters.items():
        if name in ("self", "cls"):
            continue
        piece = str(parameter.replace(annotation=inspect.Parameter.empty))
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in "".join(pieces):
            pieces.append("*")
        pieces.append(piece)
    call = textwrap.fill(f"{title}({', '.join(pieces)})", 90, subsequent_indent="    ")
    return f"```text\n{call}\n```\n\n"


def _described(value: Any) -> str:
    """Return a docstring as Markdown: text, example, tables of its sections."""
    docstring = inspect.cleandoc(value.__doc__ or "")
    example = "\n\n".join(_DOCTEST.findall(docstring))
    pieces = _SECTION.split(_DOCTEST.sub("", docstring))
    text = _filled(pieces[0])
    if example:
        text += f"```pycon\n{example}\n```\n\n"
    for index in range(1, len(pieces), 3):
        kind, first, body = pieces[index : index + 3]
        if kind == "Source":
            continue
        if kind == "Returns":
            text += f"Returns {' '.join(f'{first} {body}'.split())}\n\n"
            continue
        annotations = _annotations(value) if kind == "Args" else {}
        text += _table(kind, list(_entries(body)), annotations)
    return text


def _filled(text: str) -> str:
    """Return paragraphs and lists with one line each."""
    paragraphs = []
    for paragraph in re.split(r"\n\s*\n", text.strip()):
        items = re.split(r"\n(?=- )", paragraph)
        paragraphs.append("\n".join(" ".join(item.split()) for item in items))
    return "\n\n".join(paragraphs) + "\n\n"


def _entries(body: str) -> Iterator[tuple[str, str]]:
    """Yield the names and the meaning of each entry of a docstring's section."""
    pieces = _ENTRY.split(body)
    for names, meaning in zip(pieces[1::2], pieces[2::2], strict=True):
        for name in names.split(", "):
            yield name, " ".join(meaning.split())


def _table(
    kind: str, entries: list[tuple[str, str]], annotations: Mapping[str, tuple[str, str]]
) -> str:
    """Return the table of a docstring's section."""
    if kind == "Raises":
        text = "| raises | if |\n|---|---|\n"
        for name, meaning in entries:
            text += f"| `{name}` | {_cell(meaning)} |\n"
        return f"{text}\n"
    if kind == "Attributes":
        text = "| attribute | meaning |\n|---|---|\n"
        for name, meaning in entries:
            text += f"| `{name}` | {_cell(meaning)} |\n"
        return f"{text}\n"
    text = "| argument | type | default | meaning |\n|---|---|---|---|\n"
    for name, meaning in entries:
        hint, default = annotations[name]
        text += f"| `{name}` | {hint} | {default} | {_cell(meaning)} |\n"
    return f"{text}\n"


def _annotations(value: Any) -> dict[str, tuple[str, str]]:
    """Return the type and the default of each argument, as cells of a table. The arguments of a
    class are those of its constructor.
    """
    call = value.__init__ if inspect.isclass(value) else value
    tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(call))))
    function = tree.body[0]
    assert isinstance(function, ast.FunctionDef)
    arguments = function.args
    known = [*arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
    parameters = inspect.signature(call).parameters
    cells = {}
    for argument in known:
        if argument is None or argument.annotation is None:
            continue
        default = parameters[argument.arg].default
        shown = "" if default is inspect.Parameter.empty else f"`{default!r}`"
        cells[argument.arg] = (_type(argument.annotation), shown)
    return cells


def _type(annotation: ast.expr) -> str:
    """Return an annotation as a cell. The arguments of a function are left out."""
    text = ast.unparse(annotation)
    for name, meaning in _TYPES.items():
        text = text.replace(name, meaning)
    if "Callable[[" in text:
        optional = " | None" if text.endswith("| None") else ""
        text = f"Callable{optional}"
    return f"`{_cell(text)}`"


def _fields(value: type) -> str:
    """Return the table of a config's fields. A field with a page of its own links to it."""
    hints = _field_hints(value)
    described = _field_meanings()
    pages = set(key_names())
    text = "| field | type | default | meaning |\n|---|---|---|---|\n"
    for field in dataclasses.fields(value):
        default = "" if field.default is dataclasses.MISSING else f"`{field.default!r}`"
        if field.default_factory is not dataclasses.MISSING:
            default = f"`{field.default_factory()!r}`"
        name = f"`{field.name}`"
        if field.name in pages:
            name = f"[{name}](config/{field.name}.md)"
        meaning = _cell(described.get(field.name, ""))
        text += f"| {name} | `{_cell(hints[field.name])}` | {default} | {meaning} |\n"
    return f"{text}\n"


def _field_hints(value: type) -> dict[str, str]:
    """Return the annotation of each field of a class, as its source has it."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(value)))
    hints = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            hints[node.target.id] = ast.unparse(node.annotation)
    return hints


def _field_meanings() -> dict[str, str]:
    """Return the sentence of the schema about each key of the hierarchical form."""
    schema = block_of("hierarchical")
    blocks = [schema["properties"]]
    for definition in schema["definitions"].values():
        blocks.append(definition.get("properties", {}))
    blocks.append(block_of("hierarchical", "spec")["properties"])
    meanings = {}
    for block in blocks:
        for key, entry in block.items():
            if isinstance(entry, dict) and "description" in entry:
                meanings[key] = entry["description"]
    return meanings


def _settings(kind: type[AlgoConfig]) -> str:
    """Return the fields of an algorithm. Their meaning is on the page of its key."""
    names = [f"`{name}`" for name in settings_of(kind)]
    if not names:
        return ""
    page = f"[`{kind.name}`](config/{kind.name}.md)"
    return (
        f"Fields: {', '.join(names)}. The page of the key {page} has their values, defaults "
        "and an example.\n\n"
    )


def _members(name: str, value: type[Enum]) -> str:
    """Return the table of an enumeration's members."""
    meanings: dict[str, str] = {}
    key = _ENUM_KEYS.get(name)
    if key is not None:
        entry = block_of("hierarchical", "spec")["properties"][key]
        meanings = dict(zip(entry["enum"], entry["enumDescriptions"], strict=True))
    if not meanings:
        members = [f"`{member.name}`" for member in value]
        return f"Members: {', '.join(members)}.\n\n"
    text = "| member | meaning |\n|---|---|\n"
    for member in value:
        text += f"| `{member.name}` | {_cell(meanings[member.name])} |\n"
    return f"{text}\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
