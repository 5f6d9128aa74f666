"""Convert a config of either file form to a document of the other form."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from quantizer.commands.convert.findings import (
    WEIGHTED,
    ConvertedDocument,
    inexpressible,
    one_per_reason,
)
from quantizer.commands.convert.to_hierarchical import to_hierarchical
from quantizer.commands.convert.to_layered import to_layered
from quantizer.config.diagnostics import Diagnostics, Place, by_place
from quantizer.config.document.document import Document
from quantizer.config.forms.form import Form
from quantizer.config.load import check_document
from quantizer.config.model import Config

__all__ = ["WEIGHTED", "WRITERS", "ConvertedDocument", "convert_config"]

WRITERS: Mapping[Form, Callable[[Config], ConvertedDocument]] = {
    "layered": to_layered,
    "hierarchical": to_hierarchical,
}
"""The function that writes each form."""


def convert_config(config: Config, form: Form) -> ConvertedDocument:
    """Return the document of `form` that means the same, checked as any file of that form is.
    Errors among its findings are what it cannot express.
    """
    conversion = WRITERS[form](config)
    findings = [*conversion.findings]
    if all(finding.severity != "error" for finding in findings):
        findings += _refused(config, form, conversion)
    return replace(conversion, findings=by_place(one_per_reason(findings)))


def _refused(config: Config, form: Form, conversion: ConvertedDocument) -> Diagnostics:
    """Yield the errors of a file of the form with this document, at the places of the
    source.
    """
    document = Document.of(conversion.document, config.source)
    for error in check_document(document).diagnostics:
        if error.severity == "error":
            yield inexpressible(
                f"the {form} form would refuse it, {error.code}: {error.message}",
                _origin(config, conversion, error.place),
                error.help or "change it",
            )


def _origin(config: Config, conversion: ConvertedDocument, place: Place | None) -> Place | None:
    """Return where in the source the value at a place of the document comes from; the first
    rule, if that is not known.
    """
    pointer = place.pointer if place else ""
    origins: list[Place | None] = []
    for part, origin in conversion.origins.items():
        if pointer == part or pointer.startswith(f"{part}/"):
            origins.append(origin)
    for rule in config.rules:
        origins.append(rule.selector.place or rule.roles_place)
    return next((origin for origin in origins if origin), None)
