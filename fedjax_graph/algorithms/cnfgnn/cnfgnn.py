"""CNFGNN: split learning between sensors and a graph network on the server.

Meng, Rambhatla, Liu, "Cross-Node Federated Graph Neural Network for Spatio-Temporal
Data Modeling", KDD 2021, Algorithms 1 and 2, strategy "AT + FedAvg".

One global round (line numbers of Algorithm 1):
  (1) lines 7-14: client rounds with h_G fixed, then FedAvg;
  (2) lines 15-18: h_c of every window, once;
  (3) lines 19-30: server rounds of the GN with the client weights fixed;
  (4) lines 31-35: h_G of every window, once.

Differences from the paper:
- Step (4) of a round runs at the start of the next one, from the same weights. Then
  h_G of all windows (2.8 GiB on PEMS-BAY) is never part of the state or a checkpoint.
- The last minibatch of a pass is padded and masked.
- With `participation` < 1 a cohort trains in step (1); the GN always sees all nodes.
From the released code, where the paper is silent: minibatches of 128 windows on a
client and of 48 windows on the server, scheduled sampling, zeros as the first h_G and
as the GN's global input, a fresh client optimizer each round and a lasting one for the
server.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, Literal, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax

from fedjax_graph.algorithms.cnfgnn.exchange import (
    Hidden,
    for_all_windows,
    real_share,
    real_windows,
)
from fedjax_graph.algorithms.cnfgnn.joint_training import joint_training
from fedjax_graph.algorithms.cnfgnn.private_exchange import PrivateExchange
from fedjax_graph.core import (
    aggregation,
    batching,
    channel,
    communication,
    folding,
    mesh,
    sharding,
    trees,
)
from fedjax_graph.core.aggregators import NamedAggregator
from fedjax_graph.core.algorithm import FederatedAlgorithm
from fedjax_graph.core.channel import ChannelConfig
from fedjax_graph.core.checks import Checked, limited
from fedjax_graph.core.errors import InputError
from fedjax_graph.core.federated import federated_round
from fedjax_graph.core.optimizers import OptimizerConfig
from fedjax_graph.data.traffic import windows
from fedjax_graph.data.traffic.windows import TrafficData, Windows
from fedjax_graph.models import graph_network, seq2seq
from fedjax_graph.tasks import forecasting
from fedjax_graph.tasks.traffic_seq2seq import ClientData, local_training


@dataclasses.dataclass(frozen=True)
class HalvesConfig(Checked):
    """Configures the two halves and their optimizers; the defaults are the paper's."""

    hidden_size: int = limited(64, lower=1)
    gn_layers: int = limited(2, lower=1)
    gn_mlp_sizes: tuple[int, ...] = limited((256, 256, 128), lower=1, is_filled=True)
    server_batch_size: int = limited(48, lower=1)
    client_optimizer: OptimizerConfig = OptimizerConfig("adam", 1e-3)
    server_optimizer: OptimizerConfig = OptimizerConfig("adam", 1e-3)
    sampling_decay: float = limited(1000.0, above=0)
    clients_per_chunk: int | None = limited(None, lower=1)
    masked_loss: bool = False  # leaves missing readings out
    server_dtype: Literal["float32", "bfloat16"] = "float32"  # of the graph network
    # whose messages the graph network holds at once; 0: those of all edges
    edges_per_chunk: int = limited(0, lower=0)
    exchange_bits: ClassVar[int] = 32  # nothing is rounded where nothing is sent

    def __post_init__(self) -> None:
        """Checks types and limits; raises `InputError`."""
        super().__post_init__()
        if len(self.gn_mlp_sizes) < 2:
            raise InputError(
                f"gn_mlp_sizes={self.gn_mlp_sizes}: expected two or more sizes, of "
                "hidden layers and of the last one"
            )


@dataclasses.dataclass(frozen=True)
class SplitConfig(HalvesConfig):
    """Configures methods whose clients and server exchange hidden states.

    `exchange_bits` is the width of the numbers exchanged.
    """

    # of h_c, h_G and their gradients; fewer cost less
    exchange_bits: Literal[32, 16, 8, 4] = 32


@dataclasses.dataclass(frozen=True)
class CNFGNNConfig(NamedAggregator, ChannelConfig, SplitConfig):
    """Hyper-parameters; defaults: the paper's on METR-LA."""

    client_rounds: int = limited(1, lower=1)  # R_c, passes over a client's windows
    # R_s, passes over all windows; 20 on PEMS-BAY
    server_rounds: int = limited(1, lower=1)
    client_batch_size: int = limited(128, lower=1)
    participation: float = limited(1.0, above=0, upper=1)

    def __post_init__(self) -> None:
        """Checks types and limits; raises `InputError`."""
        super().__post_init__()
        channel.check_aggregator(self, self.named_aggregator())


class CNFGNNState(NamedTuple):
    """Holds both halves of the model, and how far training is."""

    client_params: Any  # pytree of [1, ...], or [K, ...] without FedAvg
    server_params: Any
    server_opt_state: optax.OptState
    round: jax.Array  # [] int32, global rounds so far
    num_steps: jax.Array  # [] int32, optimization steps so far
    noise_key: Any = ()  # data of that of the h_c last sent, if they are private


class Models(NamedTuple):
    """The two halves: on each client, and on the server."""

    client: seq2seq.Seq2Seq
    server: graph_network.GraphNetwork
    clients_per_chunk: int | None = None  # where clients have models of their own
    server_dtype: str = "float32"
    exchange_bits: int = 32

    def init(self, key: jax.Array) -> tuple[Any, Any]:
        """First parameters: of the client, [1, ...], and of the server."""
        client_key, server_key = jax.random.split(key)
        client_params = seq2seq.init_params(self.client, client_key)
        client_params = trees.one_row(client_params)
        return client_params, graph_network.init_params(self.server, server_key)

    def _apply(self, fn, client_params, *args) -> jax.Array:
        chunk = forecasting.own_chunk(client_params, self.clients_per_chunk)
        return forecasting.apply_models(
            fn, client_params, *args, clients_per_chunk=chunk
        )

    def encode(self, client_params, inputs: jax.Array) -> jax.Array:
        """ClientEncode of Algorithm 2 for all clients: h_c [K, B, H]."""
        return self._apply(
            lambda params, x: self.client.apply(
                {"params": params}, x, method=self.client.encode
            ),
            client_params,
            inputs,
        )

    def embed(self, server_params, data: TrafficData, hidden) -> jax.Array:
        """The GN of Eq. 3: h_G [K, B, H] from h_c [K, B, H], both float32."""
        params, h_c = jax.tree.map(
            lambda x: x.astype(self.server_dtype), (server_params, hidden)
        )
        h_g = self.server.apply({"params": params}, data.graph, h_c)
        return h_g.astype(hidden.dtype)

    def decode(
        self, client_params, gathered: Windows, hidden, embedding, feed_truth
    ) -> tuple[jax.Array, jax.Array]:
        """Eq. 2 for all clients: normalised outputs and targets, both [K, 12, B]."""
        inputs, targets = gathered

        def one(params, hidden, embedding, last, targets):
            outputs = self.client.apply(
                {"params": params},
                hidden,
                embedding,
                last[0],
                targets,
                feed_truth,
                method=self.client.decode,
            )
            return cast(jax.Array, outputs)[..., None]

        outputs = self._apply(
            one, client_params, hidden, embedding, inputs[:, -1:], targets
        )
        return outputs[..., 0], targets[..., 0]

    def forecast(
        self, client_params, server_params, data: TrafficData, starts
    ) -> jax.Array:
        """Forecasts of both halves together, [K, B, 12] in the unit of the data."""
        bits = self.exchange_bits
        gathered = forecasting.gather_all(data, starts)
        h_c = self.encode(client_params, gathered.inputs)
        h_g = self.embed(server_params, data, communication.up(h_c, bits=bits))
        h_g = communication.down(h_g, bits=bits)
        feed_truth = jnp.zeros(windows.TARGET_STEPS, bool)
        outputs, _ = self.decode(client_params, gathered, h_c, h_g, feed_truth)
        return jnp.swapaxes(outputs, 1, 2) * data.std + data.mean


def make_models(config: HalvesConfig) -> Models:
    """Makes the encoder-decoder of clients and the server's graph network."""
    size = config.hidden_size
    network = graph_network.GraphNetwork(
        size, size, config.gn_mlp_sizes, config.gn_layers, config.edges_per_chunk
    )
    return Models(
        seq2seq.Seq2Seq(hidden_size=size, embedding_size=size),
        network,
        config.clients_per_chunk,
        config.server_dtype,
        config.exchange_bits,
    )


def client_phase(
    config: CNFGNNConfig, aggregate: aggregation.Aggregator | None = None
) -> Callable[..., Any]:
    """Step (1): client rounds with h_G fixed, then aggregation (lines 7-14).

    Returns:
      (client_params, embeddings [K, S, H], data, key, num_steps) ->
      (client_params, mean loss, steps taken).

    Raises:
      InputError: if labels are to be flipped, which sensors have not, or missing
        readings would show in what is private.
    """
    if config.privacy is not None and config.masked_loss:
        raise InputError(
            "privacy: masked_loss leaves missing readings out of gradients, which "
            "shows where they are"
        )
    if config.misbehaviour.flips_labels:
        raise InputError("attack='label_flip': CNFGNN has no labels")
    aggregate = aggregate or config.named_aggregator()
    train = local_training(
        make_models(config).client,
        config.client_optimizer,
        batch_size=config.client_batch_size,
        num_epochs=config.client_rounds,
        sampling_decay=config.sampling_decay,
        masked_loss=config.masked_loss,
    )

    def update(params, client, key, data, num_steps):
        start = {"params": params, "batch_stats": {}}
        result = train(start, client, key, data, None, num_steps)
        return result.model["params"], result.loss

    def phase(client_params, embeddings, data: TrafficData, key, num_steps):
        client_params, loss = federated_round(
            update,
            aggregate,
            participation=config.participation,
            clients_per_chunk=config.clients_per_chunk,
            channel_config=config,
        )(
            client_params,
            ClientData(data.speed, embeddings),
            data.client_ids,
            data.client_weights,
            key,
            data,
            num_steps,
        )
        steps = batching.steps_per_epoch(len(data.starts), config.client_batch_size)
        return client_params, loss, config.client_rounds * steps

    return phase


def server_phase(config: CNFGNNConfig) -> Callable[..., Any]:
    """Step (3): split learning of the GN with the clients fixed (lines 19-30).

    Returns:
      (server_params, opt_state, client_params, hidden, data, key, num_steps) ->
      (server_params, opt_state, mean loss of a client, steps taken), where `hidden` is
      `Hidden` of all windows, as rows.
    """
    models, bits = make_models(config), config.exchange_bits
    exchange = PrivateExchange(config.privacy, config.server_rounds)

    def gradients(server_params, data, batch):
        """Loss and gradient of the GN for a batch, summed over clients (line 27)."""
        share, starts = real_share(data, config.server_batch_size), batch.starts
        client_params = batch.common
        gathered = forecasting.gather_all(data, starts)
        hidden = batch.own.of_clients(len(data.client_ids))
        h_g, pull_back = jax.vjp(
            lambda params: models.embed(params, data, hidden.at_server()),
            server_params,
        )  # line 21

        def loss(h_g):  # lines 24-26, ClientBackward
            outputs, targets = models.decode(
                client_params, gathered, hidden.at_clients, h_g, batch.feed_truth
            )
            return jnp.sum(batch.weights * (outputs - targets) ** 2)

        arrived = communication.down(h_g, share, bits)
        value, grads = jax.value_and_grad(loss)(arrived)
        grads = exchange.gradients(grads, data, starts, batch.weights, batch.noise_key)
        return value, *pull_back(communication.up(grads, share, bits))

    train = joint_training(
        gradients,
        config.server_optimizer.build(),
        batch_size=config.server_batch_size,
        num_epochs=config.server_rounds,
        sampling_decay=config.sampling_decay,
        masked_loss=config.masked_loss,
    )

    def phase(server_params, opt_state, client_params, hidden, data, key, num_steps):
        exchange.release()
        return train(
            server_params, opt_state, data, key, num_steps, hidden, client_params
        )

    return phase


def cnfgnn(
    config: CNFGNNConfig, aggregate: aggregation.Aggregator | None = None
) -> FederatedAlgorithm:
    """Factory of CNFGNN; an aggregator in place of the config's makes another method.

    Raises:
      InputError: see `client_phase`.
    """
    models = make_models(config)
    aggregate = aggregate or config.named_aggregator()
    train_clients, train_server = client_phase(config, aggregate), server_phase(config)
    batch_size, bits = config.server_batch_size, config.exchange_bits
    exchange = PrivateExchange(config.privacy, config.server_rounds)

    def init(key: jax.Array, data: TrafficData) -> CNFGNNState:
        client_params, server_params = models.init(key)
        return CNFGNNState(
            aggregation.initial(aggregate, client_params, len(data.client_ids)),
            server_params,
            config.server_optimizer.build().init(server_params),
            round=jnp.int32(0),
            num_steps=jnp.int32(0),
            noise_key=exchange.noise_key(key),
        )

    def encode_batch(client_params, data, starts, noise_key) -> Hidden:
        inputs, _ = forecasting.gather_all(data, starts)
        h_c = models.encode(client_params, inputs)
        return Hidden.of(h_c, bits, exchange.hidden(h_c, data, starts, noise_key))

    def embeddings(state: CNFGNNState, data: TrafficData) -> jax.Array:
        """Step (4) of the round before; zeros before the first round."""

        def embed_batch(starts, data, client_params, server_params, noise_key):
            hidden = encode_batch(client_params, data, starts, noise_key)
            h_g = models.embed(server_params, data, hidden.at_server())
            h_g = communication.down(h_g, real_windows(data, batch_size), bits)
            factor = folding.factor(config.hidden_size, len(starts))
            return folding.fold(sharding.to_clients(h_g), factor)

        def embed_windows(_):
            params = (state.client_params, state.server_params, state.noise_key)
            h_g = for_all_windows(
                embed_batch, batch_size, data, *params, axis=2, out_axis=0
            )
            return h_g.reshape(len(h_g), -1, h_g.shape[-1])

        def zeros(_):
            like = jax.eval_shape(embed_windows, None)
            return mesh.cut_clients(jnp.zeros(like.shape, like.dtype))

        return jax.lax.cond(state.round > 0, embed_windows, zeros, None)

    def encode_rows(starts, data, client_params, noise_key) -> Hidden:
        return encode_batch(client_params, data, starts, noise_key).as_rows()

    def round_(state: CNFGNNState, data: TrafficData, key: jax.Array):
        client_key, server_key = jax.random.split(key)
        noise_key = exchange.noise_key(key)
        h_g = embeddings(state, data)  # (4) of the round before
        client_params, client_loss, client_steps = train_clients(  # (1)
            state.client_params, h_g, data, client_key, state.num_steps
        )
        hidden = for_all_windows(  # (2)
            encode_rows, batch_size, data, client_params, noise_key, axis=0, out_axis=0
        ).sent(real_windows(data, batch_size))
        exchange.release()
        server_params, opt_state, server_loss, server_steps = train_server(  # (3)
            state.server_params,
            state.server_opt_state,
            client_params,
            hidden,
            data,
            server_key,
            state.num_steps + client_steps,
        )
        state = CNFGNNState(
            client_params,
            server_params,
            opt_state,
            round=state.round + 1,
            num_steps=state.num_steps + client_steps + server_steps,
            noise_key=noise_key,
        )
        return state, {"train_loss": client_loss, "server_loss": server_loss}

    return split_algorithm(config, init, round_)._replace(
        privacy=config.privacy, participation=config.participation
    )


def split_algorithm(config: HalvesConfig, init, round_) -> FederatedAlgorithm:
    """A method whose states have `client_params` and `server_params`.

    The loss of its evaluation leaves out what the training loss does.
    """
    models = make_models(config)

    def predict_batch(state, data: TrafficData, starts: jax.Array):
        return models.forecast(state.client_params, state.server_params, data, starts)

    return forecasting.forecaster(
        init, round_, predict_batch, config.server_batch_size, config.masked_loss
    )


def at_without_fedavg(config: CNFGNNConfig) -> FederatedAlgorithm:
    """AT without FedAvg (Table 10): every client keeps its own model.

    Raises:
      InputError: if the config names another aggregator than that of CNFGNN.
    """
    if config.aggregator != CNFGNNConfig.aggregator:
        raise InputError(f"aggregator={config.aggregator}: here nothing is averaged")
    return cnfgnn(config, aggregation.none)
