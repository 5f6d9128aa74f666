"""Decides whether a file computes what test mode does, and refuses one that does not.

Other engines run it as programs of their own. What they find refuses nothing: some files crash
an engine, and some engines bring other versions of packages.
"""

import logging
import math
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from quantizer.comparison.output_comparison import Recorder
from quantizer.errors import VerificationError, first_line, or_without
from quantizer.export.agreement import Agreement, EngineCheck, Verification
from quantizer.export.deployment import Deployment, tensor_leaves, to_float32
from quantizer.export.part_agreement import WITHIN, PartAgreement
from quantizer.graph.ir import Call
from quantizer.nn.network import Network

# Of two roundings of one network, neither worse than the other, the difference has twice the
# energy of the error.
MARGIN_DB = 3.0
# A difference of 1 % is rounding, even where test mode loses less.
SUFFICIENT_DB = 40.0
# Relative to the largest value. A smaller difference is none where test mode gives only zeros.
_NEGLIGIBLE = 1e-6
Outputs = Callable[[Call], list[Tensor]]
"""Returns what a file gives for one call: the tensors, in order."""

logger = logging.getLogger(__name__)
_MAX_SECONDS = 600


@torch.no_grad()
def compared_calls(
    deployment: Deployment,
    runs: Callable[[Call], Sequence[list[Tensor]]],
    calls: Iterable[Call] | None = None,
    network: Network | None = None,
) -> list[Verification]:
    """Compare what each of several sessions gives with test mode's outputs.

    Args:
        runs: returns what each session gives for a call.
        calls: all calls of the deployment by default.
        network: another one than test mode's.

    Raises:
        VerificationError: an output has another shape.
    """
    agreements: list[Agreement] = []
    network = network or deployment.reference
    for call in deployment.calls() if calls is None else calls:
        recorder = Recorder(deployment.outputs)
        expected = to_float32(tensor_leaves(network.observe(*call, recorder.watchers)))
        for index, actual in enumerate(runs(call)):
            if index == len(agreements):
                steps = deployment.part_steps
                agreements.append(Agreement("outputs", deployment.outputs, steps))
            agreements[index].add(expected, actual, recorder)
    return [agreement.result() for agreement in agreements]


def verified_calls(
    deployment: Deployment, outputs: Outputs, *, name: str, remedy: str, subject: str = "it"
) -> Verification:
    """Compare what a file gives with test mode's outputs over all calls.

    Args:
        name: of the file.
        remedy: what to do if it is refused.
        subject: of the sentence on a file that is refused.

    Raises:
        VerificationError: the outputs differ.
    """
    (verification,) = compared_calls(deployment, lambda call: [outputs(call)])
    refusal = f"{name} is not written: {subject}"
    return accept_file(verification, deployment, outputs, refusal=refusal, remedy=remedy)


@contextmanager
def failures_named(engine: str, name: str, remedy: str) -> Iterator[None]:
    """Raise what an engine raises as `VerificationError`; its exceptions have no common class.

    Args:
        engine: the engine.
        name: of the file that it runs.
        remedy: what to do.
    """
    try:
        yield
    except VerificationError:
        raise
    except Exception as error:
        raise VerificationError(
            f"{name} is not written: {engine} cannot run it: {first_line(error)}", help=remedy
        ) from error


def accept_file(
    verification: Verification,
    deployment: Deployment,
    outputs: Outputs,
    *,
    refusal: str,
    remedy: str,
) -> Verification:
    """Return the figures of a file, with those against the float network where they decide.

    Args:
        refusal: begins the sentence on a file that is refused.
        remedy: what to do then.

    Raises:
        VerificationError: the file does not compute what test mode does.
    """
    verification = with_float_figures(verification, outputs, deployment)
    differing = worst_of(verification, deployment)
    if differing is None:
        return verification
    text = f"{refusal} does not compute what test mode does: {verification.figures()}"
    if len(verification.parts) > 1:
        text += f"; {_part_text(differing)}"
    loss = deployment.loss_of(differing.name)
    text += f"; test mode itself is {loss:.1f} dB from the float network"
    raise VerificationError(text, help=remedy)


def worst_of(verification: Verification, deployment: Deployment) -> PartAgreement | None:
    """Return the part that differs most from test mode; None if all parts agree."""
    differing = [
        part
        for part in verification.parts
        if not _part_agrees(part, deployment.loss_of(part.name), verification)
    ]
    return min(differing, key=lambda part: part.sqnr_db or -math.inf, default=None)


def _part_agrees(part: PartAgreement, sqnr_db: float, verification: Verification) -> bool:
    """Return whether one part is what test mode computes.

    A part agrees if nearly all of its values are within one step. It also agrees if its
    difference from test mode costs no more than quantization itself: one other code in an early
    layer changes many in later ones. In a deep network nearly all codes may change. Then the
    file's error against the float network may be twice that of test mode.

    Args:
        sqnr_db: of the part in test mode against the float network.
    """
    if part.within_share is not None and part.within_share >= WITHIN:
        return True
    if part.collapses:
        return False
    if part.sqnr_db is None:
        extents = [other.expected for other in verification.parts if other.is_float]
        ends = [max(abs(extent.low), abs(extent.high)) for extent in extents]
        largest = max(filter(math.isfinite, ends), default=0.0)
        return part.equal_share >= WITHIN or part.largest <= _NEGLIGIBLE * largest
    nearest = part.sqnr_db
    if part.float_sqnr_db is not None:
        nearest = max(nearest, part.float_sqnr_db)
    return nearest >= least_db(sqnr_db)


def least_db(sqnr_db: float) -> float:
    """Return the least SQNR, against test mode or the float network, of another rounding that
    costs no more."""
    return min(SUFFICIENT_DB, sqnr_db - MARGIN_DB)


def _part_text(part: PartAgreement) -> str:
    """Return the figures of a part that differs, as part of a sentence."""
    index = "" if part.index in (None, part.name) else f" ({part.index})"
    if part.collapses:
        return f"{part.name}{index} is {part.actual.low:.3g} everywhere"
    ratio = "" if part.sqnr_db is None else f"{part.sqnr_db:.1f} dB, "
    return f"{part.name}{index} has {ratio}{part.equal_share:.2%} equal values"


def with_float_figures(
    verification: Verification,
    outputs: Outputs,
    deployment: Deployment,
    calls: Iterable[Call] | None = None,
) -> Verification:
    """Return the figures, with those against the float network, if there is one, where they
    decide.

    This takes a second pass over the calls.
    """
    if deployment.float_graph is None or worst_of(verification, deployment) is None:
        return verification
    network = Network(deployment.float_graph.in_memory())
    compared = compared_calls(deployment, lambda call: [outputs(call)], calls, network)
    if not compared or not compared[0].parts:
        return verification
    (figures,) = compared
    floats = {part.name: part.sqnr_db for part in figures.parts}
    parts = tuple(
        replace(part, float_sqnr_db=floats.get(part.name)) for part in verification.parts
    )
    return replace(verification, parts=parts, float_sqnr_db=figures.sqnr_db)


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
    calls = [deployment.call]
    try:
        results = run()
        verifications = compared_calls(deployment, lambda _: results, calls)
        for index, outputs in enumerate(results):
            verifications[index] = with_float_figures(
                verifications[index], _giving(outputs), deployment, calls
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
    return lambda call: tensors


def started(program: str, folder: Path) -> subprocess.Popen[str]:
    """Start a program of another engine in a folder, with pipes for its input and outputs.

    Args:
        program: its text, so that no module next to its file stands for one that it imports.
        folder: that it works in.
    """
    return subprocess.Popen(
        [sys.executable, "-c", program],
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
