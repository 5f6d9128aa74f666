"""What engines and files hold of a tensor: rows that one function reads.

`Limits` has the settings of an engine that takes tensors by a few of these, and each reason is
named. A list of `Limit` is for a format with conditions of its own, and the first that fails is
named.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from quantizer.config.model import QuantizationSpec
from quantizer.export.exporter import Reason


@dataclass(frozen=True)
class Limits:
    """What an engine or a file takes of one kind of tensors. None stands for everything.

    Attributes:
        engine: the engine, as the subject of a sentence.
        otherwise: what helps besides another setting, as the end of a sentence.
        dtypes: the number formats.
        bits: the widths of integers; a range of those up to a largest one.
        schemes: the granularities of static ranges.
        roundings: the rounding modes.
        takes_dynamic: whether ranges may be dynamic.
        takes_narrow: whether signed codes may end before their type does.
        takes_zero_points: whether codes may be unsigned or have a zero point.
        takes_shifts: whether they may have one with scales that are powers of two.
    """

    engine: str
    otherwise: str
    dtypes: Collection[str] = ("int",)
    bits: Sequence[int] | None = None
    schemes: Collection[str] | None = None
    roundings: Collection[str] | None = None
    takes_dynamic: bool = False
    takes_narrow: bool = True
    takes_zero_points: bool = True
    takes_shifts: bool = True


def limit_reasons(limits: Limits, spec: QuantizationSpec) -> Iterator[Reason]:
    """Yield all reasons why an engine cannot hold a tensor, each with what to change."""
    for why, remedy in _faults(limits, spec):
        yield why, f"{remedy}, or {limits.otherwise}"


def kind_of(spec: QuantizationSpec) -> str:
    """Return the width of integers, or the name of another format, as a part of a sentence.

    >>> kind_of(QuantizationSpec(bit_width=16)), kind_of(QuantizationSpec(dtype="fp4"))
    ('has 16 bits', 'is fp4')
    """
    return f"has {spec.bit_width} bits" if spec.dtype == "int" else f"is {spec.dtype}"


def _faults(limits: Limits, spec: QuantizationSpec) -> Iterator[Reason]:
    """Yield why an engine cannot hold a tensor, and which setting to change."""
    engine = limits.engine
    if spec.dtype not in limits.dtypes:
        taken = _one_of(name.replace("int", "integers") for name in limits.dtypes)
        yield f"{kind_of(spec)}; {engine} takes {taken}", 'set its dtype to "int"'
        return
    if spec.is_dynamic and not limits.takes_dynamic:
        yield f"has a dynamic range, which {engine} lacks", "set is_dynamic to false there"
    if limits.schemes and spec.qscheme not in limits.schemes and not spec.is_dynamic:
        taken = _one_of(limits.schemes)
        yield (
            f"is {spec.qscheme}; {engine} takes {taken}",
            f"set its qscheme to {taken} (per_channel to false)",
        )
    if spec.dtype != "int":
        return
    if limits.bits and spec.bit_width not in limits.bits:
        taken = f"{limits.bits[-1]} or fewer"
        if not isinstance(limits.bits, range):
            taken = _one_of(limits.bits)
        yield f"{kind_of(spec)}; {engine} takes {taken}", f"set its bit_width to {taken}"
    if not limits.takes_zero_points and not spec.has_signed_codes:
        yield (
            f"is not int8 with the zero point 0, as {engine} needs it",
            'set symmetry and signed to true there (in the hierarchical form dtype "int8" and '
            "symmetric true)",
        )
    elif not limits.takes_shifts and spec.scale_type == "poweroftwo" and not spec.symmetric:
        yield (
            f"has power-of-two scales and a zero point; {engine} takes one of them",
            "set symmetry to true there, or scale_type to float",
        )
    if not limits.takes_narrow and spec.narrow_range and spec.has_signed_codes:
        yield (
            f"has a narrow range, and {engine} takes all codes of a type",
            "set narrow_range to false there",
        )
    if limits.roundings and spec.round_mode not in limits.roundings:
        taken = _one_of(sorted(limits.roundings))
        yield (
            f"is rounded by {spec.round_mode}; {engine} takes {taken}",
            'set round_mode to "half_even" there',
        )


def _one_of(words: Iterable[object]) -> str:
    *others, last = map(str, words)
    return f"{', '.join(others)} or {last}" if others else last


@dataclass(frozen=True)
class Limit:
    """A row of what an engine or a file can hold.

    Attributes:
        holds: whether a spec is within the limit.
        why: what is said of others. `{spec}` and `{number_format}` stand for theirs.
        help: what to change.
    """

    holds: Callable[[QuantizationSpec], bool]
    why: str
    help: str


HALF_EVEN = Limit(
    lambda spec: spec.round_mode == "half_even",
    "is rounded by {spec.round_mode}, and the runtime rounds half to even",
    "set its round_mode to half_even",
)


SCALES_OF_OUTPUTS = Limit(
    lambda spec: spec.qscheme != "per_channel" or spec.ch_axis == 0,
    "has a scale for each input",
    "set its ch_axis to 0",
)


GROUPS_OF_INPUTS = Limit(
    lambda spec: spec.qscheme != "per_group" or spec.ch_axis == 1,
    "has groups of outputs",
    "set its ch_axis to 1",
)


def beyond(limits: Iterable[Limit], spec: QuantizationSpec) -> Reason | None:
    """Return why the first limit that does not hold a spec refuses it; None if all hold it."""
    number_format = f"int{spec.bit_width}" if spec.dtype == "int" else spec.dtype
    for limit in limits:
        if not limit.holds(spec):
            return limit.why.format(spec=spec, number_format=number_format), limit.help
    return None
