"""What `--help` shows on a terminal of 80 columns, and what shells complete."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from dataclasses import fields

import click
import pytest
from support.without_torch import BLOCKED

from quantizer.cli.arguments.options import RUN, TARGET_OPTIONS, Options, word_of
from quantizer.cli.main import cli, run_command, subcommands

_OF_TEST = ("eval_data", "evaluate", "skip_len", "report_dir", "exact", "gate")
HELPS = [[], *([name] for name in subcommands())]
FROM_INIT = ("net.json", "my_model.py")


def help_of(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> str:
    monkeypatch.setenv("COLUMNS", "80")
    assert run_command([*arguments, "--help"]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "first", "left_out"),
    [
        ("calib", ["config_file", "to", "help"], {*_OF_TEST}),
        ("test", ["config_file", "to", "help"], {"dynamic", "memory", "resume"}),
    ],
)
def test_options_are_in_groups(
    command: str,
    first: list[str],
    left_out: set[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = help_of([command], monkeypatch, capsys)
    sections = dict(re.findall(r"^(\w+):\n((?:  .*\n)+)", text, re.MULTILINE))
    assert list(sections) == ["Options", "Model", "Data", "Algorithm", "Output", "Debugging"]
    of_group = {
        title: re.findall(r"^  (?:-\w, )?--(\w+)", rows, re.MULTILINE)
        for title, rows in sections.items()
    }
    assert of_group["Options"] == first
    for title in ("Model", "Data", "Algorithm", "Debugging"):
        declared = [
            word_of(field.name)
            for field in fields(Options)
            if field.name in RUN
            and field.name != TARGET_OPTIONS
            and field.name not in left_out
            and field.metadata["settings"]["group"] == title
        ]
        assert of_group[title] == declared
    columns = {
        len(row[1])
        for row in re.finditer(r"^(  (?:-\w, )?-?-?\w+(?: [A-Z]+)?  +)\S", text, re.MULTILINE)
    }
    assert columns == {24}


@pytest.mark.parametrize("command", ["calib", "test", "run"])
@pytest.mark.parametrize(
    ("name", "shown", "hidden"),
    [
        ("", "", "--onnx_profile"),
        ("trt", "--onnx_profile", "--gguf_template"),
        ("q4_k_m", "--gguf_template", "--onnx_profile"),
        ("unknown", "", "--onnx_profile"),
    ],
)
def test_a_help_shows_the_options_of_the_named_destination(
    command: str, name: str, shown: str, hidden: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in ([f"--to={name}", "--help"], ["--help", "--to", name]):
        assert run_command([command, *words]) == 0
        text = capsys.readouterr().out
        assert shown in text
        assert hidden not in text
        assert ("--to NAME --help` shows" in text) == (not shown)


@pytest.mark.parametrize("command", HELPS, ids=lambda command: "".join(command) or "quantizer")
def test_examples_are_commands_for_files_that_a_user_of_the_wheel_has(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = help_of(command, monkeypatch, capsys)
    assert max(map(len, text.splitlines())) <= 80
    examples = [
        shlex.split(line)[1:] for line in re.findall(r"^  (quantizer .*)$", text, re.MULTILINE)
    ]
    assert examples
    for example in examples:
        words = example[: example.index(">")] if ">" in example else example
        context = cli.make_context("quantizer", list(words))
        name = words[0] if words[0] in subcommands() else None
        if name is not None:
            inner = cli.get_command(context, name)
            assert inner is not None
            inner.make_context(name, words[1:], parent=context)
        read = [
            word
            for word, option in zip(words[1:], words, strict=False)
            if option not in ("-o", "--output")
        ]
        assert {word for word in read if "." in word} <= {
            *FROM_INIT,
            "other.json",
            "layer1.conv1",
            "layer1.*",
        }


@pytest.mark.parametrize("command", HELPS, ids=lambda command: "".join(command) or "quantizer")
def test_a_variable_is_called_as_its_option(command: list[str]) -> None:
    found = cli.get_command(click.Context(cli), command[0]) if command else cli
    assert found is not None
    options = [
        one for one in found.params if isinstance(one, click.Option) and not one.secondary_opts
    ]
    assert [one.opts[0].removeprefix("--") for one in options] == [one.name for one in options]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("quantizer p", "plain,plan"),
        ("quantizer --quant_mode c", "plain,calib"),
        ("quantizer --config_file ", "file,"),
        ("quantizer validate --form", "plain,--format"),
    ],
)
def test_shells_complete_without_torch(words: str, expected: str) -> None:
    environment = {
        "_QUANTIZER_COMPLETE": "bash_complete",
        "COMP_WORDS": words,
        "COMP_CWORD": str(words.count(" ")),
    }
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout.split(), done.stderr) == ([expected], "")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "analyze --metric sqnr_db>=2 --tensors --config net.json --model my_model.py",
            "--tensors has no effect here",
        ),
        (
            "analyze --metric sqnr_db>=2 --choices 2 --config net.json --model my_model.py",
            "--choices has no effect here",
        ),
        (
            "analyze --evaluate my_model.py --config net.json --model my_model.py",
            "--evaluate has no effect here",
        ),
        ("diff net.json net.json --top 3", "--top has no effect here"),
        ("diff . . --model my_model.py", "--model has no effect here"),
        ("report . --plots_as png", "--plots_as has no effect here"),
        ("retune . --method maxmin --dry_run --output_dir x", "--dry_run writes no results"),
    ],
)
def test_an_option_that_would_change_nothing_is_refused(
    words: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(shlex.split(words)) == 2
    assert said in capsys.readouterr().err
