"""Write quantizer/__init__.pyi: the public names with their types, for editors and mypy."""

from __future__ import annotations

import ast
import inspect
import json
import textwrap
from collections.abc import Iterator

import quantizer
from quantizer.api.config import OBSERVERS
from quantizer.api.quantize import quantize
from quantizer.declarations import TargetOption
from quantizer.export.destinations import ALSO, DESTINATIONS
from quantizer.export.targets import CHOICES, EXPORTERS
from quantizer.option_words import worded
from quantizer.tables import RANGE_METHODS

_TITLE = '''"""{docstring}

`python docs/generate.py` writes this file.
"""

import os
from collections.abc import Callable, Collection, Iterable
from typing import Any, Literal, TypedDict

from torch import nn as _torch_nn

from quantizer import nn as nn
from quantizer.api.calibrate import CalibrationData
from quantizer.api.config import AnyConfig
from quantizer.calibration.events import Events
'''
_LINE = 96


def stub() -> str:
    """Return the text of the file."""
    made = {name for row in RANGE_METHODS.values() for name in row.observers}
    summary, *_ = (quantizer.__doc__ or "").splitlines()
    text = _TITLE.format(docstring=summary)
    for home, names in sorted(quantizer.homes_of_names().items()):
        for name in sorted(names):
            if name != "quantize":
                text += f"from {home} import {name} as {name}\n"
    text += "\n__version__: str\n__all__ = [\n"
    text += "".join(f'    "{name}",\n' for name in quantizer.__all__)
    text += "]\n"
    for name in sorted(made):
        docstring = _filled(OBSERVERS[name].__doc__ or "")
        text += f"\nclass {name}(ObserverBase):\n{docstring}"
    text += "\nclass ExportOptions(TypedDict, total=False):\n"
    text += '    """The options of targets, for `Result.export`."""\n\n'
    for name, option in CHOICES.items():
        # Editors complete the values, and a variable may have them
        text += f"    {name}: {_type(option)}{' | str' if len(option.values) > 1 else ''}\n"
    text += f"\nExportTarget = Literal[{', '.join(map(json.dumps, EXPORTERS))}]\n"
    return f"{text}\n{_quantize()}"


def _quantize() -> str:
    """Return the declaration of `quantize`, with the options of the targets as arguments."""
    source = textwrap.dedent(inspect.getsource(inspect.unwrap(quantize)))
    function = ast.parse(source).body[0]
    assert isinstance(function, ast.FunctionDef)
    arguments = function.args
    rest = arguments.kwarg
    assert rest is not None
    lines = list(_declared(arguments.args, [None, *arguments.defaults]))
    lines.append("*")
    lines += _declared(arguments.kwonlyargs, arguments.kw_defaults)
    lines += [f"{name}: {_type(option)} = ..." for name, option in CHOICES.items()]
    lines += [f"**{argument}" for argument in _declared([rest], [None])]
    text = "def quantize(\n" + "".join(f"    {line},\n" for line in lines)
    meanings = "".join(
        textwrap.fill(
            f"{name}: {worded(option.help, lambda options: options[0].name, 'python')}",
            _LINE - 8,
            initial_indent=" " * 8,
            subsequent_indent=" " * 12,
        )
        + "\n"
        for name, option in CHOICES.items()
    )
    docstring = ast.get_docstring(function, clean=False) or ""
    before, last, after = docstring.partition("        options:")
    assert last
    return f'{text}) -> Quantized:\n    """{before}{meanings}{last}{after}"""\n'


def _declared(arguments: list[ast.arg], defaults: list[ast.expr | None]) -> Iterator[str]:
    """Yield the arguments with their types and defaults."""
    for argument, default in zip(arguments, defaults, strict=True):
        annotation = ast.unparse(argument.annotation) if argument.annotation else "Any"
        text = f"{argument.arg}: {annotation.replace('nn.Module', '_torch_nn.Module')}"
        if argument.arg == "to":
            # Editors complete the names, and packages of others may add some
            names = ", ".join(map(json.dumps, (*DESTINATIONS, *ALSO)))
            text = f"to: Literal[{names}] | str | None"
        if default is not None:
            text += f" = {ast.unparse(default)}".replace("'", '"')
        yield text


def _type(option: TargetOption) -> str:
    """Return the type of an option's values."""
    if option.is_file:
        return "str | os.PathLike[str]"
    if option.is_text:
        return "str"
    return f"Literal[{', '.join(map(json.dumps, option.values))}]"


def _filled(docstring: str) -> str:
    return textwrap.indent(textwrap.fill(f'"""{docstring}"""', _LINE - 4), "    ") + "\n"
