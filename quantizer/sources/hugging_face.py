"""Load models from Hugging Face folders with transformers: local safetensors only, and no code
of the folder unless it is trusted.
"""

import importlib
import importlib.util
import logging
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quantizer.config.wording import closest_word, counted, first_names
from quantizer.errors import DataError, ModelError, pip_line
from quantizer.sources.deferred_checkpoint import (
    CHECKPOINT_FILE,
    CHECKPOINT_INDEX,
    deferred_model,
    filled_model,
    indexed_files,
    read_generation_settings,
    require_inside,
    stored_tensors,
)
from quantizer.sources.embedding_modules import embedding_modules
from quantizer.sources.json_files import read_object, require_readable
from quantizer.sources.pretrained import check_config, load_pretrained, model_class
from quantizer.sources.quantized_folders.dequantized_folder import (
    QUANTIZATION_KEYS,
    dequantized_folder,
    quantization_of,
    stored_dtype,
)
from quantizer.sources.quantized_folders.method_settings import MethodSettings
from quantizer.sources.unused_tensors import keep_unused_tensors
from quantizer.sources.user_code import user_errors
from quantizer.sources.windows import longest_window, prepare_for_windows

_logger = logging.getLogger(__name__)

HUGGING_FACE_CONFIG = "config.json"


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
        message = f"{folder} is a Hugging Face model, and transformers is missing"
        raise ModelError(message, help=pip_line("llm"))
    require_readable(folder, ModelError)
    embedding_modules(folder)
    config = read_object(folder / HUGGING_FACE_CONFIG, ModelError)
    remedy = f"transformers.AutoModel.from_pretrained('{folder}') shows where it fails"
    with user_errors(f"transformers, loading {folder},", ModelError, remedy=remedy):
        _require_own_files(folder, config)
        quantization = quantization_of(folder, config)
        architecture = _class_name(config, folder, trust=trust)
        _require_weights(folder, architecture)
        _logger.info("loading %s from %s", architecture, folder)
        if not trust:
            check_config(folder / HUGGING_FACE_CONFIG, config)
            _require_known_type(folder, config)
        if quantization is not None:
            return _load_dequantized(folder, architecture, quantization, trust=trust)
        if not trust:
            deferred = deferred_model(folder, architecture)
            if deferred is not None:
                return prepare_for_windows(deferred)
        module, report = read_checkpoint(
            folder, architecture, trust=trust, ignore_mismatched_sizes=True
        )
        stored = stored_tensors(folder)
    keep_unused_tensors(folder, module, stored, report["unexpected_keys"])
    _require_fit(folder, architecture, report)
    return module


def _load_dequantized(
    folder: Path, architecture: str, quantization: MethodSettings, *, trust: bool
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
    stored = stored_tensors(folder)
    dtype = config.dtype or stored_dtype(stored)
    dequantized = dequantized_folder(folder, quantization, stored, dtype)
    _logger.warning("%s", dequantized.remark)
    if not trust:
        deferred = filled_model(folder, config, architecture, dequantized.tensors)
        if deferred is not None:
            return prepare_for_windows(deferred)
    # It renames and fuses weights, as it does for folders of float models
    module, report = read_checkpoint(
        None,
        model_class(architecture, config, folder, trust=trust),
        config=config,
        state_dict=dequantized.tensors,
        ignore_mismatched_sizes=True,
    )
    read_generation_settings(module, folder)
    vars(module)["name_or_path"] = str(folder)
    loaded_config: Any = module.config
    loaded_config.name_or_path = str(folder)
    _require_fit(folder, architecture, report)
    keep_unused_tensors(folder, module, dequantized.tensors, report["unexpected_keys"])
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
    misshaped: list[str] = []
    for name, stored, expected in sorted(report["mismatched_keys"]):
        misshaped.append(f"{name} {list(stored)} instead of {list(expected)}")
    if misshaped:
        weights = counted(len(misshaped), "weight")
        raise ModelError(
            f"{folder} has {weights} of other shapes than its {HUGGING_FACE_CONFIG} says: "
            f"{first_names(misshaped)}",
            help=f"give the {HUGGING_FACE_CONFIG} that was saved with these weights",
        )
    missing = sorted(report["missing_keys"])
    if missing:
        weights = counted(len(missing), "weight")
        raise ModelError(
            f"{folder} lacks {weights} of {architecture}: {first_names(missing)}",
            help="save the whole model, or name the class that was saved in config.json; "
            "missing weights would be drawn at random",
        )


def _require_weights(folder: Path, architecture: str) -> None:
    """Check that the folder has safetensors files, and that they are whole.

    Raises:
        ModelError: it has none, or one is damaged.
    """
    if stored_tensors(folder):
        return
    shards = sorted(folder.glob("*.safetensors"))
    if shards:
        raise ModelError(
            f"{folder} has {shards[0].name}, but no {CHECKPOINT_FILE}, and no "
            f"{CHECKPOINT_INDEX}, which names the files of a model",
            help="copy or download the whole model",
        )
    pickles = sorted(folder.glob("*.bin"))
    if pickles:
        raise ModelError(
            f"{folder} has its weights in {pickles[0].name}, a pickle, which can run code",
            help=f"if you trust it, transformers.{architecture}.from_pretrained('{folder}')"
            ".save_pretrained('converted') writes a folder with safetensors",
        )
    raise ModelError(
        f"{folder} has no weights: there is no {CHECKPOINT_FILE}",
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
    if kind in known:
        return
    near = closest_word(str(kind), known)
    remedy = "install a newer transformers"
    if near is not None:
        remedy = f"did you mean {near}? Otherwise {remedy}"
    raise ModelError(
        f"{folder / HUGGING_FACE_CONFIG} has the model_type {kind!r}, which transformers "
        f"{transformers.__version__} does not have",
        help=remedy,
    )


def _require_own_files(folder: Path, config: dict[str, Any]) -> None:
    """Check that the folder names no weights outside itself.

    Raises:
        ModelError: it does; the file is named.
    """
    explicit = str(config.get("transformers_weights") or "")
    require_inside(folder / HUGGING_FACE_CONFIG, explicit)
    for name in (CHECKPOINT_INDEX, explicit):
        if name.endswith(".index.json") and (folder / name).exists():
            indexed_files(folder / name)


def _class_name(config: dict[str, Any], folder: Path, *, trust: bool) -> str:
    """Return the name of the class in transformers that builds the model. For code of the
    folder, it is the Auto class that finds it.

    Raises:
        ModelError: there is none, or it is code that is not trusted.
    """
    transformers = importlib.import_module("transformers")
    architectures = config.get("architectures") or ["AutoModel"]
    name = str(architectures[0])
    auto_classes: dict[str, str] = {}
    for auto_class, place in (config.get("auto_map") or {}).items():
        _, _, class_name = str(place).rpartition(".")
        auto_classes[class_name] = auto_class
    if trust and name in auto_classes:
        return auto_classes[name]
    model = getattr(transformers, name, None)
    if isinstance(model, type) and hasattr(model, "from_pretrained"):
        return name
    if name in auto_classes:
        raise ModelError(
            f"{folder} is not loaded: {name} is code in this folder",
            help="read its Python files, and add <--trust> to run them",
        )
    raise ModelError(
        f"{folder / HUGGING_FACE_CONFIG} names a model {name!r}, which this version of "
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
    return prepare_for_windows(module), report


def example_input(module: nn.Module, seq_len: int) -> dict[str, Tensor]:
    """Return one sample of the right shape: token ids 0, 1, 2, … or black pixels.

    Args:
        module: the model.
        seq_len: the number of tokens. It is limited to the positions of the model.

    Raises:
        DataError: the model takes neither tokens nor pixels.
    """
    config: Any = getattr(module, "config", None)
    name = getattr(module, "main_input_name", "input_ids")
    if name == "input_ids" and isinstance(getattr(config, "vocab_size", None), int):
        length = min(seq_len, longest_window(module) or seq_len)
        ids = torch.arange(length)[None] % config.vocab_size
        inputs = {name: ids}
        if config.is_encoder_decoder:
            inputs["decoder_input_ids"] = ids
        return inputs
    size = getattr(config, "image_size", None)
    if name == "pixel_values" and size is not None:
        height, width = (size, size) if isinstance(size, int) else size
        channels = getattr(config, "num_channels", 3)
        dtype = next(module.parameters()).dtype
        return {name: torch.zeros(1, channels, height, width, dtype=dtype)}
    raise DataError(
        f"{type(module).__name__} does not state the shape of its input", help="give <--data>"
    )
