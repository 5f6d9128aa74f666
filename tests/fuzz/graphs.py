"""Small networks drawn at random, written as a model file: images or tokens, with residual
sums, gates and norms, states, writes in place, inputs with channels of different units, and
outputs of very different ranges, joined or one by one. Batches have one to three samples, or
eight.
"""

from __future__ import annotations

import random

HEAD = """import torch
from torch import nn
from torch.nn import functional as F


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed({seed})
{layers}

    def forward(self, {inputs}):
{body}
        return {inputs}


def model():
    net = Net().eval()
    for norm in net.modules():
        if isinstance(norm, (nn.BatchNorm1d, nn.BatchNorm2d)):
            norm.running_mean.normal_(std=0.1)
            norm.running_var.uniform_(0.5, 1.5)
    return net


def batches(seed):
    draw = torch.Generator().manual_seed(seed)
    calls = []
    sample = 0
    for samples in {samples}:
        values = {scale} * torch.randn(samples, {shape}, generator=draw){units}
        for x in values:
            {loudness}
            sample += 1
        x = values
        state = torch.randn(1, samples, {channels}, generator=draw)
        calls.append(({inputs}))
    return calls


def calibration_data():
    data = batches({seed})
    first = data[0][0] if isinstance(data[0], tuple) else data[0]
    first[0] *= {corrupt}
    return data


def fresh_data():
    return batches({seed} + 1)
"""
LOUDNESS = (
    "pass",
    "pass",
    "x *= 1e-3 if sample % 2 else 1",
    "x *= 10 ** -(2 * torch.rand((), generator=draw))",
)
"""What makes some samples louder than others."""
ACTIVATIONS = (
    "F.relu",
    "F.relu6",
    "F.gelu",
    "F.silu",
    "F.hardswish",
    "torch.sigmoid",
    "torch.tanh",
    "F.leaky_relu",
)
Step = tuple[list[str], list[str], int]
"""Lines that make layers, lines of the forward, and the channels after them."""


def model_file(seed: int) -> tuple[str, bool]:
    """The text of a model file, and whether it has no norm that is folded into a layer, and no
    recurrent layer. One of these takes its state, and gives it.
    """
    draw = random.Random(seed)
    images = draw.random() < 0.6
    channels = draw.choice([4, 6, 8])
    size = draw.choice([6, 8])
    shape = f"{channels}, {size}, {size}" if images else f"{size}, {channels}"
    layers, body = list[str](), list[str]()
    units = ""
    if has_units(seed):
        sizes = [round(10 ** draw.uniform(-3, 4), 6) for _ in range(channels)]
        units = f" * torch.tensor({sizes}).view({'-1, 1, 1' if images else '-1'})"
        body.append(f"x = x{units.replace('*', '/')}")
    samples = [draw.choice([1, 2, 3]) for _ in range(draw.choice([1, 2, 4]))]
    if draw.random() < 0.5:
        samples += [8, 8]
    inputs, width = "x", channels
    if not images and draw.random() < 0.3:
        inputs = "x, state"
        layers.append(f"self.cells = nn.GRU({channels}, {channels}, batch_first=True)")
        body.append("x, state = self.cells(x, state)")
    for index in range(draw.choice([1, 2, 3, 4])):
        made, lines, channels = (_image if images else _token)(draw, f"l{index}", channels)
        layers += made
        body += lines
    if draw.random() < 0.4:
        made, lines = _two_ranges(draw, channels, images=images)
        layers += made
        body += lines
    elif draw.random() < 0.7:
        body.append("x = x.mean((2, 3))" if images else "x = x.mean(1)")
        layers.append(f"self.head = nn.Linear({channels}, 5)")
        body.append("x = self.head(x)")
    if not layers:
        layers, body = ["self.head = nn.Identity()"], [*body, "x = self.head(x)"]
    text = HEAD.format(
        seed=seed,
        layers="\n".join(" " * 8 + line for line in layers),
        body="\n".join(" " * 8 + line for line in body),
        scale=draw.choice([1.0, 1.0, 10.0, 0.01]),
        shape=shape,
        samples=samples,
        channels=width,
        inputs=inputs,
        loudness=draw.choice(LOUDNESS),
        corrupt=draw.choice([1, 1, 1, 1e4]),
        units=units,
    )
    plain = not any("BatchNorm" in line or "GRU" in line for line in layers)
    return text, plain


def has_units(seed: int) -> bool:
    """Whether the input has channels of different units, which the network divides by them."""
    return seed % 5 == 0


RETURNED = {
    "joined": ["x = torch.cat([far, near], {axis})"],
    "stacked": ["x = torch.stack([far, near], {axis})"],
    "moved": ["x = torch.cat([far, near], {axis}).flatten(2).transpose(1, 2)"],
    "filled": ["x = torch.empty_like(both)", "x[{far}] = far", "x[{near}] = near"],
    "in place": ["x = torch.cat([far / {factor}, near], {axis})", "x[{far}] *= {factor}"],
    "written": ["x = both.clone()", "x[{near}] = near * near"],
    "chosen": ["x = torch.where(both > 1, both, both * 0.5)"],
    "several": ["x = {{'far': far, 'near': near, 'index': near.argmax({axis})}}"],
    "nested": ["x = [torch.cat([both, near], {axis}), (far,)]"],
    "multiplied": ["x = self.last(both)"],
    "multiplied and returned": ["x = both, self.last(both)"],
}
"""What is returned of two values, of which one is far larger."""


def _two_ranges(
    draw: random.Random, channels: int, *, images: bool
) -> tuple[list[str], list[str]]:
    """Layers and lines that end a network with values of two ranges, put together in some
    way.
    """
    axis, factor = (
        (1, draw.choice([64.0, 640.0])) if images else (2, draw.choice([64.0, 640.0]))
    )
    layer = "nn.Conv2d({}, {}, 1)" if images else "nn.Linear({}, {})"
    layers = [f"self.{name} = {layer.format(channels, 3)}" for name in ("far", "near")]
    layers.append(f"self.last = {layer.format(6, 4)}")
    layers.append(f"self.last.weight.data[:, :3] /= {factor}")
    squash = draw.choice(["torch.sigmoid", "torch.tanh", "F.relu"])
    places = (
        {"far": "..., :3", "near": "..., 3:"}
        if axis == 2
        else {"far": ":, :3", "near": ":, 3:"}
    )
    words = {"axis": axis, "factor": factor, **places}
    lines = [
        f"far, near = {squash}(self.far(x)) * {factor}, {squash}(self.near(x))",
        f"both = torch.cat([far, near], {axis})",
    ]
    kind = draw.choice(list(RETURNED))
    return layers, lines + [line.format(**words) for line in RETURNED[kind]]


def _image(draw: random.Random, name: str, channels: int) -> Step:
    """A block for [n, channels, h, w] that keeps h and w."""
    kind = draw.choice(
        [
            "conv",
            "conv",
            "conv_bn",
            "bn",
            "residual",
            "depthwise",
            "excite",
            "concat",
            "pool",
            "act",
        ]
    )
    act, wide = draw.choice(ACTIVATIONS), draw.choice([4, 8])
    conv = (
        f"self.{name} = nn.Conv2d({channels}, {{}}, {draw.choice([1, 3])}, padding='same', "
        f"bias={draw.random() < 0.7})"
    )
    if kind == "conv":
        return [conv.format(wide)], [f"x = {act}(self.{name}(x))"], wide
    if kind == "conv_bn":
        norm = f"self.{name}n = nn.BatchNorm2d({wide})"
        return [conv.format(wide), norm], [f"x = {act}(self.{name}n(self.{name}(x)))"], wide
    if kind == "bn":
        return (
            [f"self.{name} = nn.BatchNorm2d({channels})"],
            [f"x = {act}(self.{name}(x))"],
            channels,
        )
    if kind == "residual":
        return [conv.format(channels)], [f"x = F.relu(x + {act}(self.{name}(x)))"], channels
    if kind == "depthwise":
        layer = (
            f"self.{name} = nn.Conv2d({channels}, {channels}, 3, padding=1, groups={channels})"
        )
        return [layer], [f"x = {act}(self.{name}(x))"], channels
    if kind == "excite":
        layer = f"self.{name} = nn.Conv2d({channels}, {channels}, 1)"
        return (
            [layer],
            [f"x = x * torch.sigmoid(self.{name}(F.adaptive_avg_pool2d(x, 1)))"],
            channels,
        )
    if kind == "concat":
        return (
            [conv.format(wide)],
            [f"x = torch.cat([x, {act}(self.{name}(x))], 1)"],
            channels + wide,
        )
    if kind == "pool":
        pool = draw.choice(["F.max_pool2d(x, 3, 1, 1)", "F.avg_pool2d(x, 3, 1, 1)"])
        return [], [f"x = {pool}"], channels
    return [], [f"x = {act}(x)"], channels


def _token(draw: random.Random, name: str, channels: int) -> Step:
    """A block for [n, t, channels]."""
    kind = draw.choice(["linear", "linear", "linear_bn", "mlp", "norm", "attention", "act"])
    act, wide = draw.choice(ACTIVATIONS), draw.choice([4, 8])
    if kind == "linear":
        return (
            [f"self.{name} = nn.Linear({channels}, {wide})"],
            [f"x = {act}(self.{name}(x))"],
            wide,
        )
    if kind == "linear_bn":
        layers = [
            f"self.{name} = nn.Linear({channels}, {wide})",
            f"self.{name}n = nn.BatchNorm1d({wide})",
        ]
        moved = draw.choice(
            ["self.{0}n(y.mT).mT", "self.{0}n(y.flatten(0, 1)).reshape_as(y)"]
        ).format(name)
        return layers, [f"y = self.{name}(x)", f"x = {act}({moved})"], wide
    if kind == "mlp":
        layers = [
            f"self.{name}a = nn.Linear({channels}, 16)",
            f"self.{name}b = nn.Linear(16, {channels}, bias=False)",
        ]
        return layers, [f"x = x + self.{name}b({act}(self.{name}a(x)))"], channels
    if kind == "norm":
        return [f"self.{name} = nn.LayerNorm({channels})"], [f"x = self.{name}(x)"], channels
    if kind == "attention":
        layers = [f"self.{name} = nn.Linear({channels}, {3 * channels})"]
        body = [
            f"q, k, v = self.{name}(x).chunk(3, -1)",
            f"x = x + (q @ k.transpose(1, 2) * {channels**-0.5:.6f}).softmax(-1) @ v",
        ]
        return layers, body, channels
    return [], [f"x = {act}(x)"], channels
