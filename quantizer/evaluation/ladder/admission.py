"""Decides which trials need not be measured: the config has errors, the change has no effect on
this model, or a target cannot hold it.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from quantizer.config.diagnostics import ConfigError
from quantizer.config.model import Config
from quantizer.errors import QuantizerError, UsageError
from quantizer.evaluation.ladder.rungs import Ground, Rung
from quantizer.graph.passes import run_passes
from quantizer.plan.fitted_algorithms import why_algorithm_is_idle
from quantizer.plan.model import Plan
from quantizer.plan.resolve import resolve_plan

NO_CHANGE = "changes nothing in this model"


@dataclass(frozen=True)
class Admission:
    """Decides which changes of a rung are measured.

    Args:
        ground: what all rungs share.
        rung: the rung that trials change.
    """

    ground: Ground
    rung: Rung

    def require_worth_measuring(self, changed: Rung) -> None:
        """Raise an error if a changed rung need not be measured.

        Raises:
            ConfigError: its config has errors, in itself or for this model.
            UsageError: it changes nothing, a new algorithm has no layer to change, or a target
                cannot hold it.
        """
        config = changed.config
        plan = _plan(self.ground, config)
        errors = [finding for finding in plan.diagnostics if finding.severity == "error"]
        if errors:
            raise ConfigError(errors)
        self._require_layers_to_change(config, plan)
        if _effect(changed, config, plan) == self._effect_before:
            raise UsageError(NO_CHANGE)
        refusal = self.ground.refusal(plan, config.algorithms)
        if refusal:
            raise UsageError(refusal)

    @cached_property
    def plan(self) -> Plan:
        """Return the plan of the rung, before algorithms."""
        return _plan(self.ground, self.rung.config)

    @cached_property
    def _effect_before(self) -> tuple[Any, ...]:
        """Return all that the rung does to the model."""
        return _effect(self.rung, self.rung.config, self.plan)

    def _require_layers_to_change(self, config: Config, plan: Plan) -> None:
        """Raise `UsageError` if an algorithm that the rung does not have finds no layer."""
        present = {algorithm.name for algorithm in self.rung.config.algorithms}
        for algorithm in config.algorithms:
            if algorithm.name in present:
                continue
            reason = why_algorithm_is_idle(algorithm, plan)
            if reason is not None:
                raise UsageError(reason)


def reason_of(error: QuantizerError) -> str:
    """Return the message of an error, without the place in a config."""
    if isinstance(error, ConfigError):
        for finding in error.diagnostics:
            if finding.severity == "error":
                return finding.message
    return error.message


def _plan(ground: Ground, config: Config) -> Plan:
    """Return the plan of a config for the model, before algorithms."""
    graph = run_passes(ground.original, config.settings)
    return resolve_plan(config, graph, ground.original)


def _effect(rung: Rung, config: Config, plan: Plan) -> tuple[Any, ...]:
    """Return all that a rung does to a model. Rungs with the same effect have the same
    results.
    """
    # If equalization changes something, the graph's changes have it. Places are lines of a file
    settings = replace(config.settings, include_cle=False, places={})
    algorithms = [algorithm.settings for algorithm in config.algorithms]
    return plan.specs, settings, algorithms, plan.graph.changes, rung.fast_finetune
