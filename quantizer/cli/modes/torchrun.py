"""Joins the ranks that torchrun has started, of which only rank 0 prints."""

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import replace
from typing import TYPE_CHECKING

from quantizer.cli.arguments.options import Options
from quantizer.distributed import Ranks
from quantizer.errors import ModelError, QuantizerError
from quantizer.sources.user_code import ends_in_user_code, user_error

if TYPE_CHECKING:
    from quantizer.distributed.process_group import ProcessGroup

_URL = "env://"
_joined: list["ProcessGroup"] = []
"""The group of this process, which it leaves at the end."""


@contextmanager
def joined_ranks(options: Options) -> Iterator[tuple[Ranks, Options]]:
    """Join the other ranks.

    Yields:
        The ranks, and the options of this one. They name its own GPU, and ranks other than the
        first are quiet.

    Raises:
        RankError: not all ranks start.
    """
    import torch

    from quantizer.distributed.process_group import ProcessGroup

    device = options.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
    options = replace(options, device=device)
    backend = "cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo"
    group = ProcessGroup(_URL, backend, options.rank_timeout, options.device)
    _joined.append(group)
    if not group.is_first:
        options = replace(options, quiet=True)
    try:
        yield group, options
    except BaseException as error:
        reported = error
        is_unexpected = isinstance(error, Exception) and not isinstance(error, QuantizerError)
        if is_unexpected and ends_in_user_code(error):
            # All ranks end with the same exit code
            reported = user_error("your code", error, ModelError)
        group.fail(reported)
        raise


@contextmanager
def one_voice(arguments: list[str]) -> Iterator[None]:
    """Let only the first rank print, unless --debug is given.

    At the end, the other ranks wait until the first has printed everything.
    """
    with ExitStack() as stack:
        if os.environ["RANK"] != "0" and "--debug" not in arguments:
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
