"""How the user's model comes in: `--model` and `--weights` give a module in eval mode. A Python
file is run as code.
"""

import inspect
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from quantizer.config.wording import a_kind
from quantizer.errors import DataError, ModelError
from quantizer.nn.inplace import check_float
from quantizer.sources.batches import Batch
from quantizer.sources.directions import BY_NAME, Directions
from quantizer.sources.hugging_face import CONFIG, example_input, for_windows, load_hugging_face
from quantizer.sources.tokenizer import Encode, as_encode, has_tokenizer, load_tokenizer
from quantizer.sources.user_code import (
    UserModule,
    import_user_module,
    split_spec,
    user_errors,
    user_exits,
)
from quantizer.sources.weights import WEIGHT_SUFFIXES, check_finite, load_weights

logger = logging.getLogger(__name__)

FORMS = (
    "give FILE.py, FILE.py:factory, package.module:factory, an exported .pt2 or a Hugging "
    "Face folder"
)
Measure = Callable[[Callable[..., Any], Iterable[Any]], dict[str, float]]
"""A function that goes through the data with a model, and gives metrics by name."""


@dataclass(frozen=True)
class Evaluate:
    """The user's `evaluate(model, data)`, called as that is.

    Args:
        function: it.
        directions: which of its metrics are better when they are lower, as far as its file
            says.
    """

    function: Measure
    directions: Directions = BY_NAME

    def __call__(self, model: Callable[..., Any], data: Iterable[Any]) -> dict[str, float]:
        """Return the metrics of a model on the data."""
        return self.function(model, data)


@dataclass(frozen=True)
class LoadedModel:
    """A float model ready to be traced, and what its file offers under the conventional names.

    `name` is the class name of `module`. `calibration_data` and `evaluation_data` (by default
    the same) return what `load_batches` takes; `evaluate(model, data)` returns metrics by name,
    of which `directions` says what the file declares. `tokenizer` loads the function from text
    to token ids. `example(seq_len)` is an item as data give it, for its shape alone.
    """

    module: nn.Module
    name: str
    calibration_data: Callable[[], Any] | None = None
    evaluation_data: Callable[[], Any] | None = None
    evaluate: Evaluate | None = None
    directions: Directions = BY_NAME
    tokenizer: Callable[[], Encode] | None = None
    example: Callable[[int], Any] | None = None


def load_model(
    spec: str,
    weights: str | None = None,
    *,
    trust: bool = False,
    max_unpacked: int | None = None,
) -> LoadedModel:
    """The model of `--model`, with the weights of `--weights` if given.

    `spec` is `FILE.py` (its `model()`), `FILE.py:factory`, `package.module:factory`, an
    exported `.pt2` (only with `trust`, as loading one can run code), or a Hugging Face folder
    (whose own Python runs with `trust` alone).

    Raises:
        ModelError: whatever goes wrong.
    """
    path = Path(spec)
    if path.is_dir():
        loaded = _from_folder(path, trust)
    elif path.suffix.lower() in _REFUSED:
        why, remedy = (text.format(path=path) for text in _REFUSED[path.suffix.lower()])
        raise ModelError(why, help=remedy)
    elif path.suffix.lower() == ".pt2":
        module = _from_pt2(path, trust)
        loaded = LoadedModel(module, type(module).__name__)
    else:
        loaded = _from_python(spec)
    check_float(loaded.module, traced=True)
    if weights is not None:
        load_weights(loaded.module, weights, max_unpacked)
    check_finite(loaded.module)
    return loaded


def materialize(module: nn.Module, batch: Batch) -> None:
    """Give lazy layers their shapes by running the first batch; what they draw at random is the
    same in every run.

    Raises:
        ModelError: the module cannot run the batch, or the drawn weights are not finite.
    """
    if not any(is_lazy(tensor) for tensor in (*module.parameters(), *module.buffers())):
        return
    logger.warning(
        "%s has lazy layers: their weights are drawn at random", type(module).__name__
    )
    with (
        torch.random.fork_rng(),
        torch.no_grad(),
        user_errors("running the model on the first batch", ModelError),
    ):
        torch.manual_seed(0)
        module(*batch.args, **batch.kwargs)
    check_finite(module)


def try_first_batch(module: nn.Module, batch: Batch) -> None:
    """Run a model that could not be traced on the batch it was traced with.

    Raises:
        DataError: it cannot run at all, so the batch and the model do not fit.
        ModelError: it would end the process.
    """
    inputs = [
        f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
        for _, tensor in batch.tensors()
    ]
    what = f"running the model on the first batch ({', '.join(inputs)})"
    with (
        torch.random.fork_rng(),
        torch.no_grad(),
        user_errors(what, DataError, ended=ModelError),
    ):
        module(*batch.args, **batch.kwargs)


def load_evaluate(spec: str, beside: Directions = BY_NAME) -> Evaluate:
    """Return the function `evaluate(model, data)` of `--evaluate FILE.py`, or the one that
    `FILE.py:function` names.

    Args:
        spec: the file, or the file and the function.
        beside: what the model's file declares of metrics of which this one declares nothing.

    Raises (also when the function is called): DataError: there is none, it raises, it does not
    return a dict of numbers, or what the file declares of its metrics is no set of names.
    """
    location, name = split_spec(spec)
    user = import_user_module(location, DataError)
    function = _checked_evaluate(user, user.get("evaluate" if name is None else name))
    return Evaluate(function, Directions.declared_by(user).beside(beside))


def _from_python(spec: str) -> LoadedModel:
    location, name = split_spec(spec)
    if name is None and not location.endswith(".py"):
        raise ModelError(f"{spec!r} is neither a file, a folder nor module:factory", help=FORMS)
    user = import_user_module(location, ModelError)
    module = _build(user, "model" if name is None else name)
    with user_errors("eval() of the model", ModelError):
        for_windows(module)
    evaluate, calibration_data = user.find("evaluate"), _data(user, "calibration_data")
    example, tokenizer = _data(user, "example_input"), _data(user, "tokenizer")
    directions = Directions.declared_by(user)
    return LoadedModel(
        module=module,
        name=type(module).__name__,
        calibration_data=calibration_data,
        evaluation_data=_data(user, "evaluation_data") or calibration_data,
        evaluate=Evaluate(_checked_evaluate(user, evaluate), directions)
        if evaluate is not None
        else None,
        directions=directions,
        tokenizer=(lambda: as_encode(tokenizer(), f"tokenizer() of {user.label}"))
        if tokenizer is not None
        else None,
        example=(lambda seq_len: example()) if example is not None else None,
    )


def _build(user: UserModule, name: str) -> nn.Module:
    factory = user.get(name)
    if isinstance(factory, nn.Module):
        return factory
    what = f"{name} of {user.label}"
    if not callable(factory):
        raise ModelError(
            f"{what} is {a_kind(factory)}, not a function that returns a torch.nn.Module"
        )
    if required := _required_parameters(factory):
        remedy = f"give them defaults, or write a function without parameters that calls {name}"
        raise ModelError(f"{what} needs arguments: {', '.join(required)}", help=remedy)
    module = user.call(factory, ModelError)
    if not isinstance(module, nn.Module):
        raise ModelError(f"{what} returned {a_kind(module)}, not a torch.nn.Module")
    return module


def _required_parameters(function: Callable[..., Any]) -> list[str]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (ValueError, TypeError):  # builtins have no signature; calling them will tell
        return []
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind not in variadic]


def _data(user: UserModule, name: str) -> Callable[[], Any] | None:
    source = user.find(name)
    if source is None:
        return None
    return (lambda: user.call(source, DataError)) if callable(source) else (lambda: source)


def _checked_evaluate(user: UserModule, function: Any) -> Measure:
    if not callable(function):
        raise user.error(
            f"evaluate of {user.label} is {a_kind(function)}, not a function of (model, data)"
        )

    def evaluate(model: Callable[..., Any], data: Iterable[Any]) -> dict[str, float]:
        metrics = user.call(function, DataError, model, data)
        try:
            return {str(name): float(value) for name, value in metrics.items()}
        except (AttributeError, TypeError, ValueError) as cause:
            what = f"evaluate() of {user.label} returned {metrics!r:.80}, not a dict of numbers"
            raise DataError(what, help='return for example {"top1": 0.97}') from cause

    return evaluate


def _from_pt2(path: Path, trust: bool) -> nn.Module:
    if not path.is_file():
        raise ModelError(f"there is no file {path}", help=FORMS)
    if not trust:
        raise ModelError(
            f"{path} is not loaded: a .pt2 file can run code when torch.export.load opens it",
            help="add --trust if it is your own, or give the Python that builds the model",
        )
    try:
        # Registers operators that programs may call
        import torch.ao.quantization.fx._decomposed

        with user_exits(f"loading {path}", ModelError):
            return torch.export.load(path).module()
    except ModelError:
        raise
    except Exception as cause:
        raise ModelError(f"{path} cannot be read as an exported program: {cause}") from cause


_WEIGHTS = (
    "{path} holds weights, not a model",
    "give the Python that builds it: --model FILE.py --weights {path}",
)
_REFUSED: Mapping[str, tuple[str, str]] = {
    ".onnx": (
        "{path}: an ONNX graph is not a PyTorch model, and quantizer has no converter",
        "give the PyTorch model it was exported from, or convert it to a torch.nn.Module first",
    ),
    **dict.fromkeys(WEIGHT_SUFFIXES, _WEIGHTS),
}
"""Files that hold no model, by their suffix: why, and what to give instead."""


def _from_folder(folder: Path, trust: bool) -> LoadedModel:
    if not (folder / CONFIG).is_file():
        raise ModelError(
            f"{folder} is a folder without a {CONFIG}, so not a Hugging Face model", help=FORMS
        )
    module = load_hugging_face(folder, trust=trust)
    return LoadedModel(
        module,
        type(module).__name__,
        tokenizer=partial(load_tokenizer, folder, trust=trust)
        if has_tokenizer(folder)
        else None,
        example=partial(example_input, module),
    )
