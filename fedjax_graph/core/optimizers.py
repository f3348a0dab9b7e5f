"""Optimizers as configuration: a frozen record that builds an optax transformation.

A task says what its clients step with and a method what its server steps with, both as
an `OptimizerConfig`; neither names an optimizer in its code.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from fedjax_graph.core.errors import InputError

Schedule = Callable[[jax.Array], jax.Array]
RISE = 0.25  # share of the steps in which `triangular` reaches its highest rate


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """An optimizer and its hyper-parameters; JSON-able by `dataclasses.asdict`.

    The gradients are clipped, then weight decay is added to them (for `adamw`, as its
    definition has it, to the updates), then the optimizer named by `name` acts.
    """

    name: str = "sgd"  # see OPTIMIZERS
    learning_rate: float = 0.1  # the highest, under a schedule
    momentum: float | None = None  # None: 0 of sgd, 0.9 (beta_1) of the Adam family
    weight_decay: float = 0.0
    schedule: str = "constant"  # see SCHEDULES
    clip_norm: float | None = None  # most Euclidean norm over all leaves; None: any
    second_momentum: float | None = None  # beta_2; None: optax's
    epsilon: float | None = None  # added to a root in a denominator; None: optax's
    last_learning_rate: float = 0.0  # where a schedule ends

    def __post_init__(self) -> None:
        """Checks names and ranges.

        Raises:
          InputError: naming the field.
        """
        for kind, value, known in (
            ("name", self.name, OPTIMIZERS),
            ("schedule", self.schedule, SCHEDULES),
        ):
            if value not in known:
                raise InputError(
                    f"optimizer {kind} {value!r}: unknown; known: {', '.join(known)}"
                )
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            is_number = not isinstance(value, str | None)
            if is_number and not 0 <= value < float("inf"):
                raise InputError(
                    f"optimizer {field.name}={value}: expected a finite number, 0 or "
                    "more"
                )

    def build(
        self, num_steps: int | None = None, num_epochs: int = 1
    ) -> optax.GradientTransformation:
        """The transformation of gradients into updates.

        Args:
          num_steps: steps that the schedule spans; only `constant` needs none.
          num_epochs: passes over the data that these steps make.

        Raises:
          InputError: if a schedule lacks its number of steps.
        """
        rate = self._rate(num_steps, num_epochs)
        parts = []
        if self.clip_norm is not None:
            parts.append(optax.clip_by_global_norm(self.clip_norm))
        if self.weight_decay and self.name not in DECOUPLED:
            parts.append(optax.add_decayed_weights(self.weight_decay))
        parts.append(OPTIMIZERS[self.name](self, rate))
        return parts[0] if len(parts) == 1 else optax.chain(*parts)

    def _rate(self, num_steps: int | None, num_epochs: int) -> float | Schedule:
        if self.schedule == "constant":
            return self.learning_rate
        if num_steps is None:
            raise InputError(
                f"optimizer schedule {self.schedule!r} needs a number of steps, which "
                "is not known here; use constant"
            )
        return SCHEDULES[self.schedule](self, num_steps, num_epochs)

    def _given(self, **names: str) -> dict[str, float]:
        """The fields that are not None, under optax's names for them."""
        fields = {key: getattr(self, field) for key, field in names.items()}
        return {key: value for key, value in fields.items() if value is not None}


def _momentum(config: OptimizerConfig, rate: float | Schedule, nesterov: bool):
    return optax.sgd(rate, config.momentum or None, nesterov=nesterov)


def _adaptive(make: Callable[..., optax.GradientTransformation]):
    def build(config: OptimizerConfig, rate: float | Schedule):
        given = config._given(b1="momentum", b2="second_momentum", eps="epsilon")
        return make(rate, **given)

    return build


def _adagrad(config: OptimizerConfig, rate: float | Schedule):
    return optax.adagrad(rate, **config._given(eps="epsilon"))


def _adamw(config: OptimizerConfig, rate: float | Schedule):
    given = config._given(b1="momentum", b2="second_momentum", eps="epsilon")
    return optax.adamw(rate, weight_decay=config.weight_decay, **given)


OPTIMIZERS: dict[str, Callable[..., optax.GradientTransformation]] = {
    "sgd": lambda config, rate: _momentum(config, rate, nesterov=False),
    "nesterov": lambda config, rate: _momentum(config, rate, nesterov=True),
    "adam": _adaptive(optax.adam),
    "adamw": _adamw,
    "yogi": _adaptive(optax.yogi),
    "adagrad": _adagrad,
}
"""Name -> (config, learning rate or schedule) -> transformation. Add your own."""
DECOUPLED = ("adamw",)  # apply weight decay themselves


def _linear(config: OptimizerConfig, num_steps: int, num_epochs: int) -> Schedule:
    del num_epochs
    last = config.last_learning_rate
    return optax.linear_schedule(config.learning_rate, last, num_steps)


def _cosine(config: OptimizerConfig, num_steps: int, num_epochs: int) -> Schedule:
    del num_epochs
    highest = config.learning_rate
    share = config.last_learning_rate / highest if highest else 0.0
    return optax.cosine_decay_schedule(highest, num_steps, share)


def _triangular(config: OptimizerConfig, num_steps: int, num_epochs: int) -> Schedule:
    steps_per_epoch = num_steps // num_epochs
    knots = jnp.array([0, RISE * num_epochs, num_epochs])
    rates = jnp.array([0, config.learning_rate, config.last_learning_rate])
    return lambda step: jnp.interp((step + 1) / steps_per_epoch, knots, rates)


SCHEDULES: dict[str, Any] = {
    "constant": None,
    "linear": _linear,
    "cosine": _cosine,
    "triangular": _triangular,  # from 0 up to the rate, then down to the last one
}


def parse(text: str, default: OptimizerConfig) -> OptimizerConfig:
    """Reads an optimizer: a name, and fields that differ from those of a default.

    Args:
      text: such as "adam" or "sgd,momentum=0.9,schedule=cosine".
      default: what is not given stays as it is here.

    Raises:
      InputError: if it cannot be read.
    """
    name, *pairs = [part.strip() for part in text.split(",")]
    fields = {field.name for field in dataclasses.fields(OptimizerConfig)}
    given: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or key not in fields or key == "name":
            known = ", ".join(sorted(fields - {"name"}))
            raise InputError(
                f"optimizer {text!r}: {pair!r} is no field; known: {known}, as in "
                "sgd,momentum=0.9"
            )
        try:
            given[key] = value if key == "schedule" else float(value)
        except ValueError as error:
            raise InputError(
                f"optimizer {text!r}: {key} is {value!r}, expected a number"
            ) from error
    return dataclasses.replace(default, name=name, **given)
