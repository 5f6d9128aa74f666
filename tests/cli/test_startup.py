"""The command line before any work: help, versions, exit codes, streams."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support import fresh_processes
from support.fresh_processes import QUANTIZER

import quantizer
from quantizer import __version__
from quantizer.cli import main as entry
from quantizer.cli.arguments.options import Options
from quantizer.cli.main import run_command, subcommands
from quantizer.config.diagnostics import ConfigError, Diagnostic, Place
from quantizer.errors import (
    DataError,
    GateError,
    ModelError,
    OutOfMemoryError,
    QuantizerError,
    ResultError,
    UsageError,
)
from quantizer.results.result_set import mark_result_folder

CASES = Path(__file__).parents[1] / "cases" / "configs"


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "quantizer", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **environment}, check=False
    )


def test_help_lists_every_command_and_exit_code() -> None:
    done = run("-h")
    assert done.returncode == 0
    assert all(name in done.stdout for name in subcommands())
    assert len(done.stdout.splitlines()) <= 40
    codes = run("help", "exit-codes").stdout
    assert all(f"{code} " in codes for code in (0, 1, 2, 6, 70, 130))
    assert "QUANTIZER_SEED=1" in run("help", "variables").stdout
    versions = run("--version").stdout.splitlines()
    assert versions == [f"quantizer, version {__version__}", f"torch {version('torch')}"]


@pytest.mark.parametrize(
    ("chosen", "told"),
    [
        ({}, "10000, None"),
        ({"GOMP_SPINCOUNT": "7"}, "7, None"),
        ({"OMP_WAIT_POLICY": "PASSIVE"}, "None, PASSIVE"),
    ],
)
def test_threads_wait_briefly_unless_the_user_has_chosen(
    chosen: dict[str, str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch reads the variables when it is imported, which is before the model is."""
    names = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    model = tmp_path / "model.py"
    lines = [
        f"first, second = map(os.environ.get, {names})",
        'raise OSError(f"{first}, {second}")',
    ]
    model.write_text("\n".join(["import os", *lines]), "utf-8")
    done = run("inspect", "--model", str(model), "--data", "random:1x4", **chosen)
    assert f"OSError: {told}" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "Usage"),
        (["vaildate"], "did you mean `quantizer validate`?"),
        (["calibrate"], "did you mean `quantizer calib`?"),
        (["--config_file", "x.json"], "write one before the options: `quantizer calib`"),
        (["calib", "--onnx"], "help: did you mean --to onnx?"),
        (["run", "m.py", "--llama-cpp"], "help: `quantizer run --help` lists all options"),
        (["run", "m.py", "--q4_k_m"], "help: did you mean --to q4_k_m?"),
        (
            ["test", "--to", "onx"],
            "--to: there is no destination 'onx'\nhelp: did you mean onnx?",
        ),
        (["float", "--to", "onnx"], "error: quantizer float has no option --to"),
        (["--quant_mode", "train"], "help: known are float, calib, test"),
        (["--quant_mode", "tset"], "help: did you mean test?"),
        (["--confg_file", "x.json"], "help: did you mean --config_file?"),
        (["plan", "--confg_file=x.json"], "error: quantizer plan has no option --confg_file"),
        (["validate", "-x", "net.json"], "error: quantizer validate has no option -x"),
        (["--quant_mode", "calib", "validate", "x.json"], "exclude each other"),
        (["--seed", "3", "plan"], "error: --seed is before the command plan"),
        (["--quant_mode", "calib", "--batch_size", "0"], "--batch_size: 0 is not in the range"),
        (["--quant_mode", "calib", "--seed", f"{1 << 64}"], "is not in the range 0<=x<="),
        (["--quant_mode", "calib", "--seed", "x"], "--seed: 'x' is not a whole number"),
        (
            ["--quant_mode", "calib", "--seed"],
            "error: --seed needs a value\nhelp: write --seed N",
        ),
        (["plan", "--model", "--data", "x.npy"], "error: --model needs a value"),
        (["validate", "--fix=yes", "x.json"], "error: --fix takes no value"),
        (
            ["validate"],
            "error: missing FILE...\nhelp: write quantizer validate [OPTIONS] FILE...",
        ),
        (["schema", "layer"], "error: NAME: 'layer' is not one of its values"),
        (["init", "net.json"], "unexpected extra argument (net.json)"),
        (["help", "retun"], "did you mean `quantizer help retune`?"),
        (["init", "-q", "--list", "-v"], "--quiet and --verbose exclude each other"),
    ],
)
def test_wrong_usage_is_exit_code_2(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Click's own errors have the form of all others."""
    assert run_command(arguments) == 2
    captured = capsys.readouterr()
    assert told in captured.err
    assert captured.out == ""
    if arguments:
        first, second = captured.err.splitlines()
        assert first.startswith("error: ")
        assert second.startswith("help: ")


@pytest.mark.parametrize("command", ["plan", "init", "calib", "schema"])
def test_help_of_a_command_is_that_of_its_option(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["help", command]) == 0
    text = capsys.readouterr().out
    assert run_command([command, "--help"]) == 0
    assert text == capsys.readouterr().out
    assert text.startswith(f"Usage: quantizer {command} ")


def test_help_alone_is_that_of_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["help"]) == 0
    text = capsys.readouterr().out
    assert run_command(["--help"]) == 0
    assert text == capsys.readouterr().out


def said(order: str, option: list[str], command: list[str], capsys: Any) -> Any:
    """What a command prints with an option before or after its name."""
    words = [*option, *command] if order == "before" else [*command, *option]
    assert run_command(words) in (0, 1)
    return capsys.readouterr()


@pytest.mark.parametrize("order", ["before", "after"])
def test_quiet_and_color_hold_before_and_after_a_command(
    order: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "net.json"
    init = ["init", "-o", str(path), "--overwrite"]
    assert "wrote" in said(order, [], init, capsys).err
    assert said(order, ["-q"], init, capsys).err == ""
    check = ["validate", str(path)]
    assert "valid" in said(order, [], check, capsys).out
    assert said(order, ["--quiet"], check, capsys).out == ""
    path.write_text("{}")
    assert "error QZ" in said(order, ["--quiet"], check, capsys).out, "errors are no notes"
    assert "\x1b[" not in said(order, [], check, capsys).out
    assert "\x1b[31m" in said(order, ["--color", "always"], check, capsys).out
    assert "\x1b[" not in said(order, ["--color", "never"], check, capsys).out


@pytest.mark.parametrize("order", ["before", "after"])
def test_verbose_prints_details_of_this_command_only(
    order: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "net.json"
    assert run_command(["init", "-o", str(path)]) == 0
    check = ["validate", str(path)]
    shown = said(order, ["-v"], check, capsys)
    assert f"debug: cli.terminal.screen: quantizer {__version__}, torch" in shown.err
    assert f"debug: config.load: {path} has the layered form: 0 findings" in shown.err
    assert "debug" not in said(order, [], check, capsys).err


def test_errors_are_colored_as_asked(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["--color", "always", "nonsense"]) == 2
    assert capsys.readouterr().err.startswith("\x1b[31m\x1b[1merror:")


def raised_by_quantizer(error: BaseException) -> None:
    """Raise an error as code of quantizer does: one of the user's code is not internal."""
    code = compile("raise error", quantizer.__file__, "exec")
    exec(code, {"error": error})


def runner(monkeypatch: pytest.MonkeyPatch, outcome: Any) -> list[Options]:
    """Put a stand-in for the run command in place: it notes its options, then returns or raises
    `outcome`.
    """
    seen: list[Options] = []

    def stand_in(options: Options) -> int:
        seen.append(options)
        if isinstance(outcome, BaseException):
            raised_by_quantizer(outcome)
        return int(outcome)

    module = SimpleNamespace(run_mode=stand_in)
    monkeypatch.setitem(sys.modules, "quantizer.cli.modes.run_mode", module)
    return seen


def test_options_reach_the_run_in_both_spellings(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = runner(monkeypatch, 0)
    monkeypatch.setenv("QUANTIZER_SEED", "7")
    assert (
        run_command(
            [
                "--quant-mode",
                "calib",
                "--config_file",
                "c.json",
                "--subset-len",
                "9",
                "--gate",
                "a>=1",
            ]
        )
        == 0
    )
    assert seen == [
        Options("calib", config_file="c.json", subset_len=9, gate=("a>=1",), seed=7)
    ]


def test_variables_are_no_options_that_were_typed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {
        "QUANT_MODE": "calib",
        "VERSION": "0.1.0",
        "VALIDATE_FORMAT": "json",
    }.items():
        monkeypatch.setenv(f"QUANTIZER_{name}", value)
    seen = runner(monkeypatch, 0)
    assert run_command([]) == 0
    assert [options.quant_mode for options in seen] == ["calib"]
    assert run_command(["validate", str(CASES / "invalid" / "qz101_method.json")]) == 1
    assert json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (GateError("no"), 1),
        (UsageError("no"), 2),
        (ModelError("no"), 3),
        (DataError("no"), 4),
        (ResultError("no"), 5),
        (OutOfMemoryError("no"), 6),
        (QuantizerError("no"), 70),
        (KeyboardInterrupt(), 130),
    ],
)
def test_every_error_has_its_exit_code(
    error: BaseException,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    runner(monkeypatch, error)
    assert run_command(["--quant_mode", "test"]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.strip().endswith("interrupted" if code == 130 else "error: no")


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:133] can't allocate memory: you tried 8"),
        OSError(12, "Cannot allocate memory"),
        # The parent of torch's own class
        RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    ],
)
def test_no_more_memory_is_exit_code_6(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where it was taken for a fault of the data on the way."""
    wrapped = DataError("batch 3: it cannot run on this input")
    wrapped.__cause__ = error
    for found in (error, wrapped):
        runner(monkeypatch, found)
        assert run_command(["--quant_mode", "calib"]) == 6
        told = capsys.readouterr().err.splitlines()
        assert [line.partition(":")[0] for line in told] == ["error", "help"]
        assert told[0].startswith("error: out of memory; this process used up to ")
        assert "--batch_size" in told[1]


@pytest.mark.skipif(
    not sys.platform.startswith("linux"),
    reason="others do not limit what a process may reserve",
)
def test_a_limit_of_memory_ends_in_a_sentence(tmp_path: Path) -> None:
    """`ulimit -v`, with data that take more."""
    model = "import torch\n\ndef model():\n    return torch.nn.Linear(8, 8)\n\n"
    data = "def calibration_data():\n    return [torch.zeros(1 << 29, 8)]\n"
    (tmp_path / "net.py").write_text(model + data)
    command = ["--quant_mode", "calib", "--model", "net.py"]
    done = fresh_processes.run(QUANTIZER, *command, cwd=tmp_path, memory=4 << 30)
    assert done.returncode == 6, done.stderr
    assert "error: out of memory" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_config_error_is_shown_with_its_excerpt(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = Diagnostic(
        "QZ402", "matches no layer", Place("net.json", 2, 3, 4), help="closest: conv1"
    )
    runner(monkeypatch, ConfigError([found], {"net.json": "{\n  conv\n}"}))
    assert run_command(["--quant_mode", "calib"]) == 2
    assert capsys.readouterr().err == (
        "net.json:2:3: error QZ402: matches no layer\n    2 |   conv\n      |   ^^^^\n   "
        "help: closest: conv1\n"
    )


def test_an_unexpected_error_is_one_sentence_and_a_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runner(monkeypatch, RuntimeError("boom"))
    arguments = ["--quant_mode", "calib", "--output_dir", str(tmp_path)]
    assert run_command(arguments) == 70
    assert not list(tmp_path.iterdir()), (
        "nothing is written to a folder that is not quantizer's"
    )
    capsys.readouterr()
    mark_result_folder(tmp_path)
    assert run_command(arguments) == 70
    told = capsys.readouterr().err
    assert "internal error: RuntimeError: boom" in told
    assert "Traceback" not in told
    assert "Traceback" in (tmp_path / "run.log").read_text("utf-8")
    assert run_command([*arguments, "--debug"]) == 70
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize("link", [Path.symlink_to, Path.hardlink_to])
def test_the_log_of_an_unexpected_error_is_not_written_through_a_link(
    link: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "precious").write_text("mine\n")
    (tmp_path / "out").mkdir()
    mark_result_folder(tmp_path / "out")
    link(tmp_path / "out" / "run.log", tmp_path / "precious")
    runner(monkeypatch, RuntimeError("boom"))
    assert run_command(["--quant_mode", "calib", "--output_dir", str(tmp_path / "out")]) == 70
    assert (tmp_path / "precious").read_text() == "mine\n"
    assert "internal error: RuntimeError: boom" in capsys.readouterr().err


def test_colour_only_where_it_is_wanted() -> None:
    wrong = str(CASES / "invalid" / "qz101_method.json")
    assert "\x1b" not in run("validate", wrong).stdout
    assert "\x1b" in run("--color", "always", "validate", wrong).stdout
    assert "\x1b" not in run("validate", wrong, NO_COLOR="1").stdout


def test_a_terminal_without_the_characters_gets_no_traceback(tmp_path: Path) -> None:
    path = tmp_path / "größe.json"
    path.write_text('{"größe": 1}', encoding="utf-8")
    done = run("validate", str(path), PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
def test_sigterm_is_exit_code_143(tmp_path: Path) -> None:
    program = (
        "import sys, time, types; from quantizer.cli import main\n"
        "def wait(options):\n    print('ready', flush=True)\n    time.sleep(60)\n"
        "sys.modules['quantizer.cli.modes.run_mode'] = types.SimpleNamespace(run_mode=wait)\n"
        "sys.argv = ['quantizer', '--quant_mode', 'calib']\nmain.main()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        started = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 143
        assert time.monotonic() - started < 30


def test_every_command_in_the_table_has_an_import_path() -> None:
    assert all(
        command.function.startswith("quantizer.") and command.help.endswith(".")
        for command in subcommands().values()
    )
    assert entry._RUN_MODE == "quantizer.cli.modes.run_mode:run_mode"


def test_a_traced_run_imports_nothing_of_modules_in_place() -> None:
    code = (
        "import sys, quantizer.cli.modes.calib_mode, quantizer.cli.modes.test_mode, quantizer.sources.models;"
        "print(*(name for name in sys.modules if name.startswith('quantizer.')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    imported = set(done.stdout.split())
    assert "quantizer.calibration.target" in imported
    assert not imported & {
        "quantizer.calibration.module_target",
        "quantizer.graph.modules",
        "quantizer.nn.inplace",
    }
