"""`quantizer explain --model M LAYER`: what holds for one layer, in the file's words, and where
the file says it.
"""

from collections.abc import Iterator
from typing import Any

import click

from quantizer.cli import session
from quantizer.cli.options import Options
from quantizer.cli.render import say
from quantizer.cli.traced_model import traced_model
from quantizer.config.document.document import Document, pointer_to
from quantizer.config.document.read import read_document
from quantizer.config.forms.hierarchical import KEY_OF
from quantizer.config.forms.hierarchical_spec import FIELDS_OF_KEYS, specification
from quantizer.config.forms.layered import FIELDS, parameters
from quantizer.config.model import QuantizationSpec, Selector
from quantizer.config.roles import base_role, is_parameter
from quantizer.config.wording import listed
from quantizer.errors import UsageError
from quantizer.plan.match import advice, match
from quantizer.plan.model import Plan, TensorPlan
from quantizer.printable import json_text
from quantizer.report.tables import why_float


def explain_layer(name: str, options: Options) -> None:
    """Print each tensor of a layer, key by key with its value and its place in the file.

    Raises:
        UsageError: no layer has this name.
    """
    with session.notes_on_stderr(options.json):
        read = session.read_config(options.config_file)
        original = traced_model(options).graph
    plan = session.make_plan(read, original, quiet=True)
    selector = Selector("name", name)
    layers = match(selector, plan.graph, original).layers
    if not layers:
        raise UsageError(f"no layer is called {name!r}", help=advice(selector, original))
    if options.json:
        found = {n: {role: t.to_json() for role, t in plan.of_layer(n).items()} for n in layers}
        click.echo(json_text(found))
        return
    document = (
        read_document(options.config_file) if options.config_file else Document.of({}, "")
    )
    for layer in layers:
        for line in _lines(plan, layer, document, read.config.form):
            say(line)


def _lines(plan: Plan, layer: str, document: Document, form: str) -> Iterator[str]:
    """The layer's exact name, then what holds for each of its tensors."""
    yield layer
    for role, tensor in plan.of_layer(layer).items():
        others = [name for name in tensor.members if name != layer]
        yield f"  {_word(role, form)}" + (
            f" (shared with {', '.join(others)})" if others else ""
        )
        for key, (value, origin) in _values(tensor, document, form).items():
            yield f"    {key:<24}{listed([value]):<29}{origin}"
    for role in (role for name, role in plan.off if name == layer):
        yield f"  {_word(role, form)}: float, as {plan.off[layer, role]} says"
    for role in (role for name, role in plan.ungrouped if name == layer):
        yield f"  {_word(role, form)}: float, as {plan.ungrouped[layer, role]}"
    if layer in plan.floats:
        yield f"  {_word('activation', form)}: {why_float(plan.floats[layer])}"


def _values(tensor: TensorPlan, document: Document, form: str) -> dict[str, tuple[Any, str]]:
    """Each key that decides something, its value, and its place in the file or "default"."""
    read = {
        field: origin
        for field, origin in tensor.origins.items()
        if tensor.spec.is_scaled or field == "dtype"
    }
    paths = {
        origin: document.paths_at[origin]
        for origin in read.values()
        if origin in document.paths_at
    }
    found = {str(path[-1]): (document.at(*path), origin) for origin, path in paths.items()}
    for path in list(paths.values()):
        # It decides the number format together with dtype
        element = (*path[:-1], "mx_element_dtype")
        if path[-1] == "dtype" and pointer_to(*element) in document:
            found["mx_element_dtype"] = (
                document.at(*element),
                str(document.place(pointer_to(*element))),
            )
    fields = frozenset(field for field, origin in read.items() if origin not in paths)
    idle = {"is_dynamic"} if is_parameter(tensor.role) else set()
    rule = (
        {"symmetric_scale": tensor.spec.symmetric_scale}
        if tensor.spec.has_symmetric_scale
        else {}
    )
    defaults = _defaults(tensor.spec, fields, form) | rule
    return found | {
        key: (value, "default") for key, value in defaults.items() if key not in {*found, *idle}
    }


def _defaults(spec: QuantizationSpec, fields: frozenset[str], form: str) -> dict[str, Any]:
    """The keys that would decide these fields of the spec as they are."""
    words = (
        specification(spec)
        if form == "hierarchical"
        else {"datatype": spec.dtype, **parameters(spec)}
    )
    decided = FIELDS_OF_KEYS if form == "hierarchical" else FIELDS
    return {
        word: value
        for word, value in words.items()
        if decided.get(word, word) in fields and value is not None
    }


def _word(role: str, form: str) -> str:
    """What the file calls a tensor."""
    base = base_role(role)
    return KEY_OF[base] + role.removeprefix(base) if form == "hierarchical" else role
