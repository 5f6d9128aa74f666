"""Checks what a file of the layered form means: the rules on every merged spec, and parameters
that nothing reads.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from quantizer.config.diagnostics import Diagnostic, Place, related_to
from quantizer.config.document.document import pointer_to
from quantizer.config.forms.layered import OPTIONAL, Layered, Level
from quantizer.config.model import Fields, QuantizationSpec, Role, Settings, Sourced
from quantizer.config.rules.spec_rules import Conflict, conflicts

DPU_ONLY = frozenset({"change_concat_input_fix", "change_pool_input_fix"})
"""Settings about fix positions, which other devices do not have."""

LEAST_PERCENTAGE = 50
"""A smaller percentage is most likely a slip."""


def check_layered(layered: Layered) -> Iterator[Diagnostic]:
    """Findings on a file whose structure is sound, or on the sound part of it."""
    scopes, settings = list(_scopes(layered)), layered.config.settings
    device = settings.places.get("target_device")
    for scope in scopes:
        found = conflicts(scope.spec, scope.role, settings.target_device if device else "")
        yield from filter(
            None, (_conflict(conflict, scope.merged, device) for conflict in found)
        )
        yield from filter(
            None,
            (
                refused_under_float(block, dtype)
                for block, dtype in inherits_float(scope.blocks)
            ),
        )
        yield from _small_percentage(scope)
    yield from _dpu_only(settings)
    yield from _unused(layered, scopes)
    for level in (layered.top, *layered.layers):
        yield from _overall_per_channel(level)
        yield from _unlisted(layered, level)
    yield from _repeated(layered.layers)


@dataclass(frozen=True)
class _Scope:
    """What the file says about one tensor role of all layers, or of the layers of one entry:
    blocks, widest first.
    """

    role: Role
    blocks: tuple[Fields, ...]

    @cached_property
    def merged(self) -> dict[str, Sourced]:
        return {name: sourced for block in self.blocks for name, sourced in block.items()}

    @cached_property
    def spec(self) -> QuantizationSpec:
        return QuantizationSpec.of(self.merged)

    def reads(self, name: str) -> bool:
        """Whether the spec reads a field."""
        optional = {
            "percentage": self.spec.method == "percentile",
            "symmetric_scale": self.spec.has_symmetric_scale,
        }
        return name == "dtype" or (self.spec.dtype == "int" and optional.get(name, True))


def _scopes(layered: Layered) -> Iterator[_Scope]:
    top = layered.top
    yield from (_Scope(role, top.blocks(role)) for role in top.quantized)
    for level in layered.layers:
        yield from (
            _Scope(role, (*top.blocks(role), *level.blocks(role))) for role in level.quantized
        )


def _conflict(
    conflict: Conflict, merged: Mapping[str, Sourced], device: Place | None
) -> Diagnostic | None:
    """An error at the value written last, a warning at the idle value; None if one is missing,
    which is reported.
    """
    named = [merged[name].place for name in conflict.fields if name in merged]
    places = [place for place in named if place]
    if len(places) < len(conflict.fields):
        return None
    idle = conflict.severity == "warning"
    at, *others = places if idle else sorted(places, reverse=True)
    remark = "because of this" if idle else "in conflict with this"
    related = (*((place, remark) for place in sorted(others)),)
    related += related_to(device if conflict.on_device else None, "for this device")
    return Diagnostic(
        conflict.code,
        conflict.message,
        at,
        conflict.severity,
        help=conflict.help,
        related=related,
    )


def inherits_float(blocks: Sequence[Fields]) -> Iterator[tuple[Fields, Sourced]]:
    """The blocks that inherit a floating-point datatype from a wider one, and that datatype;
    the widest comes first.
    """
    stating = [at for at, block in enumerate(blocks) if "dtype" in block]
    if stating and (dtype := blocks[stating[-1]]["dtype"]).value != "int":
        yield from ((block, dtype) for block in blocks[stating[-1] + 1 :])


def refused_under_float(block: Fields, dtype: Sourced) -> Diagnostic | None:
    """The finding for a block's parameters that an inherited floating-point datatype makes
    dead, if it has any.
    """
    place = min((sourced.place for sourced in block.values() if sourced.place), default=None)
    if not place or not dtype.place:
        return None
    text, help_ = (
        f"these parameters would have no effect: the datatype is {dtype.value}",
        'write "datatype": "int"',
    )
    related = related_to(dtype.place, "inherited from here")
    return Diagnostic(
        "QZ306", text, place, help=f"{help_} next to them, or remove them", related=related
    )


def _small_percentage(scope: _Scope) -> Iterator[Diagnostic]:
    """A percentage that clips more than half of the values: most likely a fraction was
    meant.
    """
    found, percentage = scope.merged.get("percentage"), scope.spec.percentage
    if found and scope.reads("percentage") and percentage < LEAST_PERCENTAGE:
        meant = LEAST_PERCENTAGE <= percentage * 100 <= 100
        help_ = (
            f'did you mean "percentage": {percentage * 100:.10g}?'
            if meant
            else 'for example "percentage": 99.9'
        )
        text = f"this keeps {percentage:.10g} % of the values and clips the rest"
        yield Diagnostic("QZ113", text, found.place, "warning", help=help_)


def _dpu_only(settings: Settings) -> Iterator[Diagnostic]:
    device = settings.places.get("target_device")
    if device is None or settings.target_device == "DPU":
        return
    for name, place in settings.places.items():
        if name in DPU_ONLY and getattr(settings, name):
            text, help_ = (
                f"{name} has no effect: only the DPU has fix positions",
                "remove it, or set it to false",
            )
            yield Diagnostic(
                "QZ115",
                text,
                place,
                "warning",
                help=help_,
                related=related_to(device, "for this device"),
            )


def _unused(layered: Layered, scopes: list[_Scope]) -> Iterator[Diagnostic]:
    """Parameters that no spec reads, one finding per block; an overall block has to be
    complete, read or not.
    """
    refused = {
        found.place
        for scope in scopes
        for block, _ in inherits_float(scope.blocks)
        for found in block.values()
    }
    read = (
        sourced
        for scope in scopes
        for name, sourced in scope.merged.items()
        if scope.reads(name)
    )
    used = {sourced.place for sourced in read} | refused
    for level in (layered.top, *layered.layers):
        blocks = [(level.overall["weights"], True)]
        blocks += [
            (level.tensor[role], False) for role in level.tensor if role in level.quantized
        ]
        for block, complete in blocks:
            floating = "dtype" in block and block["dtype"].value != "int"
            idle = [
                (name, sourced.place)
                for name, sourced in block.items()
                if sourced.place
                and sourced.place not in used
                and (name in OPTIONAL or not complete or (floating and name != "dtype"))
            ]
            yield from _idle([place for _, place in idle], floating)


def _idle(places: list[Place], floating: bool) -> Iterator[Diagnostic]:
    if places:
        words = [place.pointer.rpartition("/")[2] for place in places]
        message = f"{', '.join(words)} {'has' if len(words) == 1 else 'have'} no effect"
        only = ["a floating-point datatype reads no other parameter"]
        reasons = only if floating else [OPTIONAL[word] for word in words]
        yield Diagnostic(
            "QZ111", message, min(places), "warning", help=f"remove: {'; '.join(reasons)}"
        )


def _overall_per_channel(level: Level) -> Iterator[Diagnostic]:
    qscheme = level.overall["weights"].get("qscheme")
    others = [role for role in level.quantized if role != "weights"]
    if qscheme and qscheme.value == "per_channel" and others:
        text = f"per_channel applies to weights only; {', '.join(others)} stay per tensor"
        help_ = 'write "weights": {"per_channel": true} in tensor_quantize_config'
        yield Diagnostic("QZ112", text, qscheme.place, "warning", help=help_)


def _unlisted(layered: Layered, level: Level) -> Iterator[Diagnostic]:
    """Tensor blocks for roles that the level does not quantize; at the top a layer entry may
    still quantize them.
    """
    listing = [level] if level.pointer else [level, *layered.layers]
    for role in level.tensor:
        if not any(role in each.quantized for each in listing):
            place = layered.document.place(
                pointer_to(*level.pointer, "tensor_quantize_config", role), key=True
            )
            text = f"{role} is not quantized, so nothing reads these parameters"
            help_ = f'add "{role}" to quantizable_data_type, or remove the block'
            related = related_to(level.roles_place, "not listed here")
            yield Diagnostic("QZ108", text, place, help=help_, related=related)


def _repeated(levels: Iterable[Level]) -> Iterator[Diagnostic]:
    first: dict[tuple[str, str], Level] = {}
    for level in levels:
        selector = level.selector
        earlier = first.setdefault((selector.kind, selector.text), level)
        if earlier is not level and selector.place and earlier.selector.place:
            text = (
                f'this is a second entry for "{selector.text[:60]}", which overrides the '
                "first, key by key"
            )
            related = related_to(earlier.selector.place, "first here")
            yield Diagnostic(
                "QZ109",
                text,
                selector.place,
                "warning",
                help="merge the two entries",
                related=related,
            )
