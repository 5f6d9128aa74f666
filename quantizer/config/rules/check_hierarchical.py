"""Check a file of the hierarchical form: the rules on each level merged with the global one,
parameters that nothing reads, and what it says of the key-value cache.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from quantizer.config.algorithms import SWITCHES
from quantizer.config.diagnostics import Diagnostic, Diagnostics, Place, Severity, related_to
from quantizer.config.document.document import pointer_to
from quantizer.config.forms.dtypes import BLOCK_FORMATS, INTEGERS
from quantizer.config.forms.form import CACHE_BLOCK
from quantizer.config.forms.hierarchical import Hierarchical
from quantizer.config.forms.hierarchical_spec import OBSERVER_METHODS, PARAMETERS, Words
from quantizer.config.model import CAST_ONLY, Fields, QuantizationSpec
from quantizer.config.roles import ROLE_OF
from quantizer.config.rules.spec_rules import Conflict, conflicts
from quantizer.config.wording import quoted
from quantizer.tables import RANGE_METHODS, SEARCHED

_PERCENTILE = "PerTensorPercentileObserver"
_CACHED_LAYERS = "kv_cache_group"
"""The key of the list of layers whose outputs are cached."""


def check_hierarchical(levels: Hierarchical) -> Diagnostics:
    """Yield the findings on the valid part of a file."""
    scopes = list(_scopes(levels))
    for scope in scopes:
        yield from _broken_rules(levels, scope)
        yield from _observer(scope)
        yield from _elements(levels, scope)
        yield from _blocks(scope)
        yield from _read_otherwise(scope)
    yield from _idle(scopes)
    yield from _devices(levels)
    yield from _passes(levels)
    yield from _nothing(levels)
    yield from _heads_before_rotation(levels)
    yield from _unspecified_cache(levels)


@dataclass(frozen=True)
class _Scope(Words):
    """A role at one level: what the level states over what it inherits."""

    stated: Fields
    wider: Words

    def place(self, *keys: str) -> Place | None:
        """Return the place of the first of the keys that is stated."""
        return next((self.raw[key].place for key in keys if key in self.raw), None)

    def places(self, causes: Iterable[Place | None]) -> list[Place]:
        """Return the places of values in conflict, those of this level first.

        Where all are at wider levels, the dtype of this level comes first: it asks for them.
        """
        stated = {sourced.place for sourced in self.stated.values()}
        places = list(dict.fromkeys(place for place in causes if place))
        if stated.isdisjoint(places) and "dtype" in self.stated:
            dtype_place = self.stated["dtype"].place
            if dtype_place:
                return [dtype_place, *places]
        return sorted(places, key=lambda place: place not in stated)

    def finding(
        self, code: str, text: str, *keys: str, help_: str, severity: Severity = "error"
    ) -> Diagnostic:
        """Return a finding at the first of the keys that is stated."""
        return Diagnostic(code, text, self.place(*keys), severity, help=help_)


def _scopes(levels: Hierarchical) -> Iterator[_Scope]:
    for level in levels.levels:
        for role, stated in level.specs.items():
            yield _Scope(role, level.merged(role).raw, stated, level.inherited(role))


def _broken_rules(levels: Hierarchical, scope: _Scope) -> Diagnostics:
    """Yield the rules that a scope breaks, at the value that asks for a missing one."""
    merged = scope.fields()
    wider_codes = {rule.code for rule in _conflicts(levels, scope, scope.wider.fields())}
    stated = {sourced.place for sourced in scope.stated.values()}
    for rule in _conflicts(levels, scope, merged):
        places = [merged[name].place for name in rule.fields if name in merged]
        # The wider level breaks it by itself, and it is reported there
        if rule.code in wider_codes and stated.isdisjoint(places):
            continue
        subject = rule.fields[0]
        if subject not in merged and levels.is_wrong(subject):
            continue
        if not any(places):
            places = [scope.place("dtype", *scope.raw)]
        yield rule.at(scope.places(places))


def _conflicts(levels: Hierarchical, scope: _Scope, fields: Fields) -> tuple[Conflict, ...]:
    device = levels.config.settings.target_device
    return conflicts(QuantizationSpec.of(fields), scope.role, device, "hierarchical")


def _observer(scope: _Scope) -> Diagnostics:
    """Yield an observer for another granularity, or none for a format that needs one."""
    observer = scope.observer
    if observer is None or scope.dtype in CAST_ONLY:
        return
    if observer not in OBSERVER_METHODS:
        yield scope.finding(
            "QZ117",
            f"{observer} finds no range, and {scope.dtype} needs one",
            "observer_cls",
            help_="remove the key: a MinMax observer is the default",
        )
        return
    scheme = scope.scheme
    method, supported = OBSERVER_METHODS[observer]
    if RANGE_METHODS[method].integers_only and scope.dtype not in INTEGERS:
        yield scope.finding(
            "QZ117",
            f"{observer} needs integers, and {scope.dtype} is none",
            "observer_cls",
            help_="remove the key: a MinMax observer is the default",
        )
    if scheme in supported:
        return
    fitting = next(
        name
        for name, (method, schemes) in OBSERVER_METHODS.items()
        if scheme in schemes and method == "maxmin"
    )
    place, *others = scope.places([scope.place("observer_cls"), scope.place("qscheme")])
    yield Diagnostic(
        "QZ117",
        f"{observer} does not support {scheme}",
        place,
        help=f'write "observer_cls": "{fitting}", or "qscheme": "{supported[0]}"',
        related=tuple((other, "in conflict with this") for other in others),
    )


def _elements(levels: Hierarchical, scope: _Scope) -> Diagnostics:
    """Yield an mx dtype without the format of its elements."""
    key = "mx_element_dtype"
    if scope.dtype == "mx" and key not in scope.raw and not levels.is_wrong(key):
        yield scope.finding(
            "QZ105",
            f"a key is missing here: {key}",
            "dtype",
            help_=f'for example "{key}": "fp4"',
        )


def _blocks(scope: _Scope) -> Diagnostics:
    """Yield blocks with other numbers of rows than of columns."""
    sides = scope.value("block_size")
    if scope.scheme != "per_block" or sides is None or sides[0] == sides[1]:
        return
    yield scope.finding(
        "QZ104",
        f"blocks are squares, and block_size has {sides[0]} rows and {sides[1]} columns",
        "block_size",
        help_='write for example "block_size": [128, 128]; per_group has scales of one row',
    )


def _read_otherwise(scope: _Scope) -> Diagnostics:
    """Yield words that have another meaning here than they seem to have."""
    if scope.dtype in CAST_ONLY:
        return
    if scope.role in PARAMETERS and scope.value("is_dynamic") is True:
        yield scope.finding(
            "QZ122",
            "weights and biases are quantized ahead of time, so is_dynamic has no effect",
            "is_dynamic",
            help_='write "is_dynamic": false',
            severity="note",
        )
    if scope.scheme == "per_channel" and scope.is_per_token:
        keys = ("qscheme", "observer_cls")
        yield scope.finding(
            "QZ122",
            "dynamic per_channel is read as per_token: each row (for convolutions, each "
            "sample) has a scale",
            *keys,
            help_='write "qscheme": "per_token"',
            severity="note",
        )
    if scope.scheme == "per_group" and scope.observer == "PerChannelMinMaxObserver":
        yield from _groups_of_channels(scope)


def _groups_of_channels(scope: _Scope) -> Diagnostics:
    """Yield a finding if PerChannelMinMaxObserver is set for groups: its `ch_axis` is the axis
    of channels in groups.
    """
    axis = scope.value("ch_axis")
    instead = '"observer_cls": "PerGroupMinMaxObserver"'
    if not scope.is_channel_axis:
        yield scope.finding(
            "QZ117",
            "PerChannelMinMaxObserver divides the channels of weights into groups; it cannot "
            "group activations",
            "observer_cls",
            help_=f"write {instead}",
        )
    elif axis in (0, 1) and "ch_axis" in scope.stated:
        yield scope.finding(
            "QZ122",
            f"with PerChannelMinMaxObserver, ch_axis {axis} is the channel axis: groups run "
            f"along axis {1 - axis}",
            "ch_axis",
            help_=f'write {instead}, "ch_axis": {1 - axis}',
            severity="note",
        )
    elif axis not in (None, 0, 1):
        yield scope.finding(
            "QZ104",
            "with PerChannelMinMaxObserver, ch_axis is the channel axis, so it must be 0 or 1",
            "ch_axis",
            help_=f"write 0 or 1, or {instead} with the axis along which groups run",
        )


def _idle(scopes: list[_Scope]) -> Diagnostics:
    """Yield keys that no level reads; what is read at one level has an effect."""
    reasons = [_unread(scope) for scope in scopes]
    used: set[Place | None] = set()
    for scope, unread in zip(scopes, reasons, strict=True):
        for key, sourced in scope.raw.items():
            if key not in unread:
                used.add(sourced.place)
    for scope, unread in zip(scopes, reasons, strict=True):
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
    """Return the stated keys that have no effect in this scope, and why."""
    dtype = scope.dtype
    unread: dict[str, str] = {}
    if dtype in CAST_ONLY:
        for key, sourced in scope.raw.items():
            if key != "dtype" and sourced.value != "PlaceholderObserver":
                unread[key] = f"{dtype} has no scale"
        return unread
    scheme = scope.scheme
    scale_format = scope.value("scale_format")
    if scheme not in ("per_channel", "per_group"):
        unread["ch_axis"] = f"{scheme} reads no axis"
    if scheme != "per_group":
        unread["group_size"] = "only per_group reads it"
    if scheme != "per_block":
        unread["block_size"] = "only per_block reads it"
    if scope.observer != _PERCENTILE:
        unread["percentage"] = f"only {_PERCENTILE} reads it"
    if not QuantizationSpec.of(scope.fields()).has_symmetric_scale:
        reason = "only symmetric signed integers with a float scale read it"
        unread["symmetric_scale"] = reason
    if dtype != "mx":
        unread["mx_element_dtype"] = "only the dtype mx reads it"
    if not scope.has_scale_mode:
        reason = "only block formats read it"
        if scope.is_block:
            reason = f"{dtype} has its own way to find exponents"
        unread["scale_calculation_mode"] = reason
    if dtype in SEARCHED:
        unread["scale_type"] = f"{dtype} has scales of its own"
        unread["scale_format"] = f"{dtype} has scales of its own"
        return {key: reason for key, reason in unread.items() if key in scope.raw}
    if scope.is_block and scope.value("scale_type") == "pof2":
        unread["scale_type"] = "a block format's scale is a power of two anyway"
    elif scope.has_quantized_scales:
        unread["scale_type"] = "scale_format says what scales are"
    if dtype in BLOCK_FORMATS and scale_format in ("float32", "e4m3"):
        unread["scale_format"] = f"the scale of {dtype} is a power of two"
    return {key: reason for key, reason in unread.items() if key in scope.raw}


def _devices(levels: Hierarchical) -> Diagnostics:
    """Yield each layer's target_device that is not the model's."""
    document = levels.document
    settings = levels.config.settings
    device = settings.target_device
    pointers = dict.fromkeys(level.pointer for level in levels.levels[1:])
    for pointer in pointers:
        stated = document.at(*pointer).get("target_device")
        if not isinstance(stated, str) or stated == device:
            continue
        yield Diagnostic(
            "QZ119",
            f"the model's device is {device}; a layer cannot have another one",
            document.place(pointer_to(*pointer, "target_device")),
            help="remove the key, and write it in global_quant_config",
            related=related_to(settings.places.get("target_device"), "the model's device"),
        )


def _passes(levels: Hierarchical) -> Diagnostics:
    """Yield passes over the graph that are listed after an algorithm, as they run before all,
    or twice.
    """
    algorithm: str | None = None
    algorithm_place: Place | None = None
    seen: set[str] = set()
    for name, place in levels.listed:
        if name not in SWITCHES:
            if algorithm is None:
                algorithm = name
                algorithm_place = place
        elif algorithm is not None:
            yield Diagnostic(
                "QZ330",
                f"{name} changes the float network before all algorithms, and here it comes "
                f"after {algorithm}",
                place,
                help=f"write {name} before {algorithm}",
                related=related_to(algorithm_place, "comes first here"),
            )
        elif name in seen:
            yield Diagnostic(
                "QZ128",
                f"{name} is listed twice, and nothing is gained by doing it again",
                place,
                "warning",
                help="keep one of the two",
            )
        seen.add(name)


def _nothing(levels: Hierarchical) -> Diagnostics:
    """Warn of a file without any spec, right or wrong."""
    place = levels.levels[0].selector.place
    if not place:
        return
    for level in levels.levels:
        block = levels.document.at(*level.pointer)
        if not isinstance(block, dict):
            continue
        for key in ROLE_OF:
            if block.get(key) is not None:
                return
    yield Diagnostic(
        "QZ123",
        "no tensor has a specification, so nothing is quantized",
        place,
        "warning",
        help='for example "weight": {"dtype": "int8"}',
    )


def _heads_before_rotation(levels: Hierarchical) -> Diagnostics:
    """Yield each spec with a scale for each head, if it is about the outputs of layers."""
    for level in levels.levels:
        if level.selector.kind != "cache_source":
            continue
        words = level.merged("activation")
        if words.scheme != "per_channel" or words.is_per_token:
            continue
        path = (*level.pointer, "output_tensors", "qscheme")
        if pointer_to(*path) not in levels.document:
            path = (*level.pointer, "output_tensors", "observer_cls")
        yield Diagnostic(
            "QZ335",
            "before the rotation, the outputs of a layer are not split into heads, so that "
            "these cannot have a scale each",
            levels.document.place(pointer_to(*path)),
            help='write "kv_cache_post_rope": true, or "qscheme": "per_tensor"',
        )


def _unspecified_cache(levels: Hierarchical) -> Diagnostics:
    """Yield each item of the list of cached layers that has no entry."""
    document = levels.document.value
    names = document.get(_CACHED_LAYERS)
    if not isinstance(names, list):
        return
    specified = document.get(CACHE_BLOCK)
    if not isinstance(specified, dict):
        specified = {}
    for index, name in enumerate(names):
        if not isinstance(name, str) or name in specified:
            continue
        yield Diagnostic(
            "QZ336",
            f"{quoted(name)} is listed as cached, and {CACHE_BLOCK} has no entry of that name",
            levels.document.place(pointer_to(_CACHED_LAYERS, index)),
            help=f'write "{name}": {{"output_tensors": {{"dtype": "fp8_e4m3"}}}} in '
            f"{CACHE_BLOCK}",
        )
