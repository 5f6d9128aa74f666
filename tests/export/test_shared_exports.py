"""The suite's own sharing of exports: a file from a shared program has the bytes of one from an
export of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.deployments import calibrated
from support.extended import extended
from support.shared_exports import SharedExports
from torch import Tensor, nn

from quantizer.calibration.solution import Solution
from quantizer.config.model import QuantizationSpec
from quantizer.export.deployment import Deployment
from quantizer.export.exporting import export
from quantizer.export.programs import program
from quantizer.export.targets import EXPORTERS
from quantizer.graph.tracing.trace import trace

for package in EXPORTERS["onnx"].needs:
    pytest.importorskip(package, reason="needs quantizer-torch[onnx]")

from torch.onnx._internal.exporter import _core

from quantizer.export.onnx import translation

INT4 = QuantizationSpec(bit_width=4, qscheme="per_channel", ch_axis=0)


class Scaled(nn.Module):
    """A layer and a factor that is part of the code."""

    def __init__(self, seed: int, factor: float, size: int = 4) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layer = nn.Linear(size, size)
        self.register_buffer("table", torch.rand(size))
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).relu() * self.factor + self.table


def deployed(module: nn.Module, weights: QuantizationSpec = INT4, size: int = 4) -> Deployment:
    torch.manual_seed(0)
    x = torch.randn(3, size)
    graph = trace(module.eval(), (x,))
    return Deployment(graph, calibrated(graph, (x,), {}, weights=weights), (x,), {})


@pytest.fixture
def exports(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """Share exports anew; return the modules that are exported."""
    exported: list[nn.Module] = []
    own = program._with_open_sizes
    plain = own.export if isinstance(own, SharedExports) else own

    def recorded(module: nn.Module, *arguments: object) -> object:
        exported.append(module)
        return plain(module, *arguments)

    monkeypatch.setattr(program, "_with_open_sizes", SharedExports(recorded))
    return exported


@pytest.fixture
def unshared(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Stop sharing."""

    def stop() -> None:
        for module, name, attribute in (
            (program, "_with_open_sizes", "export"),
            (translation, "translatable", "rewrite"),
            (_core, "_prepare_exported_program_for_export", "rewrite"),
        ):
            shared = getattr(module, name)
            monkeypatch.setattr(module, name, getattr(shared, attribute, shared))

    return stop


@pytest.mark.slow
@pytest.mark.parametrize("target", ["onnx", "pt2", *extended("pt2_float")])
def test_a_file_from_a_shared_export_has_the_bytes_of_its_own(
    target: str, exports: list[nn.Module], unshared: Callable[[], None], tmp_path: Path
) -> None:
    """Weights and tables differ; scales of activations, which are constants of a .pt2, do not."""
    first = deployed(Scaled(1, 0.5))
    second = deployed(Scaled(2, 0.5))
    activations = {
        key: tensor for key, tensor in first.solution.tensors.items() if key[1] == "activation"
    }
    tensors = second.solution.tensors | activations
    second = replace(second, solution=replace(second.solution, tensors=tensors))
    export(target, first, tmp_path / "first")
    export(target, second, tmp_path / "shared")
    assert len(exports) == 1
    unshared()
    export(target, second, tmp_path / "alone")
    shared = (tmp_path / "shared").read_bytes()
    assert shared == (tmp_path / "alone").read_bytes()
    assert shared != (tmp_path / "first").read_bytes()


OTHERS: dict[str, Callable[[], Deployment]] = {
    "factor": lambda: deployed(Scaled(1, 0.25)),
    "size": lambda: deployed(Scaled(1, 0.5, 6), size=6),
    "quantized tensors": lambda: replace(deployed(Scaled(1, 0.5)), solution=Solution({})),
}


@pytest.mark.slow
def test_other_networks_are_exported_anew(exports: list[nn.Module], tmp_path: Path) -> None:
    export("pt2_float", deployed(Scaled(1, 0.5)), tmp_path / "net")
    for count, (name, other) in enumerate(OTHERS.items(), 2):
        export("pt2_float", other(), tmp_path / name)
        assert len(exports) == count, name
    export("pt2_float", deployed(Scaled(2, 0.5)), tmp_path / "last")
    assert len(exports) == 1 + len(OTHERS)


def test_other_scales_of_activations_are_other_programs(
    exports: list[nn.Module], tmp_path: Path
) -> None:
    export("pt2", deployed(Scaled(1, 0.5)), tmp_path / "net")
    export("pt2", deployed(Scaled(2, 0.5)), tmp_path / "other")
    assert len(exports) == 2
