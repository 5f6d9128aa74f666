"""One computation of what the report says about a tensor's values, for all calibrations of a
test process that observed the same values under the same spec.

It takes a tenth of a small calibration. A key holds all that the function reads.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
from torch import Tensor

from quantizer.config.model import QuantizationSpec

Distributed = Callable[
    [Mapping[str, Tensor], Mapping[str, Tensor], QuantizationSpec, Any], dict[str, Any]
]


class SharedDistributions:
    """Stands for the function that looks at the histogram of a tensor."""

    def __init__(self, compute: Distributed) -> None:
        self.compute = compute
        self.rows: dict[Hashable, dict[str, Any]] = {}

    def __call__(
        self,
        histogram: Mapping[str, Tensor],
        own_statistics: Mapping[str, Tensor],
        spec: QuantizationSpec,
        entry: Any,
    ) -> dict[str, Any]:
        """Return what `compute` would."""
        key = (
            _digest(histogram),
            _digest(own_statistics),
            repr(spec),
            json.dumps(entry, sort_keys=True),
        )
        if key not in self.rows:
            self.rows[key] = self.compute(histogram, own_statistics, spec, entry)
        return copy.deepcopy(self.rows[key])


def _digest(tensors: Mapping[str, Tensor]) -> str:
    """Return a digest of names, types, shapes and values."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        # Adding 0 reads a deferred tensor
        values = (tensor + 0).detach().contiguous()
        digest.update(f"{name} {values.dtype} {tuple(values.shape)}".encode())
        digest.update(values.reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()
