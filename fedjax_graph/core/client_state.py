"""Wrappers of tasks whose models carry a part more that never leaves its client.

Under `LOCAL` it is the model that the client trained last, under `OPT_STATE` what its
optimizer has gathered.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from fedjax_graph.core import aggregation, trees
from fedjax_graph.core.errors import InputError
from fedjax_graph.core.local import LocalResult, Model
from fedjax_graph.core.optimizers import STATEFUL_ADVICE, OptimizerConfig
from fedjax_graph.core.task import Task, TaskConfig
from fedjax_graph.core.trees import IsPersonal

Score = Literal["aggregated", "local"]  # u_i, or v_i
LOCAL = "local"
OPT_STATE = "client_opt_state"
IDENTITY = OptimizerConfig("sgd", learning_rate=1.0)  # subtracts what it is given


# --- The model trained last ----------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class LocalModelTask:
    """Wraps a task so that a client also keeps v_i.

    That is what its last local steps made of u_i, the model that the server mixed.
    """

    task: TaskConfig
    score: Score

    @property
    def kind(self) -> str:
        """That of the task."""
        return self.task.kind

    def build(self) -> Task:
        """The task's functions, of models that hold v_i under `LOCAL`."""
        task = build_task(self.task)

        def init(key):
            model = task.init(key)
            return model | {LOCAL: plain(model)}

        def keeping(update):
            def run(start, *args, **named) -> LocalResult:
                result = update(aggregated(start), *args, **named)
                model = result.model | {LOCAL: plain(result.model)}
                return result._replace(model=model)

            return run

        def scored(models):
            if self.score == "local":
                return {LOCAL: models[LOCAL]}
            return aggregated(models)

        def model_of(models):
            parts = scored(models)
            return parts.get(LOCAL, parts)

        update_by, embed = task.update_by, task.embed
        return task._replace(
            init=init,
            update=keeping(task.update),
            update_by=update_by and (lambda loss: keeping(update_by(loss))),
            evaluate=lambda models, data: task.evaluate(model_of(models), data),
            predict=lambda models, data: task.predict(model_of(models), data),
            embed=embed
            and (lambda model, *a, **named: embed(aggregated(model), *a, **named)),
            scored=scored,
        )


def task_of(config: Any) -> TaskConfig:
    """The task of a method's config, which keeps v where `score` has v scored."""
    task, score = config.task, getattr(config, "score", None)
    if score != "local" or isinstance(task, LocalModelTask):
        return task
    return LocalModelTask(task, score)


def refuse_local(config: Any, reason: str) -> None:
    """Raises an `InputError` if `score` says that v is scored, which a method lacks."""
    if getattr(config, "score", None) == "local":
        name = type(config).__name__
        raise InputError(f"{name} score='local': {reason}; leave score='aggregated'")


def aggregated(models: Model) -> Model:
    """u alone, of models that may hold v beside it."""
    return {part: tree for part, tree in models.items() if part != LOCAL}


def is_local(path: tuple[Any, ...]) -> bool:
    """Path of a leaf in a model -> whether it is of v, and so stays with its client."""
    return path[0].key == LOCAL


# --- The optimizer's state -----------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class StatefulOptimizerTask:
    """A task whose clients' optimizers go on where their last round ended.

    In local steps the task's own optimizer becomes the identity, and the one that is
    kept acts on the gradients ahead of it, after what a method does with them. Steps
    that are a part of scoring begin anew.
    """

    task: Any  # a dataclass and `TaskConfig`, with an `OptimizerConfig` in `optimizer`

    @property
    def kind(self) -> str:
        """That of the task."""
        return self.task.kind

    def build(self) -> Task:
        """The task's functions, of models that hold the state under `OPT_STATE`."""
        going_on = dataclasses.replace(self.task.optimizer, stateful=False)
        anew = dataclasses.replace(going_on, num_steps=None)
        task = dataclasses.replace(self.task, optimizer=anew).build()
        stepping = dataclasses.replace(self.task, optimizer=IDENTITY).build()
        optimizer = going_on.build()

        def init(key):
            model = task.init(key)
            return model | first_opt_state(self.task, model["params"])

        def keeping(update):
            def run(start, client_data, key, data, adjust, num_rounds, term=None):
                steps = continued(optimizer, start[OPT_STATE])
                chained = optax.chain(adjust, steps) if adjust else steps
                named = {"term": of_plain_models(term)} if term else {}
                args = client_data, key, data, chained, num_rounds
                result = update(plain(start), *args, **named)
                kept = result.opt_state[0]  # the method's comes first, if it has one
                own = kept[1] if adjust else kept
                return result._replace(
                    model=result.model | {OPT_STATE: own}, opt_state=kept
                )

            return run

        def of_plain(function):
            def run(models, *args, **named):
                return function(plain(models), *args, **named)

            return run if function else None

        update_by = stepping.update_by
        return task._replace(
            init=init,
            update=keeping(stepping.update),
            update_by=update_by and (lambda loss: keeping(update_by(loss))),
            evaluate=of_plain(task.evaluate),
            predict=of_plain(task.predict),
            logits=of_plain(task.logits),
            embed=of_plain(task.embed),
        )


def continued(
    optimizer: optax.GradientTransformation, opt_state: optax.OptState
) -> optax.GradientTransformation:
    """An optimizer that starts from a state, for `IDENTITY` to apply its updates."""

    def update(gradients, state, params=None):
        updates, state = optimizer.update(gradients, state, params)
        return jax.tree.map(jnp.negative, updates), state

    return optax.GradientTransformation(lambda params: opt_state, update)


def of_plain_models(term: Callable[..., Any]) -> Callable[..., Any]:
    """A `Term` that may embed models with an optimizer's state."""
    return lambda embed: term(lambda model: embed(plain(model)))


def plain(models: Model) -> Model:
    """Models without what their clients' optimizers have gathered."""
    return {part: tree for part, tree in models.items() if part != OPT_STATE}


def or_kept(rule: IsPersonal) -> IsPersonal:
    """A rule of what stays with its client, and all that these wrappers keep there."""
    return lambda path: is_local(path) or trees.is_of_optimizer(path) or rule(path)


def build_task(config: TaskConfig) -> Task:
    """Builds a task, whose clients keep their optimizers' states if it says so."""
    if is_stateful(config):
        return StatefulOptimizerTask(config).build()
    return _begun_anew(config)


def build_stateless(config: TaskConfig, method: str) -> Task:
    """Builds a task for a method whose clients' optimizers begin anew each round.

    Args:
      config: of the task.
      method: its name, for messages.

    Raises:
      InputError: if the task says that they go on.
    """
    if is_stateful(config):
        raise InputError(f"{method}: optimizer stateful=True: {STATEFUL_ADVICE}")
    return _begun_anew(config)


def _begun_anew(config: TaskConfig) -> Task:
    """Builds a task; raises now what its clients' optimizer would raise in a round."""
    optimizer = getattr(config, "optimizer", None)
    if isinstance(optimizer, OptimizerConfig):  # a task of one's own may have another
        optimizer.check_begun_anew()
    return config.build()


def first_opt_state(config: TaskConfig, params: Any) -> Model:
    """A model's part of what clients' optimizers have gathered, before a first step.

    Args:
      config: of a task.
      params: that its local steps train, of any shape.

    Returns:
      {`OPT_STATE`: a state}; {} where optimizers begin anew each round.
    """
    if not is_stateful(config):
        return {}
    going_on = dataclasses.replace(config.optimizer, stateful=False)
    return {OPT_STATE: going_on.build().init(params)}


def is_stateful(config: TaskConfig) -> bool:
    """Whether the clients of a task are to keep their optimizers' states."""
    optimizer = getattr(config, "optimizer", None)
    return isinstance(optimizer, OptimizerConfig) and optimizer.stateful


def broadcast_own(model: Model, num_clients: int) -> Model:
    """A first model with leaves [1, ...], of clients' optimizers [K, ...]."""
    one = trees.one_row(model)
    shared, own = trees.partition(one, trees.is_of_optimizer)
    return trees.combine(shared, aggregation.broadcast(own, num_clients))
