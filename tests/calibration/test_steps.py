"""The steps of a calibration, one by one: each returns a new state and leaves its own."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace

import pytest
import torch
from support.configs import document

from quantizer.calibration import steps
from quantizer.calibration.request import CalibrationRequest, CalibrationState
from quantizer.calibration.solution import Solution
from quantizer.calibration.target import Target
from quantizer.config.document.document import Document
from quantizer.config.load import check_document
from quantizer.graph.tracing.trace import trace
from quantizer.sources.data import load_batches


@pytest.fixture
def request_() -> CalibrationRequest:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(144, 5)
    ).eval()
    data = [torch.randn(4, 3, 8, 8) for _ in range(3)]
    config = check_document(Document.of(document(), "config")).require()
    return CalibrationRequest(
        target=Target(trace(model, (data[0],))), config=config, batches=load_batches(data)
    )


def all_states(request: CalibrationRequest) -> dict[str, CalibrationState]:
    """The state before each step, by its number and by its function, and the one "at the end"."""
    state = CalibrationState(target=request.target)
    states: dict[str, CalibrationState] = {}
    for number, step in enumerate(steps.STEPS):
        states[str(number)] = states[getattr(step.run, "__name__", "of a plug-in")] = state
        if step.when(request, state):
            state = step.run(request, state)
    return {**states, "at the end": state}


def assert_same(one: Solution, other: Solution) -> None:
    assert one.tensors.keys() == other.tensors.keys()
    for key, tensor in one.tensors.items():
        again = other.tensors[key]
        assert torch.equal(tensor.scale, again.scale), key
        assert torch.equal(tensor.zero_point, again.zero_point), key
        assert (tensor.codes is None) == (again.codes is None), key
        assert tensor.codes is None or torch.equal(tensor.codes, again.codes), key


@pytest.mark.parametrize("first", range(len(steps.STEPS)))
def test_a_calibration_goes_on_from_any_step(request_: CalibrationRequest, first: int) -> None:
    expected = all_states(request_)
    state = expected[str(first)]
    for step in steps.STEPS[first:]:
        if step.when(request_, state):
            state = step.run(request_, state)
    assert_same(state.solution, expected["at the end"].solution)


def test_a_middle_step_runs_on_a_state_that_is_made_by_hand(
    request_: CalibrationRequest,
) -> None:
    before = all_states(request_)["find_scales"]
    doubled = before.calibration.unseen()
    for batch in request_.read():
        twice = (batch.args[0] * 2,)
        with before.target.observed() as model:
            steps.observing.observe_batches(doubled, model, [replace(batch, args=twice)])
    scales = steps.find_scales(request_, before).solution.tensors
    doubled_scales = steps.find_scales(
        request_, replace(before, calibration=doubled)
    ).solution.tensors
    key = next(key for key in scales if key[1] == "input")
    assert torch.equal(doubled_scales[key].scale, scales[key].scale * 2)


def test_observing_leaves_the_state_that_it_starts_from(request_: CalibrationRequest) -> None:
    states = all_states(request_)
    assert states["observe"].calibration.batches == 0
    assert states["find_scales"].calibration.batches == 3
    again = steps.start_observers(request_, states["start_observers"]).calibration
    left = states["observe"].calibration.state_dict()
    assert all(torch.equal(left[name], value) for name, value in again.state_dict().items())


def test_states_and_requests_are_frozen(request_: CalibrationRequest) -> None:
    state = CalibrationState(target=request_.target)
    with pytest.raises(FrozenInstanceError):
        state.kept = {}  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError):
        request_.seed = 1  # type: ignore[misc]
