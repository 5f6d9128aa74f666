"""Language models on the command line: a Hugging Face folder, text, perplexity, and configs
that need no data.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.runs import ROOT

from quantizer.cli.main import run_command

pytestmark = pytest.mark.slow

WEIGHTS_ONLY = str(ROOT / "configs" / "weight_int8.json")
DYNAMIC = str(ROOT / "configs" / "dynamic_int8.json")
STATIC = str(ROOT / "configs" / "cpu_int8.json")
TEXT = "a text of the bytes that a model without training finds as good as any others. " * 4

NET = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = torch.nn.Embedding(256, 8), torch.nn.Linear(8, 256)
    def forward(self, input_ids):
        return self.head(self.table(input_ids).relu())

class Bytes:
    def encode(self, text):
        return list(text.encode())

model, tokenizer = Net, Bytes
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a model's file, a text and the text's tokenizer."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(NET)
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path


def run(mode: str, *more: str, model: str = "net.py") -> int:
    return run_command(["--quant_mode", mode, "--model", model, "-q", *more])


TEXT_DATA = ("--data", "text.txt", "--seq_len", "16")


def test_perplexity_of_a_file_with_a_tokenizer(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("float", *TEXT_DATA, "--json") == 0
    before = json.loads(capsys.readouterr().out)["metrics"]["perplexity"]
    assert 200 < before < 700, "about as many as there are bytes"
    assert run("calib", "--config_file", STATIC, *TEXT_DATA) == 0
    capsys.readouterr()
    assert run("test", *TEXT_DATA, "--json", "--gate", "perplexity_ratio<=1.05") == 0
    metrics = json.loads(capsys.readouterr().out)["metrics"]
    assert metrics["perplexity_float"] == pytest.approx(before, rel=1e-5)
    assert metrics["perplexity_ratio"] == metrics["perplexity"] / metrics["perplexity_float"]
    assert json.loads(Path("quantize_result/report.json").read_text())["metrics"] == metrics
    assert run("test", *TEXT_DATA, "--gate", "perplexity<=100") == 1


def test_a_stride_scores_tokens_with_more_before_them(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = []
    for stride in ((), ("--stride", "4")):
        assert run("float", *TEXT_DATA, *stride, "--json", "--batch_size", "3") == 0
        found.append(json.loads(capsys.readouterr().out)["metrics"]["perplexity"])
    assert found[0] != found[1]
    assert found[0] == pytest.approx(found[1], rel=0.1)


@pytest.mark.parametrize("config", [WEIGHTS_ONLY, DYNAMIC])
def test_what_needs_no_data_is_calibrated_without(
    config: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("calib", "--config_file", config) == 2
    said = capsys.readouterr().err
    assert "Missing option '--data'" in said
    assert "example_input() in the model's file" in said
    (folder / "net.py").write_text(
        NET + "def example_input(): return torch.zeros(1, 16, dtype=torch.long)\n"
    )
    assert run("calib", "--config_file", config) == 0
    assert "quantized without data" in capsys.readouterr().out
    assert run("calib", "--config_file", STATIC) == 2, "this one needs them"
    capsys.readouterr()
    assert run("test", *TEXT_DATA, "--json", "--gate", "perplexity_ratio<=1.05") == 0
    assert "stamp" not in json.loads(capsys.readouterr().out)


def test_random_data_give_the_shape_and_no_stamp(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "dense.py").write_text(
        "import torch\ndef model(): return torch.nn.Linear(3, 2)\n"
    )
    torch.save(torch.ones(2, 3), "x.pt")
    for config, stamped in ((WEIGHTS_ONLY, False), (STATIC, True)):
        assert (
            run("calib", "--config_file", config, "--data", "random:4x3", model="dense.py") == 0
        )
        capsys.readouterr()
        assert run("test", "--data", "x.pt", "--json", model="dense.py") == 0
        content = json.loads(capsys.readouterr().out)
        assert ("calibration_stamp" in content) == stamped
        assert "stamp" not in content, "the figures are of x.pt"


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (("--data", "text.txt"), 4, "text.txt has 316 tokens, fewer than a window of 512"),
        ((*TEXT_DATA, "--stride", "17"), 2, "--stride must be from 1 to --seq_len, 16, not 17"),
        ((*TEXT_DATA, "--seq_len", "1"), 2, "--seq_len"),
        ((*TEXT_DATA, "--tokenizer", "missing"), 4, "there is no file or folder missing"),
        (
            ("--data", "random:2x3", "--stride", "2"),
            2,
            "--stride is for texts, but the data is not text",
        ),
        (
            ("--data", "random:2x3", "--seq_len", "3"),
            2,
            "--seq_len is for texts, but the data is not text",
        ),
        (
            ("--data", "random:2x3", "--tokenizer", "."),
            2,
            "--tokenizer is for texts, but the data is not text",
        ),
    ],
)
def test_options_that_do_not_go(
    options: tuple[str, ...],
    code: int,
    said: str,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run("float", *options) == code
    assert said in capsys.readouterr().err


@pytest.fixture
def llama(folder: Path) -> str:
    """A tiny LLaMA in bfloat16 with a tied head, saved by transformers, and a tokenizer of
    bytes beside it.
    """
    transformers = pytest.importorskip("transformers", reason="needs quantizer-torch[llm]")
    tokenizers = pytest.importorskip("tokenizers", reason="needs quantizer-torch[llm]")
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "vocab_size": 256,
    }
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 24}
    config = transformers.LlamaConfig(**sizes, **heads, tie_word_embeddings=True)
    transformers.LlamaForCausalLM(config).bfloat16().save_pretrained(folder / "llama")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(
        tokenizers.models.BPE({letter: i for i, letter in enumerate(alphabet)}, [])
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.save(str(folder / "llama" / "tokenizer.json"))
    return "llama"


def test_a_hugging_face_folder(llama: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Without `--seq_len` its windows are as long as its 24 positions; it stays in bfloat16."""
    assert run("calib", "--config_file", DYNAMIC, model=llama) == 0
    assert (
        run("test", "--data", "text.txt", "--gate", "perplexity_ratio<=1.05", model=llama) == 0
    )
    stored = load_file("quantize_result/weights.safetensors")
    dtypes = {tensor.dtype for tensor in stored.values() if tensor.dim() == 2}
    assert dtypes == {torch.int8, torch.bfloat16}, "the head has the weight of the embedding"
    entries = json.loads(Path("quantize_result/quant_info.json").read_text())[
        "tensors"
    ].values()
    assert {
        own["codes"]["dtype"] for roles in entries for own in roles.values() if "codes" in own
    } == {"bfloat16"}
    capsys.readouterr()
    assert run_command(["inspect", "--model", llama, "--json"]) == 0
    said = capsys.readouterr()
    assert "Linear[q_proj]" in said.out
    assert "Loading weights" not in said.err, "no bar of another package in our logs"
    assert run("float", "--data", "text.txt", "--seq_len", "32", model=llama) == 2
    assert "--seq_len 32 is too long: the model has 24 positions" in capsys.readouterr().err


def test_results_hold_for_texts_of_any_length(
    llama: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The check of the model traces it with the calibrated length; without `--seq_len`, that is
    the one that is run.
    """
    assert run("calib", "--config_file", WEIGHTS_ONLY, "--seq_len", "16", model=llama) == 0
    found = []
    for length in ((), ("--seq_len", "16"), ("--seq_len", "24")):
        capsys.readouterr()
        assert run("test", "--data", "text.txt", *length, "--json", model=llama) == 0
        found.append(json.loads(capsys.readouterr().out)["metrics"]["perplexity"])
    assert found[0] == found[1] != found[2]
    weights = load_file(f"{llama}/model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"][0, 0] += 1
    save_file(weights, f"{llama}/model.safetensors", metadata={"format": "pt"})
    assert run("test", "--data", "text.txt", "--seq_len", "24", model=llama) == 5
    assert (
        "the weights are not those that were calibrated: model.layers.0.mlp.up_proj"
        in capsys.readouterr().err
    )


def test_lengths_that_a_calibration_does_not_hold_for(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    branch = (
        "x = self.table(input_ids)\n        return self.head(x.relu() if x.shape[1] > 20 "
        "else "
        "x.tanh())"
    )
    (folder / "branch.py").write_text(
        NET.replace("return self.head(self.table(input_ids).relu())", branch)
    )
    assert run("calib", "--config_file", STATIC, *TEXT_DATA, model="branch.py") == 0
    capsys.readouterr()
    assert run("test", "--data", "text.txt", "--seq_len", "20", model="branch.py") == 0
    assert run("test", "--data", "text.txt", "--seq_len", "24", model="branch.py") == 5
    said = capsys.readouterr().err
    assert (
        "calibrated with inputs of the shape [b, 16]; this run has [b, 24], for which layer "
        "Net::Net/tanh differs" in said
    )
    assert "help: give --seq_len 16" in said


def test_a_scale_for_each_position_fixes_the_length(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = {
        "dtype": "int8",
        "observer_cls": "PerChannelMinMaxObserver",
        "symmetric": True,
        "scale_type": "float",
    }
    spec |= {
        "round_method": "half_even",
        "qscheme": "per_channel",
        "ch_axis": 1,
        "is_dynamic": False,
    }
    config = {
        "global_quant_config": {},
        "layer_quant_config": {"head": {"input_tensors": spec}},
    }
    (folder / "positions.json").write_text(json.dumps(config))
    assert run("calib", "--config_file", "positions.json", *TEXT_DATA) == 0
    assert run("test", "--data", "text.txt") == 0
    assert run("test", "--data", "text.txt", "--seq_len", "24") == 5
    assert (
        "for which input of layer Net::Net/Linear[head]/linear has 24 channels"
        in capsys.readouterr().err
    )


FAMILIES = {
    "gpt2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 24},
    ),
    "bert": (
        "BertForMaskedLM",
        "BertConfig",
        {
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
        },
    ),
    "t5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {
            "d_model": 16,
            "d_kv": 8,
            "d_ff": 32,
            "num_layers": 1,
            "num_heads": 2,
            "decoder_start_token_id": 0,
        },
    ),
}


def saved(name: str, folder: Path) -> str:
    """A folder with an untrained model of the family that takes the tokens of bytes."""
    transformers = pytest.importorskip("transformers", reason="needs quantizer-torch[llm]")
    model, config, sizes = FAMILIES[name]
    torch.manual_seed(0)
    network = getattr(transformers, model)(
        getattr(transformers, config)(vocab_size=256, **sizes)
    )
    network.save_pretrained(folder / name)
    return name


def test_another_family(llama: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """GPT-2 has learned positions, one projection for query, key and value, and weights the
    other way round; its inputs are quantized too.
    """
    model, tokens = (
        saved("gpt2", folder),
        ("--tokenizer", llama, "--data", "text.txt", "--seq_len", "16"),
    )
    assert run("calib", "--config_file", DYNAMIC, model=model) == 0
    capsys.readouterr()
    assert run("test", *tokens, "--gate", "perplexity_ratio<=1.05", "--json", model=model) == 0
    assert json.loads(capsys.readouterr().out)["metrics"]["sqnr_db"] > 30


def test_a_model_of_masked_words_has_no_perplexity(
    llama: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, tokens = (
        saved("bert", folder),
        ("--tokenizer", llama, "--data", "text.txt", "--seq_len", "16"),
    )
    assert run("calib", "--config_file", WEIGHTS_ONLY, model=model) == 0
    capsys.readouterr()
    assert run("test", *tokens, "--json", model=model) == 0, (
        "another length: BERT takes all positions, or some"
    )
    said = capsys.readouterr()
    assert (
        said.err.count(
            "BertForMaskedLM does not predict the next token: there is no perplexity"
        )
        == 1
    )
    metrics = json.loads(said.out)["metrics"]
    assert metrics["sqnr_db"] > 30
    assert "perplexity" not in metrics
    assert run("float", *tokens, model=model) == 2


def test_an_encoder_and_a_decoder_need_more_than_a_text(
    llama: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = saved("t5", folder)
    assert run("calib", "--config_file", WEIGHTS_ONLY, "--seq_len", "16", model=model) == 0
    capsys.readouterr()
    assert run("test", "--tokenizer", llama, "--data", "text.txt", model=model) == 4
    assert "T5ForConditionalGeneration needs two texts" in capsys.readouterr().err


def test_memory_is_that_of_the_batches_read(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    looked = ["plan", "--config_file", WEIGHTS_ONLY, "--model", "net.py", *TEXT_DATA]
    for more, size in (((), 1), (("--batch_size", "4"), 4)):
        assert run_command([*looked, *more]) == 0
        assert f"MB of activations at batch size {size}\n" in capsys.readouterr().out
