"""Two networks that were compared, and a batch to find out why they differ."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from quantizer.graph.output_parts import Output
from quantizer.nn.network import Network
from quantizer.sources.batches import Batch
from quantizer.sources.data import Batches


@dataclass(frozen=True)
class Networks:
    """The float network and the quantized one; `outputs` are those of both, `device` is
    where they are."""

    reference: Network
    quantized: Network
    batches: Batches
    device: torch.device
    outputs: Sequence[Output]

    @cached_property
    def first(self) -> Batch:
        """The first batch, read once and only when it is asked for."""
        return next(iter(self.batches)).to(self.device)
