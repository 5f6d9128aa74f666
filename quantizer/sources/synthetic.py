"""Make calibration data from the model itself, for `--data synthetic`: inputs from the
statistics of batch norms, or sequences sampled from a language model.
"""

import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from quantizer.config.wording import counted
from quantizer.errors import DataError, UsageError
from quantizer.sources.arguments import arguments_of
from quantizer.sources.batch_norm_inputs import (
    STEPS,
    batch_norm_distance,
    best_scaling,
    match_batch_norms,
    trained_batch_norms,
)
from quantizer.sources.batches import Batch
from quantizer.sources.data import DEFAULT_BATCH_SIZE, SYNTHETIC, Batches, shape_of_spec
from quantizer.sources.sampled_tokens import first_tokens, sample_tokens, vocabulary_of
from quantizer.sources.user_data import call_once_if_list
from quantizer.sources.windows import longest_window

_logger = logging.getLogger(__name__)

STAMP = "synthetic data, made from the model itself"
"""What reports say of these data."""
DEFAULT_SAMPLES = 32
DEFAULT_SEQUENCES = 8
_NO_SHAPE = (
    "add example_input() to the model's file, or give the shape, for example "
    f"--data {SYNTHETIC}:{DEFAULT_SAMPLES}x3x224x224, or {SYNTHETIC}:{DEFAULT_SEQUENCES}x512 "
    "for a language model"
)


@dataclass(frozen=True)
class Wanted:
    """How much synthetic data to make.

    Args:
        samples: how many; by default 32 inputs or 8 sequences.
        batch_size: samples in a batch; by default 32, or 1 for sequences.
        seq_len: tokens of a sequence; by default those of the example.
        seed: of all random numbers.
    """

    samples: int | None = None
    batch_size: int | None = None
    seq_len: int | None = None
    seed: int = 0


def synthetic_batches(
    spec: str, module: nn.Module, example: Batch | None, wanted: Wanted
) -> Batches:
    """Return batches that are made when the first of them is read, and then kept.

    Args:
        spec: "synthetic", or "synthetic:NxCxHxW" for N samples of this shape.
        module: the model.
        example: a batch with the shapes and dtypes of the data; None if there is none.
        wanted: how much.

    Raises:
        UsageError: the spec is not one of these, or `seq_len` does not fit it.
        DataError: no data can be made for this model, or their shape is not known.
    """
    if spec != SYNTHETIC:
        count, shape = shape_of_spec(spec)
        wanted = replace(wanted, samples=min(count, wanted.samples or count))
        example = _example_of_shape(module, shape)
    if example is None:
        raise DataError("the shape of synthetic data is not known", help=_NO_SHAPE)
    kinds = {tensor.is_floating_point() for _, tensor in example.tensors()}
    if kinds == {True}:
        if wanted.seq_len is not None:
            raise UsageError(
                "--seq_len is for texts, but the input of the model is floating-point",
                help="leave out the option",
            )
        return _input_batches(spec, module, example, wanted)
    if kinds == {False}:
        return _token_batches(spec, module, example, wanted)
    raise DataError(
        f"no synthetic data can be made for {type(module).__name__}, which takes integers "
        "and floating-point inputs",
        help="give real data with --data",
    )


def _example_of_shape(module: nn.Module, shape: list[int]) -> Batch:
    """Return one sample of this shape: token ids if the model has embeddings and no batch
    norms, else floats.
    """
    has_embeddings = any(isinstance(layer, nn.Embedding) for layer in module.modules())
    takes_tokens = has_embeddings and not trained_batch_norms(module)
    name = getattr(module, "main_input_name", "")
    dtype = torch.float32
    parameter = next(module.parameters(), None)
    if takes_tokens:
        dtype = torch.long
    elif parameter is not None and parameter.is_floating_point():
        dtype = parameter.dtype
    tensor = torch.zeros(1, *shape, dtype=dtype)
    if name in arguments_of(module).known:
        return Batch((), {name: tensor}, None, {name: tensor})
    return Batch.of(tensor)


def _input_batches(spec: str, module: nn.Module, example: Batch, wanted: Wanted) -> Batches:
    """Return batches of inputs from the statistics of batch norms."""
    layers = trained_batch_norms(module)
    if not layers:
        name = type(module).__name__
        raise DataError(
            f"no synthetic data can be made for {name}: it has no batch normalization with "
            "statistics of training, and its input is not token ids",
            help="give real data with --data",
        )
    samples = wanted.samples or DEFAULT_SAMPLES
    size = wanted.batch_size or DEFAULT_BATCH_SIZE
    way = (
        f"{counted(samples, 'input')} from the statistics of "
        f"{counted(len(layers), 'batch norm')}, in {STEPS} steps a batch"
    )

    def starts() -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(wanted.seed)
        for begin in range(0, samples, size):
            count = min(size, samples - begin)
            draw = partial(_normal_like, count=count, generator=generator)
            yield example.with_inputs(draw)

    def make() -> list[Batch]:
        """Return the batches, matched to the batch norms."""
        _logger.info("making %s", way)
        noise = next(starts())
        scaling = best_scaling(module, noise)
        batches: list[Batch] = []
        for batch in starts():
            batches.append(match_batch_norms(module, batch, scaling))
        before = batch_norm_distance(module, noise)
        after = batch_norm_distance(module, batches[0])
        _logger.info(
            "mean distance of a batch norm from its statistics: %.3g nats, and %.3g for noise",
            after,
            before,
        )
        return batches

    batches = _made_once(make, starts, spec, way)
    return replace(batches, length=math.ceil(samples / size), arguments=arguments_of(module))


def _token_batches(spec: str, module: nn.Module, example: Batch, wanted: Wanted) -> Batches:
    """Return batches of sequences sampled from the model."""
    shapes = [list(tensor.shape) for _, tensor in example.tensors()]
    if len(shapes) != 1 or len(shapes[0]) != 2:
        texts = " and ".join(map(str, shapes))
        raise DataError(
            f"no synthetic data can be made for {type(module).__name__}: its integer inputs "
            f"have the shapes {texts}, and sequences of tokens are one input [samples, tokens]",
            help="give real data with --data",
        )
    length = wanted.seq_len or shapes[0][1]
    longest = longest_window(module)
    if longest is not None and length > longest:
        raise UsageError(
            f"sequences of {length} tokens are too long: the model has {longest} positions",
            help=f"make sequences of at most {longest} tokens",
        )
    fill = partial(_filled, example)
    vocabulary = vocabulary_of(module, example)
    samples = wanted.samples or DEFAULT_SEQUENCES
    size = wanted.batch_size or 1
    way = f"{counted(samples, 'sequence')} of {length} tokens sampled from the model"

    def starts() -> Iterator[Batch]:
        first = first_tokens(samples, vocabulary, wanted.seed)
        for part in torch.split(first, size):
            yield fill(part.repeat(1, length))

    def make() -> list[Batch]:
        _logger.info("making %s", way)
        first = first_tokens(samples, vocabulary, wanted.seed)
        ids = sample_tokens(module, fill, first, length, seed=wanted.seed)
        return [fill(part.clone()) for part in torch.split(ids, size)]

    batches = _made_once(make, starts, spec, way)
    return replace(batches, length=math.ceil(samples / size), arguments=arguments_of(module))


def _made_once(
    make: Callable[[], list[Batch]], starts: Callable[[], Iterator[Batch]], spec: str, way: str
) -> Batches:
    """Return batches that `make` returns at the first pass.

    Args:
        make: runs the model.
        starts: yields batches with the same shapes, without running the model.
        spec: the value of `--data`.
        way: says how the batches are made.
    """
    make_once = call_once_if_list(make)
    return Batches(lambda: iter(make_once()), spec, stamp=STAMP, way=way, open_shapes=starts)


def _filled(example: Batch, ids: Tensor) -> Batch:
    """Return the example with other token ids."""
    return example.with_inputs(lambda tensor: ids.to(tensor.dtype))


def _normal_like(tensor: Tensor, *, count: int, generator: torch.Generator) -> Tensor:
    """Return `count` samples of normally distributed values in the shape of a batch's."""
    values = torch.randn(count, *tensor.shape[1:], generator=generator)
    return values.to(tensor.dtype)
