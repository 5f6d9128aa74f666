"""ResNet-18 for ImageNet, with the flags of the example script that comes with vai_q_pytorch.

    cd examples
    python imagenet_resnet18.py --quant_mode calib --config_file ../configs/example.json \
        --data_dir DIR --model_dir DIR
    python imagenet_resnet18.py --quant_mode test --config_file ../configs/example.json \
        --data_dir DIR --model_dir DIR

The data folder holds one folder per class, all thousand of them if the accuracy is to mean
anything. The model folder holds `resnet18.pth` or `.safetensors`, such as torchvision's public
weights. Also works as `quantizer --model FILE`.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from resnet import ResNet
from torch import Tensor, nn

logger = logging.getLogger(__name__)

PREPROCESS = (
    '{"resize": 256, "crop": 224, "mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}'
)
WEIGHTS = ("resnet18.safetensors", "resnet18.pth", "resnet18.pt")


def model() -> ResNet:
    """ResNet-18 in torchvision's names and shapes; its weights are random until `--weights`
    replaces them.
    """
    logger.warning(
        "ResNet-18 has RANDOM weights, unless --weights (or --model_dir) replaces them"
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        stem = nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False)
        maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        return ResNet(
            widths=(64, 128, 256, 512), blocks=2, num_classes=1000, stem=stem, maxpool=maxpool
        )


def evaluate(
    model: Callable[[Tensor], Tensor], data: Iterable[tuple[Tensor, Tensor]]
) -> dict[str, float]:
    """Top-1 and top-5 accuracy, from 0 to 1."""
    top1 = top5 = total = 0
    for images, labels in data:
        hits = model(images).topk(5).indices == labels[:, None]
        top1, top5, total = (
            top1 + int(hits[:, 0].sum()),
            top5 + int(hits.sum()),
            total + len(labels),
        )
    return {"top1": top1 / total, "top5": top5 / total}


def command_line(arguments: list[str]) -> list[str]:
    """These flags as arguments of `quantizer`; what is not known here is passed on."""
    parser = argparse.ArgumentParser(
        description="Quantize ResNet-18 on a folder of ImageNet images."
    )
    parser.add_argument("--quant_mode", choices=["float", "calib", "test"], default="calib")
    parser.add_argument("--data_dir", default="imagenet", help="one folder of images per class")
    parser.add_argument(
        "--model_dir", default=".", help="where resnet18.pth or resnet18.safetensors lies"
    )
    parser.add_argument("--config_file", help="the JSON config")
    parser.add_argument("--subset_len", help="use this many images")
    parser.add_argument("--batch_size", default="32")
    flags, others = parser.parse_known_args(arguments)
    weights = next(
        (path for name in WEIGHTS if (path := Path(flags.model_dir) / name).is_file()), None
    )
    given = {
        "--quant_mode": flags.quant_mode,
        "--model": __file__,
        "--weights": weights,
        "--data": flags.data_dir,
        "--preprocess": PREPROCESS,
        "--config_file": flags.config_file,
        "--subset_len": flags.subset_len,
        "--batch_size": flags.batch_size,
    }
    return [
        str(word)
        for flag, value in given.items()
        if value is not None
        for word in (flag, value)
    ] + others


if __name__ == "__main__":
    from quantizer.cli.main import run_command

    sys.exit(run_command(command_line(sys.argv[1:])))
