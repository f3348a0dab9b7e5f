"""Traffic forecasting with CNFGNN's encoder-decoder: any method of a task runs on it.

Meng, Rambhatla, Liu, "Cross-Node Federated Graph Neural Network for Spatio-Temporal
Data Modeling", KDD 2021. One sensor is one client. The loss is the squared error of
normalised speeds; the scores are in the paper's convention (`forecasting`). Without an
embedding from a server this is the plain GRU of Table 7: GRU + FedAvg is `fed_avg` on
this task with `sampling_decay` = 1, GRU (local) is `local`. From the released code: the
truth is fed by scheduled sampling, and the optimizer starts anew each round.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax

from fedjax_graph.core import folding
from fedjax_graph.core.batching import steps_per_epoch
from fedjax_graph.core.checks import Checked, limited
from fedjax_graph.core.local import LocalResult, Model, local_steps
from fedjax_graph.core.optimizers import OptimizerConfig
from fedjax_graph.core.task import Task, in_head
from fedjax_graph.data.traffic import windows
from fedjax_graph.data.traffic.windows import TrafficData
from fedjax_graph.models import seq2seq
from fedjax_graph.tasks import forecasting
from fedjax_graph.tasks.scheduled_sampling import Batch, epoch_batches, target_weights

AGGREGATOR = 2  # `fold_in` 0 and 1 of a round's key are the cohort's and the clients'


@dataclasses.dataclass(frozen=True)
class TrafficSeq2SeqTask(Checked):
    """Hyper-parameters of the task; defaults: the paper's GRU with 63K parameters."""

    kind: Literal["traffic_seq2seq"] = "traffic_seq2seq"
    hidden_size: int = limited(100, lower=1)  # 200 for the 727K model
    num_layers: int = limited(1, lower=1)  # 2 for the 727K model
    embedding_size: int = limited(0, lower=0)  # width of zeros where CNFGNN has h_G
    optimizer: OptimizerConfig = OptimizerConfig("adam", 1e-3)
    batch_size: int = limited(128, lower=1)
    local_epochs: int = limited(1, lower=1)
    # k; 1: the truth is fed in the first steps alone
    sampling_decay: float = limited(1000.0, above=0)
    masked_loss: bool = False  # leaves missing readings out
    eval_batch_size: int = limited(48, lower=1)
    # in forecasts, of models of their own
    clients_per_chunk: int | None = limited(None, lower=1)

    def build(self) -> Task:
        """The task's functions."""
        predict, size = predict_batch(self), self.eval_batch_size
        metrics = functools.partial(
            forecasting.error_metrics, masked_loss=self.masked_loss
        )
        return Task(
            init=lambda key: init(self.model(), key),
            client_data=lambda data: client_data(self, data),
            update=client_update(self),
            evaluate=forecasting.evaluate_forecasts(predict, size, metrics),
            predict=forecasting.predict_forecasts(predict, size),
            is_head=in_head,
            round_keys=round_keys,
        )

    def model(self) -> seq2seq.Seq2Seq:
        """The network of one client."""
        return seq2seq.Seq2Seq(self.hidden_size, self.embedding_size, self.num_layers)


class ClientData(NamedTuple):
    """What one client trains on (with a leading client axis where stacked)."""

    speed: jax.Array  # [T] unit of the readings
    embeddings: jax.Array  # [S, E], h_G of each training window, or rows of `folding`


def init(model: seq2seq.Seq2Seq, key: jax.Array) -> Model:
    """Fresh parameters of one client; there are no running statistics."""
    return {"params": seq2seq.init_params(model, key), "batch_stats": {}}


def round_keys(key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The round's own key for the clients, and one for the aggregator."""
    return key, jax.random.fold_in(key, AGGREGATOR)


def client_data(task: TrafficSeq2SeqTask, data: TrafficData) -> ClientData:
    """All clients' series, with zeros for h_G."""
    shape = (len(data.client_ids), len(data.starts), task.embedding_size)
    return ClientData(data.speed, jnp.zeros(shape, jnp.float32))


# --- Training on one client ----------------------------------------------------------


def client_update(task: TrafficSeq2SeqTask) -> Callable[..., LocalResult]:
    """Factory of the local epochs of one client; see `Task.update`."""
    train = local_training(
        task.model(),
        task.optimizer,
        batch_size=task.batch_size,
        num_epochs=task.local_epochs,
        sampling_decay=task.sampling_decay,
        masked_loss=task.masked_loss,
    )

    def update(start, client, key, data: TrafficData, adjust, num_rounds):
        steps = steps_per_epoch(len(data.starts), task.batch_size)
        first_step = num_rounds * (task.local_epochs * steps)
        return train(start, client, key, data, adjust, first_step)

    return update


def local_training(
    model: seq2seq.Seq2Seq,
    optimizer: OptimizerConfig,
    *,
    batch_size: int,
    num_epochs: int,
    sampling_decay: float,
    masked_loss: bool = False,
) -> Callable[..., LocalResult]:
    """ClientUpdate of Algorithm 2: passes over one client's windows, h_G fixed.

    Args:
      model: the client's.
      optimizer: starts anew with each call.
      batch_size: windows in a minibatch.
      num_epochs: passes.
      sampling_decay: see `epoch_batches`.
      masked_loss: whether missing readings are left out of the loss.

    Returns:
      (model, ClientData, key, TrafficData, adjust, first_step) -> LocalResult, of ONE
      client; `adjust` as in `Task.update`, `first_step` [] int32 optimization steps
      taken so far.

    Raises:
      InputError: if the optimizer was to go on from round to round.
    """
    optimizer.check_begun_anew()

    def train(
        start: Model,
        client: ClientData,
        key: jax.Array,
        data: TrafficData,
        adjust: optax.GradientTransformation | None,
        first_step: jax.Array,
    ) -> LocalResult:
        def loss(params, stats, batch: Batch):
            starts = data.starts[batch.indices]
            inputs, targets = windows.gather(data, client.speed, starts)
            outputs = model.apply(
                {"params": params},
                inputs,
                folding.take(client.embeddings, batch.indices, model.embedding_size),
                targets,
                batch.feed_truth,
            )
            truth = windows.truth(client.speed, starts)
            weights = target_weights(truth, batch.mask, masked_loss)
            return jnp.sum(weights * (outputs - targets[..., 0]) ** 2), stats

        minibatches = epoch_batches(
            key, len(data.starts), batch_size, num_epochs, first_step, sampling_decay
        )
        built = optimizer.build(len(minibatches.indices), num_epochs)
        return local_steps(loss, built, adjust=adjust)(start, minibatches)

    return train


# --- All clients at once -------------------------------------------------------------


def apply_all(
    task: TrafficSeq2SeqTask,
    stacked_params: Any,
    data: TrafficData,
    starts: jax.Array,
    feed_truth: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """All clients' models on the windows at `starts` [B].

    Args:
      task: its model and chunks.
      stacked_params: pytree of [1 or K, ...].
      data: of K clients.
      starts: [B] int32.
      feed_truth: [12] bool.

    Returns:
      Normalised outputs and targets, both [K, 12, B].
    """
    inputs, targets = forecasting.gather_all(data, starts)

    def apply_one(params, inputs, targets):
        embedding = jnp.zeros((inputs.shape[1], task.embedding_size))
        outputs = task.model().apply(
            {"params": params}, inputs, embedding, targets, feed_truth
        )
        return cast(jax.Array, outputs)[..., None]

    chunk = forecasting.own_chunk(stacked_params, task.clients_per_chunk)
    outputs = forecasting.apply_models(
        apply_one, stacked_params, inputs, targets, clients_per_chunk=chunk
    )
    return outputs[..., 0], targets[..., 0]


def predict_batch(task: TrafficSeq2SeqTask) -> forecasting.PredictBatch:
    """Factory of (models, data, starts [B]) -> [K, B, 12] in the data's unit."""

    def predict(models, data: TrafficData, starts):
        feed_truth = jnp.zeros(windows.TARGET_STEPS, bool)
        outputs, _ = apply_all(task, models["params"], data, starts, feed_truth)
        return jnp.swapaxes(outputs, 1, 2) * data.std + data.mean

    return predict
