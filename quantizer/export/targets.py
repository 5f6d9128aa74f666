"""The targets of `--deploy`: how each file is called, what it needs and which options it has.

Imports no torch, so that the command line can list them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from quantizer.option_words import Option, Sentence, marked


@dataclass(frozen=True)
class TargetOption:
    """An option of a target, on the command line and in Python.

    `values` are what it may be, the default first. With `is_file` any path is a value, too, and
    with `is_text` any text, which `metavar` stands for. `alone` are values with which no other
    target is written. `goes_with` is an option and those of its values with which this option
    has an effect.
    """

    name: str
    target: str
    help: str
    values: tuple[str, ...]
    is_file: bool = False
    is_text: bool = False
    metavar: str = "NAME,..."
    alone: tuple[str, ...] = ()
    goes_with: tuple[str, tuple[str, ...]] | None = None

    @property
    def default(self) -> str:
        """Return the value that holds if none is given."""
        return self.values[0]


@dataclass(frozen=True)
class ExportTarget:
    """One kind of file or folder, written by the class `exporter` ("module:name").

    Attributes:
        reader: what reads the file back to verify it, for sentences.
        needs: packages, which the extra `extra` installs.
        for_transformers: whether it takes models of transformers only.
        plainly: how `reader` runs the file besides its default settings.
        by_tensor: whether it needs only one weight in memory at a time.
        plans_alone: whether a plan can be checked without these packages.
        int8_share: the metric of the share of multiplications in int8; empty if there is none.
            That of multiply-adds has the same name with `_multiply_adds`.
        holds_negative_scales: whether the scale of a weight may be negative.
    """

    exporter: str
    suffix: str
    reader: str
    needs: tuple[str, ...] = ()
    extra: str = ""
    for_transformers: bool = False
    by_tensor: bool = False
    plainly: str = "without optimizations"
    plans_alone: bool = False
    int8_share: str = ""
    holds_negative_scales: bool = False
    options: tuple[TargetOption, ...] = ()

    @property
    def int8_metrics(self) -> tuple[str, ...]:
        """Return the metrics of the shares in int8: of multiplications, and of multiply-adds.

        >>> EXPORTERS["onnx"].int8_metrics
        ('onnx_int8_share', 'onnx_int8_multiply_adds')
        """
        if not self.int8_share:
            return ()
        return self.int8_share, self.int8_share.replace("_share", "_multiply_adds")


EXPORTERS: dict[str, ExportTarget] = {
    "onnx": ExportTarget(
        "quantizer.export.onnx.exporter:OnnxExporter",
        ".onnx",
        "ONNX Runtime",
        ("onnx", "onnxruntime", "onnxscript"),
        "onnx",
        int8_share="onnx_int8_share",
        options=(
            TargetOption(
                "onnx_profile",
                "onnx",
                "An .onnx rounds as the config says, or as ONNX Runtime's fastest kernels do. "
                "tuned leaves in float what integers make slower on this machine. tensorrt and "
                "npu are for these engines.",
                ("exact", "fast", "tuned", "tensorrt", "npu"),
                alone=("tuned",),
            ),
            TargetOption(
                "onnx_weights",
                "onnx",
                "8-bit weights in an .onnx: auto is right on every CPU, int8 on those with "
                "VNNI, where it is faster.",
                ("auto", "uint8", "int8"),
                goes_with=("onnx_profile", ("exact", "fast", "tuned")),
            ),
            TargetOption(
                "deploy_file",
                "onnx",
                "A deploy.json of --onnx_profile tuned, whose choice is repeated.  [default: "
                "the one in the folder of the file, if there is one]",
                ("",),
                is_file=True,
                goes_with=("onnx_profile", ("tuned",)),
            ),
            TargetOption(
                "input_names",
                "onnx",
                "Names of the inputs of an .onnx, separated by commas.  [default: the "
                "parameters of forward()]",
                ("",),
                is_text=True,
            ),
            TargetOption(
                "output_names",
                "onnx",
                "Names of the outputs of an .onnx, separated by commas.  [default: keys and "
                "fields of the output, otherwise output_0, output_1, ...]",
                ("",),
                is_text=True,
            ),
        ),
    ),
    "openvino": ExportTarget(
        "quantizer.export.openvino_ir.exporter:OpenVinoIrExporter",
        ".xml",
        "OpenVINO",
        ("onnx", "onnxruntime", "onnxscript", "openvino"),
        "openvino",
        plainly="in float32",
        int8_share="openvino_int8_share",
    ),
    "encodings": ExportTarget(
        "quantizer.export.encodings.exporter:EncodingsExporter",
        ".encodings",
        "ONNX Runtime, with operators for the encodings",
        ("onnx", "onnxruntime", "onnxscript"),
        "onnx",
        options=(
            TargetOption(
                "encodings_version",
                "encodings",
                "The version of an .encodings file: 2.0.0 also holds axes.",
                ("1.0.0", "2.0.0"),
            ),
        ),
    ),
    "pt2": ExportTarget(
        "quantizer.export.torch_export.pt2:Pt2Exporter",
        ".pt2",
        "torch.export.load",
        options=(
            TargetOption(
                "pt2_activations",
                "pt2",
                "Integers of activations in a .pt2: uint8 for torch's compiler, int8 for "
                "ExecuTorch.",
                ("uint8", "int8"),
            ),
        ),
    ),
    "executorch": ExportTarget(
        "quantizer.export.mobile.executorch:ExecutorchExporter",
        ".pte",
        "ExecuTorch",
        ("executorch",),
        "executorch",
        plans_alone=True,
        int8_share="executorch_int8_share",
        options=(
            TargetOption(
                "executorch_batch",
                "executorch",
                "The largest batch of a .pte, for which memory is planned.  [default: the "
                "first one of the data]",
                ("",),
                is_text=True,
                metavar="N",
            ),
        ),
    ),
    "litert": ExportTarget(
        "quantizer.export.mobile.litert:LitertExporter",
        ".tflite",
        "LiteRT",
        ("litert_torch", "ai_edge_litert"),
        "litert",
        plans_alone=True,
        int8_share="litert_int8_share",
        options=(
            TargetOption(
                "litert_io",
                "litert",
                "Type of the inputs and outputs of a .tflite: float, or int8 where they are "
                "quantized.",
                ("float", "int8"),
            ),
        ),
    ),
    "pt2_float": ExportTarget(
        "quantizer.export.torch_export.pt2_float:Pt2FloatExporter",
        ".float.pt2",
        "torch.export.load",
        holds_negative_scales=True,
    ),
    "safetensors": ExportTarget(
        "quantizer.export.safetensors:SafetensorsExporter",
        ".safetensors",
        "quantizer",
        by_tensor=True,
        holds_negative_scales=True,
    ),
    "compressed-tensors": ExportTarget(
        "quantizer.export.compressed_tensors.exporter:CompressedTensorsExporter",
        "-compressed-tensors",
        "transformers with compressed-tensors",
        ("transformers", "compressed_tensors"),
        "llm",
        for_transformers=True,
        by_tensor=True,
        holds_negative_scales=True,
    ),
    "gptq": ExportTarget(
        "quantizer.export.gptq_folder.exporter:GptqExporter",
        "-gptq",
        "transformers with dequantized weights",
        ("transformers",),
        "llm",
        for_transformers=True,
    ),
    "gguf": ExportTarget(
        "quantizer.export.gguf.exporter:GgufExporter",
        ".gguf",
        "transformers",
        ("transformers", "accelerate", "gguf"),
        "llm",
        for_transformers=True,
        by_tensor=True,
        holds_negative_scales=True,
        options=(
            TargetOption(
                "gguf_template",
                "gguf",
                "A .gguf of the same model: --deploy gguf keeps its keys and tokenizer.",
                ("",),
                is_file=True,
            ),
        ),
    ),
}
"""By their names."""


@dataclass(frozen=True)
class CheckedTarget:
    """What a value of `--for` stands for: a target of `--deploy` with values of its options."""

    target: str
    choices: Mapping[str, str] = field(default_factory=dict)

    @property
    def words(self) -> Sentence:
        """Return the options of test mode that write it.

        >>> print(CHECKED_TARGETS["npu"].words)
        --deploy onnx --onnx_profile npu
        """
        choices = [Option(name, (value,)) for name, value in self.choices.items()]
        return Sentence(marked(Option("deploy", (self.target,)), *choices))


WHOLE_MODELS = ("compressed-tensors", "gptq")
"""The targets whose folders hold all tensors of a model, also those that no data reach."""

CHECKED_TARGETS = {name: CheckedTarget(name) for name in EXPORTERS}
"""By the values of `--for`: the targets, and profiles that are named in messages. Those for
other engines hold less than their target does.
"""
for _profile in ("tuned", "tensorrt", "npu"):
    CHECKED_TARGETS[_profile] = CheckedTarget("onnx", {"onnx_profile": _profile})


def checked_target(name: str, choices: Mapping[str, str]) -> CheckedTarget:
    """Return what a value of `--for` stands for if options have these values, too.

    >>> print(checked_target("onnx", {"onnx_profile": "npu", "onnx_weights": "int8"}).words)
    --deploy onnx --onnx_profile npu
    """
    checked = CHECKED_TARGETS[name]
    if checked.choices:
        return checked
    for other in CHECKED_TARGETS.values():
        is_chosen = other.choices and other.choices.items() <= choices.items()
        if other.target == name and is_chosen:
            return other
    return checked
