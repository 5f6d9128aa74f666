"""How far `quantizer plan` is from the peak of memory that calib and test mode then have:
predicted / measured.

`python benchmarks/bench_prediction.py [network …]`: networks of transformers with random
weights, ten minutes.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

MODES = ("calib", "test")
TARGET = 0.2
ROOT = Path(__file__).parents[1]
MODEL = """
import torch, transformers

def model():
    torch.manual_seed(0)
    return transformers.{name}(transformers.{config}(**{settings})).eval()

def calibration_data():
    draw = torch.Generator().manual_seed(0)
    return [{{"{key}": {item}}} for _ in range(6)]
"""
PIXELS = ("pixel_values", "torch.rand(8, 3, 224, 224, generator=draw)")
TOKENS = ("input_ids", "torch.randint(0, 1000, (4, 128), generator=draw)")
SOUND = ("input_features", "torch.randn(2, 80, 3000, generator=draw)")
NETWORKS: dict[str, tuple[str, str, dict[str, Any], tuple[str, str]]] = {
    "ResNet-50": ("ResNetForImageClassification", "ResNetConfig", {}, PIXELS),
    "ConvNeXt": ("ConvNextForImageClassification", "ConvNextConfig", {}, PIXELS),
    "MobileNetV2": ("MobileNetV2ForImageClassification", "MobileNetV2Config", {}, PIXELS),
    "RegNet": ("RegNetForImageClassification", "RegNetConfig", {}, PIXELS),
    "SegFormer": ("SegformerForSemanticSegmentation", "SegformerConfig", {}, PIXELS),
    "ViT": ("ViTForImageClassification", "ViTConfig", {"num_hidden_layers": 6}, PIXELS),
    "BERT": ("BertModel", "BertConfig", {"num_hidden_layers": 6}, TOKENS),
    "GPT-2": ("GPT2LMHeadModel", "GPT2Config", {"n_layer": 6, "use_cache": False}, TOKENS),
    "OPT": (
        "OPTForCausalLM",
        "OPTConfig",
        {"num_hidden_layers": 6, "use_cache": False},
        TOKENS,
    ),
    "Whisper's encoder": (
        "models.whisper.modeling_whisper.WhisperEncoder",
        "WhisperConfig",
        {"encoder_layers": 4},
        SOUND,
    ),
}
INT4 = {
    "dtype": "int4",
    "qscheme": "per_group",
    "ch_axis": 1,
    "group_size": 64,
    "symmetric": True,
}
CPU_INT8: dict[str, Any] = json.loads(
    (ROOT / "configs" / "cpu_int8.json").read_text(encoding="utf-8")
)
CONFIGS: dict[str, dict[str, Any]] = {
    "cpu_int8": CPU_INT8,
    "no bias corr.": CPU_INT8 | {"include_bias_corr": False},
    "int4": {
        "global_quant_config": {"weight": INT4},
        "exclude": ["kind:embedding", "kind:head"],
    },
}
CONFIGS["GPTQ"] = CONFIGS["int4"] | {"algo_config": {"name": "gptq"}}
CONFIGS["GPTQ, no stem"] = CONFIGS["GPTQ"] | {"exclude": ["kind:head", "*Conv2d*"]}
GIVEN = {"ViT": ("cpu_int8", "GPTQ, no stem"), "BERT": ("cpu_int8", "GPTQ")}
GIVEN |= dict.fromkeys(("GPT-2", "OPT"), ("int4", "GPTQ"))
"""Where other configs than the first two are measured."""


def main() -> None:
    """Measure, one process after the other, and print."""
    print(
        f"{'':20}{'':15}"
        + "".join(f"{mode:>24}" for mode in MODES)
        + "   MB predicted / measured"
    )
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for network in sys.argv[1:] or NETWORKS:
            name, config, settings, (key, item) = NETWORKS[network]
            text = MODEL.format(name=name, config=config, settings=settings, key=key, item=item)
            (folder / "net.py").write_text(text, encoding="utf-8")
            for which in GIVEN.get(network, ("cpu_int8", "no bias corr.")):
                (folder / "config.json").write_text(
                    json.dumps(CONFIGS[which]), encoding="utf-8"
                )
                print(
                    f"{network:20}{which:15}" + "".join(map(_cell, *figures(folder))),
                    flush=True,
                )


def figures(folder: Path) -> tuple[list[float], list[float]]:
    """What is predicted and measured for both modes, in bytes."""
    given = ["--model", str(folder / "net.py"), "--config_file", str(folder / "config.json")]
    planned = json.loads(_quantizer("plan", *given, "--json"))["peak_memory_bytes"]
    measured = []
    for mode in MODES:
        results = ["--output_dir", str(folder / "results"), "--overwrite", "--quiet"]
        data = ["--data", f"{folder / 'net.py'}:calibration_data"] if mode == "test" else []
        _quantizer("--quant_mode", mode, *given, *results, *data)
        measured.append(
            json.loads((folder / "results" / "run.json").read_text())["peak_memory_bytes"]
        )
    return [planned[mode] for mode in MODES], measured


def _quantizer(*arguments: str) -> str:
    command = [sys.executable, "-m", "quantizer", *arguments]
    return subprocess.run(
        command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ).stdout


def _cell(predicted: float, measured: float) -> str:
    ratio = predicted / measured
    mark = "" if abs(ratio - 1) <= TARGET else " !"
    return f"{predicted / 1e6:9.0f} /{measured / 1e6:6.0f} {ratio:5.2f}{mark:2}"


if __name__ == "__main__":
    main()
