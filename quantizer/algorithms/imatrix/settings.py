"""The settings of the importance matrix. Imports no torch."""

from dataclasses import dataclass
from typing import ClassVar

from quantizer.config.algorithms import AlgoConfig
from quantizer.config.typed_fields import type_checked


@type_checked
@dataclass
class IMatrixConfig(AlgoConfig):
    """Importance matrix, as in llama.cpp: the scales of groups are searched with each weight's
    squared error times the mean square of its input. It is for q4_k, q5_k, q6_k, iq4_nl, and
    symmetric integers in groups. Not part of the documented format.
    """

    run: ClassVar[str] = "quantizer.algorithms.imatrix.imatrix:imatrix"
    needs_groups: ClassVar[bool] = True

    name: str = "imatrix"
