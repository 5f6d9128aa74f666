"""`quantizer.quantize` makes the same files as `quantizer run`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.llamas import VOCABULARY, llama, tokens
from torch import Tensor, nn

import quantizer
from quantizer.cli.main import run_command
from quantizer.errors import GateError, ModelError, UsageError

MODEL = """import torch

def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))

def calibration_data():
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(8, 6, generator=generator) for _ in range(2)]
"""
OF_ONE_RUN = ("run.json", "run.log", ".quantizer.json", "report.html", "report.json")
"""Only the shell writes logs; reports name its commands."""


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(8, 6, generator=generator) for _ in range(2)]


def test_the_shell_and_python_write_the_same_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(MODEL)
    assert run_command(["run", "net.py", "-q", "--to", "pt2", "-o", "shell"]) == 0
    made = quantizer.quantize(network(), batches(), "pt2", folder="python")
    assert made.path == Path("python/export/Sequential.pt2")
    for path in sorted(Path("python").rglob("*")):
        if path.is_file() and path.name not in OF_ONE_RUN:
            assert path.read_bytes() == Path("shell", path.relative_to("python")).read_bytes()


def test_layers_are_kept_in_float_as_in_the_shell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(MODEL)
    asked = ["-q", "--to", "pt2", "--keep_float", "2"]
    assert run_command(["run", "net.py", *asked, "-o", "shell"]) == 0
    quantizer.quantize(network(), batches(), "pt2", folder="python", keep_float=["2"])
    configs = [Path(name, "quantize_config.json").read_text() for name in ("shell", "python")]
    assert configs[0] == configs[1]
    assert json.loads(configs[0])["exclude"] == ["2"]
    # A single name may stand without a list
    quantizer.quantize(network(), batches(), "pt2", folder="single", keep_float="2")
    assert Path("single/quantize_config.json").read_text() == configs[0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"keep_float": ["layer2"]}, "`keep_float`: 'layer2' matches no layer of Sequential"),
        ({"keep_float": ["2"], "config": "mine.json"}, "the config of this run is yours"),
    ],
)
def test_layers_that_cannot_be_kept_in_float_are_refused(
    settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=message):
        quantizer.quantize(network(), batches(), "pt2", folder=tmp_path / "made", **settings)
    assert not (tmp_path / "made" / "quantize_config.json").exists()


def test_the_text_of_the_result_is_the_verdict(tmp_path: Path) -> None:
    made = quantizer.quantize(network(), batches(), "w8", folder=tmp_path)
    lines = repr(made).splitlines()
    assert lines == list(made.verdict)
    assert lines[0].startswith(
        f"Wrote {tmp_path}/export/Sequential.safetensors: int8 weights, float activations; "
    )
    assert lines[-1].startswith("Next: ")
    assert made.comparison.metrics["sqnr_db"] > 30
    assert made.verification.equal == 1.0
    (file,) = json.loads((tmp_path / "report.json").read_text())["exports"]
    assert (file["file"], file["bytes"]) == (made.path.name, made.path.stat().st_size)


def test_gates_that_hold_are_in_the_verdict(tmp_path: Path) -> None:
    made = quantizer.quantize(
        network(), batches(), "w8", folder=tmp_path, gates=["sqnr_db>=10", "cosine>=0.9"]
    )
    assert made.verdict[0].startswith("PASS: gate sqnr_db>=10: met (")
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["gates"] == {"sqnr_db>=10": True, "cosine>=0.9": True}


def test_no_file_is_written_if_a_gate_does_not_hold(tmp_path: Path) -> None:
    with pytest.raises(GateError, match="not met: sqnr_db>=90; no file is written") as error:
        quantizer.quantize(
            network(), batches(), "w8", folder=tmp_path, gates=["cosine>=0", "sqnr_db>=90"]
        )
    assert error.value.help == f"{tmp_path}/report.html shows which layers lose most"
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["gates"] == {"cosine>=0": True, "sqnr_db>=90": False}
    assert not list((tmp_path / "export").iterdir())


def test_gates_about_the_file_are_checked_on_it(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="needs quantizer-torch[onnx]")
    gates = ["sqnr_db>=1", "onnx_int8_share<0.1", "latency_ms<=1e-9"]
    with pytest.raises(GateError) as error:
        quantizer.quantize(network(), batches(), "onnx", folder=tmp_path, gates=gates)
    assert error.value.message.endswith(".onnx: onnx_int8_share<0.1, latency_ms<=1e-9")
    assert "2 of 2 multiplications in int8" in str(error.value.help)
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["gates"] == dict(zip(gates, [True, False, False], strict=True))


def test_gates_about_the_file_say_which_files_have_the_metric(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no metric 'latency_ms'") as error:
        quantizer.quantize(network(), batches(), "w8", folder=tmp_path, gates="latency_ms<=5")
    assert error.value.help == 'it is measured on files of to="onnx" or "openvino"'


@pytest.mark.parametrize(
    ("gate", "message"),
    [
        ("sqnr_db", "`gates` 'sqnr_db' is not a comparison"),
        ("sqnr>=20", "`gates` 'sqnr>=20': there is no metric 'sqnr'"),
        (
            "top1_drop<=0.01",
            "`gates` 'top1_drop<=0.01' is not measured: the data has no targets",
        ),
    ],
)
def test_gates_that_cannot_be_checked_are_refused_before_anything_is_written(
    gate: str, message: str, tmp_path: Path
) -> None:
    folder = tmp_path / "results"
    with pytest.raises(UsageError) as error:
        quantizer.quantize(network(), batches(), "w8", folder=folder, gates=[gate])
    assert error.value.message.startswith(message)
    assert not folder.exists()


def test_a_destination_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no destination 'onx'") as error:
        quantizer.quantize(network(), batches(), "onx", folder=tmp_path)
    assert error.value.help == "did you mean onnx?"


def test_missing_data_is_an_error_before_anything_is_written(tmp_path: Path) -> None:
    folder = tmp_path / "results"
    with pytest.raises(UsageError, match='to="onnx" needs calibration data'):
        quantizer.quantize(network(), to="onnx", folder=folder)
    assert not folder.exists()


def test_options_and_targets_are_checked_before_calibration(tmp_path: Path) -> None:
    folder = tmp_path / "results"
    with pytest.raises(UsageError, match="no target has the option onnx_profil"):
        quantizer.quantize(network(), batches(), "onnx", folder=folder, onnx_profil="fast")
    misspelt: Any = {"evaluation_dat": batches()}
    with pytest.raises(UsageError) as refused:
        quantizer.quantize(network(), batches(), "onnx", folder=folder, **misspelt)
    assert refused.value.help == "did you mean evaluation_data?"
    assert not folder.exists()
    with pytest.raises(UsageError, match="gguf"):
        quantizer.quantize(network(), batches(), "gguf", folder=folder)
    assert not (folder / "quant_info.json").exists()


def test_figures_of_an_example_input_say_so_everywhere(tmp_path: Path) -> None:
    made = quantizer.quantize(llama(), to="w8", folder=tmp_path)
    in_float = "In float: model.embed_tokens, lm_head (excluded)."
    assert in_float in made.verdict, "a checkpoint has no codes of embeddings"
    stamp = "an example input, not of real data"
    assert f"These figures are of {stamp}." in made.verdict
    assert json.loads((tmp_path / "report.json").read_text())["stamp"] == stamp
    assert stamp in (tmp_path / "report.html").read_text()


def test_a_config_that_needs_data_gets_no_example_input(tmp_path: Path) -> None:
    tensor = {"dtype": "int8"}
    config = {"global_quant_config": {"weight": tensor, "input_tensors": tensor}}
    with pytest.raises(UsageError, match="the config needs calibration data"):
        quantizer.quantize(llama(), to="w8", config=config, folder=tmp_path / "out")
    assert not (tmp_path / "out" / "quant_info.json").exists()


LIMIT = 0.066
"""8 bits everywhere take 0.074 MB."""


def sized(folder: Path, limit: float | str, **settings: str) -> quantizer.Quantized:
    return quantizer.quantize(llama(), tokens(), "w4", folder=folder, max_mb=limit, **settings)


def test_python_chooses_widths_within_a_size(tmp_path: Path) -> None:
    made = sized(tmp_path, LIMIT)
    written = sum(path.stat().st_size for path in made.path.glob("*.safetensors"))
    assert 0.9 * LIMIT * 1e6 < written <= LIMIT * 1e6
    text = (tmp_path / "quantize_config.json").read_text("utf-8")
    assert f"--to w4 --max_mb {LIMIT} for LlamaForCausalLM" in text
    assert made.verdict[0].split(": ")[1].startswith("int8 and int4 weights")


@pytest.mark.parametrize(
    ("limit", "settings", "message"),
    [
        ("big", {}, 'max_mb="big" is not a size'),
        (1e-3, {}, "with 4 bits everywhere the file takes"),
        (LIMIT, {"config": "mine.json"}, "this run has one already"),
    ],
)
def test_sizes_that_cannot_be_kept_are_refused(
    limit: float | str, settings: dict[str, str], message: str, tmp_path: Path
) -> None:
    folder = tmp_path / "results"
    with pytest.raises(UsageError, match=message):
        sized(folder, limit, **settings)
    assert not folder.exists()


def test_weights_that_a_model_computes_stay_float(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="needs quantizer-torch[llm]")
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "state_size": 8,
        "vocab_size": VOCABULARY,
    }
    heads = {"head_dim": 16, "num_heads": 4, "n_groups": 1, "use_cache": False}
    model = transformers.Mamba2ForCausalLM(transformers.Mamba2Config(**sizes, **heads)).eval()
    made = quantizer.quantize(model, tokens(1), "w8", folder=tmp_path)
    assert "In float: backbone.embeddings, backbone.layers.0.mixer.conv1d, lm_head" in repr(
        made
    )


def test_parts_that_no_data_reach_are_named_and_counted(tmp_path: Path) -> None:
    """A text alone runs neither the image part nor the layers that look at images."""
    transformers = pytest.importorskip("transformers", reason="needs quantizer-torch[llm]")
    torch.manual_seed(0)
    text = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 32,
        "cross_attention_layers": [1],
        "pad_token_id": 0,
    }
    vision = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_global_layers": 1,
        "attention_heads": 2,
        "intermediate_size": 16,
        "vision_output_dim": 32,
        "image_size": 14,
        "patch_size": 7,
        "max_num_tiles": 1,
        "intermediate_layers_indices": [0],
        "supported_aspect_ratios": [[1, 1]],
    }
    config = transformers.MllamaConfig(vision_config=vision, text_config=text)
    model = transformers.MllamaForConditionalGeneration(config).eval()
    done = quantizer.quantize(model, tokens(1), "w8", folder=tmp_path)
    stored = sum(parameter.nbytes for parameter in model.parameters())
    assert f"Weights take {stored / 1000:.0f} kB in float, " in repr(done)
    layers = next(line for line in done.verdict if line.startswith("In float: "))
    assert "model.vision_model.patch_embedding" in layers
    assert "(not reached by the data)" in layers


@pytest.mark.parametrize("place", ["folder", Path("folder"), "net.py"])
def test_a_path_instead_of_a_model_names_what_loads_it(place: Any) -> None:
    """Also where there is no data."""
    config = {"global_quant_config": {"weight": {"dtype": "int8"}}}
    in_place = quantizer.ModelQuantizer(quantizer.Config.from_dict(config))
    for call in (
        lambda: quantizer.quantize(place),
        lambda: quantizer.quantize(place, [torch.ones(1)], to="onnx"),
        lambda: quantizer.calibrate(place, config, [torch.ones(1)]),
        lambda: in_place.quantize_model(place),
    ):
        with pytest.raises(ModelError, match="from_pretrained"):
            call()
    assert not Path("quantize_result").exists()
