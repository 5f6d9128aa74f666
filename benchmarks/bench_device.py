"""Measure one part of the package on a GPU, and print a line of JSON with what was found.

`python benchmarks/bench_device.py PART [arguments]`; `benchmarks/gpu.py` runs all of them. Each
part is a function of this file: `rates`, `static`, `same`, `models`, `calibrate`, `measure`,
`peer`, `ranks`, `profile`. Without a GPU it says so; BENCH_DEVICE=cpu tries the program there.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from bench_passes import calibration, plan, quantized, run
from safetensors import safe_open
from torch import Tensor, nn
from torch.utils.data import DataLoader

from quantizer.config.model import Settings
from quantizer.graph.passes import run_passes
from quantizer.graph.tracing.parameters import move_module
from quantizer.graph.tracing.trace import trace
from quantizer.layerwise.gram import Gram
from quantizer.sources.batches import Batch

Figures = dict[str, Any]

DEVICE = os.environ.get("BENCH_DEVICE", "cuda")
IMAGES, IMAGE_BATCH = 128, 32
SEQUENCES, TOKENS = 128, 512
if DEVICE == "cpu":
    IMAGES, IMAGE_BATCH, SEQUENCES, TOKENS = 4, 2, 4, 16
METHODS = ("maxmin", "percentile", "mse", "entropy")
LLAMAS = {
    "1b": (16, 2048, 8192),
    "3b": (28, 3072, 8192),
    "layer": (1, 3072, 8192),
    "slice": (4, 3072, 8192),
    "tiny": (2, 256, 512),
}
"""Layers, width and intermediate width: as many parameters as the names say, parts of the
larger one, and one to try this program with.
"""
INT4 = {
    "dtype": "int4",
    "qscheme": "per_group",
    "ch_axis": 1,
    "group_size": 128,
    "symmetric": True,
}
SEARCHED = {
    "name": "gptaq",
    "alpha": 0.5,
    "damp_percent": 0.2,
    "scale_search": True,
    "sweeps": 4,
}
"""The algorithm called `searched`: scales and codes are adjusted after rounding."""
DATA = f"""
import torch

def tokens():
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 32000, ({SEQUENCES}, {TOKENS}), generator=generator)
    return [{{"input_ids": each[None]}} for each in ids]

def few():
    return tokens()[:16]
"""
NETWORK = """
import torch
from bench_device import network, pictures

model = lambda: network("{name}")
calibration_data = lambda: pictures(2)
"""


def main() -> None:
    """Run the part that the command line names."""
    if DEVICE != "cpu" and not torch.cuda.is_available():
        print("bench_device measures a GPU, and torch finds no CUDA device here")
        return
    part, *arguments = sys.argv[1:] or ["rates"]
    torch.backends.cudnn.allow_tf32 = False
    print(json.dumps(PARTS[part](*arguments)))


def rates() -> Figures:
    """Measure what the device can do: matrix products in TFLOP/s, copies in GB/s, and the
    rate of the products that GPTQ sums up.
    """
    size, tokens, depth = 8192, 16384, 8192
    if DEVICE == "cpu":
        size, tokens, depth = 256, 256, 256
    found: Figures = {"device": device_name(), "torch": torch.__version__}
    for dtype in (torch.float32, torch.bfloat16):
        left = torch.randn(size, size, device=DEVICE, dtype=dtype)
        name = str(dtype).removeprefix("torch.")
        seconds = device_seconds(lambda left=left: left @ left)  # type: ignore[misc]
        found[f"gemm_{name}_tflops"] = 2 * size**3 / seconds / 1e12
        layer = nn.Linear(depth, 8, dtype=dtype, device=DEVICE)
        gram, x = Gram(layer), torch.randn(tokens, depth, device=DEVICE, dtype=dtype)
        seconds = device_seconds(partial(gram.add, x))
        # Only the tiles on and above the diagonal are computed, and counted
        operations = sum(
            2 * tokens * (tile.stop - tile.start) * (depth - tile.start) for tile in gram._tiles
        )
        rate = operations / seconds / 1e12
        found[f"gram_{name}_tflops"] = rate
        found[f"gram_{name}_share"] = rate / found[f"gemm_{name}_tflops"]
    source = torch.empty(1 << 28, dtype=torch.uint8)
    for name, tensor in (
        ("pageable", source),
        ("pinned", source.pin_memory() if DEVICE != "cpu" else source),
    ):
        seconds = device_seconds(lambda tensor=tensor: tensor.to(DEVICE))  # type: ignore[misc]
        found[f"load_{name}_gbps"] = tensor.nbytes / seconds / 1e9
    return found


def static(name: str) -> Figures:
    """Measure static calibration and the quantized pass, as ratios to the float pass."""
    device = torch.device(DEVICE)
    model = network(name).to(device)
    batches = [Batch.of(x).to(device) for x in pictures(IMAGES // IMAGE_BATCH)]
    original = trace(model, batches[0].args)
    graph = run_passes(original, Settings())
    parts: dict[str, Callable[[], object]] = {"float": partial(run, model, batches)}
    for method in METHODS:
        planned = plan(graph, original, method=method)
        parts[method] = partial(calibration, planned, batches)
    rounded = move_module(quantized(plan(graph, original), batches[:1]), device)
    parts["quantized pass"] = partial(run, rounded, batches)
    seconds = {key: device_seconds(part) for key, part in parts.items()}
    found: Figures = {"images": IMAGES, "float_s": seconds.pop("float")}
    for key, value in seconds.items():
        found[key] = value / found["float_s"]
    return found


def same(what: str, algorithm: str = "rtn") -> Figures:
    """Compare the results of the same command on the CPU and on the GPU, file by file."""
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        found: Figures = {}
        for device in ("cpu", DEVICE):
            command = calibration_command(what, algorithm, work, device, data="few")
            found[f"{device}_s"] = timed(command, work)
        for file in ("weights.safetensors", "qparams.safetensors"):
            files = [work / device / file for device in ("cpu", DEVICE)]
            if files[0].exists():
                found[file] = differences(*files)
        infos = [work / device / "quant_info.json" for device in ("cpu", DEVICE)]
        found["quant_info.json"] = json_differences(*infos)
    return found


def models(size: str, folder: str) -> Figures:
    """Write the checkpoint of a LLaMA, and what calibration needs beside it."""
    from large_llama import make

    place = Path(folder) / size
    place.mkdir(parents=True)
    started = time.perf_counter()
    make(place, *LLAMAS[size])
    size_bytes = sum(file.stat().st_size for file in place.iterdir())
    return {"bytes": size_bytes, "seconds": time.perf_counter() - started}


def calibrate(checkpoint: str, algorithm: str) -> Figures:
    """Measure a whole process: `quantizer --quant_mode calib` of a checkpoint on the GPU."""
    from quantizer.cli.main import run_command

    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        command = calibration_command(checkpoint, algorithm, work, DEVICE)
        with sampled():
            code = run_command(command[command.index("quantizer") + 1 :])
        assert code == 0, code
        record = json.loads((work / DEVICE / "run.json").read_text())
    found: Figures = {"tokens": SEQUENCES * TOKENS, "run_s": record["seconds"]}
    found["peak_memory_gb"] = record["peak_memory_bytes"] / 1e9
    if DEVICE != "cpu":
        found["peak_device_memory_gb"] = torch.cuda.max_memory_allocated() / 1e9
    return found


def measure(checkpoint: str) -> Figures:
    """Measure test mode on 16 sequences, after a calibration without an algorithm."""
    from quantizer.cli.main import run_command

    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        command = calibration_command(checkpoint, "rtn", work, DEVICE, data="few")
        calibration_s = timed(command, work)
        print(f"calibration took {calibration_s:.1f} s", flush=True)
        tested = [each if each != "calib" else "test" for each in command]
        with sampled():
            code = run_command(tested[command.index("quantizer") + 1 :])
        assert code == 0, code
        record = json.loads((work / DEVICE / "run.json").read_text())
        report = json.loads((work / DEVICE / "report.json").read_text())
    found: Figures = {"calibration_s": calibration_s, "run_s": record["seconds"]}
    return found | {"metrics": report.get("metrics")}


def ranks() -> Figures:
    """Check exchanges through NCCL: calibration of ResNet-50 by two ranks, compared with one,
    or with one GPU the collectives of a single rank.
    """
    found: Figures = {"devices": 1 if DEVICE == "cpu" else torch.cuda.device_count()}
    if found["devices"] < 2 and DEVICE != "cpu":
        return found | alone_in_nccl()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        command = calibration_command("resnet50", "rtn", work, DEVICE)
        found["one_rank_s"] = timed(command, work)
        (work / DEVICE).rename(work / "one")
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        found["two_ranks_s"] = timed([command[0], *torchrun, *command[1:]], work)
        files = [work / place / "weights.safetensors" for place in ("one", DEVICE)]
        found["weights"] = differences(*files)
        infos = [work / place / "quant_info.json" for place in ("one", DEVICE)]
        found["quant_info.json"] = json_differences(*infos)
    return found


def alone_in_nccl() -> Figures:
    """Sum, gather and broadcast a tensor of the device in a group of one rank, and see what two
    ranks say that have one GPU.
    """
    from quantizer.distributed.process_group import ProcessGroup

    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        url = f"file://{work / 'store'}?rank=0&world_size=1"
        group = ProcessGroup(url, "cpu:gloo,cuda:nccl", 30, "cuda:0")
        values = torch.randn(1000, 1000, device="cuda")
        equal = torch.equal(group.sum(values, "sum"), values)
        equal &= torch.equal(group.gather(values, "gather")[0], values)
        equal &= torch.equal(group.broadcast(values, "broadcast"), values)
        group.leave()
        command = calibration_command("resnet50", "rtn", work, DEVICE)
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        refused = subprocess.run(
            [command[0], *torchrun, *command[1:]],
            cwd=work,
            capture_output=True,
            text=True,
            check=False,
        )
        print(refused.stdout[-1000:], refused.stderr[-3000:])
    return {"nccl_equal": equal, "two_ranks_on_one_gpu": f"exit {refused.returncode}"}


def peer(checkpoint: str) -> Figures:
    """Measure llm-compressor's GPTQ of a checkpoint: what `calibrate` does with `gptq`, from
    the files to the compressed files.
    """
    if find_spec("llmcompressor") is None:
        return {"missing": "llmcompressor"}
    from llmcompressor import oneshot
    from llmcompressor.modifiers.gptq import GPTQModifier
    from transformers import AutoModelForCausalLM

    data: dict[str, Any] = {}
    exec(DATA, data)  # The file that calibrations of this program read
    rows = data["tokens"]()
    loader: DataLoader[Any] = DataLoader(rows, batch_size=None)
    started = time.perf_counter()
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype="bfloat16")
    loaded_s = time.perf_counter() - started
    recipe = GPTQModifier(targets="Linear", scheme="W4A16", ignore=["lm_head"])
    settings = {"num_calibration_samples": len(rows), "pipeline": "sequential"}
    # No processor is looked for
    oneshot(model=model, processor=object(), dataset=loader, recipe=recipe, **settings)
    rounded_s = time.perf_counter() - started - loaded_s
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder, save_compressed=True)
    found: Figures = {"load_s": loaded_s, "gptq_s": rounded_s}
    found["total_s"] = time.perf_counter() - started
    found["peak_memory_gb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    if DEVICE != "cpu":
        found["peak_device_memory_gb"] = torch.cuda.max_memory_allocated() / 1e9
    return found


def profile(size: str, algorithm: str) -> Figures:
    """Print which kernels a calibration runs, and what it copies from and to the device."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as torch_profile

    from quantizer.cli.main import run_command

    kind = ProfilerActivity.CPU if DEVICE == "cpu" else ProfilerActivity.CUDA
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        models(size, folder)
        command = calibration_command(str(work / size), algorithm, work, DEVICE)
        with torch_profile(activities=[kind]) as kernels:
            code = run_command(command[command.index("quantizer") + 1 :])
        assert code == 0, code
    averages = kernels.key_averages()
    print(averages.table(sort_by="self_device_time_total", row_limit=25))
    copies = {
        row.key: {"count": row.count, "ms": row.self_device_time_total / 1000}
        for row in averages
        if row.key.startswith("Memcpy")
    }
    busy = sum(row.self_device_time_total for row in averages) / 1e6
    return {"device_busy_s": busy, "copies": copies}


@contextmanager
def sampled(interval_s: float = 0.02) -> Iterator[None]:
    """Print where the main thread was while this lasted: the functions of the package with what
    they call, and the innermost functions of all.
    """
    main_thread = threading.main_thread().ident
    done = threading.Event()
    within: Counter[str] = Counter()
    innermost: Counter[str] = Counter()
    count = 0

    def sample() -> None:
        nonlocal count
        while not done.wait(interval_s):
            frame = sys._current_frames().get(main_thread or 0)
            count += 1
            functions: list[str] = []
            while frame is not None:
                file = frame.f_code.co_filename
                functions.append(f"{file.rpartition('/quantizer/')[2]}:{frame.f_code.co_name}")
                frame = frame.f_back
            innermost[functions[0]] += 1
            within.update({name for name in functions if name[0] not in "/<"})

    thread = threading.Thread(target=sample, daemon=True)
    started = time.perf_counter()
    thread.start()
    # A run that is stopped prints what was sampled so far
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        done.set()
        thread.join()
        step = (time.perf_counter() - started) / max(count, 1)
        for title, found, rows in (("within", within, 80), ("innermost", innermost, 25)):
            print(f"\nseconds, {title}")
            for name, samples in found.most_common(rows):
                print(f"{samples * step:8.2f} {name}")


def calibration_command(
    what: str, algorithm: str, work: Path, device: str, data: str = "tokens"
) -> list[str]:
    """Return a command that calibrates a checkpoint, or a network of this file by its name,
    into the folder `work / device`.
    """
    config: dict[str, Any] = {"global_quant_config": {"weight": INT4}}
    config["exclude"] = ["kind:embedding", "kind:head"]
    if algorithm == "searched":
        config["algo_config"] = SEARCHED
    elif algorithm != "rtn":
        config["algo_config"] = {"name": algorithm}
    arguments = ["--device", device, "--output_dir", str(work / device), "--quiet"]
    if Path(what).is_dir():
        (work / "config.json").write_text(json.dumps(config))
        (work / "data.py").write_text(DATA)
        arguments += ["--model", what, "--config_file", str(work / "config.json")]
        arguments += ["--data", f"{work / 'data.py'}:{data}"]
    else:
        (work / "net.py").write_text(NETWORK.format(name=what))
        arguments += ["--model", str(work / "net.py")]
    return [sys.executable, "-m", "quantizer", "--quant_mode", "calib", *arguments]


def timed(command: list[str], work: Path) -> float:
    """Run a command, and return its seconds.

    Raises:
        SystemExit: it fails; what it printed is shown.
    """
    started = time.perf_counter()
    done = subprocess.run(command, cwd=work, capture_output=True, text=True, check=False)
    if done.returncode:
        print(done.stdout[-2000:], done.stderr[-4000:])
        raise SystemExit(f"exit {done.returncode} of {' '.join(command)}")
    return time.perf_counter() - started


def differences(first: Path, second: Path) -> Figures:
    """Count the values in which two files of tensors differ, and say by how much at most."""
    found: Figures = {"values": 0, "different": 0, "largest": 0.0, "tensors_missing": 0}
    with safe_open(first, "pt") as ours, safe_open(second, "pt") as theirs:
        names = set(ours.keys())
        found["tensors_missing"] = len(names ^ set(theirs.keys()))
        for name in names & set(theirs.keys()):
            one, other = ours.get_tensor(name), theirs.get_tensor(name)
            if one.is_floating_point():
                scale = one.double().abs().clamp_min(1e-12)
                gap = (one.double() - other.double()).abs() / scale
            else:
                gap = (one.int() - other.int()).abs().double()
            found["values"] += gap.numel()
            found["different"] += int(gap.count_nonzero())
            if gap.numel():
                found["largest"] = max(found["largest"], float(gap.max()))
    return found


def json_differences(first: Path, second: Path) -> Figures:
    """Count the numbers in which two JSON files differ, and say by how much at most."""
    ours, theirs = numbers(first), numbers(second)
    found: Figures = {"values": len(ours), "different": 0, "largest": 0.0}
    found["missing"] = len(ours.keys() ^ theirs.keys())
    for place in ours.keys() & theirs.keys():
        gap = abs(ours[place] - theirs[place]) / max(abs(ours[place]), 1e-12)
        found["different"] += gap != 0
        found["largest"] = max(found["largest"], gap)
    return found


def numbers(file: Path) -> dict[str, float]:
    """Return the numbers of a JSON file by their places, but for its header."""
    found: dict[str, float] = {}

    def visit(value: Any, place: str) -> None:
        if isinstance(value, dict):
            for key, part in value.items():
                visit(part, f"{place}.{key}")
        elif isinstance(value, list):
            for index, part in enumerate(value):
                visit(part, f"{place}[{index}]")
        elif isinstance(value, (int, float)):
            found[place] = float(value)

    content = json.loads(file.read_text(encoding="utf-8"))
    content.pop("header", None)
    visit(content, "")
    return found


def network(name: str) -> nn.Module:
    """Return a network of transformers with random weights: ResNet-50 or ViT-B."""
    import transformers

    torch.manual_seed(0)
    if name == "resnet50":
        sizes = transformers.ResNetConfig()
        model: nn.Module = transformers.ResNetForImageClassification(sizes)
    else:
        model = transformers.ViTForImageClassification(transformers.ViTConfig())
    return model.eval()


def pictures(batches: int) -> list[Tensor]:
    """Return batches of images, float32 [32, 3, 224, 224]."""
    generator = torch.Generator().manual_seed(0)
    shape = (IMAGE_BATCH, 3, 224, 224)
    return [torch.randn(shape, generator=generator) for _ in range(batches)]


def device_name() -> str:
    """Return what the device is."""
    return torch.cuda.get_device_name() if DEVICE != "cpu" else "CPU"


def synchronize() -> None:
    """Wait for the device."""
    if DEVICE != "cpu":
        torch.cuda.synchronize()


def device_seconds(part: Callable[[], object], rounds: int = 3) -> float:
    """Return the median time of a part that is complete on the device, after one more."""
    found = []
    for _ in range(rounds + 1):
        synchronize()
        started = time.perf_counter()
        part()
        synchronize()
        found.append(time.perf_counter() - started)
    return statistics.median(found[1:])


PARTS: dict[str, Callable[..., Figures]] = {
    "rates": rates,
    "static": static,
    "same": same,
    "models": models,
    "calibrate": calibrate,
    "measure": measure,
    "peer": peer,
    "ranks": ranks,
    "profile": profile,
}


if __name__ == "__main__":
    main()
