"""Opens config, model and data of a command, and resolves the plan. Says what tests read."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch

from quantizer.cli.arguments.options import Options
from quantizer.cli.arguments.places import from_start, unmoved
from quantizer.cli.run_folder import missing_data
from quantizer.cli.terminal.screen import timed
from quantizer.config.diagnostics import ConfigError, Diagnostic
from quantizer.config.document.document import Document
from quantizer.config.json_types import JsonMapping
from quantizer.config.load import default_config, load_config
from quantizer.config.model import ResolvedConfig
from quantizer.config.run_options import dynamic_sizes, with_finetuning
from quantizer.config.wording import counted
from quantizer.errors import UsageError
from quantizer.graph.ir import Graph
from quantizer.graph.passes import run_passes
from quantizer.graph.tracing.parameters import move_module, with_views
from quantizer.plan.model import Plan
from quantizer.plan.remarks import plan_remarks
from quantizer.plan.resolve import resolve_plan
from quantizer.plugins import if_command
from quantizer.results.folder import OpenedResults
from quantizer.results.graph_file import reuse_or_trace, trace_module
from quantizer.sources.arguments import DEFAULT_SEQ_LEN, longest_window
from quantizer.sources.batches import Batch
from quantizer.sources.data import (
    DEFAULT_BATCH_SIZE,
    EXAMPLE_STAMP,
    Batches,
    is_synthetic,
    load_batches,
)
from quantizer.sources.models import Evaluate, LoadedModel, load_evaluate, load_model
from quantizer.storage import process_memory

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ReadConfig:
    """A config, its findings, and the texts of its files."""

    config: ResolvedConfig
    diagnostics: tuple[Diagnostic, ...]
    sources: dict[str, str]
    document: Document | None = None

    def text_of(self, value: JsonMapping) -> str:
        """Return the text of a changed config, laid out as the file is."""
        # Only configs that are changed need it
        from quantizer.config.document.edited import edited_text

        return edited_text(self.document or Document.of({}, ""), value)

    @property
    def encoding(self) -> str:
        """Return the encoding of the file."""
        return "utf-8" if self.document is None else self.document.source.encoding


def read_config_file(path: str | None) -> ReadConfig:
    """Return the config of `--config_file`, or the built-in default.

    Raises:
        ConfigError: with all findings, if it cannot be used.
    """
    if path is None:
        _logger.info(
            "there is no --config_file: the built-in default for the DPU is used%s",
            if_command("init", "; `quantizer init --list` shows others"),
        )
        return ReadConfig(default_config(), (), {})
    result = load_config(str(unmoved(path)))
    sources = dict(result.sources)
    return ReadConfig(result.require(), result.diagnostics, sources, result.document)


def config_as_asked(
    path: str | None, level: str | None, mode: str | None = None
) -> tuple[ReadConfig, str | None]:
    """Return the config of a run, and its mode of finetuning.

    Args:
        path: of the config.
        level: of `--dpu_accuracy`.
        mode: of `--fast_finetune`.

    Raises:
        ConfigError: with all findings, if it cannot be used.
        UsageError: the config excludes one of the options.
    """
    read = read_config_file(path)
    config, mode = with_finetuning(read.config, level, mode)
    return replace(read, config=config), mode


@dataclass(frozen=True)
class OpenedRun:
    """The model and the calibration data of a run, which several modes may share.

    Attributes:
        options: of the run.
        loaded: the model.
        batches: of its calibration.
        improvement: what would lose less than this run; empty if that is not known.
        float_metrics: what the user's `evaluate` returned for the float model; None if it was
            not called yet.
        evaluation: the data that it was called with, which the test has to read again.
    """

    options: Options
    loaded: LoadedModel
    batches: Batches
    improvement: str = ""
    float_metrics: Mapping[str, float] | None = None
    evaluation: Batches | None = None

    @cached_property
    def graph(self) -> Graph:
        """Return the trace on the first batch, compared with the model on it."""
        return trace_model(self.options, self.loaded, self.batches, compared=True)

    def with_batches(self, batches: Batches) -> OpenedRun:
        """Return the same run with a part of its calibration data, and the same trace."""
        # The data of the test may be another part, too
        return self.changed(batches=batches, float_metrics=None, evaluation=None)

    def changed(self, **changes: Any) -> OpenedRun:
        """Return the same run with other fields, and the same trace."""
        other = replace(self, **changes)
        # Tracing again would take longer than all else
        vars(other)["graph"] = self.graph
        return other


def open_run(options: Options) -> OpenedRun:
    """Open the model and its calibration data. The options have the targets of `--to`."""
    loaded = open_model(options)
    options = with_targets(options, loaded.module)
    return OpenedRun(options, loaded, open_data(options, loaded))


def with_targets(options: Options, model: torch.nn.Module) -> Options:
    """Return the options with the targets of `--to`: test mode writes them, other commands
    check them.

    Raises:
        UsageError: packages are missing, or two destinations need different options.
    """
    words = options.to_
    if not words:
        return options
    # Only runs for a target need them
    from quantizer.export.destinations import checked_names, written_targets
    from quantizer.export.refusals import require_extras

    options = replace(options, to_=())
    if options.quant_mode != "test":
        checked = checked_names(words, model)
        require_extras(checked, to_plan=True)
        return replace(options, for_=(*options.for_, *checked))
    targets, choices = written_targets(words, options.target_choices, model)
    require_extras(targets)
    return replace(options, deploy=(*options.deploy, *targets), target_options=choices)


def open_model(options: Options) -> LoadedModel:
    """Return the model of `--model`, on its device.

    Raises:
        UsageError: there is no `--model`, or the device is not available.
        ModelError: it cannot be loaded.
    """
    if options.model is None:
        remedy = "give FILE.py with a function model(), or package.module:factory"
        raise UsageError("Missing option '--model'", help=remedy)
    weights = options.weights
    with timed(f"loading {options.model}"):
        loaded = load_model(
            options.model,
            weights and str(from_start(weights)),
            trust=options.trust,
            max_unpacked=options.max_unpacked,
        )
    device = device_of(options)
    if device.type == "cuda":
        # Convolutions of float32 would otherwise have the precision of float16.
        torch.backends.cudnn.allow_tf32 = False
    move_module(loaded.module, device)
    return loaded


def device_of(options: Options) -> torch.device:
    """Return the device of `--device`. "auto" is a GPU if there is one.

    Raises:
        UsageError: the device is not available.
    """
    name = options.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        remedy = "use cpu: torch finds no CUDA device"
        if torch.cuda.is_available():
            remedy = "use cpu or cuda"
        reason = str(error).splitlines()[0]
        message = f"--device {options.device} cannot be used here: {reason}"
        raise UsageError(message, help=remedy) from error


def open_data(
    options: Options,
    loaded: LoadedModel,
    *,
    evaluation: bool = False,
    seq_len: int | None = None,
) -> Batches:
    """Return the batches of `--data`, or those of the model's file.

    Without both, return one example input of the right shape: some configs need no data.

    Args:
        options: of the command.
        loaded: the model.
        evaluation: whether the data is for float or test mode, which prefer `--eval_data` and
            get no example input.
        seq_len: tokens per sample of texts without `--seq_len`.

    Raises:
        UsageError: there is no data, or options do not fit it.
        DataError: it cannot be read, or synthetic data cannot be made.
    """
    option = options.data
    source: Any = loaded.calibration_data
    if evaluation:
        option = evaluation_option(options, loaded)
        source = loaded.evaluation_data
    option = unmoved(option)
    if option is not None:
        source = option
    given = options_of_kinds(options, loaded, option)
    length = sample_length(options, loaded, seq_len)
    open_batches = partial(load_batches, module=loaded.module, options=given)
    if source is None:
        if loaded.example is None or evaluation:
            raise missing_data(options)
        item = partial(loaded.example, length)
        example = open_batches(lambda: [item()])
        return replace(example, label="the example input", stands_in=True)
    batches = open_batches(
        source,
        batch_size=options.batch_size,
        subset_len=options.subset_len,
        seed=options.seed,
        defaults={
            "tokenizer": loaded.tokenizer,
            "seq_len": length,
            "trust": options.trust,
            "max_unpacked": options.max_unpacked,
        },
        example=partial(_first_of_model, loaded, length),
    )
    if evaluation:
        batches.skip_len = options.skip_len
    return batches


def open_test_data(
    options: Options, loaded: LoadedModel, opened: OpenedRun | None, seq_len: int | None = None
) -> Batches:
    """Return the batches of a test. Example inputs and synthetic data of a run that is open
    take the place of evaluation data, and the report says so.

    Args:
        options: of the test.
        loaded: the model.
        opened: the run, if it is open.
        seq_len: tokens per sample of texts without `--seq_len`.
    """
    if opened is not None:
        if opened.batches.stands_in and not options.eval_data:
            return replace(opened.batches, stamp=EXAMPLE_STAMP)
        if evaluates_on_synthetic(options, loaded):
            return opened.batches
        if opened.evaluation is not None:
            return opened.evaluation
    return open_data(options, loaded, evaluation=True, seq_len=seq_len)


def _first_of_model(loaded: LoadedModel, length: int) -> Batch | None:
    """Return the example input of a model, or else its first batch; None if it has neither."""
    source: Any = loaded.calibration_data
    if loaded.example is not None:
        source = [loaded.example(length)]
    return source and load_batches(source, module=loaded.module).first()


def batch_size(options: Options, batches: Batches) -> int:
    """Return the samples per batch, known once the first batch was read."""
    return options.batch_size or batches.first_size or DEFAULT_BATCH_SIZE


def trace_model(
    options: Options, loaded: LoadedModel, batches: Batches, *, compared: bool = False
) -> Graph:
    """Return the model's graph, traced on the first batch so that targets can be written."""
    first = batches.first().to(device_of(options))
    # torch.export imports it.
    with process_memory.importing("torch._dynamo"), timed("tracing the model"):
        sizes = dynamic_sizes(options.dynamic)
        traced = partial(trace_module, loaded.module, first, compared=compared, sizes=sizes)
        graph = traced()
        if options.for_:
            # Only runs for a target need it
            from quantizer.export.exporting import exportable

            graph = exportable(graph, first, options.for_, partial(traced, fixed=True))
    _logger.debug("%s has %s", graph.model, counted(len(graph.nodes), "layer"))
    return with_views(graph)


def recall_graph(
    options: Options, loaded: LoadedModel, batches: Batches, info: OpenedResults
) -> Graph:
    """Return the graph of a model that was calibrated; it is traced again only if it is not the
    stored one.
    """
    first = batches.first().to(device_of(options))
    return with_views(reuse_or_trace(loaded.module, first, info))


def resolved_plan(
    read: ReadConfig, original: Graph, *, quiet: bool = False, graph: Graph | None = None
) -> Plan:
    """Return the plan of a config for a traced graph, and print warnings and notes.

    Args:
        read: the config.
        original: the traced graph.
        quiet: whether nothing is printed.
        graph: the graph after passes and algorithms; if None, the passes run here.

    Raises:
        ConfigError: a selector matches nothing, or values conflict once merged.
    """
    graph = graph or run_passes(original, read.config.settings)
    plan = resolve_plan(read.config, graph, original)
    findings = (*read.diagnostics, *plan.diagnostics)
    if any(finding.severity == "error" for finding in findings):
        raise ConfigError(findings, read.sources)
    if not quiet:
        # A run without findings does not need it
        from quantizer.cli.terminal.render import print_diagnostics, say_note

        print_diagnostics(findings, read.sources)
        for line in plan_remarks(plan):
            say_note(line)
    return plan


_OF_SOME_KINDS = ("preprocess", "tokenizer", "stride", "seq_len", "shuffle")
"""The options that only some kinds of data read."""


def evaluation_option(options: Options, loaded: LoadedModel) -> str | None:
    """Return the value of `--eval_data`, or of `--data` if that is also for evaluation; None
    for the data of the model's file, which are preferred to synthetic ones.
    """
    if options.eval_data is not None:
        return options.eval_data
    if is_synthetic(options.data) and loaded.evaluation_data is not None:
        return None
    return options.data


def evaluates_on_synthetic(options: Options, loaded: LoadedModel) -> bool:
    """Return whether test mode runs on synthetic data. They have no labels."""
    return is_synthetic(evaluation_option(options, loaded))


def evaluator_of(options: Options, loaded: LoadedModel) -> Evaluate | None:
    """Return the user's `evaluate`, from --evaluate or the model's file; None if there is none,
    or if the data are synthetic.

    Raises:
        UsageError: `--evaluate` is given for synthetic data.
    """
    if evaluates_on_synthetic(options, loaded):
        if options.evaluate:
            raise UsageError(
                "--evaluate needs real data: metrics on synthetic data mean nothing",
                help="give --eval_data, or evaluation_data() in the model's file",
            )
        return None
    if options.evaluate:
        return load_evaluate(str(unmoved(options.evaluate)), loaded.directions)
    return loaded.evaluate


def options_of_kinds(options: Options, loaded: LoadedModel, data: str | None) -> dict[str, Any]:
    """Return the options that were given and that only some kinds of data read, by name.

    Args:
        options: of the command.
        loaded: the model.
        data: of `--data` or `--eval_data`.
    """
    given: dict[str, Any] = {}
    for name in _OF_SOME_KINDS:
        value = getattr(options, name)
        if value:
            given[name] = unmoved(value) if isinstance(value, str) else value
    if data is None and loaded.calibration_data is None and loaded.example is not None:
        # It sets the length of the example input
        given.pop("seq_len", None)
    if is_synthetic(data) and options.eval_data:
        # The others are for --eval_data
        return {name: value for name, value in given.items() if name == "seq_len"}
    return given


def sample_length(options: Options, loaded: LoadedModel, calibrated: int | None = None) -> int:
    """Return how many tokens a sample of text has.

    Args:
        options, loaded: of the command.
        calibrated: without `--seq_len`; 512, or the model's maximum, if None.

    Raises:
        UsageError: the model has fewer positions.
    """
    longest = longest_window(loaded.module)
    if options.seq_len and longest and options.seq_len > longest:
        raise UsageError(
            f"--seq_len {options.seq_len} is too long: the model has {longest} positions",
            help=f"use at most --seq_len {longest}",
        )
    return options.seq_len or calibrated or min(DEFAULT_SEQ_LEN, longest or DEFAULT_SEQ_LEN)
