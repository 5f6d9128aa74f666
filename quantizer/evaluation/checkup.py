"""What a run would stumble over, found before it: each finding is a fact, how bad it is, and
the remedy.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Literal

import torch

from quantizer.config.wording import shortened
from quantizer.errors import pip_line
from quantizer.graph.edits import by_channel
from quantizer.plan.model import Plan
from quantizer.plan.resolve import NO_RULES
from quantizer.plan.size import weight_bytes
from quantizer.sources.batches import Batch, Fingerprint
from quantizer.sources.data import Batches
from quantizer.storage import process_memory

Level = Literal["ok", "note", "warning", "error"]
EXTRAS = {
    "onnx": ("onnx", "onnxruntime", "onnxscript"),
    "llm": ("transformers", "tokenizers", "compressed_tensors", "gguf"),
    "images": ("PIL",),
    "plots": ("resvg_py", "tensorboard"),
}
"""The packages of each extra that something imports."""
READ = 64
"""Batches that are looked at."""
FEW = 100
"""Samples of images; a statistic over fewer is uncertain. Texts have hundreds of tokens in
each.
"""
WIDE = 30.0
"""A standard deviation beyond which inputs are probably not normalized as in training."""
SPREAD = 10.0
"""How many times wider than the narrowest the widest channel of a weight may be for one scale
to serve both.
"""


@dataclass(frozen=True)
class Check:
    """One finding: where, how bad, what, and what to do."""

    part: str
    level: Level
    text: str
    help: str = ""


def environment(device: str, folder: Path) -> Iterator[Check]:
    """Processor, memory, disk, packages."""
    cores = (
        len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count() or 1
    )
    threads, (load, *_) = torch.get_num_threads(), os.getloadavg()
    yield Check(
        "machine", "ok", f"torch {torch.__version__}, {threads} threads on {cores} cores"
    )
    if threads > cores:
        text = f"torch uses {threads} threads, and this process may use {cores} cores"
        yield Check("machine", "warning", text, f"set OMP_NUM_THREADS={cores}")
    if load > 0.5 * cores:
        text = (
            f"other processes load the machine: {load:.1f} of {cores} cores in the last minute"
        )
        yield Check("machine", "note", text, "runs take longer, and times vary")
    if torch.cuda.is_available() and device == "cpu":
        yield Check(
            "machine",
            "note",
            "there is a GPU, and the run would be on the CPU",
            "add --device cuda",
        )
    free = process_memory.available()
    if free is not None:
        yield Check("machine", "ok", f"{process_memory.in_words(free)} of memory are free")
    place = next(
        each for each in (folder.absolute(), *folder.absolute().parents) if each.exists()
    )
    if not os.access(place, os.W_OK):
        yield Check(
            "machine", "error", f"{place} cannot be written", "choose another --output_dir"
        )
    disk = shutil.disk_usage(place).free
    level: Level = "warning" if disk < 1 << 30 else "ok"
    remedy = (
        "results and what does not fit in memory go there and to TMPDIR"
        if level == "warning"
        else ""
    )
    yield Check(
        "machine", level, f"{process_memory.in_words(disk)} of disk are free at {place}", remedy
    )
    for extra, packages in EXTRAS.items():
        missing = [name for name in packages if find_spec(name) is None]
        if missing:
            text = f"the extra {extra} is not complete: {', '.join(missing)}"
            yield Check("packages", "note", text, f"{pip_line(extra)} where it is needed")


def data(batches: Batches) -> Iterator[Check]:
    """How much there is, and whether it looks like what a model is fed with.

    Raises:
        DataError: it cannot be read, or holds NaN.
    """
    seen: Counter[str] = Counter()
    samples, sizes, totals = 0, set[int](), dict[str, list[float]]()
    for batch in islice(iter(batches), READ):
        samples += batch.size
        sizes.add(batch.size)
        seen[_digest(batch)] += 1
        for name, tensor in batch.tensors():
            if tensor.is_floating_point() and tensor.numel():
                totals.setdefault(name, []).append(float(tensor.float().std(unbiased=False)))
    count = seen.total()
    total = batches.total
    more = "" if total is None or total <= count else f" (the first {count} of {total} batches)"
    yield Check("data", "ok", f"{batches.label}: {samples} samples in {count} batches{more}")
    if batches.stands_in or batches.stamp:
        text = (
            "there are no data but an example input"
            if batches.stands_in
            else f"{batches.label} are {batches.stamp}"
        )
        yield Check(
            "data",
            "warning",
            text,
            "ranges of activations need data as the model will meet them: --data",
        )
    elif totals and samples < FEW and not more:
        text = f"{samples} samples are few: ranges may still change with more"
        yield Check(
            "data",
            "warning",
            text,
            f"give {FEW} or more; the report shows after how many nothing changes",
        )
    repeated = sum(times - 1 for times in seen.values())
    if repeated:
        text = f"{repeated} of {count} batches are the same as another"
        yield Check("data", "warning", text, "look at the loader: do indices or seeds repeat?")
    if sizes == {1} and totals and count > 8:
        yield Check(
            "data",
            "note",
            "each batch has one sample",
            "larger batches run faster: 16 or 32 images",
        )
    for name, spreads in totals.items():
        if max(spreads) == 0:
            yield Check("data", "error", f"{name} is constant", "look at the loader")
        elif sum(spreads) / len(spreads) > WIDE:
            text = f"{name} has a standard deviation of {sum(spreads) / len(spreads):.3g}"
            yield Check(
                "data",
                "warning",
                text,
                "is it normalized as in training? Pixels from 0 to 255 are not",
            )


def _digest(batch: Batch) -> str:
    found = Fingerprint()
    found.update(batch)
    return str(found.to_json()["digest"])


def plan(found: Plan) -> Iterator[Check]:
    """What would be left float, wrong or slow."""
    before, after = weight_bytes(found)
    text = (
        f"{len(found.tensors)} tensors would be quantized, weights {before / 1e6:.2f} to "
        f"{after / 1e6:.2f} MB"
    )
    yield Check(
        "plan",
        "ok" if found.tensors else "error",
        text,
        "" if found.tensors else "the config quantizes nothing",
    )
    unknown = Counter(
        node.op for node in found.graph.nodes if found.floats.get(node.name) == NO_RULES
    )
    if unknown:
        names = shortened([f"{name} ({count})" for name, count in sorted(unknown.items())])
        yield Check(
            "plan",
            "note",
            f"stay in float, as there are no rules for them: {names}",
            "docs/operators.md",
        )
    shared = [name for name in _one_scale(found) if _spread(found, name) > SPREAD]
    if shared:
        text = (
            f"one scale for channels whose ranges differ more than {SPREAD:g} times: weights "
            f"of {shortened(shared, 3)}"
        )
        yield Check("plan", "warning", text, "per_channel: true for weights, or include_cle")
    tokens = [node for node in found.graph.nodes if node.op == "input" and not node.is_float]
    static = [key for key, tensor in found.tensors.items() if tensor.is_calibrated]
    if tokens and static:
        text = f"{len(static)} activations of a model of tokens have one range each, found once"
        yield Check(
            "plan",
            "note",
            text,
            "a few channels are often far wider: is_dynamic, or SmoothQuant before it",
        )


def _one_scale(found: Plan) -> Iterator[str]:
    """The layers whose weight has one scale for all channels."""
    for (name, role), tensor in found.tensors.items():
        if role == "weights" and (tensor.spec.qscheme, tensor.spec.dtype) == (
            "per_tensor",
            "int",
        ):
            yield name


def _spread(found: Plan, name: str) -> float:
    """The widest range of an output channel of a weight, as a multiple of the narrowest that is
    not zero.
    """
    node = found.graph.by_name[name]
    if not node.row.is_linear_or_convolution:
        return 1.0
    weight = found.parameter((name, "weights")).detach().float()
    widths = by_channel(node, weight).abs().amax((2, 3))
    widths = widths[widths > 0]
    return float(widths.max() / widths.min()) if len(widths) else 1.0


def room(peaks: Iterable[tuple[str, int | None]]) -> Iterator[Check]:
    """Whether what is free is enough for the peaks that are predicted."""
    free, now = process_memory.available(), process_memory.resident() or 0
    for mode, peak in peaks:
        if peak is None or free is None:
            continue
        fits = peak - now <= free
        text = f"{mode} mode takes about {process_memory.in_words(peak)}" + (
            "" if fits else f", and {process_memory.in_words(free)} are free"
        )
        remedy = "" if fits else "use a smaller --batch_size, or --memory"
        yield Check("memory", "ok" if fits else "error", text, remedy)
