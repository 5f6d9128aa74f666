"""Two networks that were compared, and a batch to find out why they differ."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from quantizer.graph.output_parts import Output, parts_named_as
from quantizer.nn.network import Network
from quantizer.sources.batches import Batch
from quantizer.sources.data import Batches


@dataclass(frozen=True)
class Networks:
    """The float network and the quantized one, and the `user`'s model where outputs are
    compared with that.

    `outputs` are those of the network that outputs are compared with; `device` is where all
    are.
    """

    reference: Network
    quantized: Network
    user: Network | None
    batches: Batches
    device: torch.device
    outputs: Sequence[Output]

    @cached_property
    def float_outputs(self) -> Sequence[Output]:
        """The outputs of the float network, by the same names."""
        if self.user is None:
            return self.outputs
        return parts_named_as(self.reference.graph, self.user.graph)

    @cached_property
    def first(self) -> Batch:
        """The first batch, read once and only when it is asked for."""
        return next(iter(self.batches)).to(self.device)
