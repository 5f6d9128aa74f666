"""ModelQuantizer: in place, nothing else changes; the plan is the one that a trace of the model
gets.
"""

from __future__ import annotations

import copy
import json
import logging
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from api.specs import TinyLM, per_token, quantized, same, spec, tiny_lm, tokens
from support.configs import document
from support.extended import extended
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from quantizer import (
    CLEConfig,
    Config,
    DeviceType,
    Dtype,
    ModelQuantizer,
    PerChannelMinMaxObserver,
    PerGroupMinMaxObserver,
    PerTensorMSEObserver,
    PerTensorPercentileObserver,
    QSchemeType,
    QuantizationConfig,
    QuantizationSpec,
    RoundType,
    ScaleType,
)
from quantizer.calibration import observing
from quantizer.calibration.changed_modules import put
from quantizer.calibration.solution import quantized_network
from quantizer.config.diagnostics import ConfigError
from quantizer.config.document.document import Document
from quantizer.config.load import check_document
from quantizer.errors import DataError, ModelError, UsageError
from quantizer.graph.passes import run_passes
from quantizer.graph.tracing.trace import trace
from quantizer.nn import Layer
from quantizer.plan.resolve import resolve_plan

X = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).eval()


def group(size: int) -> QuantizationSpec:
    return spec(
        Dtype.int4,
        qscheme=QSchemeType.per_group,
        observer_cls=PerGroupMinMaxObserver,
        ch_axis=1,
        group_size=size,
    )


def snapshot(model: nn.Module) -> dict[str, Any]:
    """All that a failed call must not have changed."""
    return {
        "classes": [type(module) for module in model.modules()],
        "modes": [module.training for module in model.modules()],
        "hooks": [
            (len(module._forward_hooks), len(module._forward_pre_hooks))
            for module in model.modules()
        ],
        "state": {
            name: (value.data_ptr(), value.clone())
            for name, value in model.state_dict().items()
        },
    }


def equal(before: dict[str, Any], after: dict[str, Any]) -> bool:
    keys = before["state"].keys() == after["state"].keys()
    values = all(
        pointer == after["state"][name][0]
        and torch.equal(value.nan_to_num(), after["state"][name][1].nan_to_num())
        for name, (pointer, value) in before["state"].items()
    )
    return (
        keys
        and values
        and all(before[key] == after[key] for key in ("classes", "modes", "hooks"))
    )


def test_it_is_the_same_object_with_the_same_methods() -> None:
    model = tiny_lm()
    expected = model.generate(tokens(), 3)
    assert quantized(model, weight=spec()) is model
    assert type(model) is TinyLM
    assert isinstance(model.fc1, nn.Linear)
    assert isinstance(model.fc1, Layer)
    assert model.generate(tokens(), 3).shape == expected.shape


def test_weights_have_the_golden_values() -> None:
    layer = nn.Linear(3, 1, bias=False)
    layer.weight.data = torch.tensor([[1.27, -0.634, 0.006]])
    quantized(layer, weight=spec())
    torch.testing.assert_close(layer.weight.data, torch.tensor([[1.27, -0.63, 0.01]]))


def test_a_trace_of_the_model_with_the_same_config_computes_the_same() -> None:
    levels = QuantizationConfig(weight=spec(), input_tensors=per_token())
    config = check_document(Document.of(Config(levels).to_dict(), "Config")).require()
    graph = trace(tiny_lm(), (tokens(),))
    plan = resolve_plan(config, run_passes(graph, config.settings), graph)
    network = quantized_network(
        plan.graph, observing.observed_solution(observing.create_observers(plan))
    )
    in_place = quantized(tiny_lm(), weight=spec(), input_tensors=per_token())
    assert same(network(tokens()), in_place(tokens()))


def test_none_inherits_from_the_wider_level() -> None:
    int4, int16 = spec(Dtype.int4), spec(Dtype.int16)
    config = Config(
        QuantizationConfig(weight=spec(), input_tensors=per_token()),
        {"Linear": QuantizationConfig(bias=int16)},
        {"2": QuantizationConfig(weight=int4)},
    )
    model = ModelQuantizer(config).quantize_model(mlp())
    bits = [
        {role: q.spec.bit_width for role, q in model[at].quantizers.items()} for at in (0, 2)
    ]
    assert bits == [
        {"weights": 8, "bias": 16, "input": 8},
        {"weights": 4, "bias": 16, "input": 8},
    ]


def test_fields_of_a_spec_inherit_too() -> None:
    only_dtype = QuantizationSpec(Dtype.int4)
    config = Config(
        QuantizationConfig(
            weight=spec(round_method=RoundType.floor, scale_type=ScaleType.pof2)
        ),
        layer_quant_config={"0": QuantizationConfig(weight=only_dtype)},
    )
    found = ModelQuantizer(config).quantize_model(mlp())[0].quantizers["weights"].spec
    assert (found.bit_width, found.round_mode, found.scale_type) == (4, "floor", "poweroftwo")


def test_excluded_layers_stay_what_they_were() -> None:
    model = quantized(mlp(), exclude=("2",), weight=spec())
    assert type(model[2]) is nn.Linear
    assert same(model[2].weight.data, mlp()[2].weight.data)


def test_shared_specs_and_the_config_are_not_changed() -> None:
    shared = spec()
    config = Config(
        QuantizationConfig(weight=shared, bias=shared, input_tensors=shared), exclude=["2"]
    )
    before = copy.deepcopy(config)
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8), nn.Linear(8, 8))
    ModelQuantizer(config).quantize_model(model, [X])
    assert config == before
    # The layer without a bias took it from nobody
    assert set(model[1].quantizers) == {"weights", "bias", "input"}


class Scaled(nn.Linear):
    """A subclass with a forward of its own."""

    def forward(self, input: Tensor, factor: float = 1.0) -> Tensor:  # noqa: A002 - as torch.nn names it
        return super().forward(input) * factor


@pytest.mark.parametrize(
    ("make", "x"),
    [
        (lambda: nn.Linear(8, 4), X),
        (lambda: Scaled(8, 4), X),
        (lambda: nn.Conv1d(8, 4, 1), X[..., None]),
        (lambda: nn.Conv2d(8, 4, 1), X[..., None, None]),
        (lambda: nn.Conv3d(8, 4, 1), X[..., None, None, None]),
        (lambda: nn.ConvTranspose1d(8, 4, 2), X[..., None]),
        (lambda: nn.ConvTranspose2d(8, 4, 2), X[..., None, None]),
        (lambda: nn.ConvTranspose3d(8, 4, 2), X[..., None, None, None]),
        (lambda: nn.LSTM(8, 4), X),
        (lambda: nn.GRU(8, 4), X),
        (lambda: nn.RNN(8, 4, nonlinearity="relu"), X),
    ],
    ids=lambda value: "" if isinstance(value, Tensor) else type(value()).__name__,
)
@pytest.mark.parametrize(
    "input_spec",
    [spec(), spec(is_dynamic=True), per_token()],
    ids=["static", "dynamic", "rows"],
)
def test_a_layer_computes_with_its_quantized_input_and_weights(
    make: Any, x: Tensor, input_spec: Any
) -> None:
    torch.manual_seed(0)
    layer = make().eval()
    reference = copy.deepcopy(layer)
    quantized(layer, [x], weight=spec(), bias=spec(), input_tensors=input_spec)
    for name, parameter in reference.named_parameters():
        assert not torch.equal(parameter.data, layer.get_parameter(name).data)
        parameter.data = layer.get_parameter(name).data
    rounded = layer.quantizers["input"](x)
    assert not torch.equal(rounded, x)
    expected, found = reference(rounded), layer(x)
    assert same(
        *(value[0] if isinstance(value, tuple) else value for value in (found, expected))
    )


class Doubled(nn.Embedding):
    """A subclass with a forward of its own."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - as torch.nn names it
        return 2 * super().forward(input)


@pytest.mark.parametrize("cls", [nn.Embedding, Doubled])
def test_an_embedding_has_quantized_rows(cls: type[nn.Embedding]) -> None:
    torch.manual_seed(0)
    layer, ids = cls(9, 8), torch.arange(9)
    scale = layer.weight.data.abs().amax(1, keepdim=True) / 7.5
    expected, factor = (
        (layer.weight.data / scale).round().clamp(-8, 7) * scale,
        2 if cls is Doubled else 1,
    )
    channels = spec(
        Dtype.int4,
        qscheme=QSchemeType.per_channel,
        observer_cls=PerChannelMinMaxObserver,
        ch_axis=0,
    )
    quantized(layer, weight=channels)
    torch.testing.assert_close(layer(ids).data, factor * expected)
    assert layer.quantizers["weights"].scale.shape == (9,)


def test_strategies_may_differ_by_layer() -> None:
    """Weight-only, static and dynamic in one model; what is float at one place stays so."""
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    levels = {
        "1": QuantizationConfig(input_tensors=spec()),
        "2": QuantizationConfig(input_tensors=per_token()),
    }
    config = Config(QuantizationConfig(weight=spec()), layer_quant_config=levels, exclude=["3"])
    ModelQuantizer(config).quantize_model(model, [X])
    found = [
        {role: q.spec.is_dynamic for role, q in getattr(each, "quantizers", {}).items()}
        for each in model
    ]
    assert found == [
        {"weights": False},
        {"weights": False, "input": False},
        {"weights": False, "input": True},
        {},
    ]


def test_a_weight_only_layer_in_a_dynamic_model_needs_no_data() -> None:
    off = {"2": QuantizationConfig(input_tensors=QuantizationSpec(Dtype.float32))}
    config = Config(
        QuantizationConfig(weight=spec(), input_tensors=per_token()), layer_quant_config=off
    )
    model = ModelQuantizer(config).quantize_model(mlp())
    assert [set(model[at].quantizers) for at in (0, 2)] == [{"weights", "input"}, {"weights"}]


def test_a_call_may_name_its_arguments() -> None:
    layer = quantized(Scaled(8, 4), input_tensors=per_token(), weight=spec())
    assert same(layer(input=X, factor=2.0), layer(X) * 2)


def test_outputs_are_codes_times_a_scale() -> None:
    model = quantized(mlp(), [X], weight=spec(), output_tensors=spec())
    assert len(model[0](X).unique()) <= 255
    assert "activation" in model[2].quantizers


@pytest.mark.parametrize("observer", [PerTensorPercentileObserver, PerTensorMSEObserver])
def test_observers_clip_outliers(observer: type) -> None:
    x = X.clone()
    x[0, 0] = 12.0
    scales = [
        quantized(mlp(), [x], input_tensors=spec(Dtype.int4, **fields), weight=spec())[0]
        .quantizers["input"]
        .scale
        for fields in (
            {},
            {
                "observer_cls": observer,
                "percentage": 90.0 if "Perc" in observer.__name__ else None,
            },
        )
    ]
    assert scales[1] < scales[0]


def test_a_static_range_is_that_of_all_batches() -> None:
    model = quantized(mlp(), X.split(4), input_tensors=spec(), weight=spec())
    assert model[0].quantizers["input"].scale.item() == pytest.approx(
        X.abs().max().item() / 127
    )


def test_rows_do_not_see_their_batch_mates() -> None:
    model = quantized(tiny_lm(), weight=spec(), input_tensors=per_token())
    whole = model(tokens(5))
    assert all(
        torch.allclose(whole[at], model(tokens(5)[at : at + 1])[0], atol=1e-6)
        for at in range(5)
    )
    layer = quantized(mlp(), weight=spec(), input_tensors=per_token())[0]
    assert same(layer.quantizers["input"](X)[3:4], layer.quantizers["input"](X[3:4]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("strategy", ["weight-only", "static", "dynamic"])
def test_the_models_dtype_stays(dtype: torch.dtype, strategy: str) -> None:
    inputs = {
        "weight-only": {},
        "static": {"input_tensors": spec()},
        "dynamic": {"input_tensors": per_token()},
    }
    model = quantized(mlp().to(dtype), [X.to(dtype)], weight=spec(), **inputs[strategy])
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    assert model(X.to(dtype)).dtype == dtype
    assert model[0].quantizers["weights"].scale.dtype == torch.float32


def test_a_scale_stays_float32_when_the_model_is_cast() -> None:
    model = quantized(mlp(), [X], weight=spec(), input_tensors=spec())
    scale = model[0].quantizers["input"].scale.clone()
    assert same(model.half()[0].quantizers["input"].scale, scale)
    assert model(X.half()).dtype == torch.float16


def test_training_mode_and_hooks_are_left_as_they_were() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(), nn.Linear(8, 8)).train()
    model[1].eval()
    seen: list[bool] = []
    model[0].register_forward_hook(lambda module, *_: seen.append(module.training))
    quantized(model, [X], weight=spec(), input_tensors=spec())
    assert [module.training for module in model] == [True, False, True]
    assert seen == [False]
    assert [
        len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model
    ] == [1, 0, 0]


def test_copies_and_pickles_compute_the_same() -> None:
    model = quantized(mlp(), [X], weight=spec(), input_tensors=spec(), output_tensors=spec())
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert same(twin(X), model(X))
        assert isinstance(twin[0], Layer)
        assert twin[0].weight is not model[0].weight


def test_freeze_ends_training_and_changes_no_output() -> None:
    model = quantized(mlp(), [X], weight=spec(), input_tensors=spec())
    before = model(X)
    assert ModelQuantizer.freeze(model) is model
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert same(model(X), before.detach())


@pytest.mark.parametrize(
    "batches",
    [
        [tokens()],
        [(tokens(),)],
        [[tokens(), torch.ones(2, 7)]],
        [{"input_ids": tokens()}],
        [{"input_ids": tokens(), "labels": tokens()}],
        DataLoader(tokens()),
        DataLoader(TensorDataset(tokens()), batch_size=2),
        (batch for batch in [tokens()]),
    ],
    ids=["tensor", "tuple", "list", "dict", "labels", "loader", "dataset", "generator"],
)
def test_batches_come_in_every_form(batches: Any) -> None:
    expected = quantized(tiny_lm(), [tokens()], weight=spec(), input_tensors=spec())
    found = quantized(tiny_lm(), batches, weight=spec(), input_tensors=spec())
    torch.testing.assert_close(found(tokens()), expected(tokens()), rtol=0, atol=1e-6)


class Unread:
    """Data that nobody is to read."""

    def __iter__(self) -> Any:
        raise AssertionError("read")


def test_data_that_are_not_needed_are_not_read() -> None:
    quantized(mlp(), Unread(), weight=spec())
    quantized(mlp(), Unread(), weight=spec(), input_tensors=per_token())


class Tied(nn.Module):
    """Two linear layers and an embedding that hold one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.first, self.second = (
            nn.Embedding(8, 8),
            nn.Linear(8, 8),
            nn.Linear(8, 8),
        )
        self.first.weight = self.second.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.second(self.first(self.embed(ids)))  # type: ignore[no-any-return]


def test_tied_weights_stay_tied_where_all_agree() -> None:
    model = quantized(Tied(), weight=spec())
    assert model.embed.weight is model.first.weight is model.second.weight
    assert torch.equal(
        model.first.quantizers["weights"](model.embed.weight), model.embed.weight
    )


@pytest.mark.parametrize("alone", ["embed", "first"])
def test_a_tied_weight_that_another_layer_keeps_float_becomes_its_own(alone: str) -> None:
    others = tuple({"embed", "first", "second"} - {alone})
    torch.manual_seed(3)
    model = Tied()
    before = model.embed.weight.detach().clone()
    quantized(model, exclude=others, weight=spec(Dtype.int4))
    assert not torch.equal(getattr(model, alone).weight, before)
    for name in others:
        assert torch.equal(getattr(model, name).weight, before)
    assert getattr(model, others[0]).weight is getattr(model, others[1]).weight


class Twice(nn.Module):
    """One layer that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.fc(x * 3))  # type: ignore[no-any-return]


def test_a_layer_that_is_called_twice_has_one_range_for_both() -> None:
    model = quantized(Twice(), [X], weight=spec(), input_tensors=spec())
    assert model.fc.quantizers["input"].scale.item() == pytest.approx(
        X.abs().max().item() * 3 / 127
    )


class Expert(nn.Module):
    """A layer that the data never reach."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.idle = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x) if x.shape[0] != 1 else self.idle(x)  # type: ignore[no-any-return]


def test_a_layer_that_no_batch_reached_is_weight_only_and_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = quantized(Expert(), [X], weight=spec(), input_tensors=spec())
    assert set(model.idle.quantizers) == {"weights"}
    assert set(model.used.quantizers) == {"weights", "input"}
    assert "Linear[idle]/linear was not reached by the calibration data" in caplog.text
    assert model(X[:1]).isfinite().all()


def test_an_encoder_layer_of_torch_does_not_pass_its_quantizers_by(
    caplog: pytest.LogCaptureFixture,
) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    quantized(layer, [X[None]], weight=spec(), input_tensors=spec(Dtype.int2))
    called: list[int] = []
    layer.linear1.quantizers["input"].register_forward_hook(lambda *_: called.append(1))
    with torch.no_grad():
        layer(X[None])
    assert called
    assert "attention and experts read their weights themselves" in caplog.text


def test_a_conv1d_of_transformers_is_a_linear_layer() -> None:
    class Conv1D(nn.Module):
        """Structured as transformers': the weight is [in, out]."""

        def __init__(self, nf: int, nx: int) -> None:
            super().__init__()
            self.nf = nf
            self.weight, self.bias = (
                nn.Parameter(torch.randn(nx, nf)),
                nn.Parameter(torch.zeros(nf)),
            )

        def forward(self, x: Tensor) -> Tensor:
            return torch.addmm(self.bias, x, self.weight)

    torch.manual_seed(0)
    conv, linear = Conv1D(4, 8), nn.Linear(8, 4)
    linear.weight.data = conv.weight.detach().t().clone()
    channels = spec(
        qscheme=QSchemeType.per_channel, observer_cls=PerChannelMinMaxObserver, ch_axis=0
    )
    for layer in (conv, linear):
        quantized(layer, weight=channels)
    assert same(conv.weight.data.t(), linear.weight.data)
    assert conv.quantizers["weights"].scale.shape == (4,)


def test_what_stays_float_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    quantized(nn.Sequential(nn.Linear(8, 8), nn.LSTMCell(8, 8)), weight=spec())
    assert (
        "left float, because there are no quantization rules for them: LSTMCell (1)"
        in caplog.text
    )


def test_a_depthwise_convolution_that_groups_do_not_fit_stays_float(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = quantized(
        nn.Sequential(nn.Conv2d(8, 8, 1, groups=8), nn.Conv2d(8, 8, 1)), weight=group(4)
    )
    assert [bool(getattr(layer, "quantizers", {})) for layer in model] == [False, True]
    assert (
        "left float, as groups of 4 do not divide 1: weights of "
        "Sequential::Sequential/Conv2d[0]" in caplog.text
    )


def test_counts_per_rule_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        quantized(mlp(), weight=spec(), bias=spec(Dtype.int32))
    assert "global_quant_config: 2 layers, 4 tensors set" in caplog.text


def bad_weights() -> nn.Sequential:
    model = mlp()
    model[2].weight.data[1, 2] = torch.nan
    return model


def bad_norm() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).eval()
    model[1].weight.data[3] = torch.nan
    return model


class Counting(nn.Module):
    """Counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.layer(x)


def test_calibration_leaves_the_buffers_that_forward_changes() -> None:
    model = quantized(Counting().eval(), [X, X], input_tensors=spec(), weight=spec())
    assert float(model.calls) == 0
    model(X)
    assert float(model.calls) == 1


@pytest.mark.parametrize(
    ("make", "data", "config", "error", "message"),
    [
        (
            bad_norm,
            None,
            QuantizationConfig(weight=spec()),
            ModelError,
            "NaN or Inf: 1 of 8 values of 1.weight",
        ),
        (
            mlp,
            None,
            QuantizationConfig(weight=spec(), input_tensors=spec()),
            DataError,
            "no dataloader, but the input",
        ),
        (
            mlp,
            [],
            QuantizationConfig(input_tensors=spec()),
            DataError,
            "the dataloader gave no batches\nhelp: give quantize_model a dataloader",
        ),
        (mlp, 5, QuantizationConfig(input_tensors=spec()), DataError, "dataloader is an int"),
        (
            mlp,
            ["x"],
            QuantizationConfig(input_tensors=spec()),
            DataError,
            "batch 0 of the dataloader is a str",
        ),
        (
            mlp,
            [X, X[:, :3]],
            QuantizationConfig(input_tensors=spec()),
            DataError,
            "batch 1: the model cannot run",
        ),
        (
            mlp,
            [X * torch.nan],
            QuantizationConfig(input_tensors=spec()),
            DataError,
            "batch 0 of the dataloader holds NaN",
        ),
        (
            bad_weights,
            None,
            QuantizationConfig(weight=spec()),
            ModelError,
            r"NaN or Inf: 1 of .* values of 2\.weight",
        ),
        (
            bad_weights,
            None,
            QuantizationConfig(weight=QuantizationSpec(Dtype.bfloat16)),
            ModelError,
            r"NaN or Inf: 1 of .* values of 2\.weight",
        ),
        (mlp, None, QuantizationConfig(weight=group(3)), ConfigError, "group"),
        (
            mlp,
            None,
            QuantizationConfig(weight=group(5), target_device=DeviceType.CPU),
            ConfigError,
            "group",
        ),
        (nn.ReLU, None, QuantizationConfig(weight=spec()), ConfigError, "no layer"),
    ],
)
def test_a_call_that_fails_leaves_the_model_as_it_was(
    make: Any, data: Any, config: QuantizationConfig, error: type[Exception], message: str
) -> None:
    model = make().train()
    before = snapshot(model)
    with pytest.raises(error, match=message):
        ModelQuantizer(Config(config)).quantize_model(model, data)
    assert equal(before, snapshot(model))


def test_names_that_match_nothing_are_told_all_at_once() -> None:
    config = Config(
        QuantizationConfig(weight=spec()),
        {"Linaer": QuantizationConfig(weight=spec())},
        {"3": QuantizationConfig(weight=spec())},
        ["fc*"],
    )
    with pytest.raises(ConfigError) as caught:
        ModelQuantizer(config).quantize_model(mlp())
    errors = [found for found in caught.value.diagnostics if found.severity == "error"]
    assert {str(found.place).partition(":")[0] for found in errors} == {
        "Config.layer_type_quant_config.Linaer",
        'Config.layer_quant_config["3"]',
        "Config.exclude[0]",
    }
    assert any("torch.nn.Linear" in (found.help or "") for found in errors)


def test_a_group_size_that_does_not_divide_is_told_for_all_layers_before_data_are_read() -> (
    None
):
    model = mlp()
    before = snapshot(model)
    config = Config(QuantizationConfig(weight=group(3), input_tensors=spec()))
    with pytest.raises(ConfigError) as caught:
        ModelQuantizer(config).quantize_model(model, Unread())
    [error] = [found for found in caught.value.diagnostics if found.severity == "error"]
    assert str(error.place) == "Config.global_quant_config.weight.group_size"
    assert "8 long in weights of Sequential::Sequential/Linear[0]/linear" in error.message
    assert "16 long in weights of Sequential::Sequential/Linear[2]/linear" in error.message
    assert equal(before, snapshot(model))


def test_nan_in_a_dynamic_input_names_the_layer() -> None:
    model = quantized(mlp(), weight=spec(), input_tensors=per_token())
    with pytest.raises(DataError, match="input of 0: "):
        model(X * torch.nan)


def test_a_quantized_model_is_not_quantized_again() -> None:
    model = quantized(mlp(), weight=spec())
    with pytest.raises(ModelError, match="0 is quantized already"):
        quantized(model, weight=spec())


def test_a_replaced_forward_is_refused_where_it_would_pass_a_quantizer_by() -> None:
    model = mlp()
    model[0].forward = nn.Linear(8, 16).forward
    with pytest.raises(ModelError, match="has a forward that replaces that of its class"):
        quantized(model, weight=spec(), input_tensors=per_token())
    quantized(model, weight=spec())


def test_what_is_no_config_or_no_model_is_refused() -> None:
    with pytest.raises(UsageError, match="config is an int, not a config"):
        ModelQuantizer(3)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="model is a Tensor"):
        quantized(X, weight=spec())  # type: ignore[arg-type]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("calls", [1, 3])
def test_what_breaks_off_while_quantizers_are_put_in_is_undone(
    error: type[BaseException], calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Sequential(
        nn.Linear(8, 8), nn.LSTM(8, 4), nn.TransformerEncoderLayer(4, 2, 8)
    ).train()
    lstm, before = model[1], snapshot(model)
    attributes = [sorted(vars(module)) for module in model.modules()]
    left = iter(range(calls))

    def put_until(*args: Any) -> None:
        if next(left, None) is None:
            raise error("in the middle")
        put(*args)

    monkeypatch.setattr("quantizer.calibration.changed_modules.put", put_until)
    with pytest.raises(error):
        quantized(model, weight=spec(), input_tensors=per_token())
    assert equal(before, snapshot(model))
    assert [sorted(vars(module)) for module in model.modules()] == attributes
    assert all(
        one is other for one, other in zip(lstm._flat_weights, lstm.parameters(), strict=True)
    )


class Named(nn.Linear):
    """A layer with attributes of its own."""

    def __init__(self, name: str, value: Any) -> None:
        super().__init__(8, 4)
        setattr(self, name, value)


@pytest.mark.parametrize("name", ["path", "_output", "role"])
def test_attributes_of_a_layers_own_stay(name: str) -> None:
    layer = quantized(
        Named(name, "mine"), [X], weight=spec(), output_tensors=spec(is_dynamic=True)
    )
    layer(X)
    assert getattr(layer, name) == "mine"


@pytest.mark.parametrize("name", ["quantizers", "quantize_output", "attach"])
def test_an_attribute_with_a_name_that_quantized_layers_need_is_refused(name: str) -> None:
    model = nn.Sequential(Named(name, "mine"))
    with pytest.raises(
        ModelError, match=rf"Named\[0\]/linear is a Named with an attribute '{name}' of its own"
    ):
        quantized(model, weight=spec())
    assert getattr(model[0], name) == "mine"


def test_an_embedding_that_rewrites_its_weight_is_refused() -> None:
    table = nn.Embedding(8, 4, max_norm=0.5)
    with pytest.raises(
        ModelError, match=r"has max_norm.*\n.*call it once on torch\.arange"
    ) as caught:
        quantized(nn.Sequential(table), weight=spec())
    assert "Embedding[0]" in caught.value.message
    with torch.no_grad():
        expected = table(torch.arange(8)).clone()
    table.max_norm = None
    assert torch.equal(table(torch.arange(8)), expected)  # what the help says changes no output
    model = quantized(nn.Sequential(table), weight=spec())
    weight = model[0].weight.detach().clone()
    model(torch.arange(8))
    assert torch.equal(model[0].weight, weight)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_and_exported_programs_are_refused() -> None:
    scripted = torch.jit.script(mlp())
    for model, where in ((scripted, "the model"), (nn.Sequential(nn.ReLU(), scripted), "1")):
        with pytest.raises(ModelError, match=rf"^{where} is compiled by torch\.jit"):
            quantized(model, weight=spec())
    with pytest.raises(
        ModelError, match=r"model is an ExportedProgram, not a torch\.nn\.Module"
    ):
        quantized(torch.export.export(mlp(), (X,)), weight=spec())
    quantized(nn.Sequential(torch.jit.script(nn.ReLU()), nn.Linear(8, 8)), weight=spec())


@pytest.mark.parametrize(
    ("compiled", "inputs"),
    [
        *extended((torch.compile, spec())),
        (torch.compile, spec(is_dynamic=True)),
        (torch.compile, per_token()),
        # It sees the same operators
        (torch.export.export, per_token()),
    ],
    ids=["compile static", "compile dynamic", "compile rows", "export rows"],
)
def test_a_quantized_model_is_traced_whole_and_computes_the_same(
    compiled: Any, inputs: Any
) -> None:
    model = quantized(mlp(), [X], weight=spec(), input_tensors=inputs, output_tensors=inputs)
    with torch.no_grad():
        if compiled is torch.compile:
            found = torch.compile(model, backend="eager", fullgraph=True)(X)
        else:
            found = torch.export.export(model, (X,)).module()(X)
        torch.testing.assert_close(found, model(X), rtol=0, atol=1e-6)


def test_weights_that_a_cast_saturates_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    model = mlp()
    model[2].weight.data[0, :3] = torch.tensor([1e6, -7e4, 65504.0])
    quantized(model, weight=QuantizationSpec(Dtype.float16))
    assert model[2].weight[0, :3].tolist() == [65504.0, -65504.0, 65504.0]
    assert (
        "Linear[2]/linear: 2 of 64 values are beyond 65504, the largest of float16"
        in caplog.text
    )
    assert "Linear[0]" not in caplog.text


def test_channels_of_nothing_but_zeros_are_counted_and_stay_zero(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = mlp()
    model[2].weight.data[:3] = 0.0
    quantized(
        model, weight=QuantizationSpec(Dtype.int8, qscheme=QSchemeType.per_channel, ch_axis=0)
    )
    assert (
        "the scale of weights that are all zero is 1, and they stay zero: Sequential::"
        in caplog.text
    )
    assert "Linear[2]/linear (3 of 4 scales)" in caplog.text and "Linear[0]" not in caplog.text
    assert not model[2].weight[:3].any() and model[2].weight[3:].isfinite().all()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"include_cle": True}, "include_cle equalizes neighbouring layers, .* needs a trace"),
        ({"include_bias_corr": True}, "include_bias_corr .* needs a trace"),
        (
            {"quantizable_data_type": ["weights", "activation"]},
            "has activation, values between operators, which needs a trace",
        ),
    ],
)
def test_what_only_a_trace_shows_is_refused_in_place(
    settings: dict[str, Any], said: str, tmp_path: Path
) -> None:
    model, path = mlp(), tmp_path / "config.json"
    before = snapshot(model)
    path.write_text(json.dumps(document(**{"quantizable_data_type": ["weights"]} | settings)))
    with pytest.raises(UsageError, match=said):
        ModelQuantizer(path).quantize_model(model, [X])
    assert equal(before, snapshot(model))


def test_equalization_needs_a_trace_in_the_words_of_the_form() -> None:
    config = Config(QuantizationConfig(weight=spec()), pre_quant_opt_config=[CLEConfig()])
    with pytest.raises(
        UsageError,
        match=r"^cle equalizes neighbouring layers, .*\n.*remove it, or use quantizer\.calibr",
    ):
        ModelQuantizer(config).quantize_model(mlp(), [X])


def test_weights_of_the_layered_form_are_quantized_in_place() -> None:
    content = document(
        quantizable_data_type=["weights"],
        tensor={"weights": {"bit_width": 4, "per_channel": True}},
    )
    model = ModelQuantizer(content).quantize_model(mlp())
    int4 = {
        "qscheme": QSchemeType.per_channel,
        "ch_axis": 0,
        "observer_cls": None,
        "symmetric_scale": "quant_max",
    }
    expected = quantized(mlp(), weight=spec(Dtype.int4, **int4))
    assert torch.equal(model(X), expected(X))
    assert not torch.equal(model(X), mlp()(X))


@pytest.mark.parametrize("observer", [PerTensorPercentileObserver, PerTensorMSEObserver])
def test_how_samples_are_cut_into_batches_does_not_show_in_the_scale(observer: Any) -> None:
    samples = (
        torch.randn(24, 8, generator=torch.Generator().manual_seed(3))
        * torch.arange(1.0, 25)[:, None]
    )
    config = Config(
        QuantizationConfig(weight=spec(), input_tensors=spec(observer_cls=observer))
    )
    scales = {
        ModelQuantizer(config)
        .quantize_model(mlp(), samples.split(size))[0]
        .quantizers["input"]
        .scale.item()
        for size in (1, 5, 24)
    }
    assert len(scales) == 1
