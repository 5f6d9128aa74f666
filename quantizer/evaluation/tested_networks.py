"""Holds the networks of a test, and a batch to find out why their outputs differ."""

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
    """The networks that a test compares.

    Attributes:
        reference: the float network.
        quantized: the quantized network.
        user: the user's model, if outputs are compared with it instead of `reference`.
        batches: of the test.
        device: of all networks.
        outputs: of the network that outputs are compared with.
    """

    reference: Network
    quantized: Network
    user: Network | None
    batches: Batches
    device: torch.device
    outputs: Sequence[Output]

    @property
    def all(self) -> list[Network]:
        """Return the networks."""
        networks = [self.reference, self.quantized]
        if self.user is not None:
            networks.append(self.user)
        return networks

    @cached_property
    def float_outputs(self) -> Sequence[Output]:
        """Return the outputs of `reference`, with the names of the user's model."""
        if self.user is None:
            return self.outputs
        return parts_named_as(self.reference.graph, self.user.graph)

    @cached_property
    def first(self) -> Batch:
        """Return the first batch, which is read once, on demand."""
        return next(iter(self.batches)).to(self.device)
