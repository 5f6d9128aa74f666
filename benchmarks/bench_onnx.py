"""What an `.onnx` costs in ONNX Runtime, against the float model and against what the runtime's
own quantizer makes.

`python benchmarks/bench_onnx.py [--threads N] [rounds] [network …]`; the same data calibrate
both; default sessions, batches of 1 and 10. Files are those that `quantizer run --to onnx`
writes.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import onnxruntime
import torch
from measure import ratios, report
from onnxruntime.quantization import (
    CalibrationDataReader,
    QuantFormat,
    QuantType,
    quantize_dynamic,
    quantize_static,
)
from onnxruntime.quantization.shape_inference import quant_pre_process
from torch import Tensor, nn
from vision import convnext, convolutions, mobile, normalized, pyramid, vit
from workloads import images, llama, resnet18, tokens

import quantizer
from quantizer import Config, Dtype, QSchemeType, QuantizationConfig, QuantizationSpec
from quantizer.export.onnx.speed import cpu_session
from quantizer.graph.tracing.trace import quiet
from quantizer.numerics.metrics import sqnr_db
from quantizer.sources.models import load_model

ROOT = Path(__file__).parents[1]
PRESET = ROOT / "configs" / "onnx_int8.json"
TARGET = 1.0
"""Not slower than the runtime's own."""


@dataclass(frozen=True)
class Case:
    """A network, what calibrates it, a batch of ten samples to time and compare, and how the
    file is written.
    """

    model: nn.Module
    config: Path | Config
    data: list[Tensor]
    x: Tensor
    profile: str = "exact"

    @property
    def is_static(self) -> bool:
        """Whether ranges are found in calibration; else at run time."""
        return self.config == PRESET


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rounds", type=int, nargs="?", default=15)
    parser.add_argument("networks", nargs="*")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    for name, make in CASES.items():
        if options.networks and name.partition(",")[0] not in options.networks:
            continue
        with TemporaryDirectory() as folder:
            measure(name, make(), Path(folder), options.rounds, options.threads)


def example(name: str) -> Case:
    """A trained network on its own data."""
    loaded = load_model(str(ROOT / "examples" / f"{name}.py"))
    assert loaded.calibration_data
    assert loaded.evaluation_data
    x = next(iter(loaded.evaluation_data()))[0]
    batches = loaded.calibration_data()
    data = [batch if torch.is_tensor(batch) else batch[0] for batch in batches]
    return Case(loaded.module.eval(), PRESET, data, x[:10])


def noise(model: nn.Module, profile: str = "exact", size: int = 224) -> Case:
    """Any network for images, on noise."""
    *data, x = images(60, size=size)
    return Case(model, PRESET, data, x, profile)


def small(model: nn.Module) -> Case:
    """A network for 64x64 images, with activations as large as those of trained networks."""
    return noise(normalized(model, images(20, size=64)[0]), size=64)


def trained_like() -> nn.Module:
    """A network like MobileNetV3, with activations as large as those of trained networks."""
    return normalized(mobile(), images(20)[0])


def mobilevit() -> nn.Module:
    """MobileViT with random weights, for 64x64 images."""
    transformers = importlib.import_module("transformers")
    torch.manual_seed(0)
    config = transformers.MobileViTConfig(image_size=64, num_labels=10)
    model = transformers.MobileViTForImageClassification(config)
    return Logits(model).eval()


class Logits(nn.Module):
    """A classifier of transformers that returns its logits alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        """[N, 3, H, W] to [N, classes]."""
        return self.model(x).logits  # type: ignore[no-any-return]


def text(config: Path | Config) -> Case:
    """The language model, whose ranges are found at run time."""
    found = torch.cat(tokens(10, 64))
    return Case(llama(), config, [found], found)


def whole_inputs() -> Config:
    """A range for each input of a linear layer as a whole, like the runtime's own."""
    weight = QuantizationSpec(dtype=Dtype.int8, qscheme=QSchemeType.per_channel, ch_axis=0)
    inputs = QuantizationSpec(
        dtype=Dtype.uint8, qscheme=QSchemeType.per_tensor, symmetric=False, is_dynamic=True
    )
    return Config(QuantizationConfig(weight=weight, input_tensors=inputs))


CASES: dict[str, Callable[[], Case]] = {
    "digits": lambda: example("digits"),
    "resnet18": lambda: noise(resnet18()),
    "efficientnet": lambda: example("efficientnet_lite"),
    "mobile": lambda: noise(trained_like()),
    "mobile, the tuned profile": lambda: noise(trained_like(), profile="tuned"),
    "vit": lambda: noise(vit()),
    "vit, the tuned profile": lambda: noise(vit(), profile="tuned"),
    "mobilevit": lambda: small(mobilevit()),
    "pyramid": lambda: noise(pyramid(), size=64),
    "silu": lambda: small(convolutions(nn.SiLU)),
    "leaky": lambda: small(convolutions(lambda: nn.LeakyReLU(0.1))),
    "prelu": lambda: small(convolutions(nn.PReLU)),
    "convnext": lambda: small(convnext()),
    "llama, a range for each token": lambda: text(ROOT / "configs" / "dynamic_int8.json"),
    "llama, a range for each input": lambda: text(whole_inputs()),
}


@torch.no_grad()
def measure(name: str, case: Case, folder: Path, rounds: int, threads: int) -> None:
    """Make the three files, and compare."""
    result = quantizer.calibrate(case.model, case.config, case.data)
    path = folder / "ours.onnx"
    kernels = result.export("onnx", path, [case.x], onnx_profile=case.profile).default_session
    assert kernels is not None
    batch = torch.export.Dim("batch", min=1)
    with quiet():
        made = torch.onnx.export(
            case.model, (case.x,), dynamo=True, dynamic_shapes=({0: batch},), verbose=False
        )
    assert made is not None
    (folder / "float.onnx").write_bytes(made.model_proto.SerializeToString())
    theirs(case, folder)
    sessions = {
        kind: session(folder / f"{kind}.onnx", threads) for kind in ("float", "ours", "theirs")
    }
    want = case.model(case.x)
    closeness = {
        kind: f"{sqnr_db(want, output(sessions[kind], case.x)):.1f} dB from float"
        for kind in ("ours", "theirs")
    }
    closeness["ours"] += (
        f", {kernels.summary_lines[0].partition(';')[0]}" if kernels.summary_lines else ""
    )
    for size in (1, 10):
        parts = {
            kind: functools.partial(output, each, case.x[:size])
            for kind, each in sessions.items()
        }
        faster = ratios(parts["ours"], {"float": parts["float"]}, rounds)
        report(
            f"{name}, batch {size}: float's time, ratio to ours", faster, {"float": TARGET}, {}
        )
        slower = ratios(parts["theirs"], {"ours": parts["ours"]}, rounds)
        report(
            f"{name}, batch {size}: ours, ratio to the runtime's own",
            slower,
            {"ours": TARGET},
            closeness,
        )
        print(f"  the runtime's own: {closeness['theirs']}")


class Reader(CalibrationDataReader):  # type: ignore[misc]  # untyped
    """The data, as the runtime's quantizer reads them."""

    def __init__(self, input_name: str, data: list[Tensor]) -> None:
        self.items: Iterator[dict[str, Any]] = iter(
            [{input_name: item.numpy()} for item in data]
        )

    def get_next(self) -> dict[str, Any] | None:
        return next(self.items, None)


def theirs(case: Case, folder: Path) -> None:
    """What ONNX Runtime's own quantizer makes of the float file, as its documentation advises
    for x64.
    """
    source, ready, made = (folder / f"{kind}.onnx" for kind in ("float", "ready", "theirs"))
    if not case.is_static:
        quantize_dynamic(source, made, weight_type=QuantType.QInt8, per_channel=True)
        return
    quant_pre_process(source, ready, skip_symbolic_shape=True)
    types = {
        "activation_type": QuantType.QUInt8,
        "weight_type": QuantType.QInt8,
        "per_channel": True,
    }
    reader = Reader(session(ready).get_inputs()[0].name, case.data)
    quantize_static(ready, made, reader, quant_format=QuantFormat.QDQ, **types)


def session(path: Path, threads: int = 1) -> onnxruntime.InferenceSession:
    """Return a session whose threads do not slow down the session after it."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    return cpu_session(path.read_bytes(), options)


def output(each: onnxruntime.InferenceSession, x: Tensor) -> Tensor:
    """What a session gives for a batch."""
    return torch.from_numpy(each.run(None, {each.get_inputs()[0].name: x.numpy()})[0])


if __name__ == "__main__":
    main()
