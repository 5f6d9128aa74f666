"""What calibration runs before it observes anything: the algorithms of the config, with progress and checkpoints."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from quantizer.algorithms.adjustment import Adjustment, Task, adjusted
from quantizer.cli import session
from quantizer.cli.options import RunOptions
from quantizer.cli.progress import BatchProgress
from quantizer.cli.refine import again
from quantizer.config.diagnostics import ConfigError
from quantizer.config.model import Config
from quantizer.engine import run_algorithms as adjust
from quantizer.engine.algorithm_checkpoint import AdjustCheckpoint
from quantizer.errors import DataError, QuantizerError, UsageError
from quantizer.graph.ir import Graph
from quantizer.plan.model import Plan
from quantizer.sources.batches import Batch
from quantizer.sources.data import Batches

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Adjusted:
    """What algorithms found, the graph with it (the same float function), and algorithms.json."""

    graph: Graph
    found: Adjustment
    report: Mapping[str, Any]


def refuse(options: RunOptions, config: Config) -> None:
    """Refuse options that do not go with the config's algorithms.

    Raises:
        UsageError: two steps would round the same weights.
    """
    rounding = [settings.name for settings in config.algorithms if settings.stage == "round"]
    if options.fast_finetune and rounding:
        raise UsageError(
            f"--fast_finetune {options.fast_finetune} and the config's {rounding[0]} both round the weights",
            help="leave out --fast_finetune, or the algorithm",
        )


def run_algorithms(options: RunOptions, read: session.ReadConfig, plan: Plan, batches: Batches) -> Adjusted:
    """All algorithms of the config, in order.

    Raises:
        ConfigError: an algorithm's entry names what is not in the model.
        DataError: a value in the network is not finite, or the data are not the same when they are read again.
        ResultError: the checkpoint to resume from is damaged or of another run.
    """
    try:
        todo = adjust.steps(plan.graph, read.config.algorithms)
    except ConfigError as error:
        raise ConfigError(error.diagnostics, read.sources) from error
    specs = {key: tensor.spec for key, tensor in plan.tensors.items()}
    run = {"seed": options.seed}
    keeper = AdjustCheckpoint(Path(options.output_dir), plan.graph, todo, specs, run, lambda: batches.fingerprint)

    def opened() -> Iterator[Batch]:
        return again(options, batches, "the algorithms", "calibrate with batches that stay the same")

    start = _restored(keeper, opened) if options.resume else adjust.Start()
    found = start.found
    for index, step in enumerate(todo):
        if index >= start.index:
            done, given = (start.done, start.before) if index == start.index else (0, found)
            task = Task(plan.graph, specs, step.structure, opened, partial(keeper.group_done, index), done, given)
            found = _run_step(options, step, task, found, keeper)
            keeper.step_done(index + 1, found)
            _tell(adjust.told(step, given, found))
    if found.parameters or found.insertions:
        share = adjust.difference(plan.graph, found, next(session.on_device(options, batches)))
        _tell(adjust.told_difference(share))
    return Adjusted(adjusted(plan.graph, found), found, adjust.report(todo, found))


def _restored(keeper: AdjustCheckpoint, opened: Callable[[], Iterable[Batch]]) -> adjust.Start:
    """What a stopped run had found; the data are read once to see that they are the same."""
    if not keeper.exists():
        return adjust.Start()
    for _ in opened():
        pass
    start = keeper.restore()
    logger.info("the algorithms go on after %s", keeper.words(start))
    return start


def _run_step(
    options: RunOptions, step: adjust.Step, task: Task, found: Adjustment, keeper: AdjustCheckpoint
) -> Adjustment:
    """One algorithm, with its progress; a stop leaves a checkpoint, unless the data are the reason."""
    total, bar = len(step.structure.groups), session.shows_bars()
    with BatchProgress(step.name, total, bar=bar, quiet=options.quiet, unit="groups") as progress:
        progress.advance(task.done)

        def after_group(made: Adjustment, done: int) -> None:
            task.after_group(made, done)
            progress.advance(done)

        try:
            return step.run(replace(task, after_group=after_group), step.settings, found)
        except (KeyboardInterrupt, QuantizerError) as error:
            if keeper.has_news() and not isinstance(error, DataError):  # one goes on with the same data alone
                logger.warning("stopped after %s; --resume goes on from there", keeper.words(keeper.save()))
            raise


def _tell(lines: Iterable[tuple[int, str]]) -> None:
    for level, line in lines:
        logger.log(level, "%s", line)
