"""Clients whose updates are not finite: found in a round, and left out if asked for.

A round that is traced inside `watching` reports them to the host as it runs, which
costs a call back from the device; elsewhere nothing is looked for and nothing changes.
"""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_graph.core import arrays, mesh
from fedjax_graph.core.clients import Cohort
from fedjax_graph.core.errors import InputError


class Watch(NamedTuple):
    """What is done about updates that are not finite."""

    report: Callable[..., None]
    """Takes (round, client ids [C], weights [C], is_finite [C]) of each cohort of a
    seed; of one inside `trial` also is_trial=True. Round 0 is one that does not count,
    of a seed that has stopped and is computed beside others."""
    skips: bool = False  # whether such a client has weight 0 in its round
    explain: Callable[[int, str], None] = lambda round_, reason: None
    """Takes a round and a reason why what the server computed in it is not finite."""


_current: contextvars.ContextVar[tuple[Watch, jax.Array] | None]
_current = contextvars.ContextVar("_current", default=None)


@contextlib.contextmanager
def watching(watch: Watch | None, round_: jax.Array) -> Iterator[None]:
    """Has cohorts that are traced inside the `with` block watched; None: nothing."""
    token = _current.set(watch and (watch, round_))
    try:
        yield
    finally:
        _current.reset(token)


@contextlib.contextmanager
def trial() -> Iterator[None]:
    """Has cohorts that are traced inside reported as those of one trial of many.

    If it loses all its clients it has failed, and the run goes on.
    """
    current = _current.get()
    if current is None:
        yield
        return
    watch, round_ = current
    report = functools.partial(watch.report, is_trial=True)
    own = Watch(report, watch.skips)  # what it cannot compute explains nothing else
    with watching(own, round_):
        yield


@contextlib.contextmanager
def watched_if(is_so: jax.Array) -> Iterator[None]:
    """Watches cohorts traced in the block only where a flag [] holds.

    A branch that is not taken is computed as well under `vmap`.
    """
    current = _current.get()
    if current is None:
        yield
        return
    watch, round_ = current
    with watching(watch, jnp.where(is_so, round_, 0)):
        yield


def explain(is_so: jax.Array, reason: str) -> None:
    """Tells a watch a reason why what a server computed is not finite.

    Args:
      is_so: [] bool, whether it is the reason.
      reason: in words.
    """
    current = _current.get()
    if current is not None:
        watch, round_ = current

        def tell(flag, round_):
            if flag and round_:
                watch.explain(int(round_), reason)

        jax.debug.callback(tell, is_so, round_)


def refuse(is_so: jax.Array, reason: str) -> None:
    """Refuses what a server cannot compute; in a compiled program a watch is told.

    Args:
      is_so: [] bool, whether it cannot.
      reason: in words.

    Raises:
      InputError: if it is known that it cannot.
    """
    if arrays.is_known(is_so) and bool(is_so):
        raise InputError(reason)
    explain(is_so, reason)


def is_finite(updated: Any) -> jax.Array:
    """Whether all of ONE client's update is finite, []; True where nobody watches."""
    finite = jnp.bool_(True)
    for x in jax.tree.leaves(updated) if _current.get() else ():
        if jnp.issubdtype(jnp.result_type(x), jnp.inexact):
            finite &= jnp.all(jnp.isfinite(x))
    return finite


def finite_weight(weight: jax.Array, finite: jax.Array) -> jax.Array:
    """A client's weight, or several: 0 of those that a watch leaves out."""
    current = _current.get()
    leaves_out = current is not None and current[0].skips
    return jnp.where(finite, weight, 0) if leaves_out else weight


def finite_cohort(cohort: Cohort, client_ids: jax.Array, finite: jax.Array) -> Cohort:
    """The cohort, without the clients that a watch leaves out; it is told of all.

    Args:
      cohort: C clients.
      client_ids: [K].
      finite: [C], see `is_finite`.
    """
    current = _current.get()
    if current is not None:
        watch, round_ = current
        found = (client_ids[cohort.indices], cohort.weights, finite)
        jax.debug.callback(watch.report, round_, *mesh.replicated(found))
    return cohort._replace(weights=finite_weight(cohort.weights, finite))
