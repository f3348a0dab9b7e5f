"""A method of one's own on one's own data: FedAvg with the median in place of the mean.

Twenty clients fit a line to points of their own; two of them are broken. The method is
an aggregator, registered under a name; the task says what a client learns.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_graph.algorithms import REGISTRY, Method, get_method
from fedjax_graph.core.federated import FederatedConfig, federated
from fedjax_graph.core.local import local_steps
from fedjax_graph.core.optimizers import OptimizerConfig
from fedjax_graph.core.task import Task, in_head
from fedjax_graph.driver.rounds import RunConfig, run


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
    optimizer: OptimizerConfig = OptimizerConfig("sgd", learning_rate=0.1)
    kind: str = "line"

    def build(self) -> Task:
        """The functions of one client's learning."""

        def update(model, own, key, data, adjust):
            def loss(params, stats, step):
                x, y = own
                return jnp.mean((predict_one(params, x) - y) ** 2), stats

            steps = local_steps(loss, self.optimizer.build(), adjust=adjust)
            return steps(model, jnp.arange(self.num_steps))

        def init(key):
            params = {"w": jnp.zeros(self.num_features), "b": jnp.zeros(())}
            return {"params": params, "batch_stats": {}}

        return Task(
            init=init,
            client_data=lambda data: (data.x, data.y),
            update=update,
            evaluate=lambda model, data: {
                "loss": mean_error(predict(model, data), data)
            },
            predict=predict,
            is_head=in_head,
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


def median(stacked, cohort):
    """Coordinate-wise median of the clients' models: [C, ...] -> [1, ...]."""
    return jax.tree.map(lambda p: jnp.median(p, axis=0, keepdims=True), stacked)


def fed_median(config: FederatedConfig):
    """FedAvg with the median in place of the mean."""
    return federated(config, lambda state, data, key: median)


def make_split(rng: np.random.Generator, num_broken: int = 0) -> Points:
    """Twenty clients' points of y = 2 a - b + 1; the first ones have other labels."""
    x = rng.normal(size=(20, 16, 2)).astype(np.float32)
    y = x @ np.array([2, -1], np.float32) + 1
    y[:num_broken] = 100
    return Points(x, y, np.arange(20, dtype=np.int32), np.full(20, 16, np.float32))


def main() -> None:
    REGISTRY["fed_median"] = Method(FederatedConfig, fed_median)
    rng = np.random.default_rng(0)
    splits = {
        "train": make_split(rng, num_broken=2),
        "validation": make_split(rng),
        "test": make_split(rng),
    }
    for name in ("fed_avg", "fed_median"):
        method = get_method(name)
        algorithm = method.factory(method.config_type(task=LineTask(num_features=2)))
        result = run(name, algorithm, splits, RunConfig(num_rounds=10))
        print(f"{name}: mean squared error {result.test['loss'][0]:.3f}")


if __name__ == "__main__":
    main()
