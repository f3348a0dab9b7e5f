"""A method of one's own on one's own data: FedAvg with a norm-bounded mean.

Twenty clients fit a line to points of their own; two of them are broken. The method is
an aggregator, registered under a name; the task says what a client learns. Of the
library's robust aggregators the `aggregator` of FedAvg's config is enough.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import fedjax_graph as fg
from fedjax_graph.core.local import local_steps


class Points(NamedTuple):
    """One split: what methods read of any data is `client_ids` and `client_weights`."""

    x: jax.Array  # [K, M, F]
    y: jax.Array  # [K, M]
    client_ids: jax.Array  # [K]
    client_weights: jax.Array  # [K] number of examples; 0 = padding


@dataclasses.dataclass(frozen=True)
class LineTask:
    """Linear regression by `num_steps` steps on all of a client's points."""

    num_features: int
    num_steps: int = 10
    optimizer: fg.OptimizerConfig = fg.OptimizerConfig("sgd", learning_rate=0.1)
    kind: str = "line"

    def build(self) -> fg.Task:
        """The functions of one client's learning."""

        def update(model, own, key, data, adjust, num_rounds):
            def loss(params, stats, step):
                x, y = own
                return jnp.mean((predict_one(params, x) - y) ** 2), stats

            steps = local_steps(loss, self.optimizer.build(), adjust=adjust)
            return steps(model, jnp.arange(self.num_steps))

        def init(key):
            params = {"w": jnp.zeros(self.num_features), "b": jnp.zeros(())}
            return {"params": params, "batch_stats": {}}

        return fg.Task(
            init=init,
            client_data=lambda data: (data.x, data.y),
            update=update,
            evaluate=lambda model, data: {
                "loss": mean_error(predict(model, data), data)
            },
            predict=predict,
            is_head=lambda path: False,  # no layer is a head
        )


def predict_one(params, x):
    return x @ params["w"] + params["b"]


def predict(model, data):
    """[K, M], by one model for all ([1, ...]) or one each ([K, ...])."""
    params = jax.tree.map(
        lambda p: jnp.broadcast_to(p, (len(data.x), *p.shape[1:])), model["params"]
    )
    return jax.vmap(predict_one)(params, data.x)


def mean_error(outputs, data):
    return jnp.mean((outputs - data.y) ** 2)


@dataclasses.dataclass(frozen=True)
class BoundedMeanConfig(fg.FederatedConfig):
    """What every method that federates has, and a hyper-parameter of its own."""

    bound: float = 0.5  # how far from the median model a client's may lie


def bounded_mean(bound):
    """Aggregator: the mean of models that are drawn to within `bound` of the median."""

    def cut(move):  # of one client
        norm = jnp.sqrt(sum(jnp.sum(x**2) for x in jax.tree.leaves(move)))
        share = bound / jnp.maximum(norm, bound)
        return jax.tree.map(lambda x: share * x, move)

    def aggregate(stacked, cohort):  # [C, ...] -> [1, ...]
        median = fg.aggregation.median(stacked, cohort)
        moves = jax.vmap(cut)(jax.tree.map(jnp.subtract, stacked, median))
        mean = fg.aggregation.weighted_mean(moves, cohort)
        return jax.tree.map(jnp.add, median, mean)

    return aggregate


@fg.register_method("bounded_mean", title="bounded mean")
def fed_bounded_mean(config: BoundedMeanConfig) -> fg.FederatedAlgorithm:
    """FedAvg with the norm-bounded mean in place of the mean."""
    return fg.federated(config, lambda state, data, key: bounded_mean(config.bound))


def make_split(rng: np.random.Generator, num_broken: int = 0) -> Points:
    """Twenty clients' points of y = 2 a - b + 1; the first ones have other labels."""
    x = rng.normal(size=(20, 16, 2)).astype(np.float32)
    y = x @ np.array([2, -1], np.float32) + 1
    y[:num_broken] = 100
    return Points(x, y, np.arange(20, dtype=np.int32), np.full(20, 16, np.float32))


def main() -> None:
    rng = np.random.default_rng(0)
    splits = {
        "train": make_split(rng, num_broken=2),
        "validation": make_split(rng),
        "test": make_split(rng),
    }
    for name in ("fed_avg", "bounded_mean"):
        method = fg.get_method(name)
        algorithm = method.factory(method.config_type(task=LineTask(num_features=2)))
        result = fg.run(name, algorithm, splits, fg.RunConfig(num_rounds=10))
        print(f"{name}: mean squared error {result.test['loss'][0]:.3f}")


if __name__ == "__main__":
    main()
