"""Client-level differential privacy: clipped updates, Gaussian noise, and epsilon.

McMahan, Ramage, Talwar, Zhang, "Learning Differentially Private Recurrent Language
Models", ICLR 2018. JAX-Privacy clips and draws the noise, and Google's dp-accounting
composes (privacy loss distributions); both come with the extra `[dp]`.

What is promised: what a run sends from its clients to others changes by epsilon and
delta at most where all that ONE client has sent is replaced by zeros (the zero-out
relation: who takes part, and how many do, is public). Each round is `num_releases`
Gaussian mechanisms of one noise multiplier, composed adaptively over all rounds. No
amplification by sampling is claimed: a cohort has a fixed size and is drawn without
replacement, which the accountant knows no bound for under this relation.

What is not covered: losses and scores that a run writes, and the choice of the best
round by them; further seeds, which are further releases; forecasts made after training.
Noise is drawn in float32 by Threefry.
"""

import dataclasses
import functools
import importlib
import math
import types
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_graph.core import communication
from fedjax_graph.core.aggregation import Aggregator
from fedjax_graph.core.checks import Checked, limited, limits
from fedjax_graph.core.clients import client_keys
from fedjax_graph.core.errors import InputError

DISCRETIZATION = 1e-4  # of privacy losses, relative to the variance of a run's


@dataclasses.dataclass(frozen=True, kw_only=True)
class Privacy(Checked):
    """Configures clipping and noise; norms are Euclidean, over all leaves together."""

    noise_multiplier: float = dataclasses.field(metadata=limits(above=0, upper=1e6))
    """Standard deviation of the noise, over the most that one client can add."""
    clip_norm: float = limited(1.0, above=0)  # of a client's update
    delta: float = limited(1e-5, above=0, below=1)
    # of CNFGNN, for a window: of h_c, and of the gradient in h_G
    hidden_clip_norm: float = limited(1.0, above=0)
    gradient_clip_norm: float = limited(1e-3, above=0)


def check(on_nan: str = "stop") -> None:
    """Checks before a run starts that nothing is missing for it.

    Args:
      on_nan: see `RunConfig`.

    Raises:
      InputError: if a package is, or clients are left out for what they send, which
        changes how many take part.
    """
    if on_nan == "skip_client":
        raise InputError(
            "on_nan=skip_client shows which clients were left out, so it is not "
            "private; numbers of an update that are not finite count as 0"
        )
    _jax_privacy()


def private_mean(
    config: Privacy, mean: Aggregator, start: Any, key: jax.Array
) -> Aggregator:
    """Factory of w + (sum_i clip(theta_i - w) + noise) / n over the n that take part.

    Clients count alike, so that each can change the sum by `clip_norm` at most; the
    noise has `noise_multiplier` times that for its standard deviation.

    Args:
      config: clipping and noise.
      mean: `aggregation.weighted_mean`, or what computes it behind a veil.
      start: w, pytree of [1 or C, ...]: known to all, as it was sent to clients.
      key: of the noise.
    """

    def aggregate(stacked, cohort):
        is_real = cohort.weights > 0
        alike = cohort._replace(weights=is_real.astype(jnp.float32))
        merged = mean(clipped_updates(config.clip_norm, stacked, start), alike)
        std = config.noise_multiplier * config.clip_norm
        release()
        return add_noise(merged, std / jnp.maximum(jnp.sum(is_real), 1), key)

    return aggregate


def private_rows(
    config: Privacy,
    aggregate: Aggregator,
    start: Any,
    client_ids: jax.Array,
    key: jax.Array,
) -> Aggregator:
    """Factory of any aggregator of w + clip(theta_i - w) + noise, of each client.

    What reads each model (a graph, distances, a median) needs noise on each: it is as
    private as a mean, of which the noise would be n times smaller.

    Args:
      config, start, key: see `private_mean`.
      aggregate: computes from the noisy models alone.
      client_ids: [K], to which the noise belongs.
    """

    def aggregate_noisy(stacked, cohort):
        models = clipped_updates(config.clip_norm, stacked, start)
        release()
        std = jnp.float32(config.noise_multiplier * config.clip_norm)
        keys = client_keys(key, client_ids[cohort.indices])
        noisy = jax.vmap(lambda model, own: add_noise(model, std, own))(models, keys)
        return aggregate(noisy, cohort)

    return aggregate_noisy


def clipped_updates(clip_norm: float, stacked: Any, start: Any) -> Any:
    """w + clip(theta_i - w) of each client; numbers that are not finite are 0.

    Args:
      clip_norm: the most that an update's norm may be.
      stacked: theta, pytree of [C, ...].
      start: w, pytree of [1 or C, ...].
    """
    updates = jax.tree.map(jnp.subtract, stacked, start)
    clipped = jax.vmap(lambda update: _clip(update, clip_norm))(updates)
    return jax.tree.map(jnp.add, start, clipped)


def _clip(tree: Any, clip_norm: float) -> Any:
    """A pytree scaled down to a norm, if its own is larger; what is not finite is 0.

    JAX-Privacy 2.0 calls what optax 0.2.8 deprecates.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "optax.global_norm", DeprecationWarning)
        return _jax_privacy().clipping.clip_pytree(tree, clip_norm)[0]


def add_noise(tree: Any, std: jax.Array, key: jax.Array) -> Any:
    """Adds independent normal noise of a standard deviation [] to all numbers."""
    privatizer = _jax_privacy().noise_addition.gaussian_privatizer(
        stddev=std, prng_key=key
    )
    noisy, _ = privatizer.update(tree, privatizer.init(tree))
    return noisy


def private_windows(
    clip_norm: float,
    std: float,
    rows: jax.Array,
    client_ids: jax.Array,
    window_ids: jax.Array,
    key: jax.Array,
) -> jax.Array:
    """Clips each client's row of each window, and adds noise that belongs to the two.

    The same window of the same client gets the same noise under the same key, so that
    it may be computed twice and is released once.

    Args:
      clip_norm: the most that a row's norm may be.
      std: of the noise, `noise_multiplier` times `clip_norm` times the root of how many
        rows of a client are released together.
      rows: [K, B, H].
      client_ids: [K].
      window_ids: [B], whole numbers.
      key: of the release.
    """

    def one(row, client_id, window_id):
        own = jax.random.fold_in(jax.random.fold_in(key, client_id), window_id)
        return _clip(row, clip_norm) + std * jax.random.normal(own, row.shape)

    of_client = jax.vmap(one, (0, None, 0))
    return jax.vmap(of_client, (0, 0, None))(rows, client_ids, window_ids)


# --- Accounting ----------------------------------------------------------------------


def release() -> None:
    """Marks one Gaussian mechanism in the traced program; see `releases_per_round`."""
    communication.mark("gaussian_mechanism")


def releases_per_round(fn: Callable[..., Any], *args: Any) -> int:
    """Counts the Gaussian mechanisms of one call of `fn(*args)`; nothing is computed.

    Args:
      fn: traceable, for example the `round` of an algorithm.
      *args: arrays or `jax.ShapeDtypeStruct`s.
    """
    return communication.count_marks("gaussian_mechanism", fn, *args)


@functools.lru_cache(maxsize=4096)
def epsilon(config: Privacy, num_releases: int) -> float:
    """The epsilon that some releases cost, at the config's delta; 0 without any.

    Losses are rounded up to multiples of an interval, so this is a bound.

    Raises:
      InputError: if there is too little noise for so many releases to tell.
    """
    if not num_releases:
        return 0.0
    dp = _dp_accounting()
    variance = config.noise_multiplier**2 / num_releases
    accountant = dp.pld.PLDAccountant(
        dp.NeighboringRelation.REPLACE_SPECIAL,
        value_discretization_interval=DISCRETIZATION * max(1.0, 1 / variance),
    )
    try:
        accountant.compose(dp.GaussianDpEvent(config.noise_multiplier), num_releases)
        found = float(accountant.get_epsilon(config.delta))
    except OverflowError as error:
        raise InputError(
            f"noise_multiplier={config.noise_multiplier}: too little noise for "
            f"{num_releases} releases, whose epsilon cannot be told; add more"
        ) from error
    if math.isinf(found):
        raise InputError(
            f"delta={config.delta}: too small for this accounting, whose epsilon it "
            "leaves infinite; expected 1e-12 or more"
        )
    return found


def spent(config: Privacy, num_releases: int, num_rounds: int) -> dict[str, Any]:
    """What a run's privacy is, for its results.

    Args:
      config: clipping and noise.
      num_releases: of a round.
      num_rounds: so far.
    """
    return {
        "epsilon": epsilon(config, num_releases * num_rounds),
        "delta": config.delta,
        "noise_multiplier": config.noise_multiplier,
        "releases_per_round": num_releases,
        "num_rounds": num_rounds,
        "unit": "client",
        "neighbouring_relation": "zero-out",
        "amplification": None,
    }


def _jax_privacy() -> types.ModuleType:
    _check_import("jax_privacy.clipping")
    return importlib.import_module("jax_privacy")


def _dp_accounting() -> types.ModuleType:
    return _check_import("dp_accounting")


def _check_import(name: str) -> types.ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise InputError(
            "differential privacy needs the package jax-privacy; run "
            "`pip install 'fedjax-graph[dp]'`"
        ) from error
