"""Tables of layers where they are printed: on a terminal, in a pipe, and cut as `--names`,
`--top`, `--filter` say.
"""

from __future__ import annotations

import csv
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from quantizer.cli.main import run_command

Capture = pytest.CaptureFixture[str]
DEEP = (
    "return torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(3, 3), "
    "torch.nn.ReLU()) for _ in range(9)))"
)
LAST = "Sequential::Sequential/Sequential[8]/Linear[0]/linear"
RELU = "Sequential::Sequential/Sequential[8]/ReLU[1]/relu"
INT8 = {
    "global_quant_config": {"weight": {"dtype": "int8"}, "input_tensors": {"dtype": "int8"}}
}


@pytest.fixture
def deep(toy: Callable[..., str], tmp_path: Path) -> list[str]:
    """Nine linear layers, each with a ReLU, and a config."""
    config = tmp_path / "q.json"
    config.write_text(json.dumps(INT8))
    return ["--model", toy(model=DEEP), "--config_file", str(config)]


def on_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on standard output is a terminal of 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)


def lines_of(capsys: Capture) -> list[str]:
    """What was printed, without colours."""
    return re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out).splitlines()


def rows_of(lines: list[str], *, paths: bool = True) -> list[list[str]]:
    """The rows about layers."""
    known = r"(\d\.[01]|input_0) " if paths else r"Sequential::\S+ "
    return [line.split() for line in lines if re.match(known, line)]


@pytest.mark.parametrize("is_terminal", [True, False])
@pytest.mark.parametrize("command", ["plan", "inspect"])
def test_tables_show_few_rows_by_module_path(
    command: str,
    is_terminal: bool,
    deep: list[str],
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if is_terminal:
        on_terminal(monkeypatch)
    else:
        monkeypatch.delenv("COLUMNS", raising=False)
    assert run_command([command, *deep]) == 0
    lines = lines_of(capsys)
    assert max(map(len, lines)) <= (80 if is_terminal else 100)
    assert len(rows_of(lines)) == {"plan": 15, "inspect": 9}[command], (
        "layers in float say little"
    )
    assert re.search(
        r"… \d+ more \w+, .* in float; --top all shows them, --filter GLOB those",
        " ".join(" ".join(lines).split()),
    )
    assert rows_of(lines, paths=False) == []


@pytest.mark.parametrize("command", ["plan", "inspect"])
def test_a_pipe_gets_all_rows_under_exact_names_when_asked(
    command: str, deep: list[str], capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert run_command([command, *deep, "--names", "exact", "--top", "all"]) == 0
    piped = lines_of(capsys)
    names = {row[0] for row in rows_of(piped, paths=False)}
    assert len(names) == {"plan": 18, "inspect": 19}[command]
    assert not [line for line in piped if "--top" in line]


def test_names_and_top_are_as_asked_for_anywhere(
    deep: list[str], capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_terminal(monkeypatch)
    monkeypatch.setenv("COLUMNS", "120")
    assert run_command(["inspect", *deep, "--names", "exact", "--top", "all"]) == 0
    rows = rows_of(lines_of(capsys), paths=False)
    assert [len(rows), *rows[-2]] == [19, LAST, "linear", "bx3", "weights,", "input"]
    monkeypatch.setattr(sys.stdout, "isatty", lambda: False)
    assert run_command(["inspect", *deep, "--names", "path", "--top", "2"]) == 0
    assert [row[0] for row in rows_of(lines_of(capsys))] == ["0.0", "1.0"]


@pytest.mark.parametrize("top", ["0", "-1", "some"])
def test_top_is_a_number_or_all(top: str, deep: list[str], capsys: Capture) -> None:
    assert run_command(["inspect", *deep, "--top", top]) == 2
    assert "--top" in capsys.readouterr().err


@pytest.mark.parametrize(
    "layers",
    ["8", "8.*", "*Sequential[8]*", "re:8\\..*", LAST.replace("Sequential[8]", "*[8]")],
)
def test_a_filter_shows_all_rows_of_what_it_finds(
    layers: str, deep: list[str], capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_terminal(monkeypatch)
    assert run_command(["inspect", *deep, "--filter", layers]) == 0
    found = [row[0] for row in rows_of(lines_of(capsys))]
    assert found == (["8.0"] if "Linear" in layers else ["8.0", "8.1"])


def test_a_filter_that_finds_nothing_names_the_closest(
    deep: list[str], capsys: Capture
) -> None:
    assert run_command(["plan", *deep, "--filter", "8.00"]) == 2
    error = capsys.readouterr().err
    assert "--filter '8.00' matches no layer" in error
    assert "closest: 8.0" in error


def test_files_and_json_are_complete_and_exact(
    deep: list[str], capsys: Capture, tmp_path: Path
) -> None:
    cut = ["--names", "path", "--top", "1", "--filter", "8"]
    assert run_command(["plan", *deep, *cut, "--json", "-o", str(tmp_path / "plan.json")]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((tmp_path / "plan.json").read_text())
    assert {row["name"] for row in printed["layers"]} > {LAST, RELU}
    assert len(printed["layers"]) == 19


def test_test_mode_shows_the_worst_tensors_and_then_the_metrics(
    deep: list[str], capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "out"
    assert (
        run_command(
            [
                "--quant_mode",
                "calib",
                *deep,
                "--output_dir",
                str(folder),
                "--inspect",
                "--top",
                "1",
            ]
        )
        == 0
    )
    assert "more layers" in capsys.readouterr().out
    test = ["--quant_mode", "test", "--output_dir", str(folder), *deep[:2]]
    on_terminal(monkeypatch)
    assert run_command([*test, "--top", "3"]) == 0
    lines = lines_of(capsys)
    rows = rows_of(lines)
    assert len(rows) == 3
    decibels = [float(row[-2]) for row in rows if row[1] == "input"]
    assert decibels == sorted(decibels)
    last = next(index for index, line in enumerate(lines) if line.startswith("peak memory"))
    assert lines[last + 1].startswith("NOT JUDGED")
    assert [line.split()[0] for line in lines[last - 4 : last + 1]] == [
        "sqnr_db",
        "sqnr_db_worst",
        "cosine",
        "top1_agreement",
        "peak",
    ]
    (note,) = [line for line in lines if line.startswith("… ")]
    assert note == (
        "… 15 more tensors in layers.csv, 6 of them without loss; --top all shows them"
    )
    with (folder / "layers.csv").open() as file:
        rows = [*csv.DictReader(file)]
    assert len(rows) == 18
    assert {row["layer"] for row in rows} > {LAST}


def test_inspect_without_a_config_shows_the_network_as_it_is(
    toy: Callable[..., str], capsys: Capture, tmp_path: Path
) -> None:
    model = toy(
        data="return [torch.ones(2, 3, 8, 8)]",
        model="return torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), "
        "torch.nn.Conv2d(8, 4, 3))",
    )
    for more in ([], ["--algorithms"]):
        assert run_command(["inspect", "--model", model, *more]) == 0
        shown = "".join(capsys.readouterr())
        assert "equalized" not in shown
        assert "--config_file" not in shown
    assert run_command(["inspect", "--model", model, "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["changes"] == []
    assert [sorted(row.get("tensors", ())) for row in content["layers"]][1] == [
        "bias",
        "weights",
    ]
    assert run_command(["plan", "--model", model]) == 0
    assert "pairs of layers equalized: 1" in capsys.readouterr().err, (
        "as the built-in default has it"
    )


def test_the_built_in_default_is_named_where_it_holds(
    toy: Callable[..., str], deep: list[str], capsys: Capture, tmp_path: Path
) -> None:
    run = ["--quant_mode", "calib", "--output_dir", str(tmp_path / "out")]
    said = (
        "there is no --config_file: the built-in default for the DPU is used; `quantizer init --list` "
        "shows others\n"
    )
    assert run_command([*run, "--model", toy()]) == 0
    assert capsys.readouterr().err.count(said) == 1
    assert run_command([*run, "--model", toy(), "--quiet"]) == 0
    assert run_command([*run, *deep, "--overwrite"]) == 0
    assert said not in capsys.readouterr().err


@pytest.mark.parametrize("option", [["--top", "3"], ["--filter", "0"], ["--names", "path"]])
def test_the_structure_is_no_table_of_layers(
    option: list[str], deep: list[str], capsys: Capture
) -> None:
    assert run_command(["inspect", *deep, "--algorithms", *option]) == 2
    assert f"{option[0]} has no effect with --algorithms" in capsys.readouterr().err
