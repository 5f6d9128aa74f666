"""An engine: the integer weights of a network in an archive that numpy reads."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quantizer.config.model import QuantizationSpec
from quantizer.export.agreement import Verification, verify
from quantizer.export.deployment import Deployment
from quantizer.export.exporter import Exporter, Refusal
from quantizer.graph.ir import Graph
from quantizer.nn.quantizer import QuantizedTensor
from quantizer.plan.model import TensorSpecs
from quantizer.storage.deferred_tensor import loaded


class ArchiveExporter(Exporter[Path]):
    """Writes `<layer>.<role>.codes`, `.scale` and `.zero_point` of each parameter."""

    def refusals(self, graph: Graph, specs: TensorSpecs, opset: int) -> Iterable[Refusal]:
        """Refuse what is no integer, or has a scale for each group."""
        for (layer, role), spec in specs.items():
            if spec.dtype != "int" or spec.has_groups:
                why = "is not in integers with a scale for each channel"
                yield Refusal(why, "use the preset cpu_int8", layer, role)

    @contextmanager
    def write(self, deployment: Deployment, path: Path) -> Iterator[Path]:
        """Write the archive."""
        arrays: dict[str, Any] = {}
        for name, tensor, codes in _parameters(deployment):
            arrays[f"{name}.codes"] = codes.numpy()
            arrays[f"{name}.scale"] = _per_channel(tensor.scale.float(), codes, tensor.spec)
            arrays[f"{name}.zero_point"] = _per_channel(tensor.zero_point, codes, tensor.spec)
        with path.open("wb") as file:
            np.savez(file, **arrays)
        yield path

    def verify(self, deployment: Deployment, written: Path) -> Verification:
        """Read the archive, compute the parameters, and compare them with test mode's."""
        computed = []
        expected = []
        with np.load(written) as arrays:
            for name, tensor, _ in _parameters(deployment):
                steps = arrays[f"{name}.codes"] - arrays[f"{name}.zero_point"]
                values = steps.astype(np.float32) * arrays[f"{name}.scale"]
                computed.append(torch.from_numpy(values))
                expected.append(tensor.decoded())
        return verify("parameters", expected, computed)


def _parameters(deployment: Deployment) -> Iterator[tuple[str, QuantizedTensor, Tensor]]:
    """Yield the name of each quantized parameter, with its scale and its codes."""
    for (layer, role), tensor in deployment.encoded.tensors.items():
        if tensor.codes is not None:
            yield f"{layer}.{role}", tensor, loaded(tensor.codes)


def _per_channel(values: Tensor, codes: Tensor, spec: QuantizationSpec) -> Any:
    """Return scales or zero points in a shape that broadcasts against the codes."""
    if values.ndim:
        shape = [1] * codes.ndim
        shape[spec.ch_axis or 0] = -1
        values = values.view(shape)
    return values.numpy()
