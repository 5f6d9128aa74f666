"""The shipped presets on the shipped examples, in an ONNX Runtime session as docs/onnx.md
opens it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from support.extended import extended
from support.generated import imported
from support.runs import ROOT, calibrate
from torch import Tensor

from quantizer.cli.main import run_command
from quantizer.sources.models import load_model

ort = pytest.importorskip("onnxruntime", reason="files are verified with it (extra: onnx)")
pytest.importorskip("onnxscript", reason="torch.onnx needs it (extra: onnx)")
pytest.importorskip(
    "sklearn", reason="the digits examples read scikit-learn's data (extra: examples)"
)

CASES = [
    pytest.param(("digits_mobile", "cpu_int8"), marks=pytest.mark.slow),
    *(
        pytest.param(("digits", config), marks=pytest.mark.real)
        for config in ("example", "dpu")
    ),
    *extended(*((("digits", config),) for config in ("cpu_int8", "gpu", "default"))),
]


INT8_SHARES = {"example": 0.9, "dpu": 1 / 11}
"""Of configs with convolutions whose outputs are rounded by operators in float; all others are
in integers.
"""


@dataclass(frozen=True)
class Deployed:
    """What is in the result folder, and the outputs of test mode and of the file for all
    evaluation images.
    """

    folder: Path
    expected: Tensor
    found: Tensor
    labels: Tensor
    config: str

    def read(self, name: str) -> dict[str, Any]:
        return dict(json.loads((self.folder / name).read_text()))


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def deployed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Deployed:
    example, config = request.param
    model, folder = (
        str(ROOT / "examples" / f"{example}.py"),
        tmp_path_factory.mktemp(f"{example}_{config}"),
    )
    given = ["--overwrite", "--config_file", str(ROOT / "configs" / f"{config}.json")]
    assert calibrate(folder, *given, model=model, config=None) == 0
    run = [
        "--quant_mode",
        "test",
        "--model",
        model,
        "--output_dir",
        str(folder),
        "-q",
        "--deploy",
        "onnx",
    ]
    assert run_command(run) == 0
    (path,) = (folder / "export").glob("*.onnx")
    session, network = ort.InferenceSession(str(path)), imported(folder / f"{path.stem}.py")
    evaluation_data = load_model(model).evaluation_data
    assert evaluation_data is not None
    data = evaluation_data()
    with torch.no_grad():
        expected = torch.cat([network(images) for images, _ in data])
    found = [
        torch.from_numpy(session.run(None, {session.get_inputs()[0].name: images.numpy()})[0])
        for images, _ in data
    ]
    return Deployed(
        folder, expected, torch.cat(found), torch.cat([labels for _, labels in data]), config
    )


def test_a_default_session_has_test_modes_accuracy(deployed: Deployed) -> None:
    ours, theirs = (
        (each.argmax(1) == deployed.labels).float().mean()
        for each in (deployed.expected, deployed.found)
    )
    assert ours > 0.98
    assert theirs >= ours - 0.002  # one image of 500
    differing = deployed.expected.argmax(1) != deployed.found.argmax(1)
    # Of 500, and only where test mode's best two are two steps apart at most
    assert int(differing.sum()) <= 2
    first, second = deployed.expected[differing].topk(2).values.T
    (step,) = {
        tensors["activation"]["scale"]
        for layer, tensors in deployed.read("quant_info.json")["tensors"].items()
        if layer.endswith("Linear[fc]/linear")
    }
    assert bool((first - second <= 2.01 * step).all())


def test_outputs_differ_by_less_than_quantization_costs(deployed: Deployed) -> None:
    difference = deployed.expected - deployed.found
    sqnr = 10 * float(
        (deployed.expected.square().sum() / difference.square().sum().clamp_min(1e-12)).log10()
    )
    assert sqnr >= deployed.read("report.json")["metrics"]["sqnr_db"]


def test_multiplications_are_in_integers_where_the_config_allows_it(deployed: Deployed) -> None:
    (verified,) = deployed.read("export/verify.json").values()
    kernels = verified["default_session"]["kernels"]
    assert len(kernels["integer"]) + len(kernels["floating"]) >= 10
    assert kernels["share"] == pytest.approx(INT8_SHARES.get(deployed.config, 1.0))
    assert all("round" in why for layer, why in kernels["floating"].items() if "/" in layer)


def test_nearly_all_codes_are_test_modes(deployed: Deployed) -> None:
    """Of all batches: at the output, to which every difference adds up, and of each layer made
    of the same codes.
    """
    (verified,) = deployed.read("export/verify.json").values()
    found = verified["default_session"]
    assert verified["equal"] >= 0.995
    # One code in a million differs in early layers, and each changes some outputs
    assert found["equal"] >= 0.99
    assert found["within_step"] >= 0.999
    assert found["top1_agreement"] >= 0.998
    assert len(found["layers"]) > 10
    assert found["first_differing"] is None
    for row in found["layers"]:
        assert row["codes"] % len(deployed.labels) == 0
        # A pair of codes that is frequent may add up to a tie
        assert row["differing"] <= 2e-4 * row["codes"]
        assert row["most_steps"] <= 1
