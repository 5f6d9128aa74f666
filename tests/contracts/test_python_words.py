"""What Python users read names arguments of Python, not options of the shell."""

import ast
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.ledger import MODULES, PACKAGE, source
from support.shell_words import options_in

import quantizer
from quantizer.api.comparison import Report
from quantizer.api.display import ARGUMENTS, in_python
from quantizer.api.result import Result
from quantizer.config.diagnostics import ConfigError, Diagnostic
from quantizer.errors import UsageError
from quantizer.export.destinations import in_words_of_checkpoint, in_words_of_run
from quantizer.export.targets import CHOICES
from quantizer.option_words import Sentence

FUNCTIONS: list[Callable[..., Any]] = [quantizer.calibrate, quantizer.load, quantizer.quantize]
CLASSES = [quantizer.Config, quantizer.ModelQuantizer, Report, Result]
OF_THE_SHELL = {
    "__main__.py",
    # Commands and options of the shell in files and tables that the shell writes, as are all
    # plugin.py
    "algorithms/finetuning/network.py",
    "api/display.py",
    "config/forms/level_edits.py",
    "config/run_config.py",
    "commands/inspection/doctor.py",
    "commands/searching/steps.py",
    "export/targets.py",
    "option_words.py",
}


def texts() -> Iterator[str]:
    """Yield the texts of all rooms that Python reaches; 7 stands for what is filled in."""
    for path in MODULES:
        place = path.relative_to(PACKAGE)
        if place.parts[0] in ("cli", "commands", "report") or place.as_posix() in OF_THE_SHELL:
            continue
        if path.name == "plugin.py":
            continue
        nodes = source(path).nodes
        # Docstrings are not shown, and parts of a text are shown with it
        parts = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        for node in nodes:
            if isinstance(node, ast.JoinedStr):
                parts.update(map(id, node.values))
                values = [getattr(part, "value", "") for part in node.values]
                yield "".join(value if isinstance(value, str) else "7" for value in values)
        for node in nodes:
            is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
            if is_text and id(node) not in parts:
                yield node.value


def test_every_text_marks_its_options() -> None:
    with_options = [text for text in texts() if options_in(text)]
    assert len(with_options) > 130
    unmarked = [text for text in with_options if options_in(in_python(text))]
    assert unmarked == []
    assert [text for text in with_options if "<--" in Sentence(text)] == []


def test_options_become_arguments_that_exist() -> None:
    names = set(CHOICES)
    for function in (*FUNCTIONS, Result.test, Result.export):
        names.update(inspect.signature(function).parameters)
    assert set(ARGUMENTS.values()) <= names


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_functions_reword_their_errors(function: Callable[..., Any]) -> None:
    assert inspect.unwrap(function) is not function


@pytest.mark.parametrize("owner", CLASSES, ids=lambda owner: owner.__name__)
def test_methods_reword_their_errors(owner: type) -> None:
    for name, method in inspect.getmembers(owner, callable):
        if not name.startswith("_") and "Raises:" in str(method.__doc__):
            assert inspect.unwrap(method) is not method, name


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("leave <--dynamic> out", "leave `dynamic` out"),
        ("run <--quant_mode calib> first", "run `calibrate` and `Result.save` first"),
        ("<--deploy gguf>: no", 'target="gguf": no'),
        ("use <--deploy onnx, pt2 or gptq>", 'use target="onnx", "pt2" or "gptq"'),
        ("use <--onnx_weights auto>, or none", 'use onnx_weights="auto", or none'),
        ("run without <--resume>", "run without resume=True"),
        ("choose another <--output_dir>", "choose another `folder`"),
        ("write <--max_mb 1.5>", "write max_mb=1.5"),
        ("<--executorch_batch 8>, or less", 'executorch_batch="8", or less'),
        ("give <--seq_len 8>", "give the shell's `seq_len` 8"),
        ("give <--data><shell:, or add calibration_data() to the file>", "give `data`"),
        ("`quantizer init --model M` does", "`quantizer init --model M` does"),
    ],
)
def test_examples(text: str, expected: str) -> None:
    assert in_python(text) == expected


@pytest.mark.parametrize(
    ("help_text", "in_run", "in_python_run"),
    [
        (
            "use <--deploy safetensors, onnx or pt2>",
            "use --to safetensors, npu or pt2",
            'use to="safetensors", "npu" or "pt2"',
        ),
        ("use <--deploy onnx --onnx_profile npu>", "use --to npu", 'use to="npu"'),
    ],
)
def test_a_run_is_told_of_what_runs_write(
    help_text: str, in_run: str, in_python_run: str
) -> None:
    with pytest.raises(UsageError) as caught, in_words_of_run("onnx", "npu"):
        raise UsageError("no", help=help_text)
    assert (caught.value.help, in_python(caught.value.help)) == (in_run, in_python_run)


def test_a_model_in_place_has_no_targets() -> None:
    with pytest.raises(UsageError) as caught, in_words_of_checkpoint():
        raise UsageError("<--deploy compressed-tensors>: no", help="use <--deploy pt2>")
    assert caught.value.message == "compressed-tensors: no"
    remedy = 'use `calibrate` and `Result.export` with target="pt2"'
    assert in_python(caught.value.help) == remedy


def test_findings_on_a_config_have_the_words_of_the_run() -> None:
    findings = [
        Diagnostic(
            "QZ700", "<--deploy onnx --onnx_profile npu>: no", help="use <--deploy pt2>"
        ),
        Diagnostic("QZ701", "a second one"),
    ]
    with pytest.raises(ConfigError) as caught, in_words_of_run("onnx", "npu"):
        raise ConfigError(findings)
    lines = ["--to npu: no", "help: use --to pt2", "a second one"]
    assert str(caught.value).splitlines() == lines
    assert caught.value.diagnostics[0].message == lines[0]
