"""Check a file of the layered form: the rules on every merged spec, and parameters that nothing
reads.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from quantizer.config.diagnostics import Diagnostic, Diagnostics, Place, Sourced, related_to
from quantizer.config.document.document import Document
from quantizer.config.forms.layered import OPTIONAL, LayeredLevel
from quantizer.config.model import Fields, QuantizationSpec, ResolvedConfig, Role, Settings
from quantizer.config.rules.spec_rules import Conflict, conflicts

_DPU_ONLY = frozenset({"change_concat_input_fix", "change_pool_input_fix"})
"""Settings about fix positions, which other devices do not have."""

_LEAST_PERCENTAGE = 50
"""A smaller percentage is most likely a slip."""


def check_layered(
    file: Document, config: ResolvedConfig, levels: Sequence[LayeredLevel]
) -> Diagnostics:
    """Yield the findings on the valid part of a file, whose config and levels these are."""
    top, *layers = levels
    scopes = [_Scope(role, top.blocks(role)) for role in top.quantized]
    for level in layers:
        for role in level.quantized:
            scopes.append(_Scope(role, (*top.blocks(role), *level.blocks(role))))
    settings = config.settings
    device_place = settings.places.get("target_device")
    device = settings.target_device if device_place else ""
    for scope in scopes:
        for conflict in conflicts(scope.spec, scope.role, device):
            yield from _conflict(conflict, scope.merged, device_place)
        yield from refused_under_float(scope.blocks)
        yield from _small_percentage(scope)
    yield from _of_other_devices(settings)
    yield from _unused(levels, scopes)
    for level in levels:
        # The DPU refuses it for weights, too
        if device != "DPU":
            yield from _overall_per_channel(level)
        yield from _unlisted(file, level, levels if level is top else [level])
    yield from _repeated(layers)


@dataclass(frozen=True)
class _Scope:
    """A tensor role of all layers, or of the layers of one entry, and the blocks that the file
    has for it, widest first.
    """

    role: Role
    blocks: tuple[Fields, ...]

    @cached_property
    def merged(self) -> dict[str, Sourced]:
        """Return the fields that apply. Those of narrower blocks replace others."""
        merged: dict[str, Sourced] = {}
        for block in self.blocks:
            merged |= block
        return merged

    @cached_property
    def spec(self) -> QuantizationSpec:
        """Return the spec that the fields make."""
        return QuantizationSpec.of(self.merged)

    def reads(self, name: str) -> bool:
        """Return whether the spec reads a field."""
        if name == "dtype":
            return True
        if self.spec.dtype != "int":
            return False
        if name == "percentage":
            return self.spec.method == "percentile"
        if name == "symmetric_scale":
            return self.spec.has_symmetric_scale
        return True


def _conflict(
    conflict: Conflict, merged: Mapping[str, Sourced], device: Place | None
) -> Diagnostics:
    """Yield an error at the value written last, or a warning at the idle value; nothing if a
    value is missing, which is reported.
    """
    places: list[Place] = []
    for name in conflict.fields:
        place = merged[name].place if name in merged else None
        if place is None:
            return
        places.append(place)
    if conflict.severity == "warning":
        idle, *others = places
        yield conflict.at([idle, *sorted(others)], remark="because of this")
        return
    *others, last = sorted(places)
    finding = conflict.at([last, *others])
    if conflict.on_device:
        related = (*finding.related, *related_to(device, "for this device"))
        finding = replace(finding, related=related)
    yield finding


def _inheriting_float(blocks: Sequence[Fields]) -> tuple[Sequence[Fields], Sourced]:
    """Return the blocks that inherit a floating-point datatype from a wider one, the widest
    first, and that datatype.
    """
    stating = [index for index, block in enumerate(blocks) if "dtype" in block]
    dtype = blocks[stating[-1]]["dtype"] if stating else Sourced("int")
    return () if dtype.value == "int" else blocks[stating[-1] + 1 :], dtype


def refused_under_float(blocks: Sequence[Fields]) -> Diagnostics:
    """Yield a finding for each block with parameters that an inherited floating-point datatype
    makes dead; the widest block is the first.
    """
    inheriting, dtype = _inheriting_float(blocks)
    for block in inheriting:
        places = [sourced.place for sourced in block.values() if sourced.place]
        if places and dtype.place:
            yield Diagnostic(
                "QZ306",
                f"these parameters would have no effect: the datatype is {dtype.value}",
                min(places),
                help='write "datatype": "int" next to them, or remove them',
                related=related_to(dtype.place, "inherited from here"),
            )


def _small_percentage(scope: _Scope) -> Diagnostics:
    """Warn of a percentage that clips more than half of the values: most likely a fraction was
    meant.
    """
    stated = scope.merged.get("percentage")
    percentage = scope.spec.percentage
    if not stated or not scope.reads("percentage") or percentage >= _LEAST_PERCENTAGE:
        return
    help_ = 'for example "percentage": 99.9'
    if _LEAST_PERCENTAGE <= percentage * 100 <= 100:
        help_ = f'did you mean "percentage": {percentage * 100:.10g}?'
    yield Diagnostic(
        "QZ113",
        f"this keeps {percentage:.10g} % of the values and clips the rest",
        stated.place,
        "warning",
        help=help_,
    )


def _of_other_devices(settings: Settings) -> Diagnostics:
    """Yield the settings that are not for the device of the file."""
    device = settings.places.get("target_device")
    if device is None:
        return
    if settings.target_device == "DPU":
        if settings.integer_activations:
            yield Diagnostic(
                "QZ211",
                "integer_activations is not for the DPU, which computes activation functions "
                "in its own way",
                settings.places["integer_activations"],
                help="remove it, or write another target_device",
                related=related_to(device, "for this device"),
            )
        return
    for name, place in settings.places.items():
        if name in _DPU_ONLY and getattr(settings, name):
            yield Diagnostic(
                "QZ115",
                f"{name} has no effect: only the DPU has fix positions",
                place,
                "warning",
                help="remove it, or set it to false",
                related=related_to(device, "for this device"),
            )


def _unused(levels: Sequence[LayeredLevel], scopes: Sequence[_Scope]) -> Diagnostics:
    """Yield a finding for each block with parameters that no spec reads. An overall block has
    to be complete, read or not.
    """
    used: set[Place | None] = set()
    for scope in scopes:
        for name, sourced in scope.merged.items():
            if scope.reads(name):
                used.add(sourced.place)
        # These are refused
        inheriting, _ = _inheriting_float(scope.blocks)
        for block in inheriting:
            used.update(sourced.place for sourced in block.values())
    for level in levels:
        yield from _unused_in(level.overall["weights"], used, is_complete=True)
        for role, block in level.tensor.items():
            if role in level.quantized:
                yield from _unused_in(block, used, is_complete=False)


def _unused_in(block: Fields, used: set[Place | None], *, is_complete: bool) -> Diagnostics:
    is_float = "dtype" in block and block["dtype"].value != "int"
    places: list[Place] = []
    for name, sourced in block.items():
        may_lack = name in OPTIONAL or not is_complete or (is_float and name != "dtype")
        if may_lack and sourced.place and sourced.place not in used:
            places.append(sourced.place)
    if not places:
        return
    words = [place.pointer.rpartition("/")[2] for place in places]
    verb = "has" if len(words) == 1 else "have"
    message = f"{', '.join(words)} {verb} no effect"
    reasons = "a floating-point datatype reads no other parameter"
    if not is_float:
        reasons = "; ".join(OPTIONAL[word] for word in words)
    yield Diagnostic("QZ111", message, min(places), "warning", help=f"remove: {reasons}")


def _overall_per_channel(level: LayeredLevel) -> Diagnostics:
    qscheme = level.overall["weights"].get("qscheme")
    others = [role for role in level.quantized if role != "weights"]
    if qscheme and qscheme.value == "per_channel" and others:
        yield Diagnostic(
            "QZ112",
            f"per_channel applies to weights only; {', '.join(others)} stay per tensor",
            qscheme.place,
            "warning",
            help='write "weights": {"per_channel": true} in tensor_quantize_config',
        )


def _unlisted(
    file: Document, level: LayeredLevel, readers: Iterable[LayeredLevel]
) -> Diagnostics:
    """Yield the tensor blocks of a level for roles that none of its readers quantizes: itself,
    and those of the top any layer entry.
    """
    quantized = {role for reader in readers for role in reader.quantized}
    for role in level.tensor:
        if role not in quantized:
            yield Diagnostic(
                "QZ108",
                f"{role} is not quantized, so nothing reads these parameters",
                file.place(*level.path, "tensor_quantize_config", role, key=True),
                help=f'add "{role}" to quantizable_data_type, or remove the block',
                related=related_to(level.roles_place, "not listed here"),
            )


def _repeated(levels: Iterable[LayeredLevel]) -> Diagnostics:
    """Warn of two entries with the same selector."""
    first: dict[tuple[str, str], Place | None] = {}
    for level in levels:
        selector = level.selector
        key = (selector.kind, selector.text)
        earlier = first.get(key)
        first.setdefault(key, selector.place)
        if selector.place and earlier:
            yield Diagnostic(
                "QZ109",
                f'this is a second entry for "{selector.text[:60]}", which overrides the '
                "first, key by key",
                selector.place,
                "warning",
                help="merge the two entries",
                related=related_to(earlier, "first here"),
            )
