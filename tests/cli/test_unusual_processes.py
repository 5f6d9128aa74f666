"""What the user's code does to the process, and data in unusual tensors: a sentence or right
results, never an internal error after the work is done.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.runs import calibrate, check

import quantizer

Toy = Callable[..., str]
Capture = pytest.CaptureFixture[str]
X = "x = torch.linspace(-1, 1, 12, device='cpu').reshape(4, 3); yield x"


@pytest.mark.parametrize(
    "same",
    [
        "torch._neg_view(-x)",
        "torch.complex(x, -x).conj().imag",
        "torch.nn.Parameter(x)",
        "torch.set_default_device('meta'); yield -(-x)",
        "torch.set_default_device('cuda'); yield -(-x)",
    ],
)
def test_the_results_are_those_of_plain_tensors(
    same: str, toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The model's file has the data too, and the graph says which code was traced
    monkeypatch.setattr("quantizer.results.graph_file.model_code", lambda *call: None)
    assert calibrate(tmp_path / "plain", model=toy(f"{X}; yield x")) == 0
    word = "" if "yield" in same else "yield "
    model = toy(f"{X}; {word}{same}")
    assert calibrate(tmp_path / "out", model=model) == 0
    assert check(tmp_path / "out", model=model) == 0
    assert torch.get_default_device().type == "cpu"
    for name in ("quant_info.json", "statistics.safetensors"):
        first, second = (tmp_path / folder / name for folder in ("plain", "out"))
        assert first.read_bytes() == second.read_bytes(), name


def test_negated_weights_are_calibrated(toy: Toy, tmp_path: Path) -> None:
    model = toy(
        model="m = torch.nn.Linear(3, 2); p = torch._neg_view(m.weight.detach()); "
        "m.weight = torch.nn.Parameter(p); return m"
    )
    assert calibrate(tmp_path / "out", model=model) == 0
    assert check(tmp_path / "out", model=model) == 0


def test_python_keeps_the_default_device() -> None:
    torch.set_default_device("meta")
    try:
        x = torch.ones(4, 3, device="cpu")
        quantizer.calibrate(torch.nn.Linear(3, 2, device="cpu"), None, [x, x])
        assert torch.get_default_device().type == "meta"
    finally:
        torch.set_default_device(None)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("data", "code", "said"),
    [
        (
            "from torch.masked import masked_tensor; yield masked_tensor(x, x > 0)",
            4,
            "args[0] is a MaskedTensor",
        ),
        ("yield torch._efficientzerotensor((4, 3))", 4, "args[0] has no values"),
        ("y = x.clone(); y.untyped_storage().resize_(0); yield y", 4, "args[0] has no values"),
        (
            "import os, signal; signal.signal(signal.SIGALRM, lambda *_: {}['slow']); "
            "signal.setitimer(signal.ITIMER_REAL, 0.001); yield x",
            3,
            "raised KeyError: 'slow'",
        ),
        (
            "import pathlib, shutil; folder = pathlib.Path(FOLDER); shutil.rmtree(folder); "
            "folder.write_text('mine'); yield x",
            5,
            "Not a directory",
        ),
        (
            "import os; [os.close(int(n)) for n in os.listdir('/proc/self/fd') if int(n) > 2 "
            "and os.readlink('/proc/self/fd/' + n).endswith('/lock')]; yield x",
            5,
            "Bad file descriptor",
        ),
    ],
)
def test_what_breaks_a_run_is_a_sentence(
    data: str, code: int, said: str, toy: Toy, tmp_path: Path, capsys: Capture
) -> None:
    folder = tmp_path / "out"
    before = signal.getsignal(signal.SIGALRM)
    data = data.replace("FOLDER", repr(str(folder)))
    try:
        assert calibrate(folder, model=toy(f"{X}; {data}")) in (code, 4)
    finally:
        signal.signal(signal.SIGALRM, before)
    printed = capsys.readouterr().err
    assert said in printed
    assert "internal error" not in printed
    assert not folder.is_file() or folder.read_text() == "mine"


def test_names_of_metrics_and_outputs_are_text_in_every_report(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    name = "<img src=x> [a](http://b.c) `d` @me | e\n::error::\x1b[2J\u202e\ud800"
    model = toy(
        f"{X}; yield x",
        "kind = type('Net', (torch.nn.Linear,), {'forward': lambda self, x: "
        f"{{{name!r}: torch.nn.Linear.forward(self, x)}}}}); return kind(3, 2)",
    )
    with Path(model).open("a") as file:
        file.write(f"def evaluate(model, data):\n    return {{{name!r}: 0.5}}\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    assert calibrate(tmp_path / "out", model=model) == 0
    assert check(tmp_path / "out", model=model) == 0
    printed = capsys.readouterr()
    files = [tmp_path / "summary.md", *(tmp_path / "out").glob("*.[jhpc][stys]*")]
    texts = {file.name: file.read_bytes().decode() for file in files}
    for place in ("summary.md", "report.json", "layers.csv", "out", "err"):
        text = texts.get(place) or getattr(printed, place, "")
        assert not [place for sign in ("\x1b", "\u202e", "\n::error::") if sign in text]
    [line] = [row for row in texts["summary.md"].splitlines() if "img" in row]
    shown = "&#60;img src=x> \\[a\\](http&#58;//b.c) \\`d\\` &#64;me \\| e\\\\n::error::"
    assert shown in line
    assert "<img src=x>" not in texts["report.html"]
    assert json.loads(texts["report.json"])["pairs"][name]["float"] == 0.5
