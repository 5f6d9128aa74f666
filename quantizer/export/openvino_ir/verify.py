"""Compares a model in OpenVINO, in float32 and as its users run it, with test mode."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from quantizer.errors import VerificationError
from quantizer.export.acceptance import accept_file
from quantizer.export.agreement import Agreement, Kernels, Verification
from quantizer.export.deployment import Deployment, tensor_leaves
from quantizer.export.float32 import to_float32
from quantizer.export.onnx.kernels import kernels_of
from quantizer.export.onnx.marks import MULTIPLYING
from quantizer.export.onnx.openvino import first_layer_that_differs
from quantizer.export.onnx.speed import speed_in_turns
from quantizer.export.openvino_ir.session import BY_DEFAULT, IN_FLOAT32, IrSession
from quantizer.export.speed import Speed

_LABELS = {
    IN_FLOAT32: "OpenVINO in float32",
    BY_DEFAULT: "OpenVINO by its default settings",
}
_REMEDY = (
    "--deploy onnx is accepted by what ONNX Runtime computes; without VNNI, processors add up "
    "int8 weights of 8 bits wrong: give weights 7 bits there"
)


def verify_ir(session: IrSession, deployment: Deployment) -> Verification:
    """Compare the outputs of a model with test mode's over all calls.

    Raises:
        VerificationError: OpenVINO cannot run it, or its outputs differ in either of the
            settings.
    """
    network = deployment.network()
    agreements: dict[int, Agreement] = {}
    for setting in _LABELS:
        agreements[setting] = Agreement("outputs", deployment.outputs, deployment.part_steps)
    for args, kwargs in deployment.calls():
        recorder = agreements[IN_FLOAT32].recorder()
        with torch.no_grad():
            result = network.observe(args, kwargs, recorder.watchers)
        expected = to_float32(tensor_leaves(result))
        for setting, outputs in enumerate(session.run(args, kwargs)):
            agreements[setting].add(expected, outputs, recorder)
    verified: dict[int, Verification] = {}
    for setting, label in _LABELS.items():
        verified[setting] = _accepted(agreements[setting], setting, label, session)
    default = replace(
        verified[BY_DEFAULT], kernels=_kernels(session, deployment), speed=_speed(session)
    )
    return replace(verified[IN_FLOAT32], default_session=default)


def _accepted(
    agreement: Agreement, setting: int, label: str, session: IrSession
) -> Verification:
    """Return the figures in one of the settings.

    Raises:
        VerificationError: the outputs differ.
    """

    def outputs(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
        return session.run(args, kwargs)[setting]

    try:
        return accept_file(
            agreement.result(),
            session.deployment,
            outputs,
            refusal=f"{session.name} is not written: {label}",
            remedy=_REMEDY,
        )
    except VerificationError as error:
        layer = first_layer_that_differs(session.model, session.deployment, session.folder)
        if not layer:
            raise
        text = f"{error.message}; the first layer that differs is {layer}"
        raise VerificationError(text, help=error.help) from error


def _kernels(session: IrSession, deployment: Deployment) -> Kernels:
    """Return which multiplications are in integers by the default settings."""
    integer_nodes = session.integer_nodes()
    integer: list[str] = []
    for node in session.model.graph.node:
        if node.op_type in MULTIPLYING and node.name in integer_nodes:
            integer.append(node.name)
    graph, solution = deployment.graph, deployment.solution
    return kernels_of(session.model, integer, graph, solution, engine="OpenVINO")


def _speed(session: IrSession) -> Speed | None:
    """Measure the speed against the float network, both by the default settings."""
    if not session.has_float:
        return None
    timers = [partial(session.seconds, which) for which in ("model", "float")]
    return speed_in_turns(*timers)
