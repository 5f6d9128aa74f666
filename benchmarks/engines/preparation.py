"""Prepares what a consumer runs: the exported file, the float network, inputs, and the outputs
of test mode and of the float network.
"""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import quantizer
from engines.network_table import MAKE, Subject
from engines.table import Engine
from quantizer.api.result import Result, result_for_file
from quantizer.export.agreement import Verification
from quantizer.export.exporting import as_run
from quantizer.export.targets import EXPORTERS, checked_choices
from quantizer.graph.tracing.trace import quiet

ROOT = Path(__file__).parents[2]
Arrays = list[NDArray[Any]]


@dataclass
class Prepared:
    """A network with its calibrations, each of which is made once.

    Attributes:
        name: of the network.
        work: the folder that has a folder for each exported file.
        results: the calibrations by the name of their config.
    """

    name: str
    subject: Subject
    work: Path
    results: dict[str, Result] = field(default_factory=dict)

    @classmethod
    def of(cls, name: str, work: Path) -> Prepared:
        """Make a network."""
        torch.manual_seed(0)
        return cls(name, MAKE[name](), work)

    def config_for(self, engine: Engine) -> str:
        """Return the name of the preset that the network has in an engine."""
        return engine.configs.get(self.name, self.subject.config)

    def folder_for(self, engine: Engine, rounds: int) -> Path:
        """Return the folder for an engine's consumer; the file is exported if it is not there.

        Raises:
            QuantizerError: the network cannot be calibrated or exported.
        """
        config = self.config_for(engine)
        parts = [self.name, config, engine.target, *engine.options.values()]
        if engine.is_next_token:
            parts.append("next_token")
        folder = self.work / "-".join(parts)
        if not (folder / "test_mode.npz").exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            self._export(engine, self._calibrated(config), folder)
        if engine.float_program:
            source = self._float_file(engine.float_program)
            link = folder / f"float{source.suffix}"
            if not link.exists():
                link.symlink_to(source.resolve())
        for name in ("outputs.npz", "facts.json"):
            (folder / name).unlink(missing_ok=True)
        (folder / "settings.json").write_text(json.dumps({"rounds": rounds}), "utf-8")
        return folder

    def _calibrated(self, config: str) -> Result:
        if config not in self.results:
            path = ROOT / "configs" / f"{config}.json"
            subject = self.subject
            self.results[config] = quantizer.calibrate(subject.model, path, subject.calibration)
        return self.results[config]

    def _export(self, engine: Engine, result: Result, folder: Path) -> None:
        """Write the file, the inputs, and the outputs of test mode and of the float network."""
        subject = self.subject
        file = folder / f"model{EXPORTERS[engine.target].suffix}"
        options: dict[str, Any] = dict(engine.options)
        if engine.target == "gguf":
            options["gguf_template"] = str(self._float_file("gguf"))
        choices = checked_choices(options, engine.target, result.export)
        written = result_for_file(
            result, [subject.batch], target=engine.target, file=file, choices=choices
        )
        verification = written.export(engine.target, file, [subject.batch], **options)
        store_kernels(folder / "kernels.json", verification)
        save(folder / "inputs.npz", "input", arrays_of(subject.batch))
        tested = network_as_run(written, engine.target, choices)
        networks = {"float": subject.model, "test_mode": tested}
        for name, network in networks.items():
            outputs = arrays_of(called(network, subject.batch))
            if engine.is_next_token:
                outputs = [next_token(logits) for logits in outputs]
            save(folder / f"{name}.npz", "output", outputs)

    def _float_file(self, program: str) -> Path:
        """Return the float network as an engine reads it, written once for all engines."""
        writer, suffix = FLOAT_PROGRAMS[program]
        path = self.work / f"{self.name}-float{suffix}"
        if not path.exists():
            writer(self.subject, path)
        return path


def network_as_run(result: Result, target: str, choices: Mapping[str, str]) -> nn.Module:
    """Return the network of test mode with `--to`, which counts what the target rounds."""
    calibrated = result._calibrated
    solution = as_run([target], calibrated.graph, calibrated.solution, choices)
    return calibrated.with_solution(solution).network()


def store_kernels(path: Path, verification: Verification) -> None:
    """Write how many multiplications the file has in integers, if the exporter knows it."""
    session = verification.default_session or verification
    counts: dict[str, int] = {}
    if session.kernels is not None:
        counts["integer"] = len(session.kernels.integer)
        counts["multiplications"] = session.kernels.count
    path.write_text(json.dumps(counts), "utf-8")


@torch.no_grad()
def called(network: nn.Module, batch: Any) -> Any:
    """Call a network on a tensor, or on the tensors of a dict by name."""
    if isinstance(batch, dict):
        return network(**batch)
    return network(batch)


def arrays_of(values: Any) -> Arrays:
    """Return the tensors of a batch or an output, in order."""
    leaves = pytree.tree_leaves(values)
    return [leaf.numpy() for leaf in leaves if isinstance(leaf, Tensor)]


def next_token(logits: NDArray[Any]) -> NDArray[Any]:
    """Return the logits of the token that follows, with a mean of 0 over the vocabulary."""
    last = logits[:, -1]
    centred: NDArray[Any] = last - last.mean(-1, keepdims=True)
    return centred


def save(path: Path, prefix: str, arrays: Arrays) -> None:
    """Write arrays under numbered names."""
    named: dict[str, Any] = {}
    for index, array in enumerate(arrays):
        named[f"{prefix}_{index}"] = array
    np.savez(path, **named)


def float_onnx(subject: Subject, path: Path) -> None:
    """Write the float network as torch exports it."""
    args, kwargs = _call(subject.batch)
    with quiet():
        program = torch.onnx.export(
            subject.model, args, kwargs=kwargs, dynamo=True, verbose=False
        )
    assert program is not None
    program.save(path, external_data=False)


def float_pt2(subject: Subject, path: Path) -> None:
    """Write the float network as a program of torch."""
    args, kwargs = _call(subject.batch)
    with quiet():
        program = torch.export.export(Leaves(subject.model), args, kwargs)
    torch.export.save(program, path)


def float_pte(subject: Subject, path: Path) -> None:
    """Write the float network for ExecuTorch, with XNNPACK."""
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower

    args, kwargs = _call(subject.batch)
    with quiet():
        program = torch.export.export(Leaves(subject.model), args, kwargs)
        lowered = to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()])
        path.write_bytes(lowered.to_executorch().buffer)


def float_tflite(subject: Subject, path: Path) -> None:
    """Write the float network for LiteRT, with one sample as the files of the exporter."""
    import litert_torch

    from quantizer.export.mobile.litert_rewrites import multiply_squares

    sample = pytree.tree_map(lambda values: values[:1], subject.batch)
    args, kwargs = _call(sample)
    with quiet(), contextlib.redirect_stdout(io.StringIO()):
        program = torch.export.export(Leaves(subject.model), args, kwargs)
        multiply_squares(program)
        network = program.module()
        network.training = False
        litert_torch.convert(network, args, kwargs or None).export(str(path))


class Leaves(nn.Module):
    """A network that returns its tensors as a tuple, so that no class of outputs is needed."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        """Call the network."""
        leaves = pytree.tree_leaves(self.network(*args, **kwargs))
        return tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))


def float_folder(subject: Subject, path: Path) -> None:
    """Write the float network as a folder of transformers."""
    model: Any = subject.model
    model.save_pretrained(path)


def float_gguf(subject: Subject, path: Path) -> None:
    """Write the float network, which is also the template of the quantized one."""
    from support.gguf_templates import template

    template(path, subject.model, "F32")


FLOAT_PROGRAMS: dict[str, tuple[Callable[[Subject, Path], None], str]] = {
    "onnx": (float_onnx, ".onnx"),
    "pt2": (float_pt2, ".pt2"),
    "transformers": (float_folder, ""),
    "gguf": (float_gguf, ".gguf"),
    "pte": (float_pte, ".pte"),
    "tflite": (float_tflite, ".tflite"),
}
"""How the float network is written for an engine, and the suffix of its file."""


def _call(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(batch, dict):
        return (), batch
    return (batch,), {}
