"""Optimizers as configuration: a frozen record that builds an optax transformation.

A task says what its clients step with and a method what its server steps with, both as
an `OptimizerConfig`; neither names an optimizer in its code.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import optax

from fedjax_graph.core import arrays
from fedjax_graph.core.checks import check, limited
from fedjax_graph.core.errors import InputError, meant
from fedjax_graph.core.registry import Registry

RISE = 0.25  # share of the steps in which `triangular` reaches its highest rate
STATEFUL_ADVICE = (
    "only clients of methods such as fed_avg, scaffold and local keep a state "
    "(docs/optimizers.md has a list)"
)
OWN_FIELDS = ("momentum", "second_momentum", "epsilon")  # that not every optimizer has


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """An optimizer and its hyper-parameters; JSON-able by `dataclasses.asdict`.

    The gradients are clipped, then weight decay is added to them (for `adamw`, as its
    definition has it, to the updates), then the optimizer named by `name` acts. It is
    optax's, so `adam` and `yogi` correct the bias of their moments, the second moment
    of `yogi` starts at 1e-6 and the sum of squares of `adagrad` at 0.1.
    """

    name: str = "sgd"  # see OPTIMIZERS
    learning_rate: float = limited(0.1, lower=0)  # the highest, under a schedule
    # None: 0 of sgd, 0.9 (beta_1) of the Adam family
    momentum: float | None = limited(None, lower=0, below=1)
    weight_decay: float = limited(0.0, lower=0)
    schedule: str = "constant"  # see SCHEDULES
    # most Euclidean norm over all leaves; None: any
    clip_norm: float | None = limited(None, above=0)
    # beta_2; None: optax's
    second_momentum: float | None = limited(None, lower=0, below=1)
    # added in a denominator; None: optax's
    epsilon: float | None = limited(None, lower=0)
    last_learning_rate: float = limited(0.0, lower=0)  # where a schedule ends
    # that a schedule spans in all rounds; None: those of a round, which a task knows
    num_steps: int | None = limited(None, lower=1)
    # of a client: its state goes on from round to round, see `core.client_state`
    stateful: bool = False

    def __post_init__(self) -> None:
        """Checks types, names, limits and what fits together.

        Raises:
          InputError: naming the field.
        """
        check(self, "optimizer")
        _check_name("name", self.name, OPTIMIZERS)
        _check_name("schedule", self.schedule, SCHEDULES)
        for field in OWN_FIELDS:
            if getattr(self, field) is not None and field not in self._rule.fields:
                raise InputError(f"optimizer {self.name}: has no {field}")
        if self.name == "nesterov" and not self.momentum:
            raise InputError("optimizer nesterov: needs a momentum, such as 0.9")
        if self.last_learning_rate and self.schedule == "constant":
            raise InputError(
                f"optimizer last_learning_rate={self.last_learning_rate}: needs a "
                "schedule that ends there, such as cosine"
            )
        if self.num_steps and self.schedule == "constant":
            raise InputError(
                f"optimizer num_steps={self.num_steps}: needs a schedule that spans "
                "them, such as cosine"
            )
        if self.stateful and self.schedule != "constant" and not self.num_steps:
            raise InputError(
                f"optimizer stateful=True: schedule={self.schedule} spans the steps of "
                "one round; give num_steps, those of all rounds, or use constant"
            )

    @property
    def is_elementwise(self) -> bool:
        """Whether an entry's update depends on the gradients of that entry alone."""
        return self._rule.is_elementwise and self.clip_norm is None

    @property
    def is_linear(self) -> bool:
        """Whether the updates are a linear function of the gradients alone."""
        is_sgd = self.name in ("sgd", "nesterov")
        return is_sgd and not self.weight_decay and self.clip_norm is None

    def build(
        self, num_steps: int | None = None, num_epochs: int = 1
    ) -> optax.GradientTransformation:
        """Builds the transformation of gradients into updates.

        Args:
          num_steps: steps that the schedule spans, of an optimizer that begins anew
            after them; only `constant` needs none.
          num_epochs: passes over the data that these steps make.

        Raises:
          InputError: if a number is no count, a schedule lacks its number of steps or
            has another one in its config, or the state was to be kept by who asks for
            an optimizer that begins anew.
        """
        self._check_kept_by_nobody()
        if num_steps is not None:
            arrays.check_count("optimizer num_steps", num_steps, 0)
            self.check_begun_anew()
        arrays.check_count("optimizer num_epochs", num_epochs)
        rate = self._rate(num_steps, num_epochs)
        parts = []
        if self.clip_norm is not None:
            parts.append(optax.clip_by_global_norm(self.clip_norm))
        if self.weight_decay and not self._rule.decays_weights:
            parts.append(optax.add_decayed_weights(self.weight_decay))
        parts.append(self._rule.build(self, rate))
        return parts[0] if len(parts) == 1 else optax.chain(*parts)

    def check_begun_anew(self) -> None:
        """Checks that the settings fit an optimizer that begins anew each round.

        Raises:
          InputError: if its state was to be kept, or its schedule spans all rounds.
        """
        self._check_kept_by_nobody()
        if self.num_steps:
            raise InputError(
                f"optimizer num_steps={self.num_steps}: spans the steps of all rounds, "
                "but this optimizer begins anew in each of them; leave it out"
            )

    def _check_kept_by_nobody(self) -> None:
        if self.stateful:
            raise InputError(
                f"optimizer stateful=True: {STATEFUL_ADVICE}; not those of this "
                "method, nor a server, whose optimizer lasts in any case"
            )

    @property
    def _rule(self) -> "Rule":
        return OPTIMIZERS[self.name]

    def _rate(self, num_steps: int | None, num_epochs: int) -> float | optax.Schedule:
        num_steps = self.num_steps or num_steps
        if not num_steps and self.schedule != "constant":
            raise InputError(
                f"optimizer schedule {self.schedule!r} needs a number of steps, which "
                "is not known here; give num_steps, or use constant"
            )
        return SCHEDULES[self.schedule](self, num_steps or 0, num_epochs)

    def given(self, **names: str) -> dict[str, Any]:
        """Returns the fields that are not None, under another library's names.

        Args:
          names: `b1="momentum"` for a library that calls the momentum b1.
        """
        fields = {key: getattr(self, field) for key, field in names.items()}
        return {key: value for key, value in fields.items() if value is not None}


def _check_name(field: str, value: Any, known: Registry[Any]) -> None:
    if value not in known:
        raise InputError(
            f"optimizer {field} {value!r}: unknown{meant(str(value), known)}; known: "
            f"{', '.join(known)}"
        )


# --- Optimizers ----------------------------------------------------------------------


class Rule(NamedTuple):
    """How an optimizer is built."""

    build: Callable[
        [OptimizerConfig, float | optax.Schedule], optax.GradientTransformation
    ]  # (config, learning rate or schedule) -> transformation
    fields: tuple[str, ...] = ()  # those of OWN_FIELDS that it has
    decays_weights: bool = False  # itself; else the decay is added to its gradients
    is_elementwise: bool = False  # an entry's update depends on that entry alone


def _betas(config: OptimizerConfig) -> dict[str, Any]:
    return config.given(b1="momentum", b2="second_momentum", eps="epsilon")


_elementwise = functools.partial(Rule, is_elementwise=True)
RULES = {
    "sgd": _elementwise(
        lambda config, rate: optax.sgd(rate, config.momentum or None), ("momentum",)
    ),
    "nesterov": _elementwise(
        lambda config, rate: optax.sgd(rate, config.momentum, nesterov=True),
        ("momentum",),
    ),
    "adam": _elementwise(
        lambda config, rate: optax.adam(rate, **_betas(config)), OWN_FIELDS
    ),
    "adamw": _elementwise(
        lambda config, rate: optax.adamw(
            rate, weight_decay=config.weight_decay, **_betas(config)
        ),
        OWN_FIELDS,
        decays_weights=True,
    ),
    "yogi": _elementwise(
        lambda config, rate: optax.yogi(rate, **_betas(config)), OWN_FIELDS
    ),
    "adagrad": _elementwise(
        lambda config, rate: optax.adagrad(rate, **config.given(eps="epsilon")),
        ("epsilon",),
    ),
}
OPTIMIZERS: Registry[Rule] = Registry("optimizer", RULES, value_type=Rule)
"""The optimizers by name."""
register_optimizer = OPTIMIZERS.registering()
"""Registers a `Rule` of one's own under a name that is free."""


# --- Schedules -----------------------------------------------------------------------


def _linear(config: OptimizerConfig, num_steps: int, num_epochs: int) -> optax.Schedule:
    del num_epochs
    last = config.last_learning_rate
    return optax.linear_schedule(config.learning_rate, last, num_steps)


def _cosine(config: OptimizerConfig, num_steps: int, num_epochs: int) -> optax.Schedule:
    del num_epochs
    highest = config.learning_rate
    share = config.last_learning_rate / highest if highest else 0.0
    return optax.cosine_decay_schedule(highest, num_steps, share)


def _triangular(
    config: OptimizerConfig, num_steps: int, num_epochs: int
) -> optax.Schedule:
    """The rate by step: 0, the highest after a quarter of the epochs, the last.

    It is linear in between. A step has the rate of its end, so the first one is not 0,
    and the last one has `last_learning_rate`.
    """
    steps_per_epoch = num_steps // num_epochs
    knots = jnp.array([0, RISE * num_epochs, num_epochs])
    rates = jnp.array([0, config.learning_rate, config.last_learning_rate])
    return lambda step: jnp.interp((step + 1) / steps_per_epoch, knots, rates)


def _constant(config: OptimizerConfig, num_steps: int, num_epochs: int) -> float:
    del num_steps, num_epochs
    return config.learning_rate


SCHEDULES: Registry[Callable[[OptimizerConfig, int, int], Any]] = Registry(
    "schedule",
    {
        "constant": _constant,
        "linear": _linear,
        "cosine": _cosine,
        "triangular": _triangular,
    },
    is_callable=True,
)
"""Name -> (config, number of steps, number of epochs) -> schedule."""
register_schedule = SCHEDULES.registering()
"""Registers such a function of one's own under a name that is free."""


# --- Text ----------------------------------------------------------------------------

PARSERS: dict[str, Callable[[str], Any]] = {  # fields that are no numbers
    "schedule": str,
    "num_steps": int,
    "stateful": {"true": True, "false": False}.__getitem__,
}


OPTIONAL = {
    field.name for field in dataclasses.fields(OptimizerConfig) if field.default is None
}


def fields_given(text: str) -> set[str]:
    """Names of the fields that an optimizer's text gives, as in "sgd,momentum=0.9"."""
    return {part.partition("=")[0].strip() for part in text.split(",")}


def parse(text: str, default: OptimizerConfig) -> OptimizerConfig:
    """Reads an optimizer: a name, and fields that differ from those of a default.

    Args:
      text: such as "adam" or "sgd,momentum=0.9,schedule=cosine".
      default: what is not given stays as it is here; only the momenta and the epsilon
        of another optimizer than the one named do not, nor the last rate and steps of
        a schedule where "schedule=constant" is given. "none" says that a momentum, the
        epsilon, the norm of clipping or the number of steps is not given.

    Raises:
      InputError: if it cannot be read.
    """
    if not isinstance(text, str):
        raise InputError(f"optimizer {text!r}: expected text, as sgd,momentum=0.9")
    name, *pairs = [part.strip() for part in text.split(",")]
    known = sorted(
        field.name
        for field in dataclasses.fields(OptimizerConfig)
        if field.name != "name"
    )
    given: dict[str, Any] = {}
    seen: set[str] = set()
    if name != default.name:
        given = dict.fromkeys(OWN_FIELDS)
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals and key in known:
            raise InputError(f"optimizer {text!r}: {key} has no value, as in {key}=...")
        if key not in known:
            raise InputError(
                f"optimizer {text!r}: {pair!r} is no field; known: {', '.join(known)}, "
                "as in sgd,momentum=0.9"
            )
        if key in seen:
            raise InputError(f"optimizer {text!r}: {key} is given twice")
        seen.add(key)
        if value == "none" and key in OPTIONAL:
            given[key] = None
            continue
        try:
            given[key] = PARSERS.get(key, float)(value)
        except (KeyError, ValueError) as error:
            expected = {"stateful": "true or false", "num_steps": "an integer"}
            raise InputError(
                f"optimizer {text!r}: {key} is {value!r}, expected "
                f"{expected.get(key, 'a number')}"
            ) from error
    if given.get("schedule") == "constant":
        given = {"last_learning_rate": 0.0, "num_steps": None} | given
    return dataclasses.replace(default, name=name, **given)
