"""Check a file of the hierarchical form: the rules on each level merged with the global one,
parameters that nothing reads, and what it says of the key-value cache.
"""

from collections.abc import Iterable, Sequence

from quantizer.config.algorithms import SWITCHES
from quantizer.config.diagnostics import Diagnostic, Diagnostics, Place, Severity, related_to
from quantizer.config.document.document import Document
from quantizer.config.forms.form import ALGORITHM_LISTS, CACHE_BLOCK
from quantizer.config.forms.hierarchical import HierarchicalLevel
from quantizer.config.forms.hierarchical_spec import OBSERVER_METHODS, PARAMETERS, Words
from quantizer.config.forms.types import BLOCK_FORMATS, INTEGERS
from quantizer.config.model import CAST_ONLY, Fields, QuantizationSpec, ResolvedConfig
from quantizer.config.roles import ROLE_OF
from quantizer.config.rules.spec_rules import Conflict, conflicts
from quantizer.config.wording import quoted
from quantizer.tables import RANGE_METHODS, SEARCHED

_PERCENTILE = "PerTensorPercentileObserver"
_CACHED_LAYERS = "kv_cache_group"
"""The key of the list of layers whose outputs are cached."""

_Levels = Sequence[HierarchicalLevel]


def check_hierarchical(file: Document, config: ResolvedConfig, levels: _Levels) -> Diagnostics:
    """Yield the findings on the valid part of a file, whose config and levels these are."""
    device = config.settings.target_device
    scopes = [words for level in levels for words in level.words.values()]
    for words in scopes:
        yield from _broken_rules(file, words, device)
        yield from _observer(words)
        yield from _elements(file, words)
        yield from _blocks(words)
        yield from _read_otherwise(words)
    yield from _idle(scopes)
    yield from _devices(file, config, levels)
    yield from _passes(file)
    yield from _nothing(file, levels)
    yield from _heads_before_rotation(file, levels)
    yield from _unspecified_cache(file)


def _finding(
    words: Words, code: str, text: str, key: str, help_: str, severity: Severity = "error"
) -> Diagnostic:
    """Return a finding at a key, if it is stated."""
    place = words.raw[key].place if key in words.raw else None
    return Diagnostic(code, text, place, severity, help=help_)


def _places(words: Words, causes: Iterable[Place | None]) -> list[Place]:
    """Return the places of values in conflict, those of this level first.

    Where all are at wider levels, the dtype of this level comes first: it asks for them.
    """
    stated = words.stated_places
    places = list(dict.fromkeys(place for place in causes if place))
    if stated.isdisjoint(places) and "dtype" in words.stated:
        dtype_place = words.stated["dtype"].place
        if dtype_place:
            return [dtype_place, *places]
    return sorted(places, key=lambda place: place not in stated)


def _is_wrong(file: Document, key: str) -> bool:
    """Return whether a value of this key was left out somewhere because it is wrong.

    Then a check must not report the key as missing.
    """
    return any(pointer.endswith(f"/{key}") for pointer in file.ignored)


def _broken_rules(file: Document, words: Words, device: str) -> Diagnostics:
    """Yield the rules that a level breaks, at the value that asks for a missing one."""

    def broken(fields: Fields) -> tuple[Conflict, ...]:
        return conflicts(QuantizationSpec.of(fields), words.role, device, "hierarchical")

    merged = words.fields()
    wider_codes = {rule.code for rule in broken(words.inherited.fields())}
    for rule in broken(merged):
        places = [merged[name].place for name in rule.fields if name in merged]
        # The wider level breaks it by itself, and it is reported there
        if rule.code in wider_codes and words.stated_places.isdisjoint(places):
            continue
        subject = rule.fields[0]
        if subject not in merged and _is_wrong(file, subject):
            continue
        if not any(places):
            places = [words.raw[key].place for key in ("dtype", *words.raw) if key in words.raw]
            places = places[:1]
        yield rule.at(_places(words, places))


def _observer(words: Words) -> Diagnostics:
    """Yield an observer for another granularity, or none for a format that needs one."""
    observer = words.observer
    if observer is None or words.dtype in CAST_ONLY:
        return
    default = "remove the key: a MinMax observer is the default"
    if observer not in OBSERVER_METHODS:
        text = f"{observer} finds no range, and {words.dtype} needs one"
        yield _finding(words, "QZ117", text, "observer_cls", default)
        return
    scheme = words.scheme
    method, supported = OBSERVER_METHODS[observer]
    if RANGE_METHODS[method].integers_only and words.dtype not in INTEGERS:
        text = f"{observer} needs integers, and {words.dtype} is none"
        yield _finding(words, "QZ117", text, "observer_cls", default)
    if scheme in supported:
        return
    observers = RANGE_METHODS["maxmin"].observers.items()
    fitting = next(name for name, row in observers if scheme in row.schemes)
    stated = [words.raw[key].place for key in ("observer_cls", "qscheme") if key in words.raw]
    place, *others = _places(words, stated)
    yield Diagnostic(
        "QZ117",
        f"{observer} does not support {scheme}",
        place,
        help=f'write "observer_cls": "{fitting}", or "qscheme": "{supported[0]}"',
        related=tuple((other, "in conflict with this") for other in others),
    )


def _elements(file: Document, words: Words) -> Diagnostics:
    """Yield an mx dtype without the format of its elements."""
    key = "mx_element_dtype"
    if words.dtype == "mx" and key not in words.raw and not _is_wrong(file, key):
        text = f"a key is missing here: {key}"
        yield _finding(words, "QZ105", text, "dtype", f'for example "{key}": "fp4"')


def _blocks(words: Words) -> Diagnostics:
    """Yield blocks with other numbers of rows than of columns."""
    sides = words.value("block_size")
    if words.scheme == "per_block" and sides is not None and sides[0] != sides[1]:
        yield _finding(
            words,
            "QZ104",
            f"blocks are squares, and block_size has {sides[0]} rows and {sides[1]} columns",
            "block_size",
            'write for example "block_size": [128, 128]; per_group has scales of one row',
        )


def _read_otherwise(words: Words) -> Diagnostics:
    """Yield words that have another meaning here than they seem to have."""
    if words.dtype in CAST_ONLY:
        return
    if words.role in PARAMETERS and words.value("is_dynamic") is True:
        yield _finding(
            words,
            "QZ122",
            "weights and biases are quantized ahead of time, so is_dynamic has no effect",
            "is_dynamic",
            'write "is_dynamic": false',
            "note",
        )
    if words.scheme == "per_channel" and words.is_per_token:
        yield _finding(
            words,
            "QZ122",
            "dynamic per_channel is read as per_token: each row (for convolutions, each "
            "sample) has a scale",
            "qscheme" if "qscheme" in words.raw else "observer_cls",
            'write "qscheme": "per_token"',
            "note",
        )
    if words.scheme == "per_group" and words.observer == "PerChannelMinMaxObserver":
        yield from _groups_of_channels(words)


def _groups_of_channels(words: Words) -> Diagnostics:
    """Yield a finding if PerChannelMinMaxObserver is set for groups: its `ch_axis` is the axis
    of channels in groups.
    """
    axis = words.value("ch_axis")
    instead = '"observer_cls": "PerGroupMinMaxObserver"'
    if not words.is_channel_axis:
        text = (
            "PerChannelMinMaxObserver divides the channels of weights into groups; it cannot "
            "group activations"
        )
        yield _finding(words, "QZ117", text, "observer_cls", f"write {instead}")
    elif axis in (0, 1) and "ch_axis" in words.stated:
        yield _finding(
            words,
            "QZ122",
            f"with PerChannelMinMaxObserver, ch_axis {axis} is the channel axis: groups run "
            f"along axis {1 - axis}",
            "ch_axis",
            f'write {instead}, "ch_axis": {1 - axis}',
            "note",
        )
    elif axis not in (None, 0, 1):
        yield _finding(
            words,
            "QZ104",
            "with PerChannelMinMaxObserver, ch_axis is the channel axis, so it must be 0 or 1",
            "ch_axis",
            f"write 0 or 1, or {instead} with the axis along which groups run",
        )


def _idle(scopes: Sequence[Words]) -> Diagnostics:
    """Yield keys that no level reads; what is read at one level has an effect."""
    found = [(words, _unread(words)) for words in scopes]
    used: set[Place | None] = set()
    for words, unread in found:
        used.update(words.raw[key].place for key in words.raw.keys() - unread.keys())
    for words, unread in found:
        for key, reason in unread.items():
            if words.raw[key].place not in used:
                text = f"{key} has no effect"
                yield _finding(words, "QZ111", text, key, f"remove: {reason}", "warning")


def _unread(words: Words) -> dict[str, str]:
    """Return the stated keys that have no effect for a tensor, and why."""
    dtype = words.dtype
    unread: dict[str, str] = {}
    if dtype in CAST_ONLY:
        for key, sourced in words.raw.items():
            if key != "dtype" and sourced.value != "PlaceholderObserver":
                unread[key] = f"{dtype} has no scale"
        return unread
    scheme = words.scheme
    if scheme not in ("per_channel", "per_group"):
        unread["ch_axis"] = f"{scheme} reads no axis"
    if scheme != "per_group":
        unread["group_size"] = "only per_group reads it"
    if scheme != "per_block":
        unread["block_size"] = "only per_block reads it"
    if words.observer != _PERCENTILE:
        unread["percentage"] = f"only {_PERCENTILE} reads it"
    if not QuantizationSpec.of(words.fields()).has_symmetric_scale:
        reason = "only symmetric signed integers with a float scale read it"
        unread["symmetric_scale"] = reason
    if dtype != "mx":
        unread["mx_element_dtype"] = "only the dtype mx reads it"
    if not words.has_scale_mode:
        reason = "only block formats read it"
        if words.is_block:
            reason = f"{dtype} has its own way to find exponents"
        unread["scale_calculation_mode"] = reason
    if words.is_block and words.value("scale_type") == "pof2":
        unread["scale_type"] = "a block format's scale is a power of two anyway"
    elif words.has_quantized_scales:
        unread["scale_type"] = "scale_format says what scales are"
    if dtype in BLOCK_FORMATS and words.value("scale_format") in ("float32", "e4m3"):
        unread["scale_format"] = f"the scale of {dtype} is a power of two"
    if dtype in SEARCHED:
        reason = f"{dtype} has scales of its own"
        unread |= {"scale_type": reason, "scale_format": reason}
    return {key: reason for key, reason in unread.items() if key in words.raw}


def _devices(file: Document, config: ResolvedConfig, levels: _Levels) -> Diagnostics:
    """Yield each layer's target_device that is not the model's."""
    settings = config.settings
    device = settings.target_device
    for path in dict.fromkeys(level.path for level in levels[1:]):
        stated = file.at(*path).get("target_device")
        if isinstance(stated, str) and stated != device:
            yield Diagnostic(
                "QZ119",
                f"the model's device is {device}; a layer cannot have another one",
                file.place(*path, "target_device"),
                help="remove the key, and write it in global_quant_config",
                related=related_to(settings.places.get("target_device"), "the model's device"),
            )


def _passes(file: Document) -> Diagnostics:
    """Yield passes over the graph that are listed after an algorithm, as they run before all,
    or twice.
    """
    first: tuple[str, Place | None] | None = None
    seen: set[str] = set()
    for name, place in file.names(*ALGORITHM_LISTS):
        if name not in SWITCHES:
            first = first or (name, place)
        elif first is not None:
            algorithm, algorithm_place = first
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


def _nothing(file: Document, levels: _Levels) -> Diagnostics:
    """Warn of a file without any spec, right or wrong."""
    place = levels[0].selector.place
    if not place:
        return
    for level in levels:
        block = file.at(*level.path)
        if isinstance(block, dict) and any(block.get(key) is not None for key in ROLE_OF):
            return
    yield Diagnostic(
        "QZ123",
        "no tensor has a specification, so nothing is quantized",
        place,
        "warning",
        help='for example "weight": {"dtype": "int8"}',
    )


def _heads_before_rotation(file: Document, levels: _Levels) -> Diagnostics:
    """Yield each spec with a scale for each head, if it is about the outputs of layers."""
    for level in levels:
        if level.selector.kind != "cache_source":
            continue
        words = level.words["activation"]
        if words.scheme == "per_channel" and not words.is_per_token:
            spec = (*level.path, "output_tensors")
            yield Diagnostic(
                "QZ335",
                "before the rotation, the outputs of a layer are not split into heads, so that "
                "these cannot have a scale each",
                file.place(*spec, "qscheme") or file.place(*spec, "observer_cls"),
                help='write "kv_cache_post_rope": true, or "qscheme": "per_tensor"',
            )


def _unspecified_cache(file: Document) -> Diagnostics:
    """Yield each item of the list of cached layers that has no entry."""
    document = file.value
    names = document.get(_CACHED_LAYERS)
    specified = document.get(CACHE_BLOCK)
    if not isinstance(specified, dict):
        specified = {}
    for index, name in enumerate(names if isinstance(names, list) else ()):
        if isinstance(name, str) and name not in specified:
            yield Diagnostic(
                "QZ336",
                f"{quoted(name)} is listed as cached, and {CACHE_BLOCK} has no entry of that "
                "name",
                file.place(_CACHED_LAYERS, index),
                help=f'write "{name}": {{"output_tensors": {{"dtype": "fp8_e4m3"}}}} in '
                f"{CACHE_BLOCK}",
            )
