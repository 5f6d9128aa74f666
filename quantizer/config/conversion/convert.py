"""A config of either file form as a document of the other form, and what that form has no words
for.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from quantizer.config.conversion.findings import WEIGHTED, Converted, inexpressible, once
from quantizer.config.conversion.to_hierarchical import to_hierarchical
from quantizer.config.conversion.to_layered import to_layered
from quantizer.config.diagnostics import Diagnostic, Place, by_place
from quantizer.config.document.document import Document
from quantizer.config.forms.form import Form
from quantizer.config.load import check_document
from quantizer.config.model import Config

__all__ = ["WEIGHTED", "WRITERS", "Converted", "converted"]

WRITERS: Mapping[Form, Callable[[Config], Converted]] = {
    "layered": to_layered,
    "hierarchical": to_hierarchical,
}
"""What writes each form."""


def converted(config: Config, form: Form) -> Converted:
    """The document of `form` that says the same, checked as any file of that form is; errors
    say why there is none.
    """
    found = WRITERS[form](config)
    is_written = all(finding.severity != "error" for finding in found.findings)
    refused = _refused(config, form, found) if is_written else ()
    return replace(found, findings=by_place(once((*found.findings, *refused))))


def _refused(config: Config, form: Form, found: Converted) -> Iterator[Diagnostic]:
    """What a file of the form with this document would be refused for, at the places of the
    source.
    """
    for wrong in check_document(Document.of(found.document, config.source)).diagnostics:
        if wrong.severity == "error":
            text = f"the {form} form would refuse it, {wrong.code}: {wrong.message}"
            yield inexpressible(
                text, _origin(config, found, wrong.place), wrong.help or "change it"
            )


def _origin(config: Config, found: Converted, place: Place | None) -> Place | None:
    """Where in the source that comes from which stands at a place of the document; the first
    rule, if nothing says.
    """
    pointer = place.pointer if place else ""
    inside = [
        origin
        for part, origin in found.origins.items()
        if pointer == part or pointer.startswith(f"{part}/")
    ]
    places = [*inside, *(rule.selector.place or rule.roles_place for rule in config.rules)]
    return next((each for each in places if each), None)
