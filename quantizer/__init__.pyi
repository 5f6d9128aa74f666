"""Post-training quantization of PyTorch models, configured by a JSON file or by dataclasses.

`python docs/generate.py` writes this file.
"""

import os
from collections.abc import Callable, Collection, Iterable
from typing import Any, Literal, TypedDict

from torch import nn as _torch_nn

from quantizer import nn as nn
from quantizer.api.calibrate import CalibrationData
from quantizer.api.config import AnyConfig
from quantizer.calibration.events import Events
from quantizer.algorithms.awq.settings import AWQConfig as AWQConfig
from quantizer.algorithms.equalization.settings import CLEConfig as CLEConfig
from quantizer.algorithms.gptq.settings import GPTAQConfig as GPTAQConfig
from quantizer.algorithms.gptq.settings import GPTQConfig as GPTQConfig
from quantizer.algorithms.gptq.settings import QronosConfig as QronosConfig
from quantizer.algorithms.imatrix.settings import IMatrixConfig as IMatrixConfig
from quantizer.algorithms.rotation.settings import RotationConfig as RotationConfig
from quantizer.algorithms.smoothquant.settings import SmoothQuantConfig as SmoothQuantConfig
from quantizer.api.calibrate import calibrate as calibrate
from quantizer.api.calibrate import load as load
from quantizer.api.config import Config as Config
from quantizer.api.config import ObserverBase as ObserverBase
from quantizer.api.config import PlaceholderObserver as PlaceholderObserver
from quantizer.api.config import QuantizationConfig as QuantizationConfig
from quantizer.api.config import QuantizationSpec as QuantizationSpec
from quantizer.api.model_quantizer import ModelQuantizer as ModelQuantizer
from quantizer.api.result import Quantized as Quantized
from quantizer.config.algorithms import AlgoConfig as AlgoConfig
from quantizer.config.algorithms import PreQuantOptConfig as PreQuantOptConfig
from quantizer.config.forms.types import DeviceType as DeviceType
from quantizer.config.forms.types import Dtype as Dtype
from quantizer.config.forms.types import QSchemeType as QSchemeType
from quantizer.config.forms.types import RoundType as RoundType
from quantizer.config.forms.types import ScaleType as ScaleType

__version__: str
__all__ = [
    "AWQConfig",
    "AlgoConfig",
    "CLEConfig",
    "Config",
    "DeviceType",
    "Dtype",
    "GPTAQConfig",
    "GPTQConfig",
    "IMatrixConfig",
    "ModelQuantizer",
    "ObserverBase",
    "PerBlock2DMinMaxObserver",
    "PerBlockBFPObserver",
    "PerBlockMXObserver",
    "PerChannelMinMaxObserver",
    "PerChannelPairSafeObserver",
    "PerGroupMSEObserver",
    "PerGroupMinMaxObserver",
    "PerTensorMSEObserver",
    "PerTensorMinMaxObserver",
    "PerTensorPercentileObserver",
    "PlaceholderObserver",
    "PreQuantOptConfig",
    "QSchemeType",
    "QronosConfig",
    "QuantizationConfig",
    "QuantizationSpec",
    "Quantized",
    "RotationConfig",
    "RoundType",
    "ScaleType",
    "SmoothQuantConfig",
    "calibrate",
    "load",
    "quantize",
]

class PerBlock2DMinMaxObserver(ObserverBase):
    """Selects a range for each block of `block_size` rows and columns, from the smallest to the
    largest value."""

class PerBlockBFPObserver(ObserverBase):
    """Selects a shared exponent for each block of `bfp16`, from its largest magnitude."""

class PerBlockMXObserver(ObserverBase):
    """Selects a shared exponent for each block of a microscaling format, from its largest
    magnitude."""

class PerChannelMinMaxObserver(ObserverBase):
    """Selects a range for each channel along `ch_axis`, or for each group of its values, from
    the smallest to the largest value."""

class PerChannelPairSafeObserver(ObserverBase):
    """Selects the smallest range for each output channel of a weight with which no x86
    processor adds up int8 products wrong."""

class PerGroupMSEObserver(ObserverBase):
    """Selects the range with the least squared error for each group of `group_size` values
    along `ch_axis`."""

class PerGroupMinMaxObserver(ObserverBase):
    """Selects a range for each group of `group_size` values along `ch_axis`, from the smallest
    to the largest value."""

class PerTensorMSEObserver(ObserverBase):
    """Selects the range with the least squared error."""

class PerTensorMinMaxObserver(ObserverBase):
    """Selects one range for the tensor, from its smallest to its largest value."""

class PerTensorPercentileObserver(ObserverBase):
    """Selects one range that contains `percentage` percent of the values."""

class ExportOptions(TypedDict, total=False):
    """The options of targets, for `Result.export`."""

    onnx_profile: Literal["exact", "fast", "tuned", "mixed", "tensorrt", "npu"] | str
    onnx_weights: Literal["auto", "uint8", "int8"] | str
    deploy_file: str | os.PathLike[str]
    input_names: str
    output_names: str
    encodings_version: Literal["1.0.0", "2.0.0"] | str
    pt2_activations: Literal["uint8", "int8"] | str
    executorch_batch: str
    litert_io: Literal["float", "int8"] | str
    gguf_template: str | os.PathLike[str]

ExportTarget = Literal["onnx", "openvino", "encodings", "pt2", "pt2_float", "executorch", "litert", "safetensors", "compressed-tensors", "gptq", "gguf"]

def quantize(
    model: _torch_nn.Module,
    data: CalibrationData | None = None,
    to: Literal["onnx", "tensorrt", "npu", "openvino", "qnn", "pt2", "pt2_float", "executorch", "litert", "safetensors", "w8", "w4", "w8a8", "fp8", "compressed-tensors", "gptq", "gguf", "int8", "trt", "aimet", "qualcomm", "encodings", "pte", "tflite", "w8a16", "w4a16", "int4", "vllm", "llama.cpp", "ollama", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q4_k", "q4_k_m", "q5_k", "q5_k_m", "q6_k", "iq4_nl"] | str | None = None,
    *,
    folder: str | os.PathLike[str] = "quantize_result",
    config: AnyConfig | None = None,
    evaluation_data: Any = None,
    evaluate: Callable[[Callable[..., Any], Iterable[Any]], dict[str, float]] | None = None,
    lower_is_better: Collection[str] = (),
    gates: Collection[str] = (),
    seed: int = 0,
    dynamic: str | None = None,
    max_mb: float | None = None,
    keep_float: Collection[str] = (),
    overwrite: bool = False,
    events: Events | None = None,
    onnx_profile: Literal["exact", "fast", "tuned", "mixed", "tensorrt", "npu"] = ...,
    onnx_weights: Literal["auto", "uint8", "int8"] = ...,
    deploy_file: str | os.PathLike[str] = ...,
    input_names: str = ...,
    output_names: str = ...,
    encodings_version: Literal["1.0.0", "2.0.0"] = ...,
    pt2_activations: Literal["uint8", "int8"] = ...,
    executorch_batch: str = ...,
    litert_io: Literal["float", "int8"] = ...,
    gguf_template: str | os.PathLike[str] = ...,
    **options: str | os.PathLike[str],
) -> Quantized:
    """Quantize a model in one call, as `quantizer run` does: calibrate, test and write it.

    Args:
        model, data, seed, dynamic, events: as in `calibrate`. Some destinations need no data.
        to: a name of `quantizer targets`. None: "w4" if the model generates text, else "onnx".
        folder, overwrite: for config, results and file; whether others there are replaced.
        config: as in `calibrate`. None for `quantize_config.json` in the folder, or a preset.
        evaluation_data: to test and verify with. None: the last quarter of 16 samples or more.
        evaluate, lower_is_better: as in `Result.test`.
        gates: such as `["top1_drop<=0.01"]`. If one does not hold, `GateError` is raised.
        max_mb: the most 10^6 bytes that the file may have, as `--max_mb` of `quantizer run`.
        keep_float: layers that stay in float, as `exclude` of a config names them.
        onnx_profile: An .onnx rounds as the config says, or as ONNX Runtime's fastest
            kernels do. tuned and mixed leave in float what integers make slower on this
            machine; mixed keeps integers elsewhere. tensorrt and npu are for these
            engines.
        onnx_weights: 8-bit weights in an .onnx: auto is right on every CPU, int8 on
            those with VNNI, where it is faster.
        deploy_file: A deploy.json of --onnx_profile tuned or mixed, whose choice is
            repeated.  [default: the one in the folder of the file, if there is one]
        input_names: Names of the inputs of an .onnx, separated by commas.  [default:
            the parameters of forward()]
        output_names: Names of the outputs of an .onnx, separated by commas.  [default:
            keys and fields of the output, otherwise output_0, output_1, ...]
        encodings_version: The version of an .encodings file: 2.0.0 also holds axes.
        pt2_activations: Integers of activations in a .pt2: uint8 for torch's compiler,
            int8 for ExecuTorch.
        executorch_batch: The largest batch of a .pte, for which memory is planned.
            [default: the first one of the data]
        litert_io: Type of the inputs and outputs of a .tflite: float, or int8 where
            they are quantized.
        gguf_template: A .gguf of the same model, whose keys and tokenizer the file
            keeps.
        options: the options of the target, as in `Result.export`.

    Raises:
        QuantizerError: as of `calibrate` and `Result`; a `UsageError` for a wrong argument.
    """
