"""`quantizer explain --model M LAYER`: shows the settings of one layer, and where the config
file sets them.
"""

from collections.abc import Collection, Iterator
from typing import Any

import click

from quantizer.cli import session
from quantizer.cli.arguments.options import Options
from quantizer.cli.terminal.render import say
from quantizer.cli.terminal.screen import notes_on_stderr
from quantizer.cli.traced_model import traced_model
from quantizer.config.document.document import Document
from quantizer.config.document.fixes import paste
from quantizer.config.document.read import read_document
from quantizer.config.forms.hierarchical_spec import FIELDS_OF_KEYS, specification
from quantizer.config.forms.layered import FIELDS
from quantizer.config.forms.level_edits import parameters
from quantizer.config.model import QuantizationSpec, Selector
from quantizer.config.roles import KEY_OF, base_role, is_parameter
from quantizer.config.wording import listed
from quantizer.errors import UsageError
from quantizer.plan.match import match
from quantizer.plan.model import Plan, TensorPlan
from quantizer.plan.selected import advice
from quantizer.printable import json_text
from quantizer.report.tables import why_float


def explain_layer(name: str, options: Options) -> None:
    """Print the settings of each tensor of a layer, with their places in the file.

    Raises:
        UsageError: no layer has this name.
    """
    with notes_on_stderr(options.json):
        read = session.read_config_file(options.config_file)
        original = traced_model(options).graph
    plan = session.resolved_plan(read, original, quiet=True)
    selector = Selector("name", name)
    layers = match(selector, plan.graph, original).layers
    if not layers:
        raise UsageError(f"no layer is called {name!r}", help=advice(selector, original))
    if options.json:
        content: dict[str, dict[str, Any]] = {}
        for layer in layers:
            content[layer] = {}
            for role, tensor in plan.of_layer(layer).items():
                content[layer][role] = tensor.to_json()
        click.echo(json_text(content))
        return
    document = Document.of({}, "")
    if options.config_file:
        document = read_document(options.config_file)
    for layer in layers:
        for line in _lines(plan, layer, document, read.config.form):
            say(line)
    if any(plan.of_layer(layer) for layer in layers):
        excluded = document.value.get("exclude") or []
        line = paste({"exclude": [*excluded, name]})
        say(f"to keep it in float, write {line} in the config")


def _lines(plan: Plan, layer: str, document: Document, form: str) -> Iterator[str]:
    """Yield the layer's exact name, then the settings of each tensor."""
    yield layer
    for role, tensor in plan.of_layer(layer).items():
        title = f"  {_word(role, form)}"
        others = [name for name in tensor.members if name != layer]
        if others:
            title += f" (shared with {', '.join(others)})"
        yield title
        for key, (value, origin) in _values(tensor, document, form).items():
            yield f"    {key:<24}{listed([value]):<29}{origin}"
    for (name, role), place in plan.off.items():
        if name == layer:
            yield f"  {_word(role, form)}: float, set by {place}"
    for (name, role), why in plan.ungrouped.items():
        if name == layer:
            yield f"  {_word(role, form)}: float, as {why}"
    if layer in plan.floats:
        word = _word("activation", form) if plan.of_layer(layer) else "all tensors"
        line = f"  {word}: {why_float(plan.floats[layer])}"
        for rule in plan.rules:
            if rule.leaves_float and layer in rule.layers:
                line += f", set by {rule.place}"
        yield line


def _values(tensor: TensorPlan, document: Document, form: str) -> dict[str, tuple[Any, str]]:
    """Return for each key that has an effect its value, and its place in the file or
    "default".
    """
    values: dict[str, tuple[Any, str]] = {}
    elements = {}
    default_fields = set()
    for field, origin in tensor.origins.items():
        if not tensor.spec.is_scaled and field != "dtype":
            continue
        if origin not in document.paths_at:
            default_fields.add(field)
            continue
        path = document.paths_at[origin]
        values[str(path[-1])] = (document.at(*path), origin)
        # This key decides the number format together with dtype.
        element = (*path[:-1], "mx_element_dtype")
        place = document.place(*element)
        if path[-1] == "dtype" and place:
            elements["mx_element_dtype"] = (document.at(*element), str(place))
    values |= elements
    defaults = _defaults(tensor.spec, default_fields, form)
    if tensor.spec.has_symmetric_scale:
        defaults["symmetric_scale"] = tensor.spec.symmetric_scale
    if is_parameter(tensor.role):
        defaults.pop("is_dynamic", None)
    for key, value in defaults.items():
        values.setdefault(key, (value, "default"))
    return values


def _defaults(spec: QuantizationSpec, fields: Collection[str], form: str) -> dict[str, Any]:
    """Return the keys that would set these fields of a spec, with their values."""
    if form == "hierarchical":
        values = specification(spec)
        field_of_key = FIELDS_OF_KEYS
    else:
        values = {"datatype": spec.dtype, **parameters(spec)}
        field_of_key = FIELDS
    defaults = {}
    for key, value in values.items():
        if field_of_key.get(key, key) in fields and value is not None:
            defaults[key] = value
    return defaults


def _word(role: str, form: str) -> str:
    """Return the file's word for a tensor."""
    if form != "hierarchical":
        return role
    base = base_role(role)
    return KEY_OF[base] + role.removeprefix(base)
