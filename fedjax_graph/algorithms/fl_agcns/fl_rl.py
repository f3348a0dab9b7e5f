"""FL-RL: a controller writes architectures, and learns from their federated scores.

The baseline of FL-AGCNS (Wang et al., arXiv 2104.04141, Section 4.1), where it is
BlockQNN, which learns values of choices. Ours is the controller of Gao et al., "Graph
Neural Architecture Search", IJCAI 2020 (GraphNAS), after Pham et al., "Efficient Neural
Architecture Search via Parameter Sharing", ICML 2018: an LSTM writes a code gene by
gene, each drawn given those before. A round trains `codes_per_round` codes from scratch
as `fl_random` does, and is one step of REINFORCE (Williams, 1992):

    R_c = score of c + w x entropy of the genes' distributions
    b  <- 0.95 b + 0.05 mean_c R_c                           at first mean_c R_c
    gradient of -mean_c (R_c - b) log p(c)

The controller is the server's: clients learn of codes alone. At first its genes are
nearly uniform, so in the paper's space, where the first absent layer ends a code, four
of five codes of all ops have all six layers, where the other searches begin with
uniform depths.
"""

import dataclasses
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from fedjax_graph.algorithms.fl_agcns.fl_random import (
    TrialConfig,
    first_state,
    try_codes,
)
from fedjax_graph.algorithms.fl_agcns.search import WORST, Weights, searched
from fedjax_graph.core.algorithm import FederatedAlgorithm
from fedjax_graph.core.checks import limited
from fedjax_graph.core.local import Params
from fedjax_graph.core.masks import masked_mean
from fedjax_graph.core.optimizers import OptimizerConfig
from fedjax_graph.models.architecture import ANYTHING, NUM_LAYERS, Choices, is_gene
from fedjax_graph.models.packed import PackedNet

INIT_RANGE = 0.1  # GraphNAS's, of embeddings and decoders
TEMPERATURE = 5.0  # GraphNAS's: a logit is 2.5 tanh(x / 5)
LARGEST_LOGIT = 2.5


@dataclasses.dataclass(frozen=True)
class FLRLConfig(TrialConfig):
    """Hyper-parameters, but for `codes_per_round` those of GraphNAS's released code."""

    codes_per_round: int = limited(5, lower=1)
    controller_size: int = limited(100, lower=1)  # of the LSTM's state
    controller_optimizer: OptimizerConfig = OptimizerConfig("adam", 3.5e-4)
    baseline_decay: float = limited(0.95, lower=0, upper=1)
    entropy_weight: float = limited(1e-4, lower=0)

    @property
    def controller(self) -> "Controller":
        """The network that draws codes."""
        return Controller(self.num_layers, self.controller_size, self.choices)


class Learnt(NamedTuple):
    """Holds what the controller has learnt."""

    params: Params
    opt_state: Any
    baseline: jax.Array  # [] moving average of rewards; 0 before the first round


class ControllerState(NamedTuple):
    """Extends `fl_random.TrialState` by what the controller has learnt."""

    weights: Weights
    code: jax.Array  # [L + 2] int32, the best so far
    num_rounds: jax.Array  # [] int32
    best_score: jax.Array  # [] of that code
    learnt: Learnt


def fl_rl(config: FLRLConfig) -> FederatedAlgorithm:
    """Factory of the search by policy gradient."""
    controller = config.controller

    def init(key, data):
        del data
        trial_key, controller_key = jax.random.split(key)
        params = controller.init(controller_key)
        opt_state = config.controller_optimizer.build().init(params)
        learnt = Learnt(params, opt_state, jnp.float32(0))
        return ControllerState(*first_state(config, trial_key), learnt)

    def round_(state, data, key):
        code_key, trial_key = jax.random.split(key)
        learnt, is_first = state.learnt, state.num_rounds == 0
        codes, _, entropies = controller.sample(
            learnt.params, code_key, config.codes_per_round
        )
        state, scores, metrics = try_codes(config, state, data, codes, trial_key)
        learnt = learn(config, learnt, codes, scores, entropies, is_first)
        return state._replace(learnt=learnt), metrics | {"entropy": jnp.mean(entropies)}

    return searched(config, init, round_, PackedNet(config.supernet).apply)


# --- Learning ------------------------------------------------------------------------


def learn(
    config: FLRLConfig,
    learnt: Learnt,
    codes: jax.Array,
    scores: jax.Array,
    entropies: jax.Array,
    is_first: jax.Array | bool,
) -> Learnt:
    """Takes a step of REINFORCE with the controller's optimizer.

    Args:
      config: of the search.
      learnt: before it.
      codes: [C, L + 2], sampled from the controller.
      scores: [C]; larger is better.
      entropies: [C], as sampled.
      is_first: whether there is no baseline yet.
    """
    is_score = scores > WORST
    rewards = scores + config.entropy_weight * entropies
    decay = jnp.where(is_first, 0, config.baseline_decay)
    baseline = move_baseline(learnt.baseline, rewards, is_score, decay)
    gains = advantages(rewards, is_score, baseline)

    def loss(params):
        return -jnp.mean(gains * config.controller.log_prob(params, codes))

    grads = jax.grad(loss)(learnt.params)
    optimizer = config.controller_optimizer.build()
    updates, opt_state = optimizer.update(grads, learnt.opt_state, learnt.params)
    return Learnt(optax.apply_updates(learnt.params, updates), opt_state, baseline)


def move_baseline(
    baseline: jax.Array, rewards: jax.Array, is_score: jax.Array, decay: jax.Array
) -> jax.Array:
    """Moves the average [] by the rewards [C] of those codes that have a score."""
    moved = decay * baseline + (1 - decay) * masked_mean(rewards, is_score)
    return jnp.where(jnp.any(is_score), moved, baseline)


def advantages(
    rewards: jax.Array, is_score: jax.Array, baseline: jax.Array
) -> jax.Array:
    """Computes by how much rewards [C] are above the baseline.

    A code without a score counts as the worst of those with one, and never as a gain.
    """
    gains = jnp.where(is_score, rewards - baseline, 0)
    return jnp.where(is_score, gains, jnp.min(gains))


# --- The controller ------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Controller:
    """Distributions of codes, as pure functions of an LSTM's parameters.

    Each gene has an embedding of the one before and a decoder of its own.
    """

    num_layers: int = NUM_LAYERS
    size: int = 100
    choices: Choices = ANYTHING

    @property
    def _cell(self) -> nn.OptimizedLSTMCell:
        return nn.OptimizedLSTMCell(self.size)

    def init(self, key: jax.Array) -> Params:
        """Draws fresh parameters, of which nearly uniform genes come."""
        cell_key, embedding_key, decoder_key = jax.random.split(key, 3)
        num_genes, num_values = is_gene(self.num_layers).shape
        x = jnp.zeros((1, self.size))
        state = self._cell.initialize_carry(cell_key, x.shape)

        def draw(key, *shape):
            return jax.random.uniform(key, shape, jnp.float32, -INIT_RANGE, INIT_RANGE)

        return {
            "cell": self._cell.init(cell_key, state, x)["params"],
            "embedding": draw(embedding_key, num_genes, num_values, self.size),
            "decoder": draw(decoder_key, num_genes, self.size, num_values),
        }

    def sample(
        self, params: Params, key: jax.Array, num: int
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Draws codes.

        Returns:
          Codes [C, L + 2] int32, the logarithms of their probabilities [C], and the
          sums [C] of the entropies of their genes, each given those before.
        """
        keys = jax.random.split(key, self.num_layers + 2)

        def draw(log_probs, key):
            return jax.random.categorical(key, log_probs).astype(jnp.int32)

        return self._write(params, draw, keys, num)

    def log_prob(self, params: Params, codes: jax.Array) -> jax.Array:
        """Computes the log-probabilities [C] of codes [C, L + 2]."""
        _, log_probs, _ = self._write(
            params, lambda log_probs, genes: genes, codes.T, len(codes)
        )
        return log_probs

    def _write(self, params, choose, sources, num):
        """Writes codes gene by gene; see `sample`.

        Args:
          params: of the controller.
          choose: (log-probabilities [C, 12 L + 1], what `sources` has for the gene) ->
            values [C] int32.
          sources: leaves [L + 2, ...].
          num: C.
        """

        def gene(carry, step):
            state, last = carry
            embedding, decoder, is_value, source = step
            state, x = self._cell.apply(
                {"params": params["cell"]}, state, embedding[last]
            )
            logits = LARGEST_LOGIT * jnp.tanh(x @ decoder / TEMPERATURE)
            log_probs = nn.log_softmax(jnp.where(is_value, logits, -jnp.inf))
            chosen = choose(log_probs, source)
            taken = jnp.take_along_axis(log_probs, chosen[:, None], axis=1)[:, 0]
            summands = jnp.exp(log_probs) * jnp.where(is_value, log_probs, 0)
            return (state, chosen), (chosen, taken, -jnp.sum(summands, axis=1))

        # Before the first gene stands a 0, whose embedding is learnt like others.
        first = jnp.zeros(num, jnp.int32)
        zeros = (jnp.zeros((num, self.size)),) * 2  # an LSTM's two states
        steps = (
            params["embedding"],
            params["decoder"],
            is_gene(self.num_layers, self.choices),
            sources,
        )
        _, (codes, taken, entropies) = jax.lax.scan(gene, (zeros, first), steps)
        return codes.T, jnp.sum(taken, axis=0), jnp.sum(entropies, axis=0)
