"""Checks what a file of the hierarchical form means: each level merged with the global one,
against the rule book.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from quantizer.config.algorithms import SWITCHES
from quantizer.config.diagnostics import Diagnostic, Place, Severity, related_to
from quantizer.config.document.document import pointer_to
from quantizer.config.forms.dtypes import BLOCK_FORMATS
from quantizer.config.forms.hierarchical import ROLE_OF, Hierarchical
from quantizer.config.forms.hierarchical_spec import METHODS, PARAMETERS, Words
from quantizer.config.model import CAST_ONLY, Fields, QuantizationSpec
from quantizer.config.rules.spec_rules import Conflict, conflicts


def check_hierarchical(levels: Hierarchical) -> Iterator[Diagnostic]:
    """Findings on a file whose structure is sound, or on the sound part of it."""
    scopes = list(_scopes(levels))
    for scope in scopes:
        yield from _broken_rules(levels, scope)
        yield from _observer(scope)
        yield from _elements(levels, scope)
        yield from _read_otherwise(scope)
    yield from _idle(scopes)
    yield from _devices(levels)
    yield from _passes(levels)
    yield from _nothing(levels)


@dataclass(frozen=True)
class _Scope(Words):
    """What holds for one role at one level: what it states over what it inherits."""

    own: Fields
    wider: Words

    def place(self, *keys: str) -> Place | None:
        """Where the first of the keys that is stated stands."""
        return next((self.raw[key].place for key in keys if key in self.raw), None)

    def places(self, named: Iterable[Place | None]) -> list[Place]:
        """The places of values in conflict, those of this level first; of a file's levels, this
        one asks for it.
        """
        stated = {sourced.place for sourced in self.own.values()}
        found = dict.fromkeys(place for place in named if place)
        if not stated.intersection(found) and (dtype := self.own.get("dtype")) and dtype.place:
            return [dtype.place, *found]
        return sorted(found, key=lambda place: place not in stated)

    def finding(
        self, code: str, text: str, *keys: str, help_: str, severity: Severity = "error"
    ) -> Diagnostic:
        """A finding at the first of the keys that is stated."""
        return Diagnostic(code, text, self.place(*keys), severity, help=help_)

    def conflict(
        self,
        code: str,
        text: str,
        named: Iterable[Place | None],
        help_: str,
        severity: Severity = "error",
    ) -> Diagnostic:
        """A finding at the value that this level states, about all of these places."""
        at, *others = self.places(named)
        related = tuple((place, "in conflict with this") for place in others)
        return Diagnostic(code, text, at, severity, help=help_, related=related)


def _scopes(levels: Hierarchical) -> Iterator[_Scope]:
    for level in levels.levels:
        for role, own in level.specs.items():
            yield _Scope(role, level.merged(role).raw, own, level.inherited(role))


def _broken_rules(levels: Hierarchical, scope: _Scope) -> Iterator[Diagnostic]:
    """What is missing is reported at the value that asks for it."""

    def broken(fields: Fields) -> tuple[Conflict, ...]:
        spec, device = QuantizationSpec.of(fields), levels.config.settings.target_device
        return conflicts(spec, scope.role, device, "hierarchical")

    merged = scope.fields()
    reported = {conflict.code for conflict in broken(scope.wider.fields())}
    stated = {sourced.place for sourced in scope.own.values()}
    for found in broken(merged):
        named = [merged[name].place for name in found.fields if name in merged]
        if found.code in reported and stated.isdisjoint(named):
            continue  # it is the wider level's, and reported there
        if found.fields[0] in merged or not levels.is_wrong(found.fields[0]):
            places = named if any(named) else [scope.place("dtype", *scope.raw)]
            yield scope.conflict(found.code, found.message, places, found.help, found.severity)


def _observer(scope: _Scope) -> Iterator[Diagnostic]:
    """An observer for another granularity, or none for a format that needs one."""
    observer, dtype, found = scope.observer, scope.dtype, scope.scheme
    if observer is None or dtype in CAST_ONLY:
        return
    if observer not in METHODS:
        text, help_ = (
            f"{observer} finds no range, and {dtype} needs one",
            "a MinMax observer is the default",
        )
        yield scope.finding("QZ117", text, "observer_cls", help_=f"remove the key: {help_}")
    elif found not in METHODS[observer][1]:
        fitting = [
            name
            for name, (method, schemes) in METHODS.items()
            if found in schemes and method == "maxmin"
        ]
        help_ = (
            f'write "observer_cls": "{fitting[0]}", or "qscheme": "{METHODS[observer][1][0]}"'
        )
        places = [scope.place("observer_cls"), scope.place("qscheme")]
        yield scope.conflict("QZ117", f"{observer} does not support {found}", places, help_)


def _elements(levels: Hierarchical, scope: _Scope) -> Iterator[Diagnostic]:
    key = "mx_element_dtype"
    if scope.dtype == "mx" and key not in scope.raw and not levels.is_wrong(key):
        text = "a key is missing here: mx_element_dtype"
        yield scope.finding(
            "QZ105", text, "dtype", help_='for example "mx_element_dtype": "fp4"'
        )


def _read_otherwise(scope: _Scope) -> Iterator[Diagnostic]:
    """Words that have another meaning here than they seem to have."""
    if scope.dtype in CAST_ONLY:
        return
    if scope.role in PARAMETERS and scope.value("is_dynamic") is True:
        text = "weights and biases are quantized ahead of time, so is_dynamic has no effect"
        yield scope.finding(
            "QZ122", text, "is_dynamic", help_='write "is_dynamic": false', severity="note"
        )
    if scope.scheme == "per_channel" and scope.is_per_token:
        text = (
            "dynamic per_channel is read as per_token: each row (for convolutions, each "
            "sample) has a scale"
        )
        help_ = 'write "qscheme": "per_token"'
        yield scope.finding(
            "QZ122", text, "qscheme", "observer_cls", help_=help_, severity="note"
        )
    if scope.scheme == "per_group" and scope.observer == "PerChannelMinMaxObserver":
        yield from _groups_of_channels(scope)


def _groups_of_channels(scope: _Scope) -> Iterator[Diagnostic]:
    """With PerChannelMinMaxObserver, `ch_axis` is that of the channels which are cut into
    groups.
    """
    axis, instead = scope.value("ch_axis"), '"observer_cls": "PerGroupMinMaxObserver"'
    if not scope.is_channel_axis:
        text = (
            "PerChannelMinMaxObserver divides the channels of weights into groups; it cannot "
            "group activations"
        )
        yield scope.finding("QZ117", text, "observer_cls", help_=f"write {instead}")
    elif axis in (0, 1) and "ch_axis" in scope.own:
        text = (
            f"with PerChannelMinMaxObserver, ch_axis {axis} is the channel axis: groups run "
            f"along axis {1 - axis}"
        )
        yield scope.finding(
            "QZ122",
            text,
            "ch_axis",
            help_=f'write {instead}, "ch_axis": {1 - axis}',
            severity="note",
        )
    elif axis not in (None, 0, 1):
        text = (
            "with PerChannelMinMaxObserver, ch_axis is the channel axis, so it must be 0 or 1"
        )
        help_ = f"write 0 or 1, or {instead} with the axis along which groups run"
        yield scope.finding("QZ104", text, "ch_axis", help_=help_)


def _idle(scopes: list[_Scope]) -> Iterator[Diagnostic]:
    """Keys that no level reads; what is read at one level has an effect."""
    reasons = [(scope, _unread(scope)) for scope in scopes]
    used = {
        sourced.place
        for scope, unread in reasons
        for key, sourced in scope.raw.items()
        if key not in unread
    }
    for scope, unread in reasons:
        for key, reason in unread.items():
            if scope.raw[key].place not in used:
                yield scope.finding(
                    "QZ111",
                    f"{key} has no effect",
                    key,
                    help_=f"remove: {reason}",
                    severity="warning",
                )


def _unread(scope: _Scope) -> dict[str, str]:
    """The stated keys that have no effect in this scope, and why."""
    raw, found, dtype = scope.raw, scope.scheme, scope.dtype
    if dtype in CAST_ONLY:
        needless = [
            key for key in raw if key != "dtype" and raw[key].value != "PlaceholderObserver"
        ]
        return dict.fromkeys(needless, f"{dtype} has no scale")
    percentile = "PerTensorPercentileObserver"
    power_of_two = scope.is_block and scope.value("scale_type") == "pof2"
    other_block = dtype in BLOCK_FORMATS and scope.value("scale_format") in ("float32", "e4m3")
    reads = {
        "ch_axis": (found in ("per_channel", "per_group"), f"{found} reads no axis"),
        "group_size": (found == "per_group", "only per_group reads it"),
        "percentage": (scope.observer == percentile, f"only {percentile} reads it"),
        "symmetric_scale": (
            QuantizationSpec.of(scope.fields()).has_symmetric_scale,
            "only symmetric signed integers with a float scale read it",
        ),
        "mx_element_dtype": (dtype == "mx", "only the dtype mx reads it"),
        "scale_calculation_mode": (
            scope.has_scale_mode,
            f"{dtype} has its own way to find exponents"
            if scope.is_block
            else "only block formats read it",
        ),
        "scale_type": (
            not power_of_two and not scope.has_quantized_scales,
            "a block format's scale is a power of two anyway"
            if power_of_two
            else "scale_format says what scales are",
        ),
        "scale_format": (not other_block, f"the scale of {dtype} is a power of two"),
    }
    return {key: why for key, (read, why) in reads.items() if key in raw and not read}


def _devices(levels: Hierarchical) -> Iterator[Diagnostic]:
    """A layer's target_device that is not the model's."""
    document, device = levels.document, levels.config.settings.target_device
    for level in levels.levels[1:]:
        stated = document.at(*level.pointer).get("target_device")
        if isinstance(stated, str) and stated != device:
            place = document.place(pointer_to(*level.pointer, "target_device"))
            text = f"the model's device is {device}; a layer cannot have another one"
            help_ = "remove the key, and write it in global_quant_config"
            related = related_to(
                levels.config.settings.places.get("target_device"), "the model's device"
            )
            yield Diagnostic("QZ119", text, place, help=help_, related=related)


def _passes(levels: Hierarchical) -> Iterator[Diagnostic]:
    """Passes over the graph run before all algorithms, whatever the order that the file
    says.
    """
    first: tuple[str, Place | None] | None = None
    seen = set[str]()
    for name, place in levels.listed:
        if name not in SWITCHES:
            first = first or (name, place)
        elif first:
            text = (
                f"{name} changes the float network before all algorithms, and here it comes "
                f"after {first[0]}"
            )
            related = related_to(first[1], "comes first here")
            yield Diagnostic(
                "QZ330", text, place, help=f"write {name} before {first[0]}", related=related
            )
        elif name in seen:
            text = f"{name} is listed twice, and nothing is gained by doing it again"
            yield Diagnostic("QZ128", text, place, "warning", help="keep one of the two")
        seen.add(name)


def _nothing(levels: Hierarchical) -> Iterator[Diagnostic]:
    """A file without any spec, right or wrong."""
    place = levels.levels[0].selector.place
    blocks = [levels.document.at(*level.pointer) for level in levels.levels] if place else []
    stated = [
        block[key]
        for block in blocks
        if isinstance(block, dict)
        for key in ROLE_OF
        if key in block
    ]
    if place and all(spec is None for spec in stated):
        text = "no tensor has a specification, so nothing is quantized"
        yield Diagnostic(
            "QZ123", text, place, "warning", help='for example "weight": {"dtype": "int8"}'
        )
