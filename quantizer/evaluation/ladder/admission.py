"""Says before a trial is measured why it need not be: the form, the model or a target has no
place for it, or it changes nothing.
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
        ground: of the ladder.
        rung: that the changes start from.
    """

    ground: Ground
    rung: Rung

    def require_worth(self, changed: Rung) -> None:
        """Raise the reason why a changed rung need not be measured.

        Raises:
            ConfigError: its config has errors, alone or for this model.
            UsageError: it changes nothing, or no target can hold it.
        """
        config = changed.config
        plan = _plan(self.ground, config)
        errors = [finding for finding in plan.diagnostics if finding.severity == "error"]
        if errors:
            raise ConfigError(errors)
        self._require_busy(config, plan)
        if _effect(changed, config, plan) == self._effect_before:
            raise UsageError(NO_CHANGE)
        refusal = self.ground.refusal(plan)
        if refusal:
            raise UsageError(refusal)

    @cached_property
    def plan(self) -> Plan:
        """Return the plan of the rung, before algorithms."""
        return _plan(self.ground, self.rung.config)

    @cached_property
    def _effect_before(self) -> tuple[Any, ...]:
        return _effect(self.rung, self.rung.config, self.plan)

    def _require_busy(self, config: Config, plan: Plan) -> None:
        """Raise `UsageError` if a new algorithm has no layer to change."""
        present = {algorithm.name for algorithm in self.rung.config.algorithms}
        for algorithm in config.algorithms:
            if algorithm.name in present:
                continue
            reason = why_algorithm_is_idle(algorithm, plan)
            if reason is not None:
                raise UsageError(reason)


def reason_of(
    error: QuantizerError,
) -> str:
    """Return what an error says, without the place in a config."""
    if isinstance(error, ConfigError):
        for finding in error.diagnostics:
            if finding.severity == "error":
                return finding.message
    return error.message


def _plan(
    ground: Ground,
    config: Config,
) -> Plan:
    graph = run_passes(ground.original, config.settings)
    return resolve_plan(config, graph, ground.original)


def _effect(
    rung: Rung,
    config: Config,
    plan: Plan,
) -> tuple[Any, ...]:
    """Return all that a rung does to a model. Rungs with the same effect have the same
    results.
    """
    specs = {key: tensor.spec for key, tensor in plan.tensors.items()}
    # Equalization shows in the graph's changes
    settings = replace(config.settings, include_cle=False, places={})
    algorithms = [algorithm.settings for algorithm in config.algorithms]
    return specs, settings, algorithms, plan.graph.changes, rung.fast_finetune
