"""Holds which multiplications an engine computes in integers, and how much work each is."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from quantizer.config.wording import first_names

Shape = Sequence[int]
_RUN = "in int8"
_NO_PRODUCTS = (
    "The network has no multiplications that integers make faster: use the float network where "
    "the device takes it"
)


@dataclass(frozen=True)
class Product:
    """A multiplication that an engine executes: a convolution, a matrix product or a recurrent
    layer.

    Attributes:
        name: of its layer, if it is known.
        operator: the engine's.
        is_integer: whether the engine multiplies integers.
        multiply_adds: how many it takes for the first batch; 0 if that is not known.
    """

    name: str
    operator: str
    is_integer: bool
    multiply_adds: int


@dataclass(frozen=True)
class Kernels:
    """The layers that an engine multiplies in integers, and by layer that it multiplies in
    float, the reason.

    Attributes:
        place: where the integers are, for sentences.
        multiply_adds: by layer, how many it takes for the first batch; 0 or missing if that is
            not known.
    """

    integer: tuple[str, ...]
    floating: dict[str, str]
    place: str = _RUN
    multiply_adds: Mapping[str, int] = field(default_factory=dict)

    @property
    def is_run(self) -> bool:
        """Return whether a runtime has done this, and not only the file says so."""
        return self.place == _RUN

    @property
    def count(self) -> int:
        """Return the number of all multiplications."""
        return len(self.integer) + len(self.floating)

    @property
    def share(self) -> float | None:
        """Return the share of multiplications in integers; None if there are none."""
        return len(self.integer) / self.count if self.count else None

    @property
    def multiply_add_share(self) -> float | None:
        """Return the share of multiply-adds in integers; None if there are no layers, or if the
        number of one of them is not known.

        >>> Kernels(("a",), {"b": ""}, multiply_adds={"a": 30, "b": 10}).multiply_add_share
        0.75
        >>> Kernels(("a",), {"b": ""}, multiply_adds={"a": 30, "b": 0}).multiply_add_share
        """
        integer = [self.multiply_adds.get(name, 0) for name in self.integer]
        floating = [self.multiply_adds.get(name, 0) for name in self.floating]
        sizes = integer + floating
        if not sizes or 0 in sizes:
            return None
        return sum(integer) / sum(sizes)

    @property
    def shares(self) -> tuple[float | None, float | None]:
        """Return the shares of multiplications and of multiply-adds."""
        return self.share, self.multiply_add_share

    @property
    def counted(self) -> str:
        """Return the shares as part of a sentence.

        >>> Kernels(("a",), {"b": ""}, multiply_adds={"a": 30, "b": 10}).counted
        '1 of 2 multiplications in int8, 75 % of the multiply-adds'
        """
        text = f"{len(self.integer)} of {self.count} multiplications {self.place}"
        share = self.multiply_add_share
        if self.floating and share is not None:
            text += f", {_percent(share)} of the multiply-adds"
        return text

    @property
    def summary_lines(self) -> list[str]:
        """Return a sentence about all multiplications, and one for each reason."""
        if not self.count:
            return [_NO_PRODUCTS]
        layers_by_reason: dict[str, list[str]] = {}
        for layer, why in self.floating.items():
            layers_by_reason.setdefault(why, []).append(layer)
        lines = [self.counted]
        for why, layers in layers_by_reason.items():
            lines.append(f"in float: {first_names(layers)}: {why}")
        return lines

    def to_json(self) -> dict[str, Any]:
        """Return the layers and the shares."""
        return {
            "integer": list(self.integer),
            "floating": self.floating,
            "share": self.share,
            "multiply_adds": dict(self.multiply_adds),
            "multiply_add_share": self.multiply_add_share,
        }


def _percent(share: float) -> str:
    """Return a share in percent; that of a part is never rounded to all or nothing.

    >>> _percent(0.0142), _percent(0.9999), _percent(0.25), _percent(0.0)
    ('1.4 %', '99.9 %', '25 %', '0 %')
    """
    percent = 100 * share
    if 0 < percent < 0.1:
        return "less than 0.1 %"
    if 99.9 < percent < 100:
        return "99.9 %"
    return f"{percent:.2g} %" if percent < 99 else f"{percent:.3g} %"


def numbered(products: Iterable[Product]) -> list[Product]:
    """Return the products with names of their own: further ones of a layer get a number."""
    counts: dict[str, int] = {}
    named: list[Product] = []
    for product in products:
        count = counts.get(product.name, 0) + 1
        counts[product.name] = count
        name = product.name if count == 1 else f"{product.name}#{count}"
        named.append(Product(name, product.operator, product.is_integer, product.multiply_adds))
    return named


def einsum_multiply_adds(equation: str, shapes: Sequence[Shape | None]) -> int:
    """Return the multiply-adds of an Einsum, which are the product of the sizes of all its
    indices; 0 if a shape is not known.

    >>> einsum_multiply_adds("btd,edh->ebth", [[4, 12, 32], [2, 32, 48]])
    147456
    >>> einsum_multiply_adds("...ij,...jk", [[5, 2, 3], [5, 3, 4]])
    120
    """
    operands = equation.replace(" ", "").partition("->")[0].split(",")
    sizes: dict[str, int] = {}
    others = 1
    for indices, shape in zip(operands, shapes, strict=True):
        if shape is None:
            return 0
        before, _, after = indices.partition("...")
        count = len(shape) - len(before) - len(after)
        others = max(others, prod(shape[len(before) : len(before) + count]))
        named = [*shape[: len(before)], *shape[len(before) + count :]]
        sizes.update(zip(before + after, named, strict=True))
    return others * prod(sizes.values())
