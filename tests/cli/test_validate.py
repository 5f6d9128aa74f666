"""`quantizer validate`: exit codes, several files, the formats, --strict and --fix."""

from __future__ import annotations

import json
from pathlib import Path

import click
import pytest

from quantizer.cli.main import run_command
from quantizer.cli.terminal.render import MAX_SHOWN, RENDERERS, render_text
from quantizer.config.diagnostics import Diagnostic, Place

ROOT = Path(__file__).parents[2]
CASES = ROOT / "tests" / "cases" / "configs"
VALID, WARNED = (
    str(CASES / "valid" / "dpu_maxmin.json"),
    str(CASES / "valid" / "warning_setting_for_the_dpu.json"),
)
WRONG, BROKEN = (
    str(CASES / "invalid" / "qz101_method.json"),
    str(CASES / "invalid" / "qz006_trailing_commas.json"),
)
CUT_OFF = str(CASES / "invalid" / "qz004_cut_off.json")


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ([VALID], 0),
        ([WARNED], 0),
        ([WARNED, "--strict"], 1),
        ([WRONG], 1),
        ([VALID, WRONG], 1),
        ([BROKEN, WRONG], 2),
        ([str(ROOT)], 2),
        (["no/such/file.json"], 2),
    ],
)
def test_exit_codes(
    arguments: list[str], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["validate", *arguments]) == code
    assert capsys.readouterr().err == ""


def test_text_ends_with_a_verdict_per_file(capsys: pytest.CaptureFixture[str]) -> None:
    run_command(["validate", VALID, WARNED, WRONG])
    verdicts = capsys.readouterr().out.splitlines()[-3:]
    assert verdicts == [f"{VALID}: valid", f"{WARNED}: valid, 2 warnings", f"{WRONG}: 1 error"]


def test_json_lists_every_finding(capsys: pytest.CaptureFixture[str]) -> None:
    run_command(["validate", "--format", "json", VALID, WRONG])
    [found] = json.loads(capsys.readouterr().out)
    assert (found["code"], found["severity"], found["line"], found["column"]) == (
        "QZ101",
        "error",
        11,
        15,
    )
    assert (found["file"], found["pointer"]) == (WRONG, "/overall_quantize_config/method")


def test_github_annotations_are_one_escaped_line_each(
    capsys: pytest.CaptureFixture[str],
) -> None:
    run_command(["validate", "--format", "github", WRONG, WARNED])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert lines[0].startswith(f"::error file={WRONG},line=11,col=15,title=QZ101::")
    assert "%0Ahelp: " in lines[0]
    assert lines[1].startswith("::warning ")


def test_sarif_has_results_with_regions(capsys: pytest.CaptureFixture[str]) -> None:
    conflict = str(CASES / "invalid" / "qz303_diffs_float.json")
    run_command(["validate", "--format", "sarif", conflict])
    log = json.loads(capsys.readouterr().out)
    [result] = log["runs"][0]["results"]
    assert log["version"] == "2.1.0"
    assert [rule["id"] for rule in log["runs"][0]["tool"]["driver"]["rules"]] == ["QZ303"]
    region = result["locations"][0]["physicalLocation"]["region"]
    assert region == {"startLine": 17, "startColumn": 19, "endColumn": 26}
    assert result["relatedLocations"][0]["physicalLocation"]["region"]["startLine"] == 11


@pytest.mark.parametrize("form", ["json", "sarif"])
def test_machine_formats_hold_when_nothing_is_found(
    form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["validate", "--format", form, VALID]) == 0
    assert json.loads(capsys.readouterr().out) is not None


def test_fix_writes_what_it_can_and_says_what_is_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "net.json"
    path.write_bytes(
        b'\xef\xbb\xbf{\r\n  "target_device": "DPU",\r\n  "include_cle": "no",\r\n  "onnx_opset_version": -2\r\n}'
    )
    path.chmod(0o640)
    assert run_command(["validate", "--fix", str(path)]) == 1
    out = capsys.readouterr().out
    assert out.count("error QZ") == 1 and "error QZ104" in out
    assert out.splitlines()[-1] == f"{path}: 2 fixed, 1 error"
    text = path.read_bytes()
    start = b'\xef\xbb\xbf{\r\n  "target_device": "DPU",\r\n  "include_cle": false,\r\n  "onnx_opset_version": -2,\r\n'
    assert text.startswith(start)
    assert path.stat().st_mode & 0o777 == 0o640
    assert [entry.name for entry in tmp_path.iterdir()] == ["net.json"]
    assert run_command(["validate", "--fix", str(path)]) == 1
    assert path.read_bytes() == text


def test_diff_shows_what_fix_would_write(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "net.json"
    path.write_bytes(Path(BROKEN).read_bytes())
    for arguments in (["--diff"], ["--fix", "--diff"]):
        assert run_command(["validate", *arguments, str(path), WRONG, "no/such/file.json"]) == 2
        out = capsys.readouterr().out.splitlines()
        assert out[:2] == [f"--- {path}", f"+++ {path}"]
        assert [line for line in out[2:20] if line.startswith("+")] == [
            '+  "quantizable_data_type": ["input", "weights", "bias", "activation"],',
            '+    "calib_statistic_method": "max"',
        ]
        assert out[-3:] == [
            f"{path}: 2 errors, 2 fixable with --fix",
            f"{WRONG}: 1 error",
            "no/such/file.json: 1 error",
        ]
        assert path.read_bytes() == Path(BROKEN).read_bytes()


@pytest.mark.parametrize("source", [VALID, WRONG, CUT_OFF], ids=lambda path: Path(path).stem)
def test_fix_leaves_files_alone_that_have_no_known_answer(source: str, tmp_path: Path) -> None:
    path = tmp_path / Path(source).name
    path.write_bytes(Path(source).read_bytes())
    run_command(["validate", "--fix", str(path)])
    assert path.read_bytes() == Path(source).read_bytes()


def test_text_shows_at_most_fifty_findings() -> None:
    many = [
        Diagnostic("QZ101", f"finding {at}", Place("net.json", at, 1))
        for at in range(1, MAX_SHOWN + 8)
    ]
    lines = render_text(many, {}).splitlines()
    assert len(lines) == MAX_SHOWN + 1
    assert lines[-1] == "… and 7 more"


def test_excerpts_cannot_steer_the_terminal_and_stay_short() -> None:
    text = "x" * 500 + '"\x1b[31m\u9b3c"' + "y" * 500
    shown = render_text(
        [Diagnostic("QZ101", "a\nb", Place("n.json", 1, 501, 8))], {"n.json": text}
    )
    assert "\x1b[31m\u9b3c" not in shown
    assert max(map(len, click.unstyle(shown).splitlines())) < 120


@pytest.mark.parametrize("form", RENDERERS)
def test_every_format_takes_a_finding_without_a_place(form: str) -> None:
    assert "QZ501" in RENDERERS[form]([Diagnostic("QZ501", "no data")], {})


def test_a_diff_is_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["validate", "--diff", "--format", "json", BROKEN]) == 2
    assert "--diff cannot be combined with --format json" in capsys.readouterr().err


FAULTS = {
    "a comment": ('{"', '{ // note\n"', 0),
    "a trailing comma": ("}}", "},}", 1),
    "no comma": ('"CPU", "', '"CPU" "', 1),
    "no comma in a list": ('"weights", ', '"weights" ', 1),
    "single quotes": ('"CPU"', "'CPU'", 1),
    "a bare key": ('"include_cle"', "include_cle", 1),
    "a word of Python": ("false", "False", 1),
    "a bare word": ('"half_even"', "half_even", 0),
    "a number": ('"bit_width": 8', '"bit_width": 08', 0),
    "not finite": ('"bit_width": 8', '"bit_width": NaN', 0),
    "an escape": ('"half_even"', '"half\\.even"', 0),
    "a second key": ('{"', '{"include_cle": true, "', 0),
    "a second bracket": ("}}", "}}}", 0),
}
"""What is replaced, by what, and whether --fix knows the answer."""


def test_a_missing_bracket_is_where_the_lines_are_indented_less(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (ROOT / "configs" / "cpu_int8.json").read_text("utf-8")
    head, closing, tail = text.partition('\n  },\n  "tensor_quantize_config"')
    path = tmp_path / "net.json"
    path.write_text(head + closing.replace("},", ",") + tail)
    line = head.count("\n", 0, head.index('"overall_quantize_config"')) + 1
    assert run_command(["validate", str(path)]) == 2
    printed = capsys.readouterr().out
    assert f'net.json:{line}:30: error QZ004: this bracket is never closed: a "}}"' in printed
    assert f"it is missing before line {text.count(chr(10), 0, len(head)) + 3}" in printed


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_wrong_behind_a_fault_of_syntax_is_found_in_the_same_round(
    fault: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, after, fixes = FAULTS[fault]
    config = json.loads((ROOT / "configs" / "default.json").read_text("utf-8"))
    config = {key: value for key, value in config.items() if not key.startswith(("//", "$"))}
    config |= {"target_device": "CPU", "no_such_key": 1}
    overall = config.pop("overall_quantize_config") | {"method": "maxmum"}
    text = json.dumps(config | {"overall_quantize_config": overall})
    path = tmp_path / "net.json"
    assert before in text
    path.write_text(text.replace(before, after, 1))
    assert run_command(["validate", str(path), "--format", "json"]) == 2
    found = json.loads(capsys.readouterr().out)
    codes = {row["code"]: row for row in found}
    assert {"QZ101", "QZ102"} <= codes.keys(), codes
    [syntax] = [row for row in found if row["code"] < "QZ010"]
    assert "not checked" not in syntax["message"]
    assert run_command(["validate", str(path), "--fix"]) == (1 if fixes else 2)
    assert ("fixed" in capsys.readouterr().out) == bool(fixes)


@pytest.mark.parametrize("text", ['{"include_cle": true', '{"a" 1, "b": 2}', '{"a": "b}\n'])
def test_it_is_said_that_the_rest_was_not_checked(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "net.json").write_text(text)
    assert run_command(["validate", str(tmp_path / "net.json")]) == 2
    assert "; the rest of the file was not checked" in capsys.readouterr().out
