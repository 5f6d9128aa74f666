"""`quantizer inspect --algorithms`: blocks, layers that read one value, where factors fold,
names that do not fit.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from support.extended import extended_except

from quantizer.cli.main import run_command

MODEL = """
import torch
from torch import nn

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.gate, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        y = self.norm(x)
        return x + self.down(self.gate(y).sigmoid() * self.up(y))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.head = nn.ModuleList([Layer(), Layer()]), nn.Linear(8, 4)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(torch.nn.functional.gelu(x))

def model():
    return Net()

def calibration_data():
    return [torch.randn(2, 8)]
"""
BUILT = """
import torch
from support.structures import Mixture, Mobile, pretrained

KINDS = {"Mixture": (Mixture, (2, 5, 16)), "Mobile": (Mobile, (2, 3, 16, 16))}

def model():
    torch.manual_seed(0)
    return KINDS[NAME][0]() if NAME in KINDS else pretrained(NAME)[0]

def calibration_data():
    return [torch.randn(KINDS[NAME][1])] if NAME in KINDS else list(pretrained(NAME)[1])
"""
GROUPED_QUERIES = {
    "self_attn.q_proj, self_attn.k_proj, self_attn.v_proj": "input_layernorm",
    "self_attn.o_proj": "self_attn.v_proj; 16 of its channels, each is read several times",
    "mlp.gate_proj, mlp.up_proj": "post_attention_layernorm",
    "mlp.down_proj": "mlp.up_proj",
    "lm_head": "model.norm",
    "15 layers read 9 values; factors": "5 4 0",
}
SHOWN = {
    "Llama": GROUPED_QUERIES,
    "Qwen2": GROUPED_QUERIES,  # with biases
    "OPT": {
        "self_attn.q_proj, self_attn.k_proj, self_attn.v_proj": "self_attn_layer_norm",
        "self_attn.out_proj": "self_attn.v_proj",
        "fc1": "final_layer_norm",
        "fc2": "fc1",
        "lm_head": "none: its weight is also that of model.decoder.embed_tokens",
        "13 layers read 9 values; factors": "4 4 1",
    },
    "GPT2": {  # its layers are addmm
        "attn.c_attn": "ln_1",
        "attn.c_proj": "attn.c_attn; 32 of its channels, not in this order or not all",
        "mlp.c_fc": "ln_2",
        "mlp.c_proj": "none: mlp.c_fc is also read by mlp.act.pow",
        "lm_head": "none: its weight is also that of transformer.wte",
        "9 layers read 9 values; factors": "4 2 3",
    },
    "Bert": {
        "attention.self.query, attention.self.key, attention.self.value": (
            "none: embeddings.LayerNorm is also read by attention.output.add",
            "none: encoder.layer.0.output.LayerNorm is also read by attention.output.add",
        ),
        "attention.output.dense": "attention.self.value",
        "intermediate.dense": "none: attention.output.LayerNorm is also read by output.add",
        "output.dense": "none: no factor passes through intermediate.intermediate_act_fn",
        "pooler.dense": "none: encoder.layer.1.output.LayerNorm is also read by the output of the network",
        "13 layers read 9 values; factors": "0 2 7",
    },
    "ViT": {
        "attention.q_proj, attention.k_proj, attention.v_proj": "layernorm_before",
        "attention.o_proj": "attention.v_proj",
        "mlp.fc1": "layernorm_after",
        "mlp.fc2": "none: no factor passes through mlp.activation_fn",
        "embeddings.patch_embeddings.projection": "none: it is an input of the network",
        "pooler.dense": "none: layernorm is also read by the output of the network",
        "14 layers read 10 values; factors": "4 2 4",
    },
    "Mixture": {
        ", ".join(
            ("moe.router", *(f"moe.experts.{n}.{w}" for n in range(3) for w in ("w1", "w3")))
        ): "norm",
        **{f"moe.experts.{n}.w2": f"moe.experts.{n}.w3" for n in range(3)},
        "head": "norm",
        "21 layers read 9 values; factors": "3 6 0",
    },
    "Mobile": {
        "stem": "none: it is an input of the network",
        "depth": "stem",
        "point": "depth",
        "grouped": "point",
        "up": "grouped; 8 of its channels, not in this order or not all",
        "head": "norm",
        "6 layers read 6 values; factors": "1 4 1",
    },
}
TEXT = """\
blocks: 2, layers.0 to layers.1, all alike
layers that read one value  channels  factors are folded into
gate, up                           8  norm
down                               8  up
in no block:
layers that read one value  channels  factors are folded into
head                               8  none: no factor passes through gelu
7 layers read 5 values; factors fold into a normalization for 2, into the layer before for 2, into neither for 1
"""


@pytest.fixture
def network(tmp_path: Path) -> str:
    path = tmp_path / "net.py"
    path.write_text(MODEL, "utf-8")
    return str(path)


def config(tmp_path: Path, **names: object) -> str:
    path = tmp_path / "q.json"
    weight = {
        "dtype": "int4",
        "qscheme": "per_channel",
        "ch_axis": 0,
        "observer_cls": "PerChannelMinMaxObserver",
    }
    content = {
        "global_quant_config": {"weight": weight},
        "algo_config": {"name": "gptq", **names},
    }
    path.write_text(json.dumps(content, indent=2), "utf-8")
    return str(path)


def test_it_shows_each_kind_of_block_once_and_what_is_outside(
    network: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["inspect", "--algorithms", "--model", network]) == 0
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == TEXT.splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("name", extended_except(SHOWN, "Llama", "Bert", "Mixture", "Mobile"))
def test_architectures(
    name: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Layers that read one value, and where its factors go; last, how many go into norms, into
    layers, nowhere.
    """
    if name not in ("Mixture", "Mobile"):
        pytest.importorskip("transformers", reason="needs transformers (extra: llm)")
    path = tmp_path / "net.py"
    path.write_text(f"NAME = {name!r}\n{BUILT}", "utf-8")
    monkeypatch.setenv("COLUMNS", "1000")
    assert run_command(["inspect", "--algorithms", "--model", str(path)]) == 0
    shown: dict[str, tuple[str, ...]] = {}
    for line in capsys.readouterr().out.splitlines():
        if row := re.fullmatch(r"(.+?) {2,}\d+ {2,}(.+?) *", line):
            shown[row[1]] = (*shown.get(row[1], ()), row[2])
        elif row := re.fullmatch(
            r"(.+) fold into .* for (\d+), .* for (\d+), .* for (\d+)", line
        ):
            shown[row[1]] = (" ".join(row.groups()[1:]),)
    wanted = {
        key: where if isinstance(where, tuple) else (where,)
        for key, where in SHOWN[name].items()
    }
    assert {key: tuple(dict.fromkeys(where)) for key, where in shown.items()} == wanted


def test_json_has_everything(network: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["inspect", "--algorithms", "--json", "--model", network]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [block["path"] for block in shown["blocks"]] == ["layers.0", "layers.1"]
    assert [group["block"] for group in shown["groups"]] == [0, 0, 1, 1, None]
    assert shown["groups"][0]["fold"]["kind"] == "norm"
    assert shown["groups"][4]["why_not"].endswith("Net::Net/gelu")


def test_names_of_the_config_are_shown_by_algorithm(
    network: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = config(tmp_path, inside_layer_modules=["up", "down"], model_decoder_layers="layers")
    assert (
        run_command(["inspect", "--algorithms", "--model", network, "--config_file", path]) == 0
    )
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "gptq (algo_config):"
    assert lines[3].split() == ["up", "8", "norm;", "also", "changes", "gate"]


def test_a_name_that_the_model_does_not_have_is_told_where_it_stands(
    network: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = config(tmp_path, inside_layer_modules=["upp"], model_decoder_layers="layers")
    assert (
        run_command(["inspect", "--algorithms", "--model", network, "--config_file", path]) == 2
    )
    told = capsys.readouterr().err
    assert "error QZ501: there is no module 'upp'" in told
    assert "did you mean up?" in told
    assert f"{path}:12:" in told


def test_the_dpu_has_no_algorithms(network: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["inspect", "--algorithms", "--target", "DPU", "--model", network]) == 2
    assert "exclude each other" in capsys.readouterr().err
