"""`quantizer schema`: prints or locates the three schemas."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quantizer.cli.main import run_command
from quantizer.config import resources
from quantizer.errors import QuantizerError


@pytest.mark.parametrize("name", ["layered", "hierarchical", "quantization_spec"])
def test_print_and_path_are_the_same_schema(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["schema", name]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert run_command(["schema", "--path", name]) == 0
    assert printed == json.loads(Path(capsys.readouterr().out.strip()).read_text("utf-8"))
    assert printed["$schema"] == "http://json-schema.org/draft-07/schema#"


def test_a_resource_that_is_not_there_is_a_sentence() -> None:
    with pytest.raises(QuantizerError, match=r"schemas/none\.json is missing"):
        resources.resource("schemas", "none.json")
