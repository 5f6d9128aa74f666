"""ModelQuantizer with algorithms: what they find is written back into modules, and saved with
them.
"""

from __future__ import annotations

import copy
import itertools
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from api.specs import same, spec
from support.extended import extended
from torch import Tensor, nn

from quantizer import (
    AWQConfig,
    Config,
    Dtype,
    GPTQConfig,
    ModelQuantizer,
    PerChannelMinMaxObserver,
    QSchemeType,
    QuantizationConfig,
    RotationConfig,
    SmoothQuantConfig,
)
from quantizer.config.diagnostics import ConfigError
from quantizer.errors import DataError, ModelError, ResultError


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SmoothQuantConfig, "run", "support.stand_ins:doubled")
    monkeypatch.setattr(GPTQConfig, "run", "support.stand_ins:coarse")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Blocks, a convolution behind them, a head whose weight is the embedding's, and a layer
    that is called twice.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.conv = nn.Conv1d(16, 16, 3, padding=1)
        self.twice = nn.Linear(16, 16)
        self.head = nn.Linear(16, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        x = self.conv(x.mT).mT
        return self.head(self.twice(self.twice(x)))


IDS = [
    torch.randint(0, 11, (4, 7), generator=torch.Generator().manual_seed(seed))
    for seed in range(3)
]


def net() -> Net:
    torch.manual_seed(0)
    return Net().eval()


WEIGHT = spec(
    Dtype.int4,
    qscheme=QSchemeType.per_channel,
    observer_cls=PerChannelMinMaxObserver,
    ch_axis=0,
)


def config(*algorithms: Any, **tensors: Any) -> Config:
    """4-bit weights with a scale per channel, unless `tensors` says something else; the
    embedding stays float.
    """
    pre = [each for each in algorithms if isinstance(each, SmoothQuantConfig)]
    rounding = [each for each in algorithms if each not in pre]
    return Config(
        QuantizationConfig(**({"weight": WEIGHT} | tensors)),
        exclude=["embed"],
        algo_config=rounding or None,
        pre_quant_opt_config=pre or None,
    )


def state(model: nn.Module) -> dict[str, Any]:
    """All that a failed call must not have changed."""
    return {
        "classes": {path: type(module) for path, module in model.named_modules()},
        "objects": {
            path: id(value) for path, value in model.named_parameters(remove_duplicate=False)
        },
        "values": {path: value.clone() for path, value in model.state_dict().items()},
        "training": {path: module.training for path, module in model.named_modules()},
    }


def equal(a: Any, b: Any) -> bool:
    """Of two states, or of two parts of them."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    return same(a, b) if isinstance(a, Tensor) else bool(a == b)


def largest_difference(found: Tensor, expected: Tensor) -> float:
    """As a share of the largest value."""
    return float((found - expected).detach().abs().max() / expected.detach().abs().max())


@pytest.mark.usefixtures("stand_in")
def test_rescaling_keeps_the_function_and_is_saved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """By powers of two, so 16-bit weights round alike; norms, columns, explicit factors and a
    broken tie.
    """
    model, fine = net(), spec(Dtype.int16)
    expected = model(IDS[0])
    with caplog.at_level(logging.INFO, "quantizer"):
        ModelQuantizer(config(SmoothQuantConfig(), weight=fine)).quantize_model(model, IDS)
    found = model(IDS[0])
    assert largest_difference(found, expected) < 1e-3
    float_model = net()
    assert not torch.equal(model.blocks[0].norm.weight, float_model.blocks[0].norm.weight)
    assert model.blocks[0].down.get_parameter("input_layers.0.weight").tolist()[:3] == [
        0.5,
        1,
        2,
    ]
    assert model.head.weight is not model.embed.weight
    assert same(model.embed.weight, float_model.embed.weight)
    assert "input_layers" not in model.twice._modules
    said = caplog.text
    assert "runs more than once, so smoothquant leaves it as it is" in said
    assert "head.weight is no longer tied" in said
    assert "smoothquant: 11 layers rescaled, 5 layers inserted" in said
    ModelQuantizer.save(model, tmp_path)
    assert same(ModelQuantizer.load(net(), tmp_path)(IDS[0]), found)
    assert same(copy.deepcopy(model)(IDS[0]), found)


@pytest.mark.usefixtures("stand_in")
def test_static_inputs_are_observed_behind_the_factors() -> None:
    model = net()
    plain = ModelQuantizer(
        config(weight=spec(Dtype.int16), input_tensors=spec())
    ).quantize_model(net(), IDS)
    ModelQuantizer(
        config(SmoothQuantConfig(), weight=spec(Dtype.int16), input_tensors=spec())
    ).quantize_model(model, IDS)
    scales = [each.blocks[0].down.quantizers["input"].scale for each in (plain, model)]
    assert scales[0] != scales[1]
    seen: list[Tensor] = []
    model.blocks[0].down.quantizers["input"].register_forward_pre_hook(
        lambda _, args: seen.append(args[0].detach())
    )
    for ids in IDS:
        model(ids)
    largest = max(float(x.abs().max()) for x in seen)
    # The layers before are float there
    assert largest == pytest.approx(127 * float(scales[1]), rel=0.05)


@pytest.mark.usefixtures("stand_in")
def test_rounded_weights_have_the_scales_that_were_found() -> None:
    plain, model = net(), net()
    ModelQuantizer(config()).quantize_model(plain)
    ModelQuantizer(config(GPTQConfig())).quantize_model(model, (batch for batch in IDS))
    for path in ("blocks.0.up", "blocks.2.down", "conv", "head"):
        one, other = plain.get_submodule(path), model.get_submodule(path)
        assert torch.allclose(
            other.quantizers["weights"].scale, 2 * one.quantizers["weights"].scale
        ), path
        assert torch.equal(other.quantizers["weights"](other.weight), other.weight)
        assert not torch.equal(one.weight, other.weight)
    assert torch.equal(plain.twice.weight, model.twice.weight)


def test_gptq_is_better_than_plain_rounding() -> None:
    expected = net()(IDS[0])
    data = [
        torch.randint(0, 11, (4, 32), generator=torch.Generator().manual_seed(seed))
        for seed in range(4)
    ]
    error = {}
    for name, algorithms in {"plain": [], "gptq": [GPTQConfig()]}.items():
        model = ModelQuantizer(config(*algorithms)).quantize_model(net(), data)
        error[name] = float((model(IDS[0]) - expected).detach().square().mean())
    assert error["gptq"] < 0.7 * error["plain"]


def skewed() -> Net:
    """Some channels behind the norms are much larger than others, as in trained language
    models.
    """
    model = net()
    for block in model.blocks:
        block.norm.weight.data[[2, 7]] *= 30
    return model


COMPOSED: dict[str, tuple[list[Any], float]] = {
    "SmoothQuant, then GPTQ": ([SmoothQuantConfig(alpha=0.5), GPTQConfig()], 0.5),
    "AWQ": ([AWQConfig()], 0.8),
    "AWQ, then GPTQ": ([AWQConfig(), GPTQConfig()], 0.5),
}


@pytest.mark.parametrize("name", COMPOSED)
def test_algorithms_go_together_and_with_quantized_inputs(name: str) -> None:
    """4-bit weights and static 8-bit inputs; the inputs' scales are found behind the
    factors.
    """
    algorithms, least = COMPOSED[name]
    data = [
        torch.randint(0, 11, (4, 32), generator=torch.Generator().manual_seed(seed))
        for seed in range(4)
    ]
    expected, models = skewed()(IDS[0]), {}
    for kind, those in {"plain": [], "composed": algorithms}.items():
        models[kind] = ModelQuantizer(config(*those, input_tensors=spec())).quantize_model(
            skewed(), data
        )
    plain, composed = (
        float((model(IDS[0]) - expected).detach().square().mean()) for model in models.values()
    )
    assert composed < least * plain
    for block in models["composed"].blocks:
        assert set(block.up.quantizers) == {"weights", "input"}
        assert torch.equal(block.up.quantizers["weights"](block.up.weight), block.up.weight)
    ups = [model.blocks[0].up.quantizers["input"].scale for model in models.values()]
    assert float(ups[1]) < float(ups[0])


class Broken(nn.Module):
    """The third batch is NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.log(self.first(x)).relu())


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) if x.sum() > 0 else x


@pytest.mark.parametrize(
    ("model", "data", "error", "text"),
    [
        (net, None, DataError, "no dataloader, but gptq needs activations of the data"),
        (net, [], DataError, "gave no batches"),
        (
            net,
            [IDS[0], torch.zeros(2, 5, 1, dtype=torch.int64)],
            DataError,
            "batch 1: .*expected",
        ),
        (Broken, [torch.randn(4, 4)], DataError, "Linear\\[second\\]/linear has .* NaN"),
        (
            Branching,
            [torch.randn(4, 4)],
            ModelError,
            "algorithms, which work on a trace of the model",
        ),
    ],
    ids=["no data", "empty", "another shape", "NaN", "not traceable"],
)
def test_a_failure_leaves_the_model_as_it_was(
    model: Any, data: Any, error: type[Exception], text: str
) -> None:
    torch.manual_seed(0)
    built = model().train()
    before = state(built)
    wanted = (
        config(GPTQConfig())
        if model is net
        else Config(QuantizationConfig(weight=WEIGHT), algo_config=[GPTQConfig()])
    )
    with pytest.raises(error, match=text):
        ModelQuantizer(wanted).quantize_model(built, data)
    assert equal(state(built), before)


@pytest.mark.parametrize(
    ("algorithms", "tensors", "why", "remedy"),
    [
        (
            [RotationConfig()],
            {},
            "rotation traces the model, which runs it on one batch",
            " one batch",
        ),
        (
            [RotationConfig(), GPTQConfig()],
            {},
            "gptq needs activations of the data",
            " some batches",
        ),
        (
            [RotationConfig()],
            {"input_tensors": spec()},
            "the input of .* has a static scale",
            " some batches",
        ),
        (
            [],
            {"input_tensors": spec()},
            "the input of .* has a static scale",
            ", or set is_dynamic=True",
        ),
    ],
)
def test_what_data_would_be_for_is_said(
    algorithms: list[Any], tensors: dict[str, Any], why: str, remedy: str
) -> None:
    with pytest.raises(DataError, match=f"^no dataloader, but {why}") as refused:
        ModelQuantizer(config(*algorithms, **tensors)).quantize_model(net())
    assert str(refused.value.help).endswith(remedy)


def test_a_rotation_alone_needs_one_batch() -> None:
    torch.manual_seed(0)
    model, x = (
        nn.Sequential(nn.Linear(8, 16), nn.RMSNorm(16), nn.Linear(16, 4)),
        torch.randn(5, 8),
    )
    before, expected = model[2].weight.detach().clone(), model(x).detach()
    wanted = Config(
        QuantizationConfig(weight=spec(Dtype.int16)), algo_config=[RotationConfig()]
    )
    ModelQuantizer(wanted).quantize_model(model, itertools.chain([x], unread()))
    assert not torch.allclose(model[2].weight, before, atol=0.01)
    assert torch.allclose(model(x), expected, atol=1e-3)


def biased() -> nn.Sequential:
    """A norm with a bias, read by a layer without one."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4, bias=False)
    ).eval()
    nn.init.normal_(model[1].bias)
    return model


def test_layers_get_the_biases_that_algorithms_move_to_them(tmp_path: Path) -> None:
    model, x = biased(), torch.randn(5, 8)
    expected = model(x).detach()
    wanted = Config(
        QuantizationConfig(weight=spec(Dtype.int16)), algo_config=[RotationConfig()]
    )
    ModelQuantizer(wanted).quantize_model(model, [x])
    assert model[2].bias is not None and not model[1].bias.any()
    assert torch.allclose(model(x), expected, atol=1e-3)
    ModelQuantizer.save(model, tmp_path)
    loaded = ModelQuantizer.load(biased(), tmp_path)
    assert same(loaded(x), model(x))
    ModelQuantizer.save(loaded, tmp_path / "again")
    assert same(ModelQuantizer.load(biased(), tmp_path / "again")(x), model(x))
    with_bias = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4))
    assert same(ModelQuantizer.load(with_bias, tmp_path)(x), model(x))
    other = nn.Sequential(nn.Linear(8, 16), nn.Identity(), nn.Linear(16, 4, bias=False))
    with pytest.raises(ResultError, match=r"1\.bias is \[16\] in the file and not in"):
        ModelQuantizer.load(other, tmp_path)


@pytest.mark.parametrize("dtype", [Dtype.int8, Dtype.int4])
def test_a_bias_that_was_added_may_be_quantized(dtype: Dtype, tmp_path: Path) -> None:
    model, x = biased(), torch.randn(5, 8)
    wanted = Config(
        QuantizationConfig(weight=spec(), bias=spec(dtype)), algo_config=[RotationConfig()]
    )
    ModelQuantizer(wanted).quantize_model(model, [x])
    ModelQuantizer.save(model, tmp_path)
    assert same(ModelQuantizer.load(biased(), tmp_path)(x), model(x))


def test_a_bias_that_was_added_is_taken_away_by_a_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = biased()
    before = state(model)
    monkeypatch.setattr("quantizer.calibration.module_target.attach_solution", lambda *_: 1 / 0)
    wanted = Config(
        QuantizationConfig(weight=spec(Dtype.int16)), algo_config=[RotationConfig()]
    )
    with pytest.raises(ZeroDivisionError):
        ModelQuantizer(wanted).quantize_model(model, [torch.randn(5, 8)])
    assert model[2].bias is None and equal(state(model), before)


def unread() -> Iterator[Tensor]:
    """Batches that nobody is to ask for."""
    raise AssertionError("read")
    yield


@pytest.mark.parametrize("algorithm", [GPTQConfig, AWQConfig, SmoothQuantConfig])
def test_names_are_checked_before_data_are_read(algorithm: Any) -> None:
    """But for the batch that the model is traced with."""
    model = net()
    before = state(model)
    wanted = config(algorithm(model_decoder_layers="block", embedding_layers=["embd"]))
    with pytest.raises(ConfigError) as refused:
        ModelQuantizer(wanted).quantize_model(model, itertools.chain(IDS[:1], unread()))
    assert {found.message for found in refused.value.diagnostics} == {
        "there is no module 'block'",
        "there is no module 'embd'",
    }
    assert {found.help for found in refused.value.diagnostics} == {
        "did you mean blocks?",
        "did you mean embed?",
    }
    assert equal(state(model), before)


@pytest.mark.usefixtures("stand_in")
def test_a_failure_after_the_algorithms_undoes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    model = net()
    before = state(model)
    monkeypatch.setattr("quantizer.calibration.module_target.attach_solution", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        ModelQuantizer(config(SmoothQuantConfig(), GPTQConfig())).quantize_model(model, IDS)
    assert equal(state(model), before)


@pytest.mark.slow
@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("family", ["Llama", *extended("OPT", "GPT2")])
def test_language_models_of_transformers(family: str, tmp_path: Path) -> None:
    """GPT-2's weights are written back transposed; the cache of keys is there for
    generate().
    """
    pytest.importorskip("transformers")
    from api import test_transformers

    ids, built = test_transformers.IDS, test_transformers.built

    expected = built(family, torch.float32)(ids).logits
    model = built(family, torch.float32)
    wanted = Config(
        QuantizationConfig(weight=spec(Dtype.int16)), pre_quant_opt_config=[SmoothQuantConfig()]
    )
    ModelQuantizer(wanted).quantize_model(model, [{"input_ids": ids}])
    found = model(ids).logits
    assert largest_difference(found, expected) < 2e-3
    assert model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=1).shape[0] == 2
    assert model.config.use_cache
    ModelQuantizer.save(model, tmp_path)
    assert same(ModelQuantizer.load(built(family, torch.float32), tmp_path)(ids).logits, found)
    coarse, plain = (built(family, torch.float32) for _ in range(2))
    ModelQuantizer(
        Config(QuantizationConfig(weight=WEIGHT), algo_config=[GPTQConfig()])
    ).quantize_model(coarse, [{"input_ids": ids}])
    ModelQuantizer(Config(QuantizationConfig(weight=WEIGHT))).quantize_model(plain)
    for (path, one), (_, other) in zip(
        plain.named_modules(), coarse.named_modules(), strict=True
    ):
        if type(one).__name__ in ("Linear", "Conv1D"):
            scales = one.quantizers["weights"].scale, other.quantizers["weights"].scale
            assert torch.allclose(2 * scales[0], scales[1]), path
