"""Public packages that quantize a network for images to int8, statically, as their
documentation advises for x64.

Measures nothing. This file runs with their interpreters: each package is imported where it is
used, and ours never.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from peers import Peer, Quantize
from torch import Tensor
from torch.utils.data import DataLoader


def torchao_pt2e(model: Any, batches: list[Tensor]) -> Any:
    """Quantization after torch.export, with the quantizer for x86: histograms, and a search for
    the least error.
    """
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

    quantizer = x86.X86InductorQuantizer().set_global(
        x86.get_default_x86_inductor_quantization_config()
    )
    prepared = prepare_pt2e(torch.export.export(model, (batches[0],)).module(), quantizer)
    for batch in batches:
        prepared(batch)
    return convert_pt2e(prepared)


def nncf_quantize(model: Any, batches: list[Tensor]) -> Any:
    """Its default: means of the extremes, and its fast bias correction."""
    import nncf

    return nncf.quantize(model, nncf.Dataset(batches), subset_size=len(batches))


def onnxruntime_static(method: str) -> Quantize:
    """QDQ with uint8 activations and int8 weights by channels; the export to ONNX is part of
    the job.
    """

    def quantize(model: Any, batches: list[Tensor]) -> Callable[[Tensor], Tensor]:
        from onnxruntime import InferenceSession
        from onnxruntime import quantization as ort
        from onnxruntime.quantization.shape_inference import quant_pre_process

        with tempfile.TemporaryDirectory() as folder:
            source, ready, made = (
                str(Path(folder) / f"{name}.onnx") for name in ("float", "ready", "quantized")
            )
            program = torch.onnx.export(model, (batches[0],), dynamo=True, verbose=False)
            assert program is not None
            # It refuses weights in other files
            Path(source).write_bytes(program.model_proto.SerializeToString())
            quant_pre_process(source, ready, skip_symbolic_shape=True)
            name = InferenceSession(ready).get_inputs()[0].name
            feeds: Iterator[dict[str, Any]] = iter([{name: batch.numpy()} for batch in batches])

            class Reader(ort.CalibrationDataReader):  # type: ignore[misc]  # untyped
                def get_next(self) -> dict[str, Any] | None:
                    return next(feeds, None)

            types = {
                "activation_type": ort.QuantType.QUInt8,
                "weight_type": ort.QuantType.QInt8,
                "per_channel": True,
            }
            chosen = ort.CalibrationMethod[method]
            form = ort.QuantFormat.QDQ
            ort.quantize_static(
                ready, made, Reader(), quant_format=form, calibrate_method=chosen, **types
            )
            session = InferenceSession(made)
        return lambda batch: torch.from_numpy(session.run(None, {name: batch.numpy()})[0])

    return quantize


def quark_static(model: Any, batches: list[Tensor]) -> Any:
    """The least and largest values of inputs and outputs, weights by channels."""
    from quark.torch import ModelQuantizer
    from quark.torch.quantization.config import config as quark

    common = {
        "symmetric": True,
        "scale_type": "float",
        "round_method": "half_even",
        "is_dynamic": False,
    }
    values = quark.Int8PerTensorSpec(observer_method="min_max", **common).to_quantization_spec()
    weight = quark.Int8PerChannelSpec(ch_axis=0, **common).to_quantization_spec()
    layers = quark.QLayerConfig(weight=weight, input_tensors=values, output_tensors=values)
    quantizer = ModelQuantizer(quark.QConfig(global_quant_config=layers))
    loader: DataLoader[Any] = DataLoader(torch.cat(batches), batch_size=len(batches[0]))  # type: ignore[arg-type]
    return quantizer.freeze(quantizer.quantize_model(model, loader))


VISION_PEERS = {
    "torchao pt2e": Peer("torchao", False, torchao_pt2e),
    "NNCF": Peer("nncf", False, nncf_quantize),
    "ONNX Runtime MinMax": Peer("onnxruntime", False, onnxruntime_static("MinMax")),
    "ONNX Runtime Entropy": Peer("onnxruntime", False, onnxruntime_static("Entropy")),
    "quark": Peer("amd-quark", False, quark_static),
}
