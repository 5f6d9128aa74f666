"""`quantizer doctor`: checks machine, config, data and model before a long run."""

from __future__ import annotations

import os
import shutil
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Literal

import click
import torch
from rich.text import Text

from quantizer.cli import session
from quantizer.cli.arguments.options import Options
from quantizer.cli.arguments.places import from_start
from quantizer.cli.terminal import output
from quantizer.cli.terminal.screen import notes_on_stderr, screen
from quantizer.cli.traced_model import traced_from
from quantizer.commands.inspection.plan import peaks_of
from quantizer.config.load import LoadResult, default_config, load_config
from quantizer.config.model import ResolvedConfig
from quantizer.config.wording import counted, first_names
from quantizer.errors import GateError, QuantizerError, UsageError
from quantizer.export.refusals import planned_refusals, refuse
from quantizer.export.targets import CHECKED_TARGETS
from quantizer.graph.edits import by_channel
from quantizer.installation import pip_line
from quantizer.plan.model import Plan
from quantizer.plan.resolve import NO_RULES
from quantizer.plan.size import weight_bytes
from quantizer.plugins import plugins
from quantizer.printable import json_text, one_line
from quantizer.sources.batches import Fingerprint
from quantizer.sources.data import Batches
from quantizer.storage import process_memory

_STYLES = {"ok": "green", "note": "cyan", "warning": "yellow", "error": "bold red"}
CheckLevel = Literal["ok", "note", "warning", "error"]
_PLOTS = ("resvg_py", "tensorboard")
"""The packages of the extra `plots`."""
MAX_CHECKED_BATCHES = 64
MIN_SAMPLES = 100
"""Images that calibration should have. Texts have hundreds of tokens in each sample."""
MAX_INPUT_STD = 30.0
"""Inputs with a larger standard deviation are probably not normalized as in training."""
MAX_CHANNEL_RATIO = 10.0
"""How many times as wide as the narrowest channel of a weight the widest may be to share a
scale with it.
"""
MIN_DISK = 1 << 30


@dataclass(frozen=True)
class CheckResult:
    """One result of a check: what was checked, how bad it is, a sentence, and a remedy."""

    part: str
    level: CheckLevel
    text: str
    help: str = ""


_machine = partial(CheckResult, "machine")
_data = partial(CheckResult, "data")
_plan = partial(CheckResult, "plan")


def show_checks(options: Options) -> None:
    """Print what the checks find.

    Raises:
        GateError: it has errors.
    """
    with notes_on_stderr(True), redirect_stdout(sys.stderr):
        checks = list(_checks(options))
    if options.json:
        click.echo(json_text([asdict(check) for check in checks]))
    else:
        _print(checks)
    errors = sum(check.level == "error" for check in checks)
    if errors:
        raise GateError(
            f"{counted(errors, 'error')} found", help="follow the remedy of each error above"
        )


def _print(checks: list[CheckResult]) -> None:
    console = output.console()
    for check in checks:
        if screen().quiet and check.level != "error":
            continue
        level = (f"{check.level:8}", _STYLES[check.level])
        line = Text.assemble(level, one_line(f"{check.part}: {check.text}"))
        output.print_line(line, console)
        if check.help:
            output.print_line(f"        help: {check.help}", console)


def _checks(options: Options) -> Iterator[CheckResult]:
    """Yield all results. If something cannot be read, the error is one of them."""
    yield from check_machine(options.device, from_start(options.output_dir))
    result = None
    config: ResolvedConfig | None = default_config()
    if options.config_file:
        result = load_config(options.config_file)
        config = result.config
    yield from _check_config(result)
    if options.model is None:
        return
    try:
        yield from _check_model(options, config)
    except QuantizerError as error:
        yield CheckResult("model", "error", error.message, error.help or "")


def _check_config(result: LoadResult | None) -> Iterator[CheckResult]:
    if result is None:
        text = "there is no --config_file: the built-in default for the DPU is used"
        yield CheckResult("config", "note", text, "`quantizer init` writes a config")
        return
    for finding in result.diagnostics:
        if finding.severity == "note":
            continue
        level: CheckLevel = finding.severity
        text = f"{finding.code}: {finding.message}"
        if finding.place:
            text = f"{finding.place}: {text}"
        yield CheckResult("config", level, text, finding.help or "")
    if result.config is not None:
        yield CheckResult("config", "ok", f"{result.config.source} is valid")


def _check_model(options: Options, config: ResolvedConfig | None) -> Iterator[CheckResult]:
    loaded = session.open_model(options)
    batches = session.open_data(options, loaded)
    yield from check_data(batches)
    if loaded.evaluate is None and loaded.evaluation_data is None and options.eval_data is None:
        text = "test mode would compare both networks on the calibration data"
        remedy = "add evaluation_data() to the model's file, or give --eval_data"
        yield _data("note", text, remedy)
    traced = traced_from(options, loaded, batches, tested=config is not None)
    original = traced.graph
    parameters = sum(parameter.numel() for parameter in loaded.module.parameters())
    text = f"{loaded.name} can be traced: {len(original.nodes)} layers"
    if original.lengths:
        text += f", {counted(len(original.lengths), 'dynamic length')}"
    text += f", {parameters / 1e6:.2f} million parameters"
    yield CheckResult("model", "ok", text)
    if config is None:
        return
    plan = session.resolved_plan(session.ReadConfig(config, (), {}), original, quiet=True)
    yield from check_planned_tensors(plan)
    for name in traced.for_:
        checked = CHECKED_TARGETS[name]
        try:
            refuse(checked.words, planned_refusals(checked, plan, config.algorithms))
        except UsageError as error:
            yield _plan("error", error.message, error.help or "")
        else:
            yield _plan("ok", f"{checked.words} can hold the network")
    peaks = peaks_of(plan, config, traced, options.memory, finetuned=False)
    yield from check_memory(peaks.items())
    if plan.corrected:
        text = f"bias correction of {counted(len(plan.corrected), 'layer')} "
        text += "takes a second pass over the data"
        yield _plan("note", text, "set include_bias_corr: false if that takes too long")


def check_machine(device: str, folder: Path) -> Iterator[CheckResult]:
    """Check processor, memory, disk and packages."""
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    threads = torch.get_num_threads()
    load = 0.0
    if hasattr(os, "getloadavg"):
        load = os.getloadavg()[0]
    yield _machine("ok", f"torch {torch.__version__}, {threads} threads on {cores} cores")
    if threads > cores:
        text = f"torch uses {threads} threads, but this process may use only {cores} cores"
        yield _machine("warning", text, f"set OMP_NUM_THREADS={cores}")
    if load > 0.5 * cores:
        text = (
            f"other processes load the machine: {load:.1f} of {cores} cores in the last minute"
        )
        yield _machine("note", text, "runs take longer, and times vary")
    if torch.cuda.is_available() and device == "cpu":
        text = "there is a GPU, but this run would use the CPU"
        yield _machine("note", text, "add --device cuda")
    memory = process_memory.available_bytes()
    if memory is not None:
        yield _machine("ok", f"{process_memory.size_text(memory)} of memory are free")
    yield from _check_disk(folder.absolute())
    for extra, packages in _packages_by_extra().items():
        missing = [name for name in packages if find_spec(name) is None]
        if missing:
            text = f"packages of the extra {extra} are missing: {', '.join(missing)}"
            yield CheckResult("packages", "note", text, f"{pip_line(extra)}, if you need it")


def _packages_by_extra() -> dict[str, tuple[str, ...]]:
    """Return the packages of each extra that something imports; one of several extras is with
    the first.
    """
    rows: list[tuple[str, tuple[str, ...]]] = []
    for plugin in plugins():
        rows += [(target.extra, target.needs) for target in plugin.targets.values()]
        rows += plugin.packages.items()
    rows.append(("plots", _PLOTS))
    by_extra: dict[str, tuple[str, ...]] = {}
    seen: set[str] = set()
    for extra, packages in rows:
        others = tuple(package for package in packages if package not in seen)
        seen.update(others)
        if others:
            by_extra[extra] = by_extra.get(extra, ()) + others
    return by_extra


def _check_disk(folder: Path) -> Iterator[CheckResult]:
    while not folder.exists():
        folder = folder.parent
    if not os.access(folder, os.W_OK):
        yield _machine("error", f"{folder} is not writable", "choose another --output_dir")
    free = shutil.disk_usage(folder).free
    text = f"{process_memory.size_text(free)} of disk are free at {folder}"
    if free < MIN_DISK:
        remedy = "free some space: results and temporary files are written here and to TMPDIR"
        yield _machine("warning", text, remedy)
    else:
        yield _machine("ok", text)


def check_data(batches: Batches) -> Iterator[CheckResult]:
    """Check how much data there is, and whether it looks like inputs of a model.

    Raises:
        DataError: it cannot be read, or holds NaN.
    """
    digests: Counter[str] = Counter()
    sizes: list[int] = []
    deviations: dict[str, list[float]] = {}
    for batch in islice(iter(batches), MAX_CHECKED_BATCHES):
        sizes.append(batch.size)
        fingerprint = Fingerprint()
        fingerprint.update(batch)
        digests[fingerprint.digest] += 1
        for name, tensor in batch.tensors():
            if tensor.is_floating_point() and tensor.numel():
                deviation = float(tensor.float().std(unbiased=False))
                deviations.setdefault(name, []).append(deviation)
    count = len(sizes)
    samples = sum(sizes)
    total = batches.total
    is_complete = total is None or total <= count
    text = f"{batches.label}: {samples} samples in {count} batches"
    if not is_complete:
        text += f" (the first {count} of {total} batches)"
    yield _data("ok", text)
    if batches.stands_in or batches.stamp:
        text = f"{batches.label} are {batches.stamp}"
        if batches.stands_in:
            text = "there is only an example input, no data"
        remedy = "give real data with --data: the ranges of activations depend on it"
        yield _data("warning", text, remedy)
    elif deviations and samples < MIN_SAMPLES and is_complete:
        text = f"{samples} samples are few: more samples may still change ranges"
        remedy = f"give at least {MIN_SAMPLES}; the report shows when ranges stop changing"
        yield _data("warning", text, remedy)
    repeated = count - len(digests)
    if repeated:
        text = f"{repeated} of {count} batches repeat another batch"
        remedy = "check the loader: do its indices or seeds repeat?"
        yield _data("warning", text, remedy)
    if set(sizes) == {1} and deviations and count > 8:
        text = "each batch has one sample"
        yield _data("note", text, "use batches of 16 or 32 images: they run faster")
    for name, values in deviations.items():
        mean = sum(values) / len(values)
        if max(values) == 0:
            yield _data("error", f"{name} is constant", "check the loader")
        elif mean > MAX_INPUT_STD:
            text = f"{name} has a standard deviation of {mean:.3g}"
            remedy = "normalize it as in training; pixels from 0 to 255 are not normalized"
            yield _data("warning", text, remedy)


def check_planned_tensors(plan: Plan) -> Iterator[CheckResult]:
    """Check what would stay in float, lose accuracy or run slowly."""
    if not plan.tensors:
        remedy = "quantize some: `quantizable_data_type` lists the kinds of tensors"
        yield _plan("error", "the config quantizes no tensors of this model", remedy)
    else:
        before, after = weight_bytes(plan)
        text = f"{len(plan.tensors)} tensors would be quantized, "
        text += f"weights shrink from {before / 1e6:.2f} to {after / 1e6:.2f} MB"
        yield _plan("ok", text)
    unknown: Counter[str] = Counter()
    for node in plan.graph.nodes:
        if plan.floats.get(node.name) == NO_RULES:
            unknown[node.op] += 1
    if unknown:
        names = [f"{name} ({count})" for name, count in sorted(unknown.items())]
        text = f"stay in float, because no rule covers them: {first_names(names)}"
        yield _plan("note", text, "docs/operators.md lists the operators")
    uneven = []
    for (name, role), tensor in plan.tensors.items():
        spec = tensor.spec
        is_single = role == "weights" and spec.qscheme == "per_tensor" and spec.dtype == "int"
        if is_single and _channel_ratio(plan, name) > MAX_CHANNEL_RATIO:
            uneven.append(name)
    if uneven:
        text = "one scale serves channels whose ranges differ by more than "
        text += f"{MAX_CHANNEL_RATIO:g} times: weights of {first_names(uneven, 3)}"
        remedy = "set per_channel: true for weights, or use include_cle"
        yield _plan("warning", text, remedy)
    reads_tokens = any(node.op == "input" and not node.is_float for node in plan.graph.nodes)
    static = 0
    for tensor in plan.tensors.values():
        static += tensor.is_calibrated and not tensor.spec.is_dynamic
    if reads_tokens and static:
        text = f"{static} activations of a language model have one static range each"
        remedy = "use is_dynamic, or SmoothQuant first: a few channels are often far wider"
        yield _plan("note", text, remedy)


def _channel_ratio(plan: Plan, name: str) -> float:
    """Return the widest range of an output channel of a weight over the narrowest one that is
    not zero.
    """
    node = plan.graph.by_name[name]
    if not node.row.is_linear_or_convolution:
        return 1.0
    weight = plan.parameter((name, "weights")).detach().float()
    ranges = by_channel(node, weight).abs().amax((2, 3))
    ranges = ranges[ranges > 0]
    return float(ranges.max() / ranges.min()) if len(ranges) else 1.0


def check_memory(peaks: Iterable[tuple[str, int | None]]) -> Iterator[CheckResult]:
    """Check whether the free memory is enough for the predicted peaks, in bytes."""
    free = process_memory.available_bytes()
    used = process_memory.resident_bytes() or 0
    for mode, peak in peaks:
        if peak is None or free is None:
            continue
        text = f"{mode} mode takes about {process_memory.size_text(peak)}"
        if peak - used <= free:
            yield CheckResult("memory", "ok", text)
        else:
            text += f", but only {process_memory.size_text(free)} are free"
            remedy = "use a smaller --batch_size, or limit it with --memory"
            yield CheckResult("memory", "error", text, remedy)
