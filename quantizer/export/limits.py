"""What engines and files hold of a tensor: rows that one function reads."""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from quantizer.config.model import QuantizationSpec
from quantizer.config.wording import joined
from quantizer.export.exporter import Reason


@dataclass(frozen=True)
class Limit:
    """A row of what an engine or a file can hold.

    Attributes:
        holds: whether a spec is within the limit.
        why: what is said of others. `{spec}`, `{number_format}` and `{kind}` stand for theirs,
            and `{engine}` for the engine, as the subject of a sentence.
        help: what to change.
        ends: whether nothing more is said of these others.
    """

    holds: Callable[[QuantizationSpec], bool]
    why: str
    help: str
    ends: bool = False


@dataclass(frozen=True)
class Limits:
    """What an engine takes of one kind of tensors.

    Attributes:
        engine: the engine, as the subject of a sentence.
        otherwise: what helps besides another setting, as the end of a sentence.
        rows: the limits.
    """

    engine: str
    otherwise: str
    rows: tuple[Limit, ...]

    def reasons(self, spec: QuantizationSpec) -> Iterator[Reason]:
        """Yield all reasons why the engine cannot hold a tensor, each with what to change."""
        for why, remedy in _reasons(self.rows, spec, self.engine):
            yield why, f"{remedy}, or {self.otherwise}"


def beyond(limits: Iterable[Limit], spec: QuantizationSpec) -> Reason | None:
    """Return why the first limit that does not hold a spec refuses it; None if all hold it."""
    return next(_reasons(limits, spec), None)


def _reasons(
    limits: Iterable[Limit], spec: QuantizationSpec, engine: str = ""
) -> Iterator[Reason]:
    """Yield why each limit that does not hold a spec refuses it, and what to change."""
    number_format = f"int{spec.bit_width}" if spec.dtype == "int" else spec.dtype
    words = {"number_format": number_format, "kind": kind_of(spec), "engine": engine}
    for limit in limits:
        if not limit.holds(spec):
            yield limit.why.format(spec=spec, **words), limit.help
            if limit.ends:
                return


def kind_of(spec: QuantizationSpec) -> str:
    """Return the width of integers, or the name of another format, as a part of a sentence.

    >>> kind_of(QuantizationSpec(bit_width=16)), kind_of(QuantizationSpec(dtype="fp4"))
    ('has 16 bits', 'is fp4')
    """
    return f"has {spec.bit_width} bits" if spec.dtype == "int" else f"is {spec.dtype}"


def is_symmetric(spec: QuantizationSpec) -> bool:
    """Return whether zero is the code in the middle, so that no zero point is stored."""
    return spec.dtype != "int" or spec.has_signed_codes


def of_formats(*dtypes: str) -> Limit:
    """Return the limit of an engine that takes some number formats, `int` for integers."""
    taken = joined((dtype.replace("int", "integers") for dtype in dtypes), "or")
    return Limit(
        lambda spec: spec.dtype in dtypes,
        f"{{kind}}; {{engine}} takes {taken}",
        'set its dtype to "int"',
        ends=True,
    )


def of_bits(widths: Sequence[int]) -> Limit:
    """Return the limit of an engine that takes integers of some widths, or of a range of those
    up to a largest one.
    """
    taken = (
        f"{widths[-1]} or fewer"
        if isinstance(widths, range)
        else joined(map(str, widths), "or")
    )
    return Limit(
        lambda spec: spec.dtype != "int" or spec.bit_width in widths,
        f"{{kind}}; {{engine}} takes {taken}",
        f"set its bit_width to {taken}",
    )


def rounded_by(modes: Collection[str]) -> Limit:
    """Return the limit of an engine that rounds integers in some modes."""
    taken = joined(sorted(modes), "or")
    return Limit(
        lambda spec: spec.dtype != "int" or spec.round_mode in modes,
        f"is rounded by {{spec.round_mode}}; {{engine}} takes {taken}",
        'set round_mode to "half_even" there',
    )


INTEGERS = of_formats("int")


STATIC_RANGES = Limit(
    lambda spec: not spec.is_dynamic,
    "has a dynamic range, which {engine} lacks",
    "set is_dynamic to false there",
)


ONE_SCALE = Limit(
    lambda spec: spec.qscheme == "per_tensor" or bool(spec.is_dynamic),
    "is {spec.qscheme}; {engine} takes per_tensor",
    "set its qscheme to per_tensor (per_channel to false)",
)


SIGNED_CODES = Limit(
    lambda spec: spec.has_signed_codes,
    "is not int8 with the zero point 0, as {engine} needs it",
    "set symmetry and signed to true there (in the hierarchical form dtype "
    '"int8" and symmetric true)',
)


POWERS_OR_ZERO_POINTS = Limit(
    lambda spec: spec.scale_type != "poweroftwo" or spec.symmetric,
    "has power-of-two scales and a zero point; {engine} takes one of them",
    "set symmetry to true there, or scale_type to float",
)


WHOLE_TYPES = Limit(
    lambda spec: not (spec.narrow_range and spec.has_signed_codes),
    "has a narrow range, and {engine} takes all codes of a type",
    "set narrow_range to false there",
)


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
