"""The step after calibration that makes a solution's power-of-two scales ones that the DPU has the shifts for."""

from __future__ import annotations

import dataclasses

import torch

from quantizer.algorithms.dpu_alignment import Key, Move, align
from quantizer.config.model import Settings
from quantizer.engine.solution import Solution
from quantizer.graph.ir import Graph


def aligned(found: Solution, graph: Graph, settings: Settings) -> tuple[Solution, tuple[Move, ...]]:
    """The solution at aligned positions, with a note at each tensor that was moved, and the moves."""
    known = {key: tensor.position for key, tensor in found.tensors.items() if tensor.spec.symmetric}
    positions, moves = align(
        graph,
        {key: at for key, at in known.items() if at is not None},
        change_concat_input_fix=settings.change_concat_input_fix,
        change_pool_input_fix=settings.change_pool_input_fix,
    )
    tensors = dict(found.tensors)
    notes: dict[Key, tuple[str, ...]] = dict(found.notes)
    for move in moves:
        key = (move.layer, move.role)
        tensor = found.tensors[key]
        tensors[key] = dataclasses.replace(tensor, scale=torch.full_like(tensor.scale, 2.0 ** -positions[key]))
        notes[key] = (*notes.get(key, ()), f"position {move.before} -> {move.after}: {move.why}")
    return dataclasses.replace(found, tensors=tensors, notes=notes), moves
