"""`--model` and what the model's file offers: every form, and a sentence for everything that
can go wrong.
"""

from __future__ import annotations

import os
import shutil
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch
from torch import nn

from quantizer.errors import DataError, ModelError
from quantizer.installation import pip_line
from quantizer.sources.models import load_evaluate, load_model

NET = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, width=3):
        super().__init__()
        self.fc = nn.Linear(width, 2)
    def forward(self, x):
        return self.fc(x)

def model():
    return Net()

def wide():
    return Net(width=5)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory of the user's with `net.py` in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(NET)
    return tmp_path


def refusal(spec: str, **options: object) -> ModelError:
    """The error of loading `spec`."""
    with pytest.raises(ModelError) as caught:
        load_model(spec, **options)  # type: ignore[arg-type]
    assert caught.value.exit_code == 3
    return caught.value


def test_a_file_gives_its_conventional_names(folder: Path) -> None:
    (folder / "net.py").write_text(
        NET
        + dedent("""
        def calibration_data():
            return [torch.zeros(4, 3)]
        def evaluate(model, data):
            return {"batches": len(data), "mean": torch.tensor(0.5)}
    """)
    )
    loaded = load_model("net.py")
    assert (loaded.name, loaded.module.training) == ("Net", False)
    assert loaded.calibration_data and loaded.evaluation_data and loaded.evaluate
    assert torch.equal(loaded.evaluation_data()[0], loaded.calibration_data()[0])
    assert loaded.evaluate(loaded.module, [1, 2]) == {"batches": 2.0, "mean": 0.5}


def test_evaluation_data_may_differ_from_calibration_data(folder: Path) -> None:
    (folder / "net.py").write_text(
        NET + "def calibration_data(): return [1]\nevaluation_data = [2]\n"
    )
    loaded = load_model("net.py")
    assert loaded.calibration_data and loaded.evaluation_data
    assert (loaded.calibration_data(), loaded.evaluation_data()) == ([1], [2])


def test_what_a_file_does_not_define_is_none(folder: Path) -> None:
    loaded = load_model("net.py")
    assert (loaded.calibration_data, loaded.evaluation_data, loaded.evaluate) == (
        None,
        None,
        None,
    )


def test_a_factory_a_class_or_a_module_can_be_named(folder: Path) -> None:
    (folder / "net.py").write_text(NET + "net = Net(width=7)\n")
    widths = [
        load_model(f"net.py:{name}").module.fc.in_features for name in ("wide", "Net", "net")
    ]
    assert widths == [5, 3, 7]


def test_a_dotted_module_is_found_in_the_working_directory(folder: Path) -> None:
    (folder / "user_package").mkdir()
    (folder / "user_package" / "__init__.py").touch()
    (folder / "user_package" / "nets.py").write_text(NET)
    assert load_model("user_package.nets:wide").module.fc.in_features == 5


def test_files_beside_the_model_can_be_imported_also_late(folder: Path) -> None:
    (folder / "net.py").write_text(
        NET + "def calibration_data():\n    import batches\n    return batches.ALL\n"
    )
    (folder / "batches.py").write_text("ALL = [1, 2, 3]\n")
    loaded = load_model("net.py")
    assert loaded.calibration_data and loaded.calibration_data() == [1, 2, 3]


def test_two_models_may_each_have_a_file_of_the_same_name_beside_them(folder: Path) -> None:
    for width in (4, 6):
        other = folder / str(width)
        other.mkdir()
        (other / "width.py").write_text(f"WIDTH = {width}\n")
        (other / "net.py").write_text(
            "from width import WIDTH\n" + NET + "def sized(): return Net(WIDTH)\n"
        )
    assert [load_model(f"{width}/net.py:sized").module.fc.in_features for width in (4, 6)] == [
        4,
        6,
    ]


def test_importing_leaves_no_trace(folder: Path) -> None:
    before = list(sys.path), sys.dont_write_bytecode
    load_model("net.py")
    refusal("net.py:nothing")
    assert (list(sys.path), sys.dont_write_bytecode) == before
    assert sorted(os.listdir(folder)) == ["net.py"]


@pytest.mark.parametrize(
    ("spec", "sentence", "remedy"),
    [
        ("missing.py", "there is no file missing.py", "FILE.py:factory"),
        ("net", "'net' is neither a file, a folder nor module:factory", "did you mean net.py?"),
        (
            "nets",
            "'nets' is neither a file, a folder nor module:factory",
            "package.module:factory",
        ),
        ("net.py:wied", "net.py has no 'wied'", "did you mean wide?"),
        (
            "no_such_package.nets:build",
            "there is no module 'no_such_package'",
            "run from the folder",
        ),
        ("a b/c:build", "'a b/c' is neither a file", "give FILE.py"),
        ("net.py:torch", "torch of net.py is a module, not a function", ""),
        ("net.onnx", "an ONNX graph is not a PyTorch model", "torch.nn.Module"),
        ("net.pth", "net.pth holds weights, not a model", "--model FILE.py --weights net.pth"),
        (".", "is a folder without a config.json", "Hugging Face folder"),
        ("missing.pt2", "there is no file missing.pt2", ""),
        ("net.ipynb", "net.ipynb is a notebook", "jupyter nbconvert --to script"),
        ("table.csv", "table.csv is not a Python file", "FILE.py:factory"),
        ("", "is a folder without a config.json", ""),
        ("net.py:", "net.py has no ''", ""),
        ("__import__('os').mkdir('x'):f", "is neither a file nor a module", ""),
        ("..net:f", "is neither a file nor a module", ""),
    ],
)
def test_a_spec_that_leads_nowhere(folder: Path, spec: str, sentence: str, remedy: str) -> None:
    (folder / "table.csv").write_text("1,2")
    error = refusal(spec)
    assert sentence in error.message
    assert remedy in (error.help or "")


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("def model(): return 3", "model of net.py returned an int, not a torch.nn.Module"),
        ("def model(width, depth=2): ...", "model of net.py needs arguments: width"),
        ("model = 7", "model of net.py is an int, not a function"),
        (
            "import no_such_thing",
            "net.py raised ModuleNotFoundError: No module named 'no_such_thing'",
        ),
        ("def model(:", "net.py raised SyntaxError"),
        ("import sys; sys.exit(0)", "net.py raised SystemExit: 0"),
        (
            "evaluate = 3\nfrom torch.nn import Identity as model",
            "evaluate of net.py is an int",
        ),
    ],
)
def test_a_file_that_is_wrong(folder: Path, source: str, sentence: str) -> None:
    (folder / "net.py").write_text(source)
    assert sentence in refusal("net.py").message


def test_what_the_users_code_raises_is_told_in_the_users_own_lines(folder: Path) -> None:
    (folder / "net.py").write_text(
        "import json\ndef build():\n    return json.loads('{')\ndef model():\n    return "
        "build()\n"
    )
    error = refusal("net.py")
    assert error.message.startswith("model() of net.py raised JSONDecodeError: ")
    assert error.help is not None
    assert [line.partition(" in ")[2] for line in error.help.splitlines()] == [
        "model: return build()",
        "build: return json.loads('{')",
    ]


def test_data_and_metrics_that_fail_say_whose_fault_it_is(folder: Path) -> None:
    (folder / "net.py").write_text(
        NET + "def calibration_data(): raise OSError('disk on fire')\ndef evaluate(model, "
        "data): return 0.5\n"
    )
    loaded = load_model("net.py")
    assert loaded.calibration_data and loaded.evaluate
    with pytest.raises(
        DataError, match=r"calibration_data\(\) of net.py raised OSError: disk on fire"
    ):
        loaded.calibration_data()
    with pytest.raises(
        DataError, match=r"evaluate of net.py returned 0.5, not a dict of numbers"
    ):
        loaded.evaluate(loaded.module, [])


def test_evaluate_may_come_from_another_file(folder: Path) -> None:
    (folder / "metrics.py").write_text(
        "def evaluate(model, data): return {'a': 1}\ndef other(model, data): return {'b': 2}\n"
    )
    assert load_evaluate("metrics.py")(nn.Identity(), []) == {"a": 1.0}
    assert load_evaluate("metrics.py:other")(nn.Identity(), []) == {"b": 2.0}


def test_an_exported_program_is_opened_only_with_trust(folder: Path) -> None:
    program = torch.export.export(nn.Linear(3, 2), (torch.zeros(2, 3),))
    torch.export.save(program, "net.pt2")
    assert "can run code" in refusal("net.pt2").message
    loaded = load_model("net.pt2", trust=True)
    assert loaded.module(torch.zeros(2, 3)).shape == (2, 2)
    (folder / "net.pt2").write_bytes(b"junk")
    assert "cannot be read as an exported program" in refusal("net.pt2", trust=True).message


class Evil:
    """Unpickling this makes a folder called `pwned`."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.mkdir, ("pwned",)


def test_a_program_that_would_run_code_does_not_run(folder: Path) -> None:
    """torch.export.load unpickles the inputs that a program was exported with, whatever they
    are.
    """
    torch.export.save(torch.export.export(nn.Linear(3, 2), (torch.zeros(2, 3),)), "good.pt2")
    torch.save(Evil(), "evil.pt")
    with zipfile.ZipFile("good.pt2") as good, zipfile.ZipFile("evil.pt2", "w") as evil:
        pickled = [name for name in good.namelist() if name.endswith(".pt")]
        assert pickled
        for name in good.namelist():
            evil.writestr(
                name, Path("evil.pt").read_bytes() if name in pickled else good.read(name)
            )
    assert "can run code" in refusal("evil.pt2").message
    assert "holds weights" in refusal(shutil.copy("evil.pt2", "evil.pth")).message
    assert "is not a weights file" in refusal("net.py", weights="evil.pt2").message
    assert "cannot be read" in refusal("net.py", weights="evil.pth").message
    assert not Path("pwned").exists()


def test_a_hugging_face_folder_needs_transformers(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "llama").mkdir()
    (folder / "llama" / "config.json").write_text('{"architectures": ["Tiny"]}')
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    error = refusal("llama")
    assert (error.message, error.help) == (
        "llama is a Hugging Face model, and transformers is missing",
        pip_line("llm"),
    )
