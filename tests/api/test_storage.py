"""A saved model, loaded into a float one, computes the same to the last bit; weights are stored
as codes.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from api.specs import per_token, quantized, same, spec, tiny_lm, tokens
from safetensors.torch import load_file, save_file
from support.extended import one_of_each
from torch import nn

from quantizer import (
    Config,
    Dtype,
    ModelQuantizer,
    PerChannelMinMaxObserver,
    PerGroupMinMaxObserver,
    QSchemeType,
    QuantizationSpec,
)
from quantizer.errors import ModelError, ResultError, UsageError
from quantizer.export.saved_description import DESCRIPTION, SAVED_TENSORS
from quantizer.storage.opened_files import json_digest

FLOATS = (Dtype.fp8_e4m3, Dtype.fp8_e5m2, Dtype.fp6_e3m2, Dtype.fp6_e2m3, Dtype.fp4)
OF_LLAMA_CPP = (Dtype.q4_k, Dtype.q5_k, Dtype.q6_k, Dtype.iq4_nl)
INTEGERS = tuple(dtype for dtype in Dtype if "int" in dtype.name)
X = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))


def weight(dtype: Dtype) -> QuantizationSpec:
    if dtype in FLOATS:
        return QuantizationSpec(dtype)
    if dtype in (Dtype.mx, Dtype.mx6, Dtype.mx9, Dtype.bfp16):
        element = Dtype.fp4 if dtype is Dtype.mx else None
        return QuantizationSpec(dtype, mx_element_dtype=element, ch_axis=1)
    return (
        spec(dtype, symmetric=not dtype.name.startswith("uint"))
        if dtype in INTEGERS
        else QuantizationSpec(dtype)
    )


FORMATS = [dtype for dtype in Dtype if dtype not in (Dtype.float32, *OF_LLAMA_CPP)]
MODEL_DTYPES = (torch.float32, torch.bfloat16)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "model_dtype"),
    one_of_each([(dtype, model_dtype) for model_dtype in MODEL_DTYPES] for dtype in FORMATS),
    ids=str,
)
def test_every_format_comes_back(
    dtype: Dtype, model_dtype: torch.dtype, tmp_path: Path
) -> None:
    role = "bias" if dtype is Dtype.int32 else "weight"
    model = quantized(tiny_lm().to(model_dtype), **{role: weight(dtype)})
    ModelQuantizer.save(model, tmp_path)
    loaded = ModelQuantizer.load(tiny_lm().to(model_dtype), tmp_path)
    assert same(loaded(tokens()), model(tokens()))
    assert loaded.lm_head.weight is loaded.embed.weight


@pytest.mark.parametrize("dtype", OF_LLAMA_CPP, ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("model_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_formats_of_llama_cpp_come_back(
    dtype: Dtype, model_dtype: torch.dtype, tmp_path: Path
) -> None:
    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(256, 8)).to(model_dtype)

    x = torch.randn(2, 256, generator=torch.Generator().manual_seed(1)).to(model_dtype)
    stored = quantized(model(), weight=QuantizationSpec(dtype, ch_axis=1))
    ModelQuantizer.save(stored, tmp_path)
    loaded = ModelQuantizer.load(model(), tmp_path)
    assert same(loaded(x), stored(x))


def test_weights_are_stored_as_codes(tmp_path: Path) -> None:
    four = spec(
        Dtype.int4,
        qscheme=QSchemeType.per_group,
        observer_cls=PerGroupMinMaxObserver,
        ch_axis=1,
        group_size=4,
    )
    eight = spec(
        qscheme=QSchemeType.per_channel, observer_cls=PerChannelMinMaxObserver, ch_axis=0
    )
    stored = []
    for weights in (four, eight):
        ModelQuantizer.save(
            quantized(nn.Sequential(nn.Linear(8, 3)), weight=weights, bias=spec()), tmp_path
        )
        stored.append(load_file(tmp_path / "model.safetensors"))
    assert [(found["0.weight"].dtype, found["0.weight"].numel()) for found in stored] == [
        (torch.uint8, 12),
        (torch.int8, 24),
    ]
    assert [found["0.quantizers.weights.scale"].shape for found in stored] == [(3, 2), (3,)]
    assert stored[1]["0.bias"].dtype == torch.int8


def test_the_first_of_two_packed_codes_is_in_the_low_half(tmp_path: Path) -> None:
    layer = nn.Linear(2, 1, bias=False)
    layer.weight.data = torch.tensor([[7.0, -3.0]])
    ModelQuantizer.save(quantized(nn.Sequential(layer), weight=spec(Dtype.int4)), tmp_path)
    assert load_file(tmp_path / "model.safetensors")["0.weight"].tolist() == [
        (7 + 8) | (-3 + 8) << 4
    ]


@pytest.mark.slow
def test_activations_and_layers_of_all_kinds_come_back(tmp_path: Path) -> None:
    def model() -> nn.Module:
        torch.manual_seed(0)
        layers = (
            nn.Linear(8, 8),
            nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
            nn.LSTM(8, 4),
        )
        return nn.Sequential(*layers).eval()

    done = quantized(
        model(),
        [X[None]],
        weight=spec(),
        bias=spec(),
        input_tensors=spec(),
        output_tensors=spec(),
    )
    ModelQuantizer.save(done, tmp_path)
    loaded = ModelQuantizer.load(model(), tmp_path)
    assert same(loaded(X[None])[0], done(X[None])[0])
    assert [type(module).__name__ for module in loaded.modules()] == [
        type(m).__name__ for m in done.modules()
    ]


def test_a_model_with_untied_weights_comes_back_untied(tmp_path: Path) -> None:
    model = quantized(
        tiny_lm(), exclude=("lm_head",), weight=spec(Dtype.int4), input_tensors=per_token()
    )
    ModelQuantizer.save(model, tmp_path)
    loaded = ModelQuantizer.load(tiny_lm(), tmp_path)
    assert loaded.lm_head.weight is not loaded.embed.weight
    assert same(loaded(tokens()), model(tokens()))


def test_a_model_without_memory_can_be_filled(tmp_path: Path) -> None:
    model = quantized(tiny_lm(), weight=spec())
    ModelQuantizer.save(model, tmp_path)
    with torch.device("meta"):
        empty = type(model)().eval()
    assert same(ModelQuantizer.load(empty, tmp_path)(tokens()), model(tokens()))


def test_two_saves_are_equal(tmp_path: Path) -> None:
    model = quantized(tiny_lm(), weight=spec())
    for folder in ("a", "b"):
        ModelQuantizer.save(model, tmp_path / folder)
    for name in ("model.safetensors", "quantizer.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_values_that_codes_would_not_give_back_are_stored_as_they_are(tmp_path: Path) -> None:
    model = quantized(nn.Sequential(nn.Linear(8, 3)), weight=spec())
    model[0].weight.data += 1e-3  # trained on, say
    ModelQuantizer.save(model, tmp_path)
    assert load_file(tmp_path / "model.safetensors")["0.weight"].dtype == torch.float32
    assert same(ModelQuantizer.load(nn.Sequential(nn.Linear(8, 3)), tmp_path)(X), model(X))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            nn.Sequential(nn.Linear(8, 4)),
            r"0\.weight is \[3, 8\] in the file and \[4, 8\] in the model",
        ),
        (
            nn.Sequential(nn.Linear(8, 3, bias=False)),
            r"0\.bias is \[3\] in the file and not in the model",
        ),
        (
            nn.Sequential(nn.Linear(8, 3), nn.Linear(3, 3)),
            "1 is not in the file and a Linear in the model",
        ),
    ],
)
def test_another_model_is_refused_and_stays_as_it_was(
    model: nn.Module, message: str, tmp_path: Path
) -> None:
    ModelQuantizer.save(quantized(nn.Sequential(nn.Linear(8, 3)), weight=spec()), tmp_path)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ResultError, match=message):
        ModelQuantizer.load(model, tmp_path)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert type(model[0]) is nn.Linear  # type: ignore[index]


def test_a_float_model_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no quantized layer"):
        ModelQuantizer.save(nn.Linear(2, 2), tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("quantizer.json", "{", "not a readable JSON file"),
        (
            "quantizer.json",
            json.dumps({"format": 5}),
            "has another format than 6, which this version reads\nhelp: quantize the model again",
        ),
        ("model.safetensors", "x", r"model\.safetensors is damaged: checksum mismatch"),
        ("model.safetensors", None, r"model\.safetensors is missing"),
        ("quantizer.json", None, r"quantizer\.json does not exist"),
    ],
)
def test_damaged_files_are_told(
    name: str, content: str | None, message: str, tmp_path: Path
) -> None:
    ModelQuantizer.save(quantized(nn.Sequential(nn.Linear(8, 3)), weight=spec()), tmp_path)
    (tmp_path / name).unlink() if content is None else (tmp_path / name).write_text(content)
    with pytest.raises(ResultError, match=message):
        ModelQuantizer.load(nn.Sequential(nn.Linear(8, 3)), tmp_path)


def rewritten(
    folder: Path, describe: Callable[[Any], object], tensors: Callable[[Any], object] = bool
) -> None:
    """Change the files of a saved model, their checksums too."""
    described, state = (
        json.loads((folder / DESCRIPTION).read_text()),
        load_file(folder / SAVED_TENSORS),
    )
    describe(described)
    tensors(state)
    save_file(state, folder / SAVED_TENSORS)
    digest = hashlib.sha256((folder / SAVED_TENSORS).read_bytes()).hexdigest()
    described["files"][SAVED_TENSORS] = digest
    del described["checksum"]
    sealed = described | {"checksum": json_digest(described)}
    (folder / DESCRIPTION).write_text(json.dumps(sealed))


SCALE = "0.quantizers.weights.scale"
ZERO_POINT = "0.quantizers.weights.zero_point"


def tensors_of(description: Any) -> Any:
    """The entries of the tensors of the only layer."""
    return description["layers"]["0"]["tensors"]


def weights_of(description: Any) -> Any:
    """The entry of its weights."""
    return tensors_of(description)["weights"]


@pytest.mark.parametrize(
    ("describe", "tensors", "message"),
    [
        (lambda d: d.pop("layers"), bool, "'layers'"),
        (lambda d: d.pop("structure"), bool, "'structure'"),
        (
            lambda d: weights_of(d).pop("codes"),
            bool,
            r"0\.weight: it is \[3, 8\] of torch\.int8 in the file and \[3, 8\] of torch\.float32",
        ),
        (lambda d: weights_of(d).update(codes="float99"), bool, "float99"),
        (lambda d: weights_of(d)["spec"].update(dtype="int7"), bool, "no number format 'int7'"),
        (lambda d: weights_of(d)["spec"].update(bits=7), bool, "lacks or has bits"),
        (
            lambda d: tensors_of(d).update(weights_x=weights_of(d)),
            bool,
            "layers/0/tensors/weights_x: the layer has no such tensor",
        ),
        (
            lambda d: d["layers"].update({"9": d["layers"]["0"]}),
            bool,
            "layers/9: there is no such layer",
        ),
        (lambda d: d["ties"].update({"0.weight": "x"}), bool, r"0\.weight: it is missing"),
        (
            lambda d: d["layers"]["0"]["input_layers"].append("InputRotation"),
            lambda t: t.update({"0.input_layers.0.weight": torch.ones(0)}),
            "input_layers.0.weight: expected a finite number for each channel",
        ),
        (bool, lambda t: t.pop(SCALE), "weights: it has no scale"),
        (bool, lambda t: t.update({SCALE: torch.ones(3)}), r"weights: it has \(3,\) scales"),
        (
            bool,
            lambda t: t.update({SCALE: torch.tensor(torch.nan)}),
            "weights: its scale is not finite and positive",
        ),
        (
            bool,
            lambda t: t.update({SCALE: torch.tensor(0.0)}),
            "weights: its scale is not finite and positive",
        ),
        (
            bool,
            lambda t: t.update({ZERO_POINT: torch.tensor(999, dtype=torch.int32)}),
            "weights: its zero point is not between",
        ),
        (bool, lambda t: t.update({"0.weight": torch.ones(3, 8)}), "stored as torch.float32"),
        (
            bool,
            lambda t: t.update({"0.weight": torch.ones(3, 9, dtype=torch.int8)}),
            r"stored as \(3, 8\), not",
        ),
        (bool, lambda t: t.update({"0.bias": torch.full((3,), torch.inf)}), "NaN or infinity"),
        (
            bool,
            lambda t: t.update({"0.bias": torch.zeros(1 << 20)}),
            r"0\.bias: it is \[1048576\]",
        ),
        (bool, lambda t: t.pop("0.bias"), r"0\.bias: it is missing"),
        (bool, lambda t: t.pop("0.weight"), r"0\.weight: it is missing"),
    ],
)
def test_a_state_that_no_save_writes_is_refused(
    describe: Callable[[Any], object],
    tensors: Callable[[Any], object],
    message: str,
    tmp_path: Path,
) -> None:
    ModelQuantizer.save(quantized(nn.Sequential(nn.Linear(8, 3)), weight=spec()), tmp_path)
    rewritten(tmp_path, describe, tensors)
    fresh = nn.Sequential(nn.Linear(8, 3))
    before = fresh[0].weight.detach().clone()
    with pytest.raises(ResultError, match=message) as caught:
        ModelQuantizer.load(fresh, tmp_path)
    assert caught.value.help
    assert type(fresh[0]) is nn.Linear
    assert torch.equal(fresh[0].weight, before)


@pytest.mark.parametrize("name", [SAVED_TENSORS, DESCRIPTION])
def test_a_changed_file_is_told_by_its_checksum(name: str, tmp_path: Path) -> None:
    ModelQuantizer.save(quantized(nn.Sequential(nn.Linear(8, 3)), weight=spec()), tmp_path)
    content = bytearray((tmp_path / name).read_bytes())
    at = -1 if name == SAVED_TENSORS else content.index(b"half_even")
    content[at] ^= 1
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ResultError, match="checksum mismatch") as caught:
        ModelQuantizer.load(nn.Sequential(nn.Linear(8, 3)), tmp_path)
    assert caught.value.help == "save the model again with ModelQuantizer.save"


def shared() -> nn.Sequential:
    """One layer at two places, a shared block with a buffer, and a layer of its own."""
    torch.manual_seed(0)
    layer, block = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    return nn.Sequential(layer, nn.ReLU(), layer, block, block, nn.Linear(8, 4)).eval()


def test_shared_layers_are_stored_once_and_come_back_shared(tmp_path: Path) -> None:
    model = quantized(shared(), [X], weight=spec(), input_tensors=spec())
    ModelQuantizer.save(model, tmp_path)
    loaded = ModelQuantizer.load(shared(), tmp_path)
    assert loaded[0] is loaded[2]
    assert same(loaded(X), model(X))
    assert not any(
        name.startswith(("2.", "4.")) for name in load_file(tmp_path / SAVED_TENSORS)
    )


@pytest.mark.parametrize("alike", [True, False])
def test_layers_that_are_shared_on_one_side_only_are_refused(
    alike: bool, tmp_path: Path
) -> None:
    layer = nn.Linear(8, 8)
    one, two = nn.Sequential(layer, layer), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    saved, other = (one, two) if alike else (two, one)
    ModelQuantizer.save(quantized(saved, weight=spec()), tmp_path)
    texts = ("the same as 0", "a Linear") if alike else ("a Linear", "the same as 0")
    with pytest.raises(
        ResultError, match="1 is {} in the file and {} in the model".format(*texts)
    ):
        ModelQuantizer.load(other, tmp_path)


def test_a_model_that_is_itself_a_layer_comes_back(tmp_path: Path) -> None:
    layer = quantized(nn.Linear(8, 4), [X], weight=spec(Dtype.int4), input_tensors=spec())
    ModelQuantizer.save(layer, tmp_path)
    assert same(ModelQuantizer.load(nn.Linear(8, 4), tmp_path)(X), layer(X))


class Alien(nn.Module):
    """Parameters like a linear layer's, and something else done with them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.zeros(3, 8)), nn.Parameter(torch.zeros(3))


def test_the_state_of_a_layer_of_another_class_is_refused(tmp_path: Path) -> None:
    ModelQuantizer.save(quantized(nn.Sequential(nn.Linear(8, 3)), weight=spec()), tmp_path)
    with pytest.raises(ResultError, match="0 is a Linear in the file and not in the model"):
        ModelQuantizer.load(nn.Sequential(Alien()), tmp_path)


def test_a_quantized_model_is_not_loaded_into(tmp_path: Path) -> None:
    model = quantized(nn.Sequential(nn.Linear(8, 3)), weight=spec())
    ModelQuantizer.save(model, tmp_path)
    with pytest.raises(ModelError, match="0 is quantized already"):
        ModelQuantizer.load(model, tmp_path)


def test_a_module_of_the_users_named_quantizers_is_stored_like_others(tmp_path: Path) -> None:
    def model() -> nn.Module:
        return nn.Sequential(
            OrderedDict(quantizers=nn.Sequential(nn.Linear(8, 8)), head=nn.Linear(8, 3))
        )

    done = quantized(model(), exclude=("quantizers.0",), weight=spec())
    ModelQuantizer.save(done, tmp_path)
    assert same(ModelQuantizer.load(model(), tmp_path)(X), done(X))


@pytest.mark.parametrize("call", [ModelQuantizer.save, ModelQuantizer.load])
def test_what_is_no_folder_or_no_model_is_told(call: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="folder is an int, not a path"):
        call(nn.Linear(2, 2), 3)
    with pytest.raises(ModelError, match="model is an int"):
        call(3, tmp_path)


def test_scales_of_fp8_come_back(tmp_path: Path) -> None:
    """Stated by the dataclass, and by a list of two specifications as newer versions of the
    public tool write it.
    """
    nvfp4 = QuantizationSpec(Dtype.fp4, scale_format="e4m3", ch_axis=1, group_size=4)
    model = quantized(tiny_lm(), weight=nvfp4)
    ModelQuantizer.save(model, tmp_path)
    assert same(ModelQuantizer.load(tiny_lm(), tmp_path)(tokens()), model(tokens()))
    first = {"dtype": "fp4", "qscheme": "per_group", "ch_axis": 1, "group_size": 4}
    second = {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_scale_quant": True}
    config = Config.from_dict({"global_quant_config": {"weight": [first, second]}})
    assert config.global_quant_config.weight == replace(nvfp4, qscheme=QSchemeType.per_group)
    assert same(ModelQuantizer(config).quantize_model(tiny_lm())(tokens()), model(tokens()))


def test_a_bias_for_a_layer_without_weights_is_refused(tmp_path: Path) -> None:
    def built() -> nn.Sequential:
        return nn.Sequential(nn.Linear(8, 3), nn.LayerNorm(3, elementwise_affine=False))

    ModelQuantizer.save(quantized(built(), weight=spec()), tmp_path)
    rewritten(
        tmp_path,
        lambda d: (d["biases"].append("1"), d["structure"].update({"1.bias": "[3]"})),
        lambda t: t.update({"1.bias": torch.ones(3)}),
    )
    with pytest.raises(ResultError, match=r"1\.bias is \[3\] in the file and not in the model"):
        ModelQuantizer.load(built(), tmp_path)


@pytest.mark.parametrize("path", ["1", "2"])
def test_a_layer_before_one_that_has_no_channels_is_refused(path: str, tmp_path: Path) -> None:
    def built() -> nn.Sequential:
        return nn.Sequential(nn.Linear(8, 3), nn.LayerNorm(3), nn.ReLU())

    ModelQuantizer.save(quantized(built(), weight=spec()), tmp_path)
    entry = {"is_rectified": False, "input_layers": ["InputRotation"], "tensors": {}}
    rewritten(
        tmp_path,
        lambda d: d["layers"].update({path: entry}),
        lambda t: t.update({f"{path}.input_layers.0.weight": torch.ones(0)}),
    )
    with pytest.raises(ResultError, match="a finite number for each channel"):
        ModelQuantizer.load(built(), tmp_path)
