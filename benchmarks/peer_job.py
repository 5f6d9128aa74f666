"""One job with one tool, as a process of its own; `bench_peers.py` starts it with the tool's
interpreter.

`python peer_job.py TOOL JOB FOLDER STARTED`: FOLDER holds JOB.pt, which `bench_peers.py` wrote,
and gets result.pt: how long it took from STARTED (seconds of the epoch) on until the quantized
network was there, what memory, and its outputs.
"""

from __future__ import annotations

import os
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

IMPORTED = Path("/proc/self/statm").read_text().split()[1]  # before anything else is imported

from peers import LANGUAGE_PEERS, Peer, in_transformers, path_there  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from vision_peers import VISION_PEERS  # noqa: E402
from workloads import Llama, ResNet18  # noqa: E402

GPTQ = {
    "global_quant_config": {
        "weight": {
            "dtype": "uint4",
            "symmetric": False,
            "qscheme": "per_group",
            "ch_axis": 1,
            "group_size": 128,
        }
    },
    "exclude": ["kind:embedding", "kind:head"],
    "algo_config": {"name": "gptq"},
}
OURS: dict[str, Any] = {
    "ours, maxmin": "cpu_int8.json",
    "ours, cpu_int8.json": "cpu_int8.json",
    "ours, GPTQ": GPTQ,
}
"""Configs; the preset has bias correction and percentiles, which "maxmin" leaves out, so that
all of it compares.
"""


def main() -> None:
    """Do the job and leave the result."""
    tool, job, folder, started = sys.argv[1:]
    work = torch.load(Path(folder) / f"{job}.pt", weights_only=True)
    model = build(job)
    model.load_state_dict(work["weights"])
    model.eval()
    batches: list[Tensor] = work["data"]
    peer = ({} if tool in OURS else VISION_PEERS | LANGUAGE_PEERS).get(tool)
    if peer is None:
        quantized = ours(model, OURS[tool], batches, plain=tool.endswith("maxmin"))
    elif isinstance(model, Llama):
        quantized = peer.quantize(in_transformers(model, folder), batches)
    else:
        with torch.no_grad():
            quantized = peer.quantize(model, batches)
    result: dict[str, Any] = {
        "wall": time.time() - float(started),
        "cpu": sum(os.times()[:4]),
        "memory": memory(),
    }
    result["version"] = version(peer.package if peer else "quantizer-torch")
    with torch.no_grad():
        outputs = [quantized(x) for x in work["heldout"]]
    result["logits"] = [getattr(each, "logits", each) for each in outputs]
    if isinstance(model, Llama):
        result["layers"] = layer_weights(model, quantized, peer)
    torch.save(result, Path(folder) / "result.pt")


def build(job: str) -> nn.Module:
    """The float network, without its weights."""
    if job == "EfficientNet-Lite0":
        from efficientnet_lite_pytorch import EfficientNet

        network: nn.Module = EfficientNet.from_name("efficientnet-lite0")
        return network
    return ResNet18() if job == "ResNet-18" else Llama()


def ours(model: nn.Module, config: Any, batches: list[Tensor], *, plain: bool) -> nn.Module:
    """What `quantizer.calibrate` makes of it."""
    import json

    import quantizer

    if isinstance(config, str):
        config = json.loads((Path(__file__).parents[1] / "configs" / config).read_text())
        config.pop("$schema")
    if plain:
        config["include_bias_corr"] = False
        config["tensor_quantize_config"]["activation"] = {"symmetry": False, "signed": False}
    return quantizer.calibrate(model, config, batches).network


@torch.no_grad()
def layer_weights(model: Llama, quantized: Any, peer: Peer | None) -> dict[str, Tensor]:
    """The weights of the linear layers, as what they make of unit vectors; none where their
    inputs became others.
    """
    if peer is not None and not peer.keeps_inputs:
        return {}
    linears = {
        name: each
        for name, each in model.named_modules()
        if isinstance(each, nn.Linear) and name != "lm_head"
    }
    if peer is None:
        nodes = {
            node.params.get("weight"): node.name
            for node in quantized.graph.nodes
            if node.op == "linear"
        }
        return {name: quantized.layers[nodes[f"{name}.weight"]].weight for name in linears}
    eyes = {name: torch.eye(each.in_features) for name, each in linears.items()}
    return {
        name: quantized.get_submodule(path_there(name))(eye).T for name, eye in eyes.items()
    }


def memory() -> float:
    """The peak of this process over its import of torch, in MB."""
    status = Path("/proc/self/status").read_text()
    peak = (
        int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1])
        * 1024
    )
    return (peak - int(IMPORTED) * os.sysconf("SC_PAGE_SIZE")) / 1e6


if __name__ == "__main__":
    main()
