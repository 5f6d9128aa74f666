"""`--weights`: state dicts of both kinds, and a file that is not one never runs code and says
what it is instead.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("hypothesis", reason="property tests need hypothesis (extra: dev)")

from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save, save_file
from torch import Tensor, nn

from quantizer.errors import ModelError
from quantizer.sources.tensor_files import load_weights
from quantizer.sources.tensor_kinds import check_finite

STATE = {"weight": torch.arange(6.0).reshape(2, 3), "bias": torch.tensor([7.0, 8.0])}


class Evil:
    """Unpickling this makes a folder called `pwned`."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.mkdir, ("pwned",)


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def refusal(path: str, module: nn.Module | None = None) -> ModelError:
    """The error of loading `path`."""
    with pytest.raises(ModelError) as caught:
        load_weights(module or nn.Linear(3, 2), path)
    return caught.value


@pytest.mark.parametrize(
    "wrap", [lambda s: s, lambda s: {"state_dict": s, "epoch": 3}, lambda s: {"model": s}]
)
def test_a_state_dict_of_torch_save_is_loaded(wrap: Callable[[Any], Any]) -> None:
    torch.save(wrap(STATE), "net.pth")
    module = nn.Linear(3, 2)
    load_weights(module, "net.pth")
    assert torch.equal(module.weight, STATE["weight"])


def test_safetensors_are_loaded() -> None:
    save_file(STATE, "net.safetensors")
    module = nn.Linear(3, 2)
    load_weights(module, "net.safetensors")
    assert torch.equal(module.bias, STATE["bias"])


def test_counters_of_batch_norm_may_be_missing() -> None:
    state = {
        name: tensor
        for name, tensor in nn.BatchNorm2d(2).state_dict().items()
        if name != "num_batches_tracked"
    }
    save_file(state, "bn.safetensors")
    load_weights(nn.BatchNorm2d(2), "bn.safetensors")


def test_tied_weights_may_be_stored_once() -> None:
    module = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False)})
    module["b"].weight = module["a"].weight
    save_file({"a.weight": torch.ones(2, 2)}, "tied.safetensors")
    load_weights(module, "tied.safetensors")
    assert torch.equal(module["b"].weight, torch.ones(2, 2))


def with_header(end: int = 32, **entry: Any) -> bytes:
    """A safetensors file whose weight has something else in its entry, or whose bias ends
    elsewhere.
    """
    weight = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]} | entry
    header = json.dumps(
        {
            "weight": weight,
            "bias": {"dtype": "F32", "shape": [2], "data_offsets": [end - 8, end]},
        }
    )
    return len(header).to_bytes(8, "little") + header.encode() + bytes(32)


def whole(path: str) -> bytes:
    torch.save({"a": torch.ones(1000)}, path)
    return Path(path).read_bytes()


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("a.pth", b"", "a.pth cannot be read: it is empty"),
        ("a.safetensors", b"", "a.safetensors cannot be read: it is empty"),
        (
            "a.pth",
            b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n",
            "it is a Git LFS pointer",
        ),
        ("a.safetensors", b"\n <!DOCTYPE html><html>404</html>", "it is an HTML page"),
        ("a.pth", b"<html></html>", "it is an HTML page"),
        (
            "a.pth",
            bytes(range(200, 256)) * 9,
            "it is not a file that torch.save wrote, or it is damaged",
        ),
        ("a.safetensors", b"\xff" * 8 + b"{}", "it is truncated or not a safetensors file"),
        ("a.safetensors", save(STATE)[:-3], "it is truncated or not a safetensors file"),
        ("a.safetensors", save(STATE) + b"x", "it is truncated or not a safetensors file"),
        # Two in one place
        ("a.safetensors", with_header(end=24), "it is truncated or not a safetensors file"),
        (
            "a.safetensors",
            with_header(dtype="F64"),
            "it is truncated or not a safetensors file",
        ),
        (
            "a.safetensors",
            with_header(dtype="F99"),
            "it is truncated or not a safetensors file",
        ),
        (
            "a.safetensors",
            with_header(shape=[1 << 30, 1 << 20]),
            "it is truncated or not a safetensors file",
        ),
    ],
)
def test_a_file_that_is_not_a_checkpoint_is_told_apart(
    name: str, content: bytes, sentence: str
) -> None:
    Path(name).write_bytes(content)
    assert sentence in refusal(name).message


def test_a_truncated_checkpoint() -> None:
    Path("cut.pth").write_bytes(whole("whole.pth")[:900])
    assert (
        "it is not a file that torch.save wrote, or it is damaged" in refusal("cut.pth").message
    )


def test_a_missing_file_a_folder_and_a_strange_name() -> None:
    Path("folder.pth").mkdir()
    assert "No such file" in refusal("none.pth").message
    assert "Is a directory" in refusal("folder.pth").message
    assert "is not a weights file" in refusal("weights.bin").message


@pytest.mark.parametrize(
    "write",
    [torch.save, lambda obj, path: Path(path).write_bytes(pickle.dumps(obj, protocol=2))],
)
def test_a_pickle_that_would_run_code_is_refused_and_does_not_run(
    write: Callable[[Any, str], None],
) -> None:
    write(Evil(), "evil.pth")
    error = refusal("evil.pth")
    assert "the pickled object posix.mkdir, and loading that could run code" in error.message
    assert "safetensors.torch.save_file" in (error.help or "")
    assert not Path("pwned").exists()


@pytest.mark.parametrize(
    ("content", "blocked"),
    [
        (nn.Linear(2, 2), "torch.nn.modules.linear.Linear"),
        ({"args": argparse.Namespace(lr=1)}, "argparse.Namespace"),
    ],
)
def test_a_pickled_object_is_named(content: object, blocked: str) -> None:
    torch.save(content, "whole.pth")
    assert f"the pickled object {blocked}" in refusal("whole.pth").message


def test_a_torchscript_archive_is_a_program() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.script(nn.Linear(2, 2)), "script.pt")
    assert "TorchScript archive" in refusal("script.pt").message


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (torch.ones(3), "holds a Tensor, not a state_dict"),
        ({}, "holds an empty dict, not a state_dict"),
        ({"weight": torch.ones(2, 3), "epoch": 3}, "'epoch' is an int, not a tensor"),
    ],
)
def test_content_that_is_no_state_dict(content: object, sentence: str) -> None:
    torch.save(content, "other.pth")
    assert sentence in refusal("other.pth").message


def fault_lines(state: dict[str, Tensor], module: nn.Module) -> list[str]:
    save_file(state, "state.safetensors")
    error = refusal("state.safetensors", module)
    assert error.message == "the weights of state.safetensors do not fit the model"
    return (error.help or "").splitlines()


def test_keys_that_do_not_fit_are_listed_together() -> None:
    lines = fault_lines({"weight": torch.ones(2, 4), "offset": torch.ones(2)}, nn.Linear(3, 2))
    assert lines == [
        "1 missing in the file: bias",
        "1 not in the model: offset",
        "1 of another shape: weight [2, 4] (the model has [2, 3])",
    ]


def test_of_many_keys_five_are_shown() -> None:
    lines = fault_lines({f"k{i}": torch.ones(1) for i in range(8)}, nn.Linear(3, 2))
    assert "8 not in the model: k0, k1, k2, k3, k4 and 3 more" in lines


def test_the_prefix_of_data_parallel_is_explained() -> None:
    lines = fault_lines(
        {f"module.{name}": tensor for name, tensor in STATE.items()}, nn.Linear(3, 2)
    )
    assert "DataParallel" in lines[-1]


@pytest.mark.parametrize(
    ("value", "dtype"), [(float("nan"), torch.float32), (float("inf"), torch.bfloat16)]
)
def test_weights_that_are_not_finite_are_named(value: float, dtype: torch.dtype) -> None:
    module = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1)).to(dtype)
    with torch.no_grad():
        module[1].weight[0, 1] = value
    with pytest.raises(ModelError, match=r"NaN or Inf: 1 of 2 values of 1\.weight"):
        check_finite(module)


def test_finite_weights_whose_sum_overflows_and_masks_of_minus_infinity_are_fine() -> None:
    module = nn.Linear(3, 2)
    nn.init.constant_(module.weight, 3e38)
    module.register_buffer("mask", torch.full((2, 2), float("-inf")))
    check_finite(module)


@settings(max_examples=60, derandomize=True, deadline=None)
@given(
    position=st.integers(0, 10_000),
    value=st.integers(0, 255),
    suffix=st.sampled_from(["pth", "safetensors"]),
)
def test_a_flipped_byte_gives_weights_or_a_sentence(
    position: int, value: int, suffix: str
) -> None:
    content = bytearray(save(STATE) if suffix == "safetensors" else whole_state())
    content[position % len(content)] = value
    Path(f"flipped.{suffix}").write_bytes(content)
    try:
        load_weights(nn.Linear(3, 2), f"flipped.{suffix}")
    except ModelError as error:
        assert f"flipped.{suffix}" in error.message


def test_no_byte_of_an_archives_directory_is_trusted() -> None:
    whole = whole_state()
    for position in range(whole.index(b"PK\x01\x02"), len(whole)):
        Path("flipped.pth").write_bytes(whole[:position] + b"\xe4" + whole[position + 1 :])
        try:
            load_weights(nn.Linear(3, 2), "flipped.pth")
        except ModelError as error:
            assert "flipped.pth" in error.message


def whole_state() -> bytes:
    torch.save(STATE, "state.pth")
    return Path("state.pth").read_bytes()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda weight: weight.long(), "weight has the dtype int64 (the model has float32)"),
        (
            lambda weight: torch.complex(weight, weight),
            "weight has the dtype complex64 (the model has float32)",
        ),
        (lambda weight: weight.to_sparse(), "weight is sparse"),
    ],
)
def test_values_of_another_kind_are_refused(
    change: Callable[[Tensor], Tensor], said: str
) -> None:
    torch.save(STATE | {"weight": change(STATE["weight"])}, "net.pth")
    with pytest.raises(ModelError, match="do not fit the model") as caught:
        load_weights(nn.Linear(3, 2), "net.pth")
    assert f"1 of another kind: {said}" in (caught.value.help or "")


def test_floats_of_another_width_are_taken() -> None:
    torch.save({name: value.double() for name, value in STATE.items()}, "net.pth")
    net = nn.Linear(3, 2)
    load_weights(net, "net.pth")
    assert torch.equal(net.weight, STATE["weight"])
