"""`quantizer explain`: every code and every key has a page; a layer is passed on."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.configs import document

from quantizer.cli.arguments.options import Options
from quantizer.cli.main import run_command
from quantizer.config.algorithms import entry_kinds
from quantizer.config.pages import key_names, key_page, rules_page, setting_names
from quantizer.config.rules.spec_rules import all_codes

LISTED = entry_kinds("hierarchical")


@pytest.mark.parametrize("code", all_codes())
def test_every_code_has_a_page(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["explain", code.lower()]) == 0
    page = capsys.readouterr().out
    assert page.startswith(f"# {code}\n")
    assert page.removeprefix("# ").strip() in rules_page()


@pytest.mark.parametrize("key", key_names())
def test_every_key_has_a_page_with_default_and_example(
    key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["explain", key]) == 0
    page = capsys.readouterr().out
    assert page == re.sub(r"\[(QZ\d+)\]\(\.\./rules\.md#qz\d+\)", r"\1", key_page(key))
    assert "](" not in page
    assert (f'"name": "{key}"' if key in LISTED else f'```json\n"{key}": ') in page
    assert "Default: " in page or key in ("overall_quantize_config", *LISTED)


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("round_mod", "did you mean round_mode?"),
        ("qz30", "did you mean QZ301, QZ302, QZ303"),
        ("QZ999", "did you mean QZ"),
        ("foo", "`quantizer explain` lists all codes and keys"),
    ],
)
def test_unknown_name_gets_the_closest_or_the_way_to_all(
    name: str, remedy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["explain", name]) == 2
    assert remedy in capsys.readouterr().err


def test_without_a_name_all_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["explain"]) == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert listed == [*all_codes(), *key_names()]


def test_a_layer_is_passed_on_with_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, Options]] = []

    def explain_layer(layer: str, options: Options) -> int:
        seen.append((layer, options))
        return 0

    monkeypatch.setitem(
        sys.modules, "quantizer.cli.explain_layer", SimpleNamespace(explain_layer=explain_layer)
    )
    assert (
        run_command(["explain", "--config", "c.json", "--model", "m.py", "layer1.0.conv1"]) == 0
    )
    assert seen == [("layer1.0.conv1", Options(model="m.py", config_file="c.json"))]


LAYERED = document(
    tensor={"weights": {"per_channel": True}}, quantizable_data_type=["weights", "activation"]
)
SPELLED_OTHERWISE = {
    "weight": {"dtype": "int4", "observer_cls": "PerTensorMinMax", "round_method": "round"}
}
BLOCKS = {
    "input_tensors": {"dtype": "mx", "mx_element_dtype": "fp4", "dynamic": True, "axis": -1}
}
OFF = {
    "global_quant_config": {"weight": {"dtype": "int8"}},
    "layer_quant_config": {"0": {"weight": {"dtype": "float32"}}},
}
EXPLAINED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "layered": (
        LAYERED,
        ["weights", "per_channel true q.json", "symmetry true q.json", "calib_statistic_method max q.json",
         "datatype int default", "symmetric_scale quant_max default", "activation", "per_channel false q.json",
         'to keep it in float, write "exclude": ["0"] in the config'],
    ),
    "hierarchical": (
        {"global_quant_config": SPELLED_OTHERWISE},
        ["weight", "dtype int4 q.json", "observer_cls PerTensorMinMax q.json", "round_method round q.json",
         "scale_type float default", "symmetric_scale half_range default", "qscheme per_tensor default",
         "output_tensors: float: the config leaves it float"],
    ),
    "blocks": (
        {"global_quant_config": BLOCKS},
        ["input_tensors", "dtype mx q.json", "mx_element_dtype fp4 q.json", "dynamic true q.json", "axis -1 q.json"],
    ),
    "excluded": (
        LAYERED | {"exclude": ["kind:embedding"]},
        ['to keep it in float, write "exclude": ["kind:embedding", "0"] in the config'],
    ),
    "named": (
        LAYERED | {"exclude": ["0"]},
        ["all tensors: float: excluded, set by q.json"],
    ),
    "off": (OFF, ["weight: float, set by q.json"]),
}  # fmt: skip
"""A config, and words of the lines that explain a linear layer under it, places without their
numbers.
"""
INTERNAL = (
    "bit_width 4",
    "symmetric ",
    "qscheme true",
    "statistic ",
    "is_dynamic",
    "scale_mode",
    "group_size None",
)


@pytest.mark.parametrize("case", EXPLAINED)
def test_a_layer_is_explained_in_the_words_of_the_file(
    case: str, toy: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, lines = EXPLAINED[case]
    (tmp_path / "q.json").write_text(json.dumps(config, indent=1))
    model = toy(model="return torch.nn.Sequential(torch.nn.Linear(3, 2))")
    assert (
        run_command(["explain", "--config", str(tmp_path / "q.json"), "--model", model, "0"])
        == 0
    )
    printed = capsys.readouterr().out.replace(f"{tmp_path}/", "")
    plain = [" ".join(re.sub(r":\d+:\d+", "", line).split()) for line in printed.splitlines()]
    assert plain[0] == "Sequential::Sequential/Linear[0]/linear"
    assert [line for line in lines if not any(each.startswith(line) for each in plain)] == []
    assert [word for word in INTERNAL if word in "\n".join(plain)] == []
    written = (tmp_path / "q.json").read_text().splitlines()
    for key, line, column in re.findall(
        r"^    (\w+) .*q\.json:(\d+):(\d+)$", printed, flags=re.MULTILINE
    ):
        assert written[int(line) - 1][: int(column) - 1].endswith(f'"{key}": ')


def test_the_built_in_default_is_explained_in_the_layered_forms_words(
    toy: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["explain", "--model", toy(), "kind:head"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["calib_statistic_method", "modal", "default"] in rows
    assert ["per_channel", "false", "default"] in rows


@pytest.mark.parametrize("key", setting_names())
def test_a_setting_of_an_algorithm_and_a_word_of_a_key_has_a_page(
    key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["explain", key]) == 0
    printed = capsys.readouterr().out
    names = re.findall(r"`quantizer explain (\w+)`", printed)
    assert names
    for name in names:
        assert run_command(["explain", name]) == 0
        page = capsys.readouterr().out
        assert f"| `{key}` |" in page or f'- `"{key}"`: ' in page
