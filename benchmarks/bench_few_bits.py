"""SmolLM2-135M in few bits: perplexity of three texts, seconds and memory of each method.

`python benchmarks/bench_few_bits.py [--bits 4 3 2] [--formats mxfp4 nvfp4] [--method NAME …]
[--steps 200] [--device cuda] [--windows FILE] [--json FILE]`. Each row is a process of its own,
one after the other. Seconds and processor seconds are those of the quantization, with model and
data in memory. AutoRound is a row where `auto-round` 0.16 can be imported.

Weights are symmetric, in groups of 64 (mxfp4: 32, nvfp4: 16); the head and the embedding stay
float. Groups of 128 do not divide SmolLM2's width of 576. All methods see the same eight
windows of 512 tokens of Python's help topics. Eight others are scored, and eight of each of two
texts that nothing was chosen on: docstrings of torch, and licences of Python packages. The
texts depend on installed versions. `--windows FILE` writes them, or reads them where the file
exists, so that another machine has the same.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import math
import resource
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from quantizer import (
    Config,
    Dtype,
    GPTAQConfig,
    GPTQConfig,
    ModelQuantizer,
    PerBlockMXObserver,
    PerGroupMinMaxObserver,
    QronosConfig,
    QSchemeType,
    QuantizationConfig,
    QuantizationSpec,
)

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "examples"))

SEQ_LEN, WINDOWS = 512, 8
CHARACTERS = 40_000  # more than 8 windows of any of the texts
LICENCE_CHARACTERS = 2_000
FLOAT = ["lm_head", "model.embed_tokens"]
INTEGERS = {4: Dtype.int4, 3: Dtype.int3, 2: Dtype.int2}
GROUP_SIZE = 64
SEARCHED: dict[str, Any] = {
    "damp_percent": 0.2,
    "scale_search": True,
    "sweeps": 4,
    "guidance": 0.5,
}
ALGORITHMS = {
    "rtn": None,
    "gptq": GPTQConfig(),
    "qronos": QronosConfig(),
    "gptaq, searched": GPTAQConfig(alpha=0.5, **SEARCHED),
}
AUTOROUND = "autoround"
METHODS = [*ALGORITHMS, AUTOROUND]
AUTOROUND_SCHEMES: dict[str, dict[str, Any]] = {
    "mxfp4": {"bits": 4, "group_size": 32, "data_type": "mx_fp"},
    "nvfp4": {"bits": 4, "group_size": 16, "data_type": "nv_fp"},
}


def main() -> None:
    """Run a row, or all rows as processes, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bits", type=int, nargs="*", default=list(INTEGERS))
    parser.add_argument("--formats", nargs="*", default=[], choices=list(AUTOROUND_SCHEMES))
    parser.add_argument("--method", nargs="*", default=METHODS, choices=METHODS)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--windows", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--row", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.row:
        weights, method = options.row
        print(json.dumps(row(weights, method, options)))
        return
    with TemporaryDirectory() as folder:
        file = options.windows or Path(folder) / "windows.pt"
        if not file.exists():
            torch.save(windows_of_texts(), file)
        rows = all_rows(options, file)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


def all_rows(options: argparse.Namespace, windows: Path) -> list[dict[str, Any]]:
    """Return what each row's process printed; print each as a line of a table."""
    rows: list[dict[str, Any]] = []
    weights = [f"int{bits}" for bits in options.bits] + options.formats
    has_autoround = importlib.util.find_spec("auto_round") is not None
    chosen = [name for name in options.method if name != AUTOROUND or has_autoround]
    jobs = [("float", "rtn")]
    for name in weights:
        jobs += [(name, method) for method in chosen]
    for job in jobs:
        command = [sys.executable, __file__, "--row", *job, "--windows", str(windows)]
        command += ["--device", options.device, "--steps", str(options.steps)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            print(f"{job[0]:6} {job[1]:16} failed\n{done.stderr[-3000:]}", flush=True)
            continue
        result = json.loads(done.stdout.strip().splitlines()[-1])
        texts = "  ".join(f"{name} {value:9.2f}" for name, value in result["ppl"].items())
        print(
            f"{job[0]:6} {job[1]:16} {texts}  {result['seconds']:7.1f} s "
            f"({result['processor_seconds']:7.1f} of the processor) "
            f"{result['memory_gb']:5.2f} GB {result['device_memory_gb']:5.2f} GB",
            flush=True,
        )
        rows.append(result)
    return rows


def row(weights: str, method: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of one method with one format of weights."""
    import smollm2

    torch.manual_seed(0)
    windows = torch.load(options.windows)
    calibration = windows.pop("calibration")
    model = smollm2.model()
    # AutoRound takes a model on the CPU and moves its blocks
    if method != AUTOROUND:
        model = model.to(options.device)
    started, processor_started = time.perf_counter(), time.process_time()
    if weights != "float" and method == AUTOROUND:
        model = autoround(model, weights, calibration, options.steps)
    elif weights != "float":
        model = ours(model, weights, method, calibration.to(options.device))
    if options.device != "cpu":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    processor_seconds = time.process_time() - processor_started
    memory_gb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    device_memory_gb = 0.0
    if options.device != "cpu":
        device_memory_gb = torch.cuda.max_memory_allocated() / 1e9
    model = model.to(options.device).float()
    scores = {name: perplexity(model, texts) for name, texts in windows.items()}
    return {
        "weights": weights,
        "method": method,
        "ppl": scores,
        "seconds": seconds,
        "processor_seconds": processor_seconds,
        "memory_gb": memory_gb,
        "device_memory_gb": device_memory_gb,
    }


def ours(model: Any, weights: str, method: str, calibration: Tensor) -> Any:
    """Return the model with weights that an algorithm of this package has rounded."""
    config = Config(
        QuantizationConfig(weight=weight_spec(weights, method)),
        exclude=FLOAT,
        algo_config=ALGORITHMS[method],
    )
    batches = [{"input_ids": window[None]} for window in calibration]
    return ModelQuantizer(config).quantize_model(model, batches)


def weight_spec(weights: str, method: str) -> QuantizationSpec:
    """Return the format of the weights; searched ones may have negative scales."""
    if weights == "mxfp4":
        return QuantizationSpec(
            dtype=Dtype.mx,
            mx_element_dtype=Dtype.fp4,
            observer_cls=PerBlockMXObserver,
            qscheme=QSchemeType.per_group,
            ch_axis=1,
            group_size=32,
        )
    grouped = QuantizationSpec(
        dtype=Dtype.fp4,
        observer_cls=PerGroupMinMaxObserver,
        qscheme=QSchemeType.per_group,
        ch_axis=1,
        group_size=16,
        scale_format="e4m3",
    )
    if weights == "nvfp4":
        return grouped
    scale = None
    if "searched" in method:
        scale = "quant_min"
    return QuantizationSpec(
        dtype=INTEGERS[int(weights.removeprefix("int"))],
        observer_cls=PerGroupMinMaxObserver,
        qscheme=QSchemeType.per_group,
        ch_axis=1,
        group_size=GROUP_SIZE,
        symmetric_scale=scale,
    )


def autoround(model: Any, weights: str, calibration: Tensor, steps: int) -> Any:
    """Return the model as AutoRound leaves it, with decoded weights. Its defaults hold, except
    for the data, the steps, and batches of 4 of the 8 windows.
    """
    import smollm2
    from auto_round import AutoRound
    from transformers import PreTrainedTokenizerFast

    samples = []
    for ids in calibration:
        samples.append({"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    scheme = AUTOROUND_SCHEMES.get(weights)
    if scheme is None:
        bits = int(weights.removeprefix("int"))
        scheme = {"bits": bits, "group_size": GROUP_SIZE, "sym": True}
    else:
        scheme = {**scheme, "act_bits": 16}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=smollm2.tokenizer())  # type: ignore[no-untyped-call]
    loader: DataLoader[Any] = DataLoader(samples, batch_size=1)  # type: ignore[arg-type]
    rounding = AutoRound(
        model,
        tokenizer,
        iters=steps,
        nsamples=WINDOWS,
        seqlen=SEQ_LEN,
        batch_size=4,
        dataset=loader,
        **scheme,
    )
    rounded, _ = rounding.quantize()
    return rounded


@torch.no_grad()
def perplexity(model: Any, windows: Tensor) -> float:
    """Return exp of the mean loss a token over windows of token ids [windows, 512]."""
    losses = []
    for window in windows.to(model.device):
        losses.append(float(model(input_ids=window[None], labels=window[None]).loss))
    return math.exp(sum(losses) / len(losses))


def windows_of_texts() -> dict[str, Tensor]:
    """Return token ids [8, 512] for calibration and of each text that is scored."""
    import smollm2

    tokenizer = smollm2.tokenizer()
    topics = smollm2.token_ids()[: 2 * WINDOWS * SEQ_LEN].view(2, WINDOWS, SEQ_LEN)
    windows = {"calibration": topics[1], "topics": topics[0]}
    for name, text in (("docstrings", docstrings()), ("licences", licences())):
        ids = torch.tensor(tokenizer.encode(text[:CHARACTERS]).ids)
        windows[name] = ids[: WINDOWS * SEQ_LEN].view(WINDOWS, SEQ_LEN)
    return windows


def docstrings() -> str:
    """Return the docstrings of torch.nn's classes by name, lines without indentation."""
    texts = [getattr(torch.nn, name).__doc__ or "" for name in sorted(dir(torch.nn))]
    return "\n".join(line.strip() for line in "\n\n".join(texts).splitlines())


def licences() -> str:
    """Return the beginnings of the licences that installed packages bring, by the packages'
    names, each text once.
    """
    texts: dict[str, None] = {}
    for package in sorted(importlib.metadata.distributions(), key=lambda one: one.name.lower()):
        for file in package.files or ():
            if file.name.upper().startswith(("LICENSE", "LICENCE", "COPYING")):
                path = Path(str(file.locate()))
                if path.is_file():
                    text = path.read_text(encoding="utf-8")
                    texts[text[:LICENCE_CHARACTERS]] = None
    return "\n\n".join(texts)


if __name__ == "__main__":
    main()
