"""The dataclasses say what they cannot take, and say the same as a file of the hierarchical
form.
"""

from __future__ import annotations

import ast
import inspect
import json
import pydoc
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from api.specs import per_token, spec
from torch import nn

import quantizer
from quantizer import (
    AlgoConfig,
    AWQConfig,
    Config,
    DeviceType,
    Dtype,
    GPTAQConfig,
    GPTQConfig,
    PerChannelMinMaxObserver,
    PerTensorMinMaxObserver,
    PerTensorPercentileObserver,
    QronosConfig,
    QSchemeType,
    QuantizationConfig,
    QuantizationSpec,
    RotationConfig,
    SmoothQuantConfig,
)
from quantizer.api.result import Result
from quantizer.config.diagnostics import ConfigError
from quantizer.config.document.document import Document
from quantizer.config.load import check_document, load_config
from quantizer.errors import UsageError
from quantizer.export.targets import CHOICES


def everything() -> Config:
    channels = spec(
        Dtype.int4,
        qscheme=QSchemeType.per_channel,
        observer_cls=PerChannelMinMaxObserver,
        ch_axis=0,
    )
    return Config(
        QuantizationConfig(
            weight=channels, input_tensors=per_token(), target_device=DeviceType.GPU
        ),
        {"Linear": QuantizationConfig(bias=spec(Dtype.int32))},
        {
            "*.fc1": QuantizationConfig(
                output_tensors=spec(observer_cls=PerTensorPercentileObserver, percentage=99.9)
            )
        },
        ["lm_head"],
        [AWQConfig(), GPTQConfig(damp_percent=0.1, block_size=64)],
        [RotationConfig(seed=1), SmoothQuantConfig(alpha=[0.25, 0.5])],
    )


@pytest.mark.parametrize(
    ("make", "message", "help_"),
    [
        (
            lambda: QuantizationSpec("int8"),
            "QuantizationSpec.dtype is 'int8', not a Dtype",
            "write Dtype.int8",
        ),  # type: ignore[arg-type]
        (lambda: spec(bits=4), "QuantizationSpec has no field 'bits'", "its fields are dtype"),
        (
            lambda: spec(symetric=True),
            "QuantizationSpec has no field 'symetric'",
            "did you mean symmetric?",
        ),
        (
            lambda: spec(is_dynamic=1),
            "QuantizationSpec.is_dynamic is 1, not a bool or 'local' or None",
            None,
        ),
        (
            lambda: spec(ch_axis=True),
            "QuantizationSpec.ch_axis is True, not an int or None",
            None,
        ),
        (
            lambda: spec(qscheme="per_tensors"),
            "qscheme is 'per_tensors'",
            "write QSchemeType.per_tensor",
        ),
        (
            lambda: spec(observer_cls=int),
            "observer_cls is <class 'int'>, not a subclass of ObserverBase",
            None,
        ),
        (
            lambda: PerTensorMinMaxObserver(),
            "has to be a class, not an instance",
            "write PerTensorMinMaxObserver, without",
        ),
        (
            lambda: QuantizationConfig(weight=Dtype.int8),
            "QuantizationConfig.weight is Dtype.int8",
            None,
        ),  # type: ignore[arg-type]
        (lambda: Config(spec()), "Config.global_quant_config is a QuantizationSpec", None),  # type: ignore[arg-type]
        (
            lambda: Config(QuantizationConfig(), exclude="fc"),
            "Config.exclude is 'fc', not a list of str",
            None,
        ),  # type: ignore[arg-type]
        (
            lambda: Config(QuantizationConfig(), {"0": spec()}),
            "Config.layer_type_quant_config['0'] is a QuantizationSpec, not a "
            "QuantizationConfig",
            "write QuantizationConfig(…) with it as input_tensors=, output_tensors=, weight=, "
            "bias=",
        ),  # type: ignore[dict-item]
        (
            lambda: Config(QuantizationConfig(), {nn.Linear: QuantizationConfig()}),
            "a key of Config.layer_type_quant_config is <class "
            "'torch.nn.modules.linear.Linear'>, not a str",
            'write "Linear"',
        ),  # type: ignore[dict-item]
        (
            lambda: Config(QuantizationConfig(), algo_config="awq"),
            "Config.algo_config is 'awq'",
            None,
        ),  # type: ignore[arg-type]
        (
            lambda: SmoothQuantConfig(alpha="all"),  # type: ignore[arg-type]
            "SmoothQuantConfig.alpha is 'all', not a float or a list of float or 'auto'",
            None,
        ),
        (
            lambda: GPTQConfig(damp_percnt=0.1),
            "GPTQConfig has no field 'damp_percnt'",
            "did you mean damp_percent?",
        ),  # type: ignore[call-arg]
    ],
)
def test_a_wrong_value_is_told_where_it_is_written(
    make: Any, message: str, help_: str | None
) -> None:
    with pytest.raises(UsageError) as caught:
        make()
    assert message in caught.value.message
    assert (caught.value.help or "").startswith(help_ or "")


def test_a_value_that_was_changed_later_is_checked_too() -> None:
    config = everything()
    config.global_quant_config.weight.dtype = "int4"  # type: ignore[union-attr, assignment]
    with pytest.raises(UsageError, match=r"QuantizationSpec\.dtype is 'int4'"):
        config.to_dict()


def test_a_config_and_its_file_say_the_same(tmp_path: Path) -> None:
    config = everything()
    config.save(tmp_path / "config.json")
    assert Config.load(tmp_path / "config.json") == config
    assert Config.from_dict(config.to_dict()) == config
    assert load_config(tmp_path / "config.json").require().form == "hierarchical"


ALGORITHMS = [
    SmoothQuantConfig(),
    SmoothQuantConfig(
        alpha="auto", scaling_layers=[{"prev_op": "norm", "layers": ["q", "k"], "inp": "q"}]
    ),
    RotationConfig(online=False),
    AWQConfig(clip_search=False, model_decoder_layers="layers", bit=8),
    GPTQConfig(),
    GPTQConfig(inside_layer_modules=["q", "o"], desc_act=False),
    GPTAQConfig(alpha=0.5),
    QronosConfig(alpha=1e-3),
]


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=str)
def test_an_algorithm_and_its_file_say_the_same(algorithm: AlgoConfig, tmp_path: Path) -> None:
    config = Config(QuantizationConfig(weight=spec(Dtype.int4)), algo_config=algorithm)
    config.save(tmp_path / "config.json")
    assert Config.load(tmp_path / "config.json") == Config.from_dict(config.to_dict()) == config
    [found] = load_config(tmp_path / "config.json").require().algorithms
    assert found.name == algorithm.name  # type: ignore[attr-defined]


def test_defaults_of_an_algorithm_are_not_stated() -> None:
    """So a width that the class has by default is no contradiction of the weights'
    specification.
    """
    config = Config(
        QuantizationConfig(weight=spec()), algo_config=[AWQConfig(), GPTQConfig(group_size=64)]
    )
    assert config.to_dict()["algo_config"] == [
        {"name": "awq"},
        {"name": "gptq", "group_size": 64},
    ]
    [told] = check_document(Document.of(config.to_dict(), "Config")).diagnostics
    assert (told.code, str(told.place)) == ("QZ127", "Config.algo_config[1].group_size")


def test_what_is_none_is_not_written() -> None:
    assert Config(QuantizationConfig(weight=QuantizationSpec(Dtype.fp4))).to_dict() == {
        "global_quant_config": {"weight": {"dtype": "fp4"}},
        "layer_type_quant_config": {},
        "layer_quant_config": {},
        "exclude": [],
    }


def test_spellings_of_other_versions_become_ours() -> None:
    document = Config(QuantizationConfig(weight=spec())).to_dict()
    document["layer_type_quant_config"] = {
        "Dense": {"weight": {"dtype": "int4", "dynamic": False}}
    }
    read = Config.from_dict(document)
    assert read.layer_type_quant_config == {
        "Linear": QuantizationConfig(weight=QuantizationSpec(Dtype.int4, is_dynamic=False))
    }


def test_all_findings_of_a_dict_are_told_with_their_places() -> None:
    document = Config(QuantizationConfig(weight=spec())).to_dict()
    document["global_quant_config"]["weight"] |= {"dtype": "int7", "round_method": "up"}
    with pytest.raises(ConfigError) as caught:
        Config.from_dict(document)
    places = {str(found.place) for found in caught.value.diagnostics}
    assert {place.partition(":")[0] for place in places} >= {
        "Config.global_quant_config.weight.dtype",
        "Config.global_quant_config.weight.round_method",
    }


def test_a_layered_file_is_not_a_config_of_dataclasses() -> None:
    with pytest.raises(UsageError, match="layered form"):
        Config.load(Path(__file__).parents[2] / "configs" / "cpu_int8.json")


def test_a_file_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot write"):
        everything().save(tmp_path / "missing" / "config.json")


def test_every_public_name_is_there_and_listed() -> None:
    assert all(getattr(quantizer, name) for name in quantizer.__all__)
    shown = {name for name in dir(quantizer) if not name.startswith("__")}
    assert shown == {*quantizer.__all__, "nn"}
    with pytest.raises(AttributeError, match="no attribute 'Confg'"):
        _ = quantizer.Confg


def test_the_help_of_the_package_is_one_page() -> None:
    """Also after a star import, which takes the same names."""
    page = pydoc.plain(pydoc.render_doc(quantizer))
    assert "result.export(" in page
    assert len(page.rstrip().splitlines()) <= 60


def test_editors_know_the_options_of_targets() -> None:
    """They read the stub, which no run does."""
    stub = ast.parse(Path(quantizer.__file__).with_suffix(".pyi").read_text())
    [options] = [
        node
        for node in stub.body
        if isinstance(node, ast.ClassDef) and node.name == "ExportOptions"
    ]
    names = [node.target.id for node in options.body if isinstance(node, ast.AnnAssign)]
    assert names == list(CHOICES)
    annotation = inspect.signature(Result.export).parameters["options"].annotation
    assert annotation == "Unpack[ExportOptions]"


def test_the_dataclasses_need_no_torch(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(everything().to_dict()))
    names = ", ".join(
        sorted(
            {*quantizer.__all__}
            - {"ModelQuantizer", "Quantized", "calibrate", "load", "quantize"}
        )
    )
    code = (
        f"import sys; from quantizer import {names}; Config.load({str(file)!r}); "
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_attribute_that_is_no_field_is_refused() -> None:
    config = everything()
    with pytest.raises(
        UsageError, match=r"Config has no field 'exclde'\nhelp: did you mean exclude\?"
    ):
        config.exclde = ["fc"]  # type: ignore[attr-defined]
    config.exclude = ["fc"]
    assert config.to_dict()["exclude"] == ["fc"]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Config.from_dict(3), "Config.from_dict got an int, not a dict"),  # type: ignore[arg-type]
        (lambda: Config.from_dict({}), "the document has no global_quant_config"),
        (lambda: everything().save(3), "path is an int, not a path"),  # type: ignore[arg-type]
        (lambda: Config.load(3), "path is an int, not a path"),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_document_and_no_path_is_told(call: Any, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        call()
    assert caught.value.message.startswith(message)
    assert caught.value.help
