"""Traffic forecasting with a plain recurrent network, as in SFL's Table 1.

A model of one's own takes its place by name.

One sensor is one client. The paper prints hidden size 64, SGD, batches of 128 and the
errors: 60 minutes (here 12 steps) ahead, of each client without missing readings,
averaged over clients. Ours where it is silent: the loss is the absolute error in the
data's units, missing readings left out; one local epoch a round; the learning rate,
chosen by FedAvg's validation loss on 30 days of METR-LA among 0.003, 0.01, 0.03 and
0.1.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_graph.core import arrays, batching, clients
from fedjax_graph.core.checks import Checked, limited
from fedjax_graph.core.local import LocalResult, local_steps
from fedjax_graph.core.optimizers import OptimizerConfig
from fedjax_graph.core.registry import Registry
from fedjax_graph.core.task import Task, in_head
from fedjax_graph.data.traffic import windows
from fedjax_graph.data.traffic.time_steps import TimeStep
from fedjax_graph.data.traffic.windows import TrafficData
from fedjax_graph.models.protocols import TrafficModel, built
from fedjax_graph.models.rnn import RNNForecaster
from fedjax_graph.tasks import forecasting


class Batch(NamedTuple):
    """One minibatch of a client's windows."""

    indices: jax.Array  # [B] int32, indices into the split's windows
    mask: jax.Array  # [B] float32, 0 for padding


@dataclasses.dataclass(frozen=True)
class TrafficRNNTask(Checked):
    """Hyper-parameters of forecasting with a plain recurrent network."""

    kind: Literal["traffic_rnn"] = "traffic_rnn"
    model: str = "rnn"  # a name of MODELS
    hidden_size: int = limited(64, lower=1)
    batch_size: int = limited(128, lower=1)
    local_epochs: int = limited(1, lower=1)
    optimizer: OptimizerConfig = OptimizerConfig("sgd", 0.01)
    eval_batch_size: int = limited(512, lower=1)

    def module(self) -> TrafficModel:
        """The model that clients train.

        Raises:
          InputError: if none is registered under this name, or it lacks what
            `TrafficModel` asks for.
        """
        what = f"traffic model {self.model!r}"
        return built(MODELS.look_up(self.model), self, TrafficModel, what)

    def build(self) -> Task:
        """The task's functions; raises as `module`."""
        model = self.module()
        return Task(
            init=lambda key: init(model, key),
            client_data=lambda data: data.speed,
            update=client_update(model, self),
            evaluate=forecasting.evaluate_forecasts(
                predict_batch(model), self.eval_batch_size, client_metrics
            ),
            predict=forecasting.predict_forecasts(
                predict_batch(model), self.eval_batch_size
            ),
            is_head=in_head,
        )


MODELS: Registry[Callable[[TrafficRNNTask], TrafficModel]] = Registry(
    "traffic model",
    {"rnn": lambda task: RNNForecaster(task.hidden_size)},
    is_callable=True,
)
"""Name -> factory: the task's config -> module; see `register_model`."""
register_model = MODELS.registering()
"""Registers a model of one's own by a function of the task's config.

    register_model("mine", lambda task: RNNForecaster(task.hidden_size))

or as a decorator of that function. The module that it returns offers what
`models.protocols.TrafficModel` asks for.
"""


def init(model: TrafficModel, key: jax.Array) -> dict[str, Any]:
    """Fresh parameters (the shapes do not depend on the batch)."""
    window = jnp.zeros((windows.INPUT_STEPS, 1, model.num_features))
    variables = model.init(key, window)
    return {"params": variables["params"], "batch_stats": {}}


def client_update(
    model: TrafficModel, config: TrafficRNNTask
) -> Callable[..., LocalResult]:
    """Factory of the local epochs of one client; see `Task.update`."""

    def update(start, speed, key, data: TrafficData, adjust, num_rounds):
        del num_rounds

        def loss(params, stats, batch):
            starts = data.starts[batch.indices]
            inputs, _ = windows.gather(data, speed, starts)
            outputs = model.apply({"params": params}, inputs)
            truth = windows.truth(speed, starts)
            error = absolute_error(outputs * data.std + data.mean, truth, batch.mask)
            return error, stats

        batches = batching.shuffled_batches(
            key, len(data.starts), config.batch_size, config.local_epochs
        )
        batches = Batch(*batches)
        num_steps = len(batches.indices)
        optimizer = config.optimizer.build(num_steps, config.local_epochs)
        return local_steps(loss, optimizer, adjust=adjust)(start, batches)

    return update


def absolute_error(forecast: jax.Array, truth: jax.Array, mask: jax.Array) -> jax.Array:
    """Mean absolute error over the readings that are there.

    Args:
      forecast: [12, B] in the data's units.
      truth: [12, B]; 0 = missing.
      mask: [B], 0 for windows that do not count.

    Raises:
      InputError: if they have not these shapes.
    """
    arrays.check_same_shape(forecast=forecast, truth=truth)
    arrays.check_shape("mask", mask, forecast.shape[1:])
    present = mask * (truth != 0)
    total = jnp.sum(present * jnp.abs(forecast - truth))
    return total / jnp.maximum(jnp.sum(present), 1)


def predict_batch(model: TrafficModel) -> forecasting.PredictBatch:
    """Factory of (models, data, starts [B]) -> [K, B, 12] in the data's units."""

    def predict(models, data: TrafficData, starts):
        inputs, _ = forecasting.gather_all(data, starts)

        def forecast(params, inputs):
            return model.apply({"params": params}, inputs)[..., None]

        outputs = forecasting.apply_models(
            forecast,
            models["params"],
            inputs,
            clients_per_chunk=clients.eval_clients_per_chunk(),
        )
        return jnp.swapaxes(outputs[..., 0], 1, 2) * data.std + data.mean

    return predict


TEST_METRICS = ("mae", "mape", "rmse", "masked")  # what a test is summed up by
ENTRY_METRICS = ("rmse_by_horizon",)  # of it in detail


def client_metrics(
    sums: forecasting.ErrorSums, std: jax.Array, step: TimeStep
) -> dict[str, Any]:
    """The paper's figures: masked, 12 steps ahead, averaged over clients.

    `loss`, by which the best round is chosen, is what is trained: the masked absolute
    error over all 12 steps and all clients; NaN where all readings are missing.
    """
    pooled = forecasting.error_metrics(sums, std, step)
    return {
        **forecasting.client_errors(sums),
        "loss": pooled["masked"]["all"]["mae"],
        "rmse_by_horizon": pooled["rmse_by_horizon"],
        "masked": pooled["masked"],
    }
