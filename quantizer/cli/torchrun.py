"""Joins the ranks that torchrun has started, if it has; only rank 0 is heard. Imports
torch.distributed only then.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import replace
from typing import TYPE_CHECKING

from quantizer.calibration.events import Events, Stage
from quantizer.cli.options import Options
from quantizer.distributed import ALONE, Ranks

if TYPE_CHECKING:
    from quantizer.distributed.process_group import ProcessGroup

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What torchrun tells each process."""
URL = "env://"
_joined: list["ProcessGroup"] = []


class Watched(Events):
    """Looks after the other ranks whenever a unit of work is done."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def advanced(self, stage: Stage) -> None:
        """Stop if another rank has."""
        self._ranks.check()


def is_used() -> bool:
    """Whether this process is one of several."""
    return all(os.environ.get(name) for name in VARIABLES) and int(os.environ["WORLD_SIZE"]) > 1


@contextmanager
def joined(options: Options) -> Iterator[tuple[Ranks, Options]]:
    """The ranks of this run, and the options of this one: its own GPU, and no notes from any
    but the first.

    Raises:
        RankError: not all of them come.
    """
    if not is_used():
        yield ALONE, options
        return
    import torch

    from quantizer.distributed.process_group import ProcessGroup

    if options.device == "auto":
        options = replace(options, device="cuda" if torch.cuda.is_available() else "cpu")
    if options.device == "cuda":
        options = replace(options, device=f"cuda:{os.environ.get('LOCAL_RANK', 0)}")
    backend = "cpu:gloo,cuda:nccl" if options.device.startswith("cuda") else "gloo"
    group = ProcessGroup(URL, backend, options.rank_timeout, options.device)
    _joined.append(group)
    try:
        yield group, options if group.is_first else replace(options, quiet=True)
    except BaseException as error:
        group.fail(error)
        raise


@contextmanager
def one_voice(arguments: list[str]) -> Iterator[None]:
    """All ranks but the first print nothing, unless they are debugged; none ends before the
    first has printed all.
    """
    with ExitStack() as stack:
        if is_used() and os.environ["RANK"] != "0" and "--debug" not in arguments:
            nowhere = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
            stack.enter_context(redirect_stdout(nowhere))
            stack.enter_context(redirect_stderr(nowhere))
        try:
            yield
        finally:
            while _joined:
                sys.stdout.flush()
                sys.stderr.flush()
                _joined.pop().leave()
