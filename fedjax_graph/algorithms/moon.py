"""MOON: representations are drawn to the server's and away from a client's last ones.

Li, He, Song, "Model-Contrastive Federated Learning", CVPR 2021, Algorithm 1:

    l_con = -log e^(s(z, z_g) / tau) / (e^(s(z, z_g) / tau) + e^(s(z, z_p) / tau))   (3)
    l = l_sup + mu l_con                                                             (4)

where s is the cosine and z, z_g and z_p are what the model in training, the server's
and the client's of its last round make of the same examples; the latter two are fixed,
and applied as they score. Equation numbers are those of this list.

mu = 1 and tau = 0.5, where the paper tunes mu among 0.1, 1, 5 and 10. Differences from
the paper: z is what the last layer reads, without a projection head of its own; before
a client's first round its last model is the server's first one, so that l_con is
constant in round 1, and pushes who joins later away from that model. OpenFGL 1.1.0
contrasts all nodes of a client, `contrast_on="all"`, and not those alone that it trains
on.
"""

import dataclasses
from typing import Literal

import jax
import optax

from fedjax_graph.algorithms.fed_avg import FedAvgConfig
from fedjax_graph.core import channel, client_state
from fedjax_graph.core.algorithm import FederatedAlgorithm
from fedjax_graph.core.building import embedding_task
from fedjax_graph.core.checks import limited
from fedjax_graph.core.client_memory import with_client_memory
from fedjax_graph.core.masks import masked_mean

NORM_FLOOR = 1e-8  # of a cosine


@dataclasses.dataclass(frozen=True)
class MoonConfig(FedAvgConfig):
    """Configures MOON: the contrast between global and previous local model."""

    contrast_weight: float = limited(1.0, lower=0)  # mu
    temperature: float = limited(0.5, above=0)  # tau
    contrast_on: Literal["trained", "all"] = "trained"  # examples of a client


def contrast(
    z: jax.Array, towards: jax.Array, away: jax.Array, temperature: float
) -> jax.Array:
    """Computes l_con (Eq. 3) of each row: three times [B, D] -> [B]."""
    near, far = (
        optax.losses.cosine_similarity(z, other, epsilon=NORM_FLOOR)
        for other in (towards, away)
    )
    return jax.nn.softplus((far - near) / temperature)


def moon(config: MoonConfig) -> FederatedAlgorithm:
    """Factory of MOON on a task with embeddings.

    Raises:
      InputError: if the task has none, or privacy is asked for.
    """
    kept = "epsilon does not account for the last models that moon's clients keep"
    channel.refuse(config, kept, "privacy")
    embedding_task(config.task, "moon")

    def update(task, w, previous, client_data, key, data, num_rounds):
        def term(embed):
            towards, away = embed(w), embed(previous)

            def add(params, seen, key):
                del params, key
                losses = contrast(seen.embeddings, towards, away, config.temperature)
                is_in = {"trained": seen.is_trained, "all": seen.is_real}
                mean = masked_mean(losses, is_in[config.contrast_on])
                return config.contrast_weight * mean  # Eq. 4

            return add

        added = term if config.contrast_weight else None
        result = task.update(w, client_data, key, data, None, num_rounds, term=added)
        return result.model, client_state.plain(result.model), result.loss

    return with_client_memory(
        config,
        config.make_aggregator,
        first_memory=client_state.plain,
        update=update,
        server_optimizer=config.server_optimizer,
    )
