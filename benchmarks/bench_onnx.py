"""What an `.onnx` costs in ONNX Runtime, against the float model and against what the runtime's
own quantizer makes.

`python benchmarks/bench_onnx.py [rounds] [network …]`; the same data calibrate both; default
sessions, batches of 1 and
10. 8-bit weights are int8 on processors with VNNI, as the runtime's own are, and uint8 on
    others, where the runtime's own products are wrong.
"""

from __future__ import annotations

import functools
import json
import logging
import sys
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
from vision import mobile, normalized, vit
from workloads import images, llama, resnet18, tokens

import quantizer
from quantizer import Config, Dtype, QSchemeType, QuantizationConfig, QuantizationSpec
from quantizer.export.onnx.speed import timed_session
from quantizer.graph.tracing.trace import quiet
from quantizer.numerics.metrics import sqnr_db
from quantizer.sources.models import load_model

ROOT = Path(__file__).parents[1]
CPU_INT8 = ROOT / "configs" / "cpu_int8.json"
WEIGHTS = "int8" if torch.cpu._is_vnni_supported() else "uint8"
TARGET = 1.0
"""Not slower than the runtime's own."""


def with_7_bits() -> dict[str, Any]:
    """The preset, with weights that no processor's sums of 16 bits can overflow with."""
    content: dict[str, Any] = json.loads(CPU_INT8.read_text(encoding="utf-8"))
    content["tensor_quantize_config"]["weights"]["bit_width"] = 7
    return content


BITS_7 = with_7_bits()


@dataclass(frozen=True)
class Case:
    """A network, what calibrates it, a batch of ten samples to time and compare, and how the
    file is written.
    """

    model: nn.Module
    config: Path | Config | dict[str, Any]
    data: list[Tensor]
    x: Tensor
    profile: str = "exact"

    @property
    def is_static(self) -> bool:
        """Whether ranges are found in calibration; else at run time."""
        return self.config in (CPU_INT8, BITS_7)


def main() -> None:
    """Measure and print."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 15
    logging.disable(logging.WARNING)
    for name, make in CASES.items():
        if sys.argv[2:] and name.partition(",")[0] not in sys.argv[2:]:
            continue
        with TemporaryDirectory() as folder:
            measure(name, make(), Path(folder), rounds)


def photos(config: Path | dict[str, Any] = CPU_INT8, profile: str = "exact") -> Case:
    """A trained network, on real photos."""
    loaded = load_model(str(ROOT / "examples" / "efficientnet_lite.py"))
    assert loaded.calibration_data
    assert loaded.evaluation_data
    x = next(iter(loaded.evaluation_data()))[0]
    data = list(loaded.calibration_data())
    return Case(loaded.module.eval(), config, data, x, profile)


def noise(
    model: nn.Module, config: Path | dict[str, Any] = CPU_INT8, profile: str = "exact"
) -> Case:
    """Any network for images, on noise."""
    *data, x = images(60)
    return Case(model, config, data, x, profile)


def trained_like() -> nn.Module:
    """A network like MobileNetV3, with activations as large as those of trained networks."""
    return normalized(mobile(), images(20)[0])


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
    "resnet18": lambda: noise(resnet18()),
    "resnet18, weights of 7 bits": lambda: noise(resnet18(), BITS_7),
    "resnet18, the tuned profile": lambda: noise(resnet18(), profile="tuned"),
    "efficientnet": photos,
    "efficientnet, weights of 7 bits": lambda: photos(BITS_7),
    "efficientnet, the tuned profile": lambda: photos(profile="tuned"),
    "mobile": lambda: noise(trained_like()),
    "mobile, the fast profile": lambda: noise(trained_like(), profile="fast"),
    "mobile, the tuned profile": lambda: noise(trained_like(), profile="tuned"),
    "vit": lambda: noise(vit()),
    "vit, the tuned profile": lambda: noise(vit(), profile="tuned"),
    "llama, a range for each token": lambda: text(ROOT / "configs" / "dynamic_int8.json"),
    "llama, a range for each input": lambda: text(whole_inputs()),
}


@torch.no_grad()
def measure(name: str, case: Case, folder: Path, rounds: int) -> None:
    """Make the three files, and compare."""
    result = quantizer.calibrate(case.model, case.config, case.data)
    settings: dict[str, Any] = {"onnx_profile": case.profile, "onnx_weights": WEIGHTS}
    kernels = result.export("onnx", folder / "ours.onnx", [case.x], **settings).default_session
    assert kernels is not None
    batch = torch.export.Dim("batch", min=1)
    with quiet():
        made = torch.onnx.export(
            case.model, (case.x,), dynamo=True, dynamic_shapes=({0: batch},), verbose=False
        )
    assert made is not None
    (folder / "float.onnx").write_bytes(made.model_proto.SerializeToString())
    theirs(case, folder)
    sessions = {kind: session(folder / f"{kind}.onnx") for kind in ("float", "ours", "theirs")}
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


def session(path: Path) -> onnxruntime.InferenceSession:
    """Return a default session whose threads do not slow down the session after it."""
    return timed_session(path.read_bytes(), onnxruntime.SessionOptions())


def output(each: onnxruntime.InferenceSession, x: Tensor) -> Tensor:
    """What a session gives for a batch."""
    return torch.from_numpy(each.run(None, {each.get_inputs()[0].name: x.numpy()})[0])


if __name__ == "__main__":
    main()
