"""Errors about groups that do not divide the axis of a tensor, and what replaces formats with
super-blocks there.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence

from quantizer.config.diagnostics import Diagnostic, Place
from quantizer.config.forms.types import integer_word
from quantizer.config.model import SUPERBLOCK, QuantizationSpec
from quantizer.config.wording import first_names
from quantizer.plan.axes import Misfit
from quantizer.plugins import if_command

_SMALLEST_GROUP = 16
"""Smaller groups cost as many bits for scales as for values."""
_SUBSTITUTES = {
    "q4_k": QuantizationSpec(bit_width=5, symmetric_scale="quant_min", method="group_mse"),
    "q5_k": QuantizationSpec(bit_width=5, signed=False, symmetric=False, method="group_mse"),
    "q6_k": QuantizationSpec(),
}
"""What llama.cpp uses for widths that super-blocks do not divide: Q5_0, Q5_1 and Q8_0."""


def misfit_findings(tensors: Sequence[Misfit]) -> Iterator[Diagnostic]:
    """Yield one error for each place in the file, with the tensors by the lengths of their
    axes.
    """
    by_place: dict[tuple[Place | None, str | None], list[Misfit]] = {}
    for tensor in tensors:
        key = tensor.place, tensor.super_blocks_of
        by_place.setdefault(key, []).append(tensor)
    for (place, super_blocks_of), alike in by_place.items():
        names: dict[int, list[str]] = {}
        for tensor in alike:
            names.setdefault(tensor.length, []).append(tensor.tensor)
        rows = [f"{length} long in {first_names(some)}" for length, some in names.items()]
        if super_blocks_of is not None:
            yield _super_block_misfit(super_blocks_of, rows, place, len(alike))
            continue
        group_sizes = {tensor.group_size for tensor in alike}
        sizes = ", ".join(str(size) for size in sorted(group_sizes))
        remedy = (
            "-1 takes the whole axis; or choose another qscheme for these layers, or exclude "
            "them"
        )
        fitting = math.gcd(*names, *group_sizes)
        if fitting >= _SMALLEST_GROUP:
            remedy = f"{fitting} divides all of them, {remedy}"
        yield Diagnostic(
            "QZ407",
            f"group_size {sizes} does not divide the axis of {len(alike)} tensor(s): "
            + "; ".join(rows),
            place,
            help=remedy,
        )


def super_block_substitute(dtype: str) -> str:
    """Return the integers that replace a format with super-blocks, in groups of 32.

    >>> super_block_substitute("q4_k"), super_block_substitute("q5_k")
    ('int5', 'uint5')
    """
    return integer_word(_SUBSTITUTES[dtype])


def without_super_blocks(spec: QuantizationSpec) -> QuantizationSpec:
    """Return the spec that replaces one with super-blocks where these do not divide an axis.

    Source: llama.cpp's fallback types.
    """
    return dataclasses.replace(
        _SUBSTITUTES[spec.dtype], qscheme="per_group", ch_axis=spec.ch_axis, group_size=32
    )


def _super_block_misfit(
    dtype: str, rows: Sequence[str], place: Place | None, count: int
) -> Diagnostic:
    """Return the error about tensors that super-blocks do not divide."""
    instead = super_block_substitute(dtype)
    how = if_command("init", " (`quantizer init --model` writes that)")
    return Diagnostic(
        "QZ407",
        f"{dtype} has super-blocks of {SUPERBLOCK}, which do not divide the axis of {count} "
        f"tensor(s): {'; '.join(rows)}",
        place,
        help=f"use {instead} in groups of 32 for these layers, as llama.cpp does{how}, or "
        "exclude them",
    )
