"""Runs files in other engines, as programs of their own, and compares them with test mode.

What they find refuses nothing. Some files crash an engine, and some engines bring other
versions of packages.
"""

import logging
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from torch import Tensor

from quantizer.errors import VerificationError, or_without
from quantizer.export.acceptance import Outputs, compared_calls, with_float_figures, worst_of
from quantizer.export.agreement import EngineCheck
from quantizer.export.deployment import Deployment

logger = logging.getLogger(__name__)
_MAX_SECONDS = 600


def engine_check(
    engine: str,
    name: str,
    deployment: Deployment,
    run: Callable[[], Sequence[list[Tensor]]],
    first_layer: Callable[[], str] | None = None,
) -> EngineCheck:
    """Return how another engine reads a file on the deployment's call.

    A warning is logged if it computes something else than test mode.

    Args:
        engine: its name with its version.
        name: of the file.
        deployment: what the outputs are compared with.
        run: returns the outputs in float32 and, if there are any, in default settings.
        first_layer: finds the first layer that differs.
    """
    call = (deployment.args, dict(deployment.kwargs))
    try:
        results = run()
        verifications = compared_calls(deployment, lambda *_: results, [call])
        for index, outputs in enumerate(results):
            verifications[index] = with_float_figures(
                verifications[index], _giving(outputs), deployment, [call]
            )
        agreeing = [worst_of(found, deployment) is None for found in verifications]
        figures, *defaults = verifications
        layer = ""
        if first_layer is not None and not agreeing[0]:
            layer = or_without("the first layer that differs", first_layer, "")
        check = EngineCheck(
            engine,
            all(agreeing),
            figures,
            layer=layer,
            defaults=next(iter(defaults), None),
            reads=agreeing[0],
        )
    except VerificationError as error:
        check = EngineCheck(engine, agrees=False, failure=error.message)
    if not check.agrees:
        logger.warning("%s: %s", name, check.line)
    return check


def _giving(tensors: list[Tensor]) -> Outputs:
    return lambda args, kwargs: tensors


def started(program: Path, folder: Path) -> subprocess.Popen[str]:
    """Start a program of another engine in a folder, with pipes for its input and outputs.

    It is given as text, so that no module beside the program stands for one that it imports.
    """
    return subprocess.Popen(
        [sys.executable, "-c", program.read_text("utf-8")],
        cwd=folder,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )


def require_success(process: subprocess.Popen[str]) -> None:
    """Wait for the end of a program.

    Raises:
        VerificationError: it fails.
    """
    try:
        _, errors = process.communicate(timeout=_MAX_SECONDS)
    except subprocess.TimeoutExpired as error:
        process.kill()
        raise VerificationError(f"it does not end within {_MAX_SECONDS} s") from error
    if process.returncode:
        raise VerificationError(failure_of(process.returncode, errors))


def failure_of(code: int, errors: str) -> str:
    """Return why a program has ended, for its exit code and what it wrote.

    >>> failure_of(-6, ""), failure_of(1, "Traceback:\\nValueError: no such operator\\n")
    ('it crashes with signal 6', 'ValueError: no such operator')
    """
    if code < 0:
        return f"it crashes with signal {-code}"
    last_line = errors.strip().rpartition("\n")[2].strip()
    return last_line or "it fails without a message"
