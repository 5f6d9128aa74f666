"""Compares a model in OpenVINO, in float32 and as its users run it, with test mode."""

from dataclasses import replace
from functools import partial

from quantizer.errors import VerificationError, or_without
from quantizer.export.acceptance import (
    accept_file,
    compared_calls,
    with_float_figures,
    worst_of,
)
from quantizer.export.agreement import Verification
from quantizer.export.deployment import Deployment
from quantizer.export.onnx.kernels import kernels_of_products
from quantizer.export.onnx.marks import RECURRENT
from quantizer.export.onnx.openvino import first_layer_that_differs
from quantizer.export.onnx.speed import speeds_in_turns
from quantizer.export.openvino_ir.session import BY_DEFAULT, IN_FLOAT32, IrSession
from quantizer.export.processor_waits import waited_seconds
from quantizer.export.speed import Speed

_COARSER = (
    "by its default settings OpenVINO loses more on this processor than quantization itself: "
    "compile the file with INFERENCE_PRECISION_HINT f32"
)
_REMEDY = (
    "<--deploy onnx> is accepted by what ONNX Runtime computes; without VNNI, processors add "
    "up int8 weights of 8 bits wrong: give weights 7 bits there"
)


def verify_ir(session: IrSession, deployment: Deployment) -> Verification:
    """Compare the outputs of a model with test mode's over all calls.

    Raises:
        VerificationError: OpenVINO cannot run it, or its outputs differ in float32.
    """
    in_float32, by_default = compared_calls(deployment, session.run)
    in_float32 = _accepted(in_float32, session)
    by_default = with_float_figures(by_default, session.outputs(BY_DEFAULT), deployment)
    remarks: tuple[str, ...] = ()
    if worst_of(by_default, deployment) is not None:
        # The processor decides that, not the file.
        remarks = (_COARSER,)
    kernels = kernels_of_products(
        session.model,
        session.products(),
        deployment.graph,
        deployment.solution,
        engine="OpenVINO",
        without_kernels=RECURRENT,
    )
    default = replace(by_default, kernels=kernels, speed=_speed(session))
    return replace(in_float32, default_session=default, remarks=remarks)


def _accepted(verification: Verification, session: IrSession) -> Verification:
    """Return the figures in float32.

    Raises:
        VerificationError: the outputs differ.
    """
    try:
        return accept_file(
            verification,
            session.deployment,
            session.outputs(IN_FLOAT32),
            refusal=f"{session.name} is not written: OpenVINO",
            remedy=_REMEDY,
        )
    except VerificationError as error:
        find = partial(
            first_layer_that_differs, session.model, session.deployment, session.folder
        )
        layer = or_without("the first layer that differs", find, "")
        if not layer:
            raise
        text = f"{error.message.marked}; the first layer that differs is {layer}"
        raise VerificationError(text, help=error.help) from error


def _speed(session: IrSession) -> Speed | None:
    """Measure the speed against the float network, both by the default settings."""
    if not session.has_float:
        return None
    timers = [partial(session.seconds, which) for which in ("model", "float")]
    waited = partial(waited_seconds, session.process.pid)
    (speed,) = speeds_in_turns(timers, waited=waited)
    return speed
