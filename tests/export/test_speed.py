"""What measured times say of a file's speed: the median of rounds with its spread, or that it
cannot be told.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import onnx
import onnxruntime
import pytest

from quantizer.export.agreement import Verification
from quantizer.export.onnx.speed import cpu_session, measured_speed, speeds_in_turns
from quantizer.export.onnx.verify import DEFAULT, OnnxFile, open_session
from quantizer.export.performance import BUSY, Kernels, Speed, waited_seconds

SECOND = [1.0] * 9


def told(ours: list[float], floats: list[float]) -> str:
    """What is printed behind the kernels of a file whose rounds took so long."""
    verification = Verification("outputs", 0.0, 0.0, 1.0, kernels=Kernels(("conv",), {}))
    line = replace(verification, speed=Speed.of(ours, floats)).summary_lines[0]
    return line.removeprefix("1 of 1 multiplications in int8").removeprefix("; ")


@pytest.mark.parametrize(
    ("floats", "said"),
    [
        (
            [1.8, 1.75, 1.85, 1.8, 1.79, 1.81, 1.9, 1.7, 1.8],
            "1.8x the speed of float (1.8 to 1.8 in 9 rounds)",
        ),
        (
            [1.5, 1.6, 1.7, 1.8, 1.7, 1.6, 1.5, 1.7, 1.6],
            "1.6x the speed of float (1.6 to 1.7 in 9 rounds)",
        ),
        ([0.65] * 9, "0.65x the speed of float (0.65 to 0.65 in 9 rounds)"),
        ([0.98, 1.02, 1.0], "1.0x the speed of float (1.0 to 1.0 in 3 rounds)"),
        # One round in which something else ran does not count.
        ([1.8] * 8 + [40.0], "1.8x the speed of float (1.8 to 1.8 in 9 rounds)"),
        ([0.02] * 9, "50 times slower than float (50.0 to 50.0 in 9 rounds)"),
        ([0.004] * 9, "250 times slower than float (250.0 to 250.0 in 9 rounds)"),
        # Rounds that disagree say nothing.
        ([0.9, 3.1, 1.0, 2.5, 1.8, 0.7, 4.0, 1.2, 2.2], BUSY),
        ([0.0001, 100.0, 0.5, 1.5, 90.0, 0.0002, 1.0, 80.0, 2.0], BUSY),
        # No kernel is a hundred times as fast: the float network was held up in every round.
        ([102.0] * 9, BUSY),
        ([1.8, 1.8], ""),
        ([], ""),
        # A clock that stood still has measured nothing.
        ([0.0] * 9, ""),
        ([0.0, 1.8, 1.8, 1.8], "1.8x the speed of float (1.8 to 1.8 in 3 rounds)"),
    ],
)
def test_times_of_rounds_as_a_sentence(floats: list[float], said: str) -> None:
    ours = SECOND[: len(floats)]
    assert told(ours, floats) == said
    slower = [10 * seconds for seconds in floats]
    assert told([10 * seconds for seconds in ours], slower) == said, (
        "a machine ten times slower says the same"
    )


def test_no_factor_is_printed_that_says_nothing() -> None:
    for exponent in range(-40, 41):
        factor = 2 ** (exponent / 4)
        line = told(SECOND, [factor, 1.05 * factor, factor * 0.96] * 3)
        assert not re.search(r"\b0\.0+x|\b\d{3,}(\.\d+)?x", line), line


def test_a_round_compares_times_of_that_round() -> None:
    """A machine that slows down by half on the way is no reason to doubt."""
    ours = [1.0, 1.2, 1.5, 1.8, 2.0]
    assert (
        told(ours, [2 * seconds for seconds in ours])
        == "2.0x the speed of float (2.0 to 2.0 in 5 rounds)"
    )


@pytest.mark.parametrize(("share", "is_clear"), [(0.0, True), (0.1, True), (0.5, False)])
def test_rounds_that_agree_count_only_with_the_processors(share: float, is_clear: bool) -> None:
    """Other programs may hold up each round of float alike. A run beside four busy programs
    printed 8.4x for int8 weights, which are 1.3x as fast as float.
    """
    timers = [lambda runs: 1.0, lambda runs: 2.0]
    # Threads wait for this share of the time that passes
    (speed,) = speeds_in_turns(timers, waited=lambda: share * time.perf_counter())
    assert speed is not None
    assert speed.ratio == 2.0
    assert speed.is_clear is is_clear
    assert (speed.text == BUSY) is not is_clear


def test_waits_of_a_process_that_has_ended_are_none() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    assert waited_seconds(process.pid) == 0.0
    assert waited_seconds() >= 0.0


def identity() -> onnx.ModelProto:
    """A model that returns its input, one float."""
    node = onnx.helper.make_node("Identity", ["x"], ["y"])
    x, y = (
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1]) for name in "xy"
    )
    return onnx.helper.make_model(
        onnx.helper.make_graph([node], "identity", [x], [y]),
        opset_imports=[onnx.helper.make_opsetid("", 20)],
        ir_version=10,
    )


def test_sessions_that_are_compared_do_not_wait_in_a_loop() -> None:
    """Their threads would take the processor from the session that is measured next."""
    model = identity()
    session = cpu_session(model.SerializeToString(), onnxruntime.SessionOptions())
    options = session.get_session_options()
    assert options.get_session_config_entry("session.force_spinning_stop") == "1"
    file = OnnxFile("identity.onnx", model.SerializeToString(), model)
    verified = open_session(file, DEFAULT).get_session_options()
    assert verified.get_session_config_entry("session.force_spinning_stop") == "1"


def test_other_programs_are_no_reason_to_give_no_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processor time is measured: a thread that waits for a processor uses none."""
    defaults = speeds_in_turns.__kwdefaults__
    # As beside other programs, threads wait for most of the time that passes
    monkeypatch.setitem(defaults, "waited", lambda: 2 * time.perf_counter())
    model = identity().SerializeToString()
    speed = measured_speed(model, model, {"x": np.zeros(1, np.float32)})
    assert speed is not None
    assert speed.waited == 0.0


def test_a_network_without_multiplications_has_no_share_of_them() -> None:
    without = Verification("outputs", 0.0, 0.0, 1.0, kernels=Kernels((), {}))
    [line] = replace(without, speed=Speed.of(SECOND, SECOND)).summary_lines
    assert line.startswith("The network has no multiplications that integers make faster")
