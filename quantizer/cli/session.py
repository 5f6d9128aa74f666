"""What the commands about a model share: load it, trace it, plan it, and tell the user what was
found on the way.
"""

import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from rich.console import Console, RenderableType
from rich.text import Text

from quantizer.calibration.finetuning import as_asked
from quantizer.cli.options import Options
from quantizer.cli.render import print_diagnostics, say
from quantizer.config.diagnostics import ConfigError, Diagnostic, pointing_into
from quantizer.config.load import default_config, load_config
from quantizer.config.model import Config, Names
from quantizer.errors import UsageError
from quantizer.graph.find_structure import find_structure
from quantizer.graph.ir import Graph
from quantizer.graph.parameters import placed
from quantizer.graph.passes import run_passes
from quantizer.graph.structure import Structure
from quantizer.plan.model import Plan
from quantizer.plan.remarks import remarks
from quantizer.plan.resolve import resolve
from quantizer.printable import json_text, one_line
from quantizer.results.calibrated import recalled, traced
from quantizer.results.folder import OpenedResults
from quantizer.sources.batches import Batch
from quantizer.sources.data import DEFAULT_BATCH_SIZE, TEXTS, Batches, find_files, load_batches
from quantizer.sources.models import LoadedModel, load_model
from quantizer.sources.text import DEFAULT_SEQ_LEN, Windows, longest_window
from quantizer.sources.tokenizer import load_tokenizer
from quantizer.storage import process_memory

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ReadConfig:
    """A config, its findings, and the text of the files they point into."""

    config: Config
    diagnostics: tuple[Diagnostic, ...]
    sources: dict[str, str]


def read_config(path: str | None) -> ReadConfig:
    """The config of `--config_file`, or the built-in default, which is logged.

    Raises:
        ConfigError: with all findings, when it cannot be used.
    """
    if path is None:
        logger.info(
            "no --config_file: the built-in default for the DPU holds; `quantizer init "
            "--list` shows others"
        )
        return ReadConfig(default_config(), (), {})
    result = load_config(path)
    return ReadConfig(result.require(), result.diagnostics, dict(result.sources))


def config_as_asked(
    path: str | None, level: str | None, mode: str | None = None
) -> tuple[ReadConfig, str | None]:
    """The config of a run with `--dpu_accuracy level` and `--fast_finetune mode`, and how it
    finetunes.

    Raises:
        ConfigError: with all findings, when it cannot be used.
        UsageError: an option does not go with it.
    """
    read = read_config(path)
    config, mode = as_asked(read.config, level, mode)
    return replace(read, config=config), mode


def open_model(options: Options) -> LoadedModel:
    """The model of `--model`, on its device.

    Raises:
        UsageError: no `--model`, or a device this machine lacks.
        ModelError: it cannot be loaded.
    """
    if options.model is None:
        remedy = "give FILE.py with a function model(), or package.module:factory"
        raise UsageError("Missing option '--model'", help=remedy)
    loaded = load_model(
        options.model, options.weights, trust=options.trust, max_unpacked=options.max_unpacked
    )
    device = device_of(options)
    if device.type == "cuda":
        # Else a convolution of float32 has the precision of float16
        torch.backends.cudnn.allow_tf32 = False
    placed(loaded.module, device)
    return loaded


def device_of(options: Options) -> torch.device:
    """The device of `--device`; cpu for commands without one. "auto" is a GPU where there is
    one.

    Raises:
        UsageError: no such device here.
    """
    try:
        found = "cuda" if torch.cuda.is_available() else "cpu"
        device = torch.empty(
            0, device=found if options.device == "auto" else options.device
        ).device
    except (RuntimeError, AssertionError) as error:
        said = f"--device {options.device} cannot be used here: {str(error).splitlines()[0]}"
        here = (
            "cpu or cuda"
            if torch.cuda.is_available()
            else "cpu: this torch finds no CUDA device"
        )
        raise UsageError(said, help=f"use {here}") from error
    return device


def open_data(
    options: Options,
    loaded: LoadedModel,
    *,
    evaluation: bool = False,
    seq_len: int | None = None,
) -> Batches:
    """The batches of `--data` (in test mode of `--eval_data` first), else those the model's
    file offers.

    Failing these, and not for an evaluation, one example input that has the right shape: some
    configs need no data. `seq_len` is the length of texts' windows where `--seq_len` is not
    given.

    Raises:
        UsageError: there are none, or options that do not go with them.
        DataError: they cannot be read.
    """
    given = (options.eval_data if evaluation else None) or options.data
    offered = loaded.evaluation_data if evaluation else loaded.calibration_data
    source = offered if given is None else given
    windows = read_windows(options, loaded, given, seq_len)
    if source is None:
        if loaded.example is None or evaluation:
            raise missing_data()
        item = partial(loaded.example, windows.seq_len)
        example = load_batches(lambda: [item()], module=loaded.module)
        return replace(example, label="the example input", stands_in=True)
    return load_batches(
        source,
        module=loaded.module,
        batch_size=options.batch_size,
        subset_len=options.subset_len,
        seed=options.seed,
        preprocess=options.preprocess,
        windows=windows,
        max_unpacked=options.max_unpacked,
    )


def read_windows(
    options: Options, loaded: LoadedModel, given: str | None, calibrated: int | None = None
) -> Windows:
    """How a text becomes samples: by `--tokenizer` or the model's own, `--seq_len` tokens long.

    Failing that as long as `calibrated` says, else 512 tokens or as many as the model can.

    Raises:
        UsageError: the lengths do not fit each other or the model, or the data given are no
            texts.
    """
    named = [name for name in ("tokenizer", "stride", "seq_len") if getattr(options, name)]
    if given is None and loaded.calibration_data is None and loaded.example is not None:
        # The example input has a length, too
        named = [name for name in named if name != "seq_len"]
    if named and (given is None or find_files(given)[0] != TEXTS):
        raise UsageError(
            f"--{named[0]} is for texts, and the data are not texts",
            help="give --data FILE.txt",
        )
    longest = longest_window(loaded.module)
    if options.seq_len and longest and options.seq_len > longest:
        raise UsageError(
            f"--seq_len {options.seq_len}: the model was made for at most {longest} positions"
        )
    tokenizer = (
        partial(load_tokenizer, options.tokenizer, trust=options.trust)
        if options.tokenizer
        else loaded.tokenizer
    )
    seq_len = options.seq_len or calibrated or min(DEFAULT_SEQ_LEN, longest or DEFAULT_SEQ_LEN)
    return Windows(tokenizer, seq_len, options.stride)


def batch_size(options: Options, batches: Batches) -> int:
    """How many samples a batch has, once the first one was read."""
    return options.batch_size or batches.first_size or DEFAULT_BATCH_SIZE


def missing_data() -> UsageError:
    """What to do without data. A config that only rounds weights, or finds ranges as it runs,
    needs but a shape.
    """
    remedy = (
        "give --data, or add calibration_data() to the model's file; a config without static "
        "activations and without algorithms needs an input's shape alone: --data "
        "random:1x3x224x224, or example_input() in the model's file"
    )
    return UsageError("Missing option '--data'", help=remedy)


def trace_model(
    options: Options, loaded: LoadedModel, batches: Batches, *, compared: bool = False
) -> Graph:
    """The model's graph, traced on the first batch, and perhaps compared with the model on
    it.
    """
    first = batches.first().to(device_of(options))
    with process_memory.importing("torch._dynamo"):  # which torch does to export
        return traced(loaded.module, first, compared=compared)


def recall_graph(
    options: Options, loaded: LoadedModel, batches: Batches, info: OpenedResults
) -> Graph:
    """Return the graph of a model that was calibrated; it is traced again only if it is not the
    stored one.
    """
    first = batches.first().to(device_of(options))
    return recalled(loaded.module, first, info)


def make_plan(
    read: ReadConfig, original: Graph, *, quiet: bool = False, graph: Graph | None = None
) -> Plan:
    """The plan of a config for a traced graph; warnings and notes go to stderr.

    `graph` is what the passes, and algorithms after them, made of `original`; without it the
    passes run here.

    Raises:
        ConfigError: a selector matches nothing, or values conflict once merged.
    """
    plan = resolve(read.config, graph or run_passes(original, read.config.settings), original)
    findings = (*read.diagnostics, *plan.diagnostics)
    if any(finding.severity == "error" for finding in findings):
        raise ConfigError(findings, read.sources)
    if not quiet:
        print_diagnostics(findings, read.sources)
        for line in remarks(plan):
            say(line, err=True)
    return plan


def named_structures(read: ReadConfig, graph: Graph) -> dict[str, Structure]:
    """By a title, what each algorithm finds that names parts of the model.

    Raises:
        ConfigError: a name that the model does not have, or that does not fit.
    """
    named = {
        f"{each.name} ({each.label})": each.names
        for each in read.config.algorithms
        if each.names != Names()
    }
    with pointing_into(read.sources):
        return {title: find_structure(graph, names) for title, names in named.items()}


def console(*, stderr: bool = False) -> Console:
    """A console that does not cut lines when it is not a terminal: layer names must survive a
    pipe.
    """
    stream = sys.stderr if stderr else sys.stdout
    given = os.environ.get("COLUMNS", "")
    width = None if stream.isatty() else (int(given) if given.isdecimal() else 0) or 1000
    return Console(stderr=stderr, width=width, highlight=False, soft_wrap=False)


def on_device(options: Options, batches: Batches) -> Iterator[Batch]:
    """A pass over the batches, on the device of `--device`."""
    device = device_of(options)
    return (batch.to(device) for batch in batches)


class _OneLine(logging.Formatter):
    """A record's message, escaped."""

    def format(self, record: logging.LogRecord) -> str:
        return one_line(record.getMessage())


@contextmanager
def notes_on_stderr(quiet: bool) -> Iterator[None]:
    """Show the package's own log records (which file was imported, which column was taken) on
    stderr.
    """
    logger = logging.getLogger("quantizer")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_OneLine())
    handler.setLevel(logging.WARNING if quiet else logging.INFO)
    level, propagate = logger.level, logger.propagate
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagate


@dataclass(frozen=True)
class Outcome:
    """`metrics` are what gates may ask for, `content` is what --json prints, `shown` what
    people see instead.

    `error` is what went wrong after that; it is raised when all is shown. `report` are the
    values of report.json, if there is one.
    """

    metrics: Mapping[str, float]
    content: Mapping[str, Any]
    shown: Sequence[RenderableType] = field(default=())
    error: Exception | None = None
    report: dict[str, Any] = field(default_factory=dict)


def show(outcome: Outcome, options: Options) -> None:
    """Print the result on stdout."""
    if options.json:
        print(json_text(outcome.content))
        return
    for item in outcome.shown:
        # Paths and layer names are not markup, and a path is one line however long.
        console().print(
            Text(one_line(item)) if isinstance(item, str) else item,
            soft_wrap=isinstance(item, str),
        )
