"""Clients whose model is weights times masks, entry by entry, both of them trained."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_graph.core.errors import InputError
from fedjax_graph.core.optimizers import OptimizerConfig
from fedjax_graph.core.proximal import squared_norm
from fedjax_graph.core.task import Task, TaskConfig

PRUNED_BELOW = 1e-3  # a smaller entry of a mask counts as 0 when a model is used


@dataclasses.dataclass(frozen=True)
class MaskedWeights:
    """A task whose params are `weights` and, of those with two axes or more, `masks`.

    To the loss come the sum of the masks' magnitudes, and the squared distance of the
    weights from where they start.
    """

    task: TaskConfig
    mask_weight: float  # of the first
    pull_weight: float  # of the second
    optimizer: OptimizerConfig | None = None  # in place of the task's

    @property
    def kind(self) -> str:
        """That of the task."""
        return self.task.kind

    def build(self) -> Task:
        """The task's functions.

        Raises:
          InputError: if the task trains on minibatches.
        """
        config: Any = self.task
        if self.optimizer is not None:
            config = dataclasses.replace(config, optimizer=self.optimizer)
        task = config.build()
        logits, update_by, train_loss = task.logits, task.update_by, task.train_loss
        if update_by is None or train_loss is None:
            raise InputError(f"the task {self.kind} trains on minibatches: no masks")

        def init(key):
            model = task.init(key)
            weights = model["params"]
            masks = jax.tree.map(
                lambda x: jnp.ones_like(x) if x.ndim > 1 else None, weights
            )
            return model | {"params": {"weights": weights, "masks": masks}}

        def update(start, *args):
            centre = start["params"]["weights"]

            def loss(params, *others):
                value, stats = train_loss(times(params), *others)
                masks, weights = params["masks"], params["weights"]
                size = sum(jnp.sum(jnp.abs(x)) for x in jax.tree.leaves(masks))
                gap = squared_norm(jax.tree.map(jnp.subtract, weights, centre))
                return value + self.mask_weight * size + self.pull_weight * gap, stats

            return update_by(loss)(start, *args)

        def used(models):
            return models | {"params": times(models["params"], PRUNED_BELOW)}

        return task._replace(
            init=init,
            update=update,
            evaluate=lambda models, data: task.evaluate(used(models), data),
            predict=lambda models, data: task.predict(used(models), data),
            logits=logits and (lambda models, data: logits(used(models), data)),
            embed=None,
            query_loss=None,
            train_loss=None,
            update_by=None,
        )


def times(params: Any, least: float = 0.0) -> Any:
    """Weights times masks, of which entries below `least` are taken as 0."""

    def product(mask, x):
        return x if mask is None else x * jnp.where(jnp.abs(mask) < least, 0, mask)

    masks, weights = params["masks"], params["weights"]
    return jax.tree.map(product, masks, weights, is_leaf=lambda x: x is None)


def is_mask(path: tuple[Any, ...]) -> bool:
    """Path of a leaf in a model -> whether it is a mask's."""
    return any(getattr(key, "key", None) == "masks" for key in path)
