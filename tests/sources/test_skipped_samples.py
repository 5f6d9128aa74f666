"""`--skip_len` leaves out the first samples, and `--subset_len` counts from there."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.runs import DIGITS

from quantizer.cli.main import run_command
from quantizer.errors import DataError
from quantizer.sources.data import load_batches

SIZES = (3, 1, 4)


def samples(skip_len: int | None, subset_len: int | None) -> list[int]:
    values = torch.arange(sum(SIZES)).view(-1, 1).split(SIZES)
    batches = load_batches(list(values), subset_len=subset_len)
    batches.skip_len = skip_len
    read: list[int] = []
    for batch in batches:
        read += batch.args[0].flatten().tolist()
    assert list(batches.first().args[0].flatten()) == read[: batches.first().size]
    return read


@given(st.integers(0, sum(SIZES) - 1), st.integers(1, 3))
def test_samples_are_skipped_and_then_counted(skip_len: int, subset_len: int) -> None:
    everything = list(range(sum(SIZES)))
    after = everything[skip_len:]
    assert samples(skip_len or None, None) == after
    if len(after) >= subset_len:
        assert samples(skip_len or None, subset_len) == after[:subset_len]


def test_nothing_left_is_an_error_that_names_the_option() -> None:
    with pytest.raises(DataError, match="--skip_len 8 leaves out all of it"):
        samples(sum(SIZES), None)


def test_calibration_refuses_it(capsys: pytest.CaptureFixture[str]) -> None:
    calib = ["--quant_mode", "calib", "--model", DIGITS, "--skip_len", "8"]
    assert run_command(calib) == 2
    assert "--skip_len needs test or float mode" in capsys.readouterr().err
