"""Load models from Hugging Face folders with transformers: local safetensors only, and no code
of the folder unless it is trusted.
"""

import importlib
import importlib.util
import logging
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from quantizer.config.wording import closest_word, counted, first_names
from quantizer.errors import ModelError
from quantizer.sources.arguments import example_input
from quantizer.sources.hugging_face.deferred_checkpoint import (
    CHECKPOINT_INDEX,
    Dequantize,
    dequantizer_of,
    filled_model,
    keep_unused_tensors,
    read_generation_settings,
    stored_dtype,
    stored_tensors,
)
from quantizer.sources.json_files import (
    CHECKPOINT_FILE,
    CONFIG_FILE,
    QUANTIZATION_KEYS,
    embedding_modules,
    load_pretrained,
    read_object,
    require_readable,
)
from quantizer.sources.models import LoadedModel, model_forms
from quantizer.sources.module_state import prepare_for_traces
from quantizer.sources.user_code import user_errors
from quantizer.storage.deferred_tensor import DeferredTensor

_logger = logging.getLogger(__name__)

_KERNELS = ("attn_implementation", "_attn_implementation")
"""Keys of config.json that may name compiled code on the hub, as `OWNER/NAME`."""
_COUNTS: Mapping[str, int] = {
    "layers": 10_000,
    "layer": 10_000,
    "depth": 10_000,
    "blocks": 10_000,
    "experts": 10_000,
    "labels": 1_000_000,
}
"""The most parts that a config may ask for, by the last word of a key. transformers makes them
one by one.
"""
_ADAPTER = "adapter_config.json"
"""The file of a folder that PEFT has written."""
_TRUST_HELP = "read its Python files, and add <--trust> to run them"


def load_model(spec: str, *, trust: bool) -> LoadedModel:
    """Return the model in a folder.

    Args:
        spec: the folder, or the name of a model on the Hugging Face Hub.
        trust: as in `load_hugging_face`.

    Raises:
        ModelError: there is none, or as in `load_hugging_face`.
    """
    folder = Path(spec)
    if not folder.is_dir():
        raise ModelError(
            f"there is no folder {spec}; quantizer downloads nothing",
            help=f"download a model of the Hugging Face Hub first: `hf download {spec} "
            f"--local-dir {folder.name}`, then <--model {folder.name}>",
        )
    if not (folder / CONFIG_FILE).is_file():
        if (folder / _ADAPTER).is_file():
            raise ModelError(
                f"{folder} holds an adapter of PEFT, not a whole model",
                help="merge it into its model first: peft.AutoPeftModelForCausalLM."
                f"from_pretrained('{folder}').merge_and_unload().save_pretrained('merged'), "
                "then <--model merged>",
            )
        raise ModelError(
            f"{folder} is a folder without a {CONFIG_FILE}, so it is not a Hugging Face model",
            help=model_forms(),
        )
    module = load_hugging_face(folder, trust=trust)
    example = partial(example_input, module)
    return LoadedModel(module, tokenizer=folder, example=example)


def load_hugging_face(folder: Path, *, trust: bool = False) -> nn.Module:
    """Return the model that `config.json` names, in eval mode, without a KV cache and in the
    dtype of its checkpoint.

    Args:
        folder: of the model.
        trust: whether Python files of the folder run if `auto_map` in config.json names them.

    Raises:
        ModelError: it cannot be read, lacks weights or needs code that is not trusted, or
            transformers is missing.
    """
    if importlib.util.find_spec("transformers") is None:
        # Only a missing extra needs it
        from quantizer.installation import pip_line

        message = f"{folder} is a Hugging Face model, and transformers is missing"
        raise ModelError(message, help=pip_line("llm"))
    require_readable(folder, ModelError)
    embedding_modules(folder)
    config = read_object(folder / CONFIG_FILE, ModelError)
    remedy = f"transformers.AutoModel.from_pretrained('{folder}') shows where it fails"
    with user_errors(f"transformers, loading {folder},", ModelError, remedy=remedy):
        dequantize = dequantizer_of(folder, config)
        architecture = _class_name(config, folder, trust=trust)
        stored = _stored_weights(folder, architecture)
        _logger.info("loading %s from %s", architecture, folder)
        if not trust:
            _check_config(folder / CONFIG_FILE, config)
            _require_known_type(folder, config)
        if dequantize is not None:
            return _load_dequantized(folder, architecture, stored, dequantize, trust=trust)
        if not trust:
            settings = load_pretrained("AutoConfig", folder)
            is_float = getattr(settings, "quantization_config", None) is None
            deferred = (
                filled_model(folder, settings, architecture, stored) if is_float else None
            )
            if deferred is not None:
                return prepare_for_traces(deferred)
        # It renames, fuses or converts weights where names, shapes or dtypes differ
        module, report = read_checkpoint(
            folder, architecture, trust=trust, ignore_mismatched_sizes=True
        )
    keep_unused_tensors(folder, module, stored, report["unexpected_keys"])
    _require_fit(folder, architecture, report)
    return module


def _load_dequantized(
    folder: Path,
    architecture: str,
    stored: Mapping[str, DeferredTensor],
    dequantize: Dequantize,
    *,
    trust: bool,
) -> nn.Module:
    """Return the model of a quantized folder, with dequantized weights.

    Raises:
        ModelError: the weights cannot be dequantized, or do not fit the model.
    """
    config = load_pretrained("AutoConfig", folder, trust=trust)
    for part in (config, getattr(config, "text_config", None)):
        for key in QUANTIZATION_KEYS:
            if getattr(part, key, None) is not None:
                delattr(part, key)
    dtype = config.dtype or stored_dtype(stored)
    tensors, remark = dequantize(stored, dtype)
    _logger.warning("%s", remark)
    if not trust:
        deferred = filled_model(folder, config, architecture, tensors)
        if deferred is not None:
            return prepare_for_traces(deferred)
    # It renames and fuses weights, as it does for folders of float models
    module, report = read_checkpoint(
        None,
        _model_class(architecture, config, folder, trust=trust),
        config=config,
        state_dict=tensors,
        ignore_mismatched_sizes=True,
    )
    read_generation_settings(module, folder)
    vars(module)["name_or_path"] = str(folder)
    loaded_config: Any = module.config
    loaded_config.name_or_path = str(folder)
    _require_fit(folder, architecture, report)
    keep_unused_tensors(folder, module, tensors, report["unexpected_keys"])
    return module


def _require_fit(folder: Path, architecture: str, report: dict[str, Any]) -> None:
    """Check that the weights of a folder are those of its model.

    Args:
        folder: of the model.
        architecture: the class of the model.
        report: of `read_checkpoint`.

    Raises:
        ModelError: weights are missing, or have other shapes.
    """
    misshaped = [
        f"{name} {list(stored)} instead of {list(expected)}"
        for name, stored, expected in sorted(report["mismatched_keys"])
    ]
    if misshaped:
        weights = counted(len(misshaped), "weight")
        raise ModelError(
            f"{folder} has {weights} of other shapes than its {CONFIG_FILE} says: "
            f"{first_names(misshaped)}",
            help=f"give the {CONFIG_FILE} that was saved with these weights",
        )
    missing = sorted(report["missing_keys"])
    if missing:
        weights = counted(len(missing), "weight")
        raise ModelError(
            f"{folder} lacks {weights} of {architecture}: {first_names(missing)}",
            help="save the whole model, or name the class that was saved in config.json; "
            "missing weights would be drawn at random",
        )


def _stored_weights(folder: Path, architecture: str) -> dict[str, DeferredTensor]:
    """Return the tensors of the folder's safetensors files by name.

    Raises:
        ModelError: it has none, or one is damaged or outside of the folder.
    """
    stored = stored_tensors(folder)
    if stored:
        return stored
    pickles = sorted(folder.glob("*.bin"))
    if pickles:
        raise ModelError(
            f"{folder} has its weights in {pickles[0].name}, a pickle, which can run code",
            help=f"if you trust it, transformers.{architecture}.from_pretrained('{folder}')"
            ".save_pretrained('converted') writes a folder with safetensors",
        )
    raise ModelError(
        f"{folder} has no weights: there is no {CHECKPOINT_FILE}, and no {CHECKPOINT_INDEX} "
        "that names its parts",
        help="copy or download the whole model",
    )


def _require_known_type(folder: Path, config: dict[str, Any]) -> None:
    """Check that transformers knows the kind of the model.

    Raises:
        ModelError: it does not; the closest kind is named.
    """
    transformers = importlib.import_module("transformers")
    known = list(transformers.CONFIG_MAPPING)
    kind = config.get("model_type")
    near = closest_word(str(kind), known)
    remedy = "install a newer transformers"
    if near is not None:
        remedy = f"did you mean {near}? Otherwise {remedy}"
    if kind not in known:
        raise ModelError(
            f"{folder / CONFIG_FILE} has the model_type {kind!r}, which transformers "
            f"{transformers.__version__} does not have",
            help=remedy,
        )


def _class_name(config: dict[str, Any], folder: Path, *, trust: bool) -> str:
    """Return the name of the class in transformers that builds the model. For code of the
    folder, it is the Auto class that finds it.

    Raises:
        ModelError: there is none, or it is code that is not trusted.
    """
    transformers = importlib.import_module("transformers")
    architectures = config.get("architectures") or ["AutoModel"]
    name = str(architectures[0])
    places = config.get("auto_map") or {}
    auto_classes: dict[str, str] = {
        str(place).rpartition(".")[2]: auto_class for auto_class, place in places.items()
    }
    if trust and name in auto_classes:
        return auto_classes[name]
    model = getattr(transformers, name, None)
    if isinstance(model, type) and hasattr(model, "from_pretrained"):
        return name
    if name in auto_classes:
        raise ModelError(
            f"{folder} is not loaded: {name} is code in this folder", help=_TRUST_HELP
        )
    raise ModelError(
        f"{folder / CONFIG_FILE} names a model {name!r}, which this version of "
        "transformers does not have"
    )


def read_checkpoint(
    folder: Path | None, architecture: Any, *, trust: bool = False, **settings: Any
) -> tuple[nn.Module, dict[str, Any]]:
    """Return the model of `from_pretrained` in eval mode, and its report of missing and unused
    keys. Errors are those of transformers.

    Args:
        folder: of the model; None if `settings` have its config and its tensors.
        architecture: the class of the model, or its name in transformers.
        trust: whether code of the folder may run.
        settings: more arguments of `from_pretrained`.
    """
    logs = importlib.import_module("transformers").utils.logging
    # The progress bar would also be written to log files
    logs.disable_progress_bar()
    verbosity = logs.get_verbosity()
    # Its warnings are in the report as well
    logs.set_verbosity_error()
    try:
        module, report = load_pretrained(
            architecture,
            folder,
            trust=trust,
            use_safetensors=True,
            output_loading_info=True,
            **{"dtype": "auto", **settings},
        )
    finally:
        logs.set_verbosity(verbosity)
    return prepare_for_traces(module), report


def _model_class(architecture: str, config: Any, folder: Path, *, trust: bool) -> Any:
    """Return the class of a model; an Auto class stands for the one that it finds.

    Args:
        architecture: its name in transformers.
        config: of transformers.
        folder: of the model.
        trust: whether the class may be code of the folder.

    Raises:
        ModelError: it is code of the folder, which is not trusted.
    """
    model = getattr(importlib.import_module("transformers"), architecture)
    if hasattr(model, "_from_config"):
        return model
    places = getattr(config, "auto_map", None) or {}
    if architecture not in places:
        return model._model_mapping[type(config)]
    if not trust:
        raise ModelError(
            f"{folder} is not loaded: {places[architecture]} is code in this folder",
            help=_TRUST_HELP,
        )
    modules = importlib.import_module("transformers.dynamic_module_utils")
    return modules.get_class_from_dynamic_module(
        places[architecture], folder, local_files_only=True
    )


def _check_config(file: Path, config: Mapping[str, Any], *, has_kernels: bool = False) -> None:
    """Check that a config names no kernel on the hub, and that it asks for no more parts than a
    model has. transformers would download the kernel and run it.

    Args:
        file: the config.json.
        config: its values, or those of a config in it. Each part of a model may have its own.
        has_kernels: whether its values name kernels.

    Raises:
        ModelError: it does; the kernel or the key is named.
    """
    for key, value in config.items():
        names_kernel = has_kernels or key in _KERNELS
        most = _COUNTS.get(key.rpartition("_")[2])
        if isinstance(value, dict):
            _check_config(file, value, has_kernels=names_kernel)
        elif names_kernel and "/" in str(value):
            raise ModelError(
                f"{file} names the kernel {str(value)!r:.200}, which is code on the hub",
                help="remove attn_implementation from it, or add <--trust> to run that code",
            )
        elif most is not None and isinstance(value, int) and value > most:
            raise ModelError(
                f"{file} asks for {key} {value}, more than a model has",
                help="give the config.json that was saved with these weights",
            )
