"""`--data` and the user's loaders: what a batch is, counting, repeating, and a sentence for
data of no use.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

pytest.importorskip("hypothesis", reason="property tests need hypothesis (extra: dev)")

from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from quantizer.errors import DataError, UsageError
from quantizer.sources import tensor_files
from quantizer.sources.data import Batches, load_batches
from quantizer.sources.kinds import data_kinds


class OneInput(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


class TwoInputs(nn.Module):
    def forward(self, x: Tensor, y: Tensor, scale: float = 1.0) -> Tensor:
        return x + y * scale


class Named(nn.Module):
    def forward(self, left: Tensor, right: Tensor | None = None) -> Tensor:
        return left if right is None else left + right


class AnyKeywords(nn.Module):
    def forward(self, **inputs: Tensor) -> Tensor:
        return inputs["image"]


X, Y = torch.arange(12.0).reshape(4, 3), torch.arange(4)


def only(source: Any, module: nn.Module | None = None) -> Any:
    """The only batch of a source."""
    (batch,) = load_batches(source, module=module)
    return batch


def refusal(batches: Batches) -> str:
    """The sentence with which going through `batches` ends."""
    with pytest.raises(DataError) as caught:
        list(batches)
    assert caught.value.exit_code == 4
    return f"{caught.value.message} | {caught.value.help}"


def test_each_suffix_of_data_has_a_reader() -> None:
    assert set(tensor_files.READERS) == set(data_kinds()["tensor files"].suffixes)


def test_a_tensor_is_the_input() -> None:
    batch = only([X])
    assert (batch.args, batch.kwargs, batch.target, batch.raw, batch.size) == (
        (X,),
        {},
        None,
        X,
        4,
    )


@pytest.mark.parametrize("pair", [(X, Y), [X, Y]])
def test_of_a_pair_the_model_gets_the_first(
    pair: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        batches = load_batches([pair, pair], module=OneInput())
        next(iter(batches))
        batch, _ = batches
    assert (batch.args, batch.target, batch.raw) == ((X,), Y, pair)
    assert caplog.text == ""


def test_the_model_tells_how_many_inputs_a_tuple_holds() -> None:
    assert only([(X, X)], TwoInputs()).args == (X, X)
    assert only([(X, X, 2.0)], nn.Module()).args[2] == 2.0
    batch = only([(X, X, Y)], TwoInputs())
    assert (batch.args, batch.target) == ((X, X), Y)


def test_a_dict_gives_keyword_arguments() -> None:
    batch = only([{"ids": X, "mask": X, "labels": Y}])
    assert (batch.args, set(batch.kwargs), batch.target) == ((), {"ids", "mask"}, Y)
    batch = only([({"x": X}, Y)], OneInput())
    assert (batch.args, set(batch.kwargs), batch.target) == ((), {"x"}, Y)


@pytest.mark.parametrize(
    ("item", "module", "sentence"),
    [
        (
            {"image": X},
            OneInput(),
            "has the key 'image', which the model does not take | forward",
        ),
        ({"lefts": X, "right": X}, Named(), "'lefts', which the model does not take | did you"),
        ({"right": X}, Named(), "lacks the key 'left', which the model needs | forward() of"),
        (
            [X, X, X],
            OneInput(),
            "has 3 elements, but the model takes 1 input (and one target may follow) | f",
        ),
        ([X[:1]] * 4, OneInput(), "no doubt, and samples are stacked to one tensor"),
    ],
)
def test_a_batch_that_does_not_fit_forward(item: Any, module: nn.Module, sentence: str) -> None:
    assert sentence in refusal(load_batches([item], module=module))


def test_a_forward_with_any_keywords_gets_all_keys() -> None:
    batch = only([{"image": X}], AnyKeywords())
    assert set(batch.kwargs) == {"image"}


def test_to_moves_every_tensor() -> None:
    moved = only([({"a": X, "b": [X, "text"]}, Y)]).to("meta")
    assert (
        moved.kwargs["a"].is_meta
        and moved.kwargs["b"][0].is_meta
        and moved.target.is_meta
        and moved.raw[1].is_meta
    )
    assert moved.kwargs["b"][1] == "text"


@pytest.mark.parametrize(
    ("item", "sentence"),
    [
        (3, "batch 0 of the data of the model's file is an int, not a tensor"),
        ("text", "is a str, not a tensor"),
        ((), "has 0 elements, but the model takes 1 input ("),
        ((X, X, X), "has 3 elements, but the model takes 1 input ("),
        ((X, 7), "is one sample and its label, or a list of numbers"),
        (torch.tensor(1.0), "is not a batch: args[0] is a single number"),
        (torch.empty(0, 3), "is empty: args[0] has the shape [0, 3]"),
        (["a"], "holds no tensor"),
        ({}, "holds no tensor"),
        ({1: X}, "is a dict with keys that are not strings"),
        (
            torch.tensor([1.0, float("nan"), float("inf")]),
            "holds NaN or Inf: 2 of 3 values of args[0]",
        ),
    ],
)
def test_an_item_that_is_no_batch(item: Any, sentence: str) -> None:
    assert sentence in refusal(load_batches([item], module=OneInput()))


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        (TensorDataset(X, Y), "is a Dataset, which gives single samples, not batches"),
        (X, "is a Tensor, not an iterable of batches"),
        ({"x": X}, "is a dict, not an iterable of batches"),
        (lambda: 7, "is an int, not an iterable of batches"),
        (iter([X]), "is an iterator, which can be read only once"),
        ([], "gives no batch"),
        (lambda: iter(()), "gives no batch"),
    ],
)
def test_a_source_that_gives_no_batches(source: Any, sentence: str) -> None:
    assert sentence in refusal(load_batches(source))


def test_a_loader_that_raises_is_told_with_the_batch_and_the_users_line() -> None:
    def loader() -> Iterator[Tensor]:
        yield X
        raise OSError("disk on fire")

    sentence = refusal(load_batches(loader))
    assert (
        "loading batch 1 of the data of the model's file raised OSError: disk on fire"
        in sentence
    )
    assert 'raise OSError("disk on fire")' in sentence


def test_a_function_is_called_for_each_pass_and_a_loader_is_left_alone() -> None:
    loader = DataLoader(TensorDataset(torch.arange(10.0)[:, None]), batch_size=4, shuffle=True)
    batches = load_batches(loader)
    passes = [[batch.raw[0].flatten().tolist() for batch in batches] for _ in range(2)]
    assert passes[0] == passes[1]
    assert [len(batch) for batch in passes[0]] == [4, 4, 2]
    order = [sample for batch in passes[0] for sample in batch]
    assert sorted(order) == list(range(10)) != order


@settings(max_examples=50, derandomize=True, deadline=None)
@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=6), wanted=st.integers(1, 60))
def test_subset_len_counts_samples_exactly(sizes: list[int], wanted: int) -> None:
    items = [
        (torch.full((size, 2), float(i)), torch.arange(size)) for i, size in enumerate(sizes)
    ]
    batches = list(load_batches(items, subset_len=wanted))
    assert sum(batch.size for batch in batches) == min(wanted, sum(sizes))
    for batch in batches:
        assert batch.target is not None
        assert batch.size == len(batch.target) == len(batch.raw[0])


def test_fewer_samples_than_asked_for_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    list(load_batches([X, X], subset_len=100))
    assert "has 8 samples of the 100 asked for" in caplog.text


def test_the_fingerprint_is_that_of_the_inputs() -> None:
    def fingerprint(*items: Any) -> Any:
        batches = load_batches(list(items))
        assert batches.fingerprint is None
        list(batches)
        return batches.fingerprint

    known = fingerprint((X, Y), (X, Y))
    assert (known["samples"], known["batches"]) == (8, 2)
    assert known["inputs"] == {"args[0]": ["float32[3]"]}
    assert fingerprint((X, Y + 1), (X, Y)) == known
    changed = X.clone()
    changed[2, 1] += 1e-6
    others = [
        fingerprint(X, changed),
        fingerprint(X, X.flip(0)),
        fingerprint(torch.cat([X, X])),
        fingerprint(X, X.double()),
    ]
    assert len({known["digest"], *(other["digest"] for other in others)}) == 5


@pytest.mark.parametrize("start", [1, 2])
def test_a_slice_of_a_tensor_has_the_fingerprint_of_its_copy(start: int) -> None:
    # 9 values of 4 bytes: the memory of a slice begins at no multiple of 8 bytes
    samples = torch.arange(45.0).view(5, 9)
    part = samples[start : start + 2]
    digests = []
    for item in (part, part.clone()):
        batches = load_batches([item])
        list(batches)
        assert batches.fingerprint is not None
        digests.append(batches.fingerprint["digest"])
    assert digests[0] == digests[1]


def test_random_data_is_seeded_and_stamped() -> None:
    batches = load_batches("random:5x3x2", batch_size=2, seed=1)
    assert batches.stamp == "random data"
    assert [tuple(batch.args[0].shape) for batch in batches] == [
        (2, 3, 2),
        (2, 3, 2),
        (1, 3, 2),
    ]
    again, other = (
        next(iter(load_batches("random:5x3x2", batch_size=2, seed=seed))).args[0]
        for seed in (1, 2)
    )
    assert torch.equal(next(iter(batches)).args[0], again)
    assert not torch.equal(again, other)


@pytest.mark.parametrize(
    "spec",
    ["random:", "random:3", "random:0x3", "random:3x-1", "random:3xN", "random:9x99999x99999"],
)
def test_random_data_of_no_shape(spec: str) -> None:
    with pytest.raises(UsageError):
        load_batches(spec)


def test_numbers_below_one_are_refused() -> None:
    for option in ("batch_size", "subset_len"):
        with pytest.raises(UsageError, match="must be at least 1, not 0"):
            load_batches([X], **{option: 0})


def test_a_factory_of_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("loader.py").write_text(
        "import torch\ndef calibration_data():\n    yield torch.ones(2, 3)\n"
        "def three():\n    return [torch.ones(3, 3)]\nready = [torch.ones(4, 3)]\ndef bad(): "
        "raise KeyError('x')\n"
    )
    specs = ["loader.py", "loader.py:three", "loader.py:ready", "loader:three"]
    assert [only(spec).size for spec in specs] == [2, 3, 4, 3]
    assert "bad() of loader.py raised KeyError" in refusal(load_batches("loader.py:bad"))
    for spec in ("loader.py:none", "missing.py", "no_such_module:data"):
        with pytest.raises(DataError):
            load_batches(spec)


def test_a_loader_that_draws_gives_the_same_batches_in_every_pass(tmp_path: Path) -> None:
    def draws() -> Iterator[torch.Tensor]:
        for _ in range(2):
            yield torch.tensor(
                [random.random(), float(numpy.random.rand()), float(torch.rand(()))]
            ).reshape(1, 3)

    batches = load_batches(draws, seed=3)
    first, second = ([batch.args[0] for batch in batches] for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))
    other = [batch.args[0] for batch in load_batches(draws, seed=4)]
    assert not (other[0] == first[0]).any()


def test_a_list_is_asked_for_once_and_a_generator_for_each_pass() -> None:
    """The tracer, calibration and bias correction all read the data, and making them may take
    longer than a pass.
    """
    calls: list[str] = []

    def listed() -> list[Tensor]:
        calls.append("list")
        return [torch.ones(2, 3)] * 2

    def generated() -> Iterator[Tensor]:
        calls.append("generator")
        yield torch.ones(2, 3)

    for source, passes in ((listed, ["list"]), (generated, ["generator"] * 3)):
        calls.clear()
        batches = load_batches(source)
        assert len({len(list(batches)) for _ in range(3)}) == 1
        assert calls == passes
