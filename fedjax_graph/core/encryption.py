"""Means over clients that the controller computes on ciphertexts.

CKKS (Cheon, Kim, Kim, Song, "Homomorphic Encryption for Arithmetic of Approximate
Numbers", ASIACRYPT 2017), with which FL-AGCNS, arXiv 2104.04141, encrypts what leaves a
client. TenSEAL, an optional package, does the cryptography.
"""

import functools
import time
import types
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jax.flatten_util import ravel_pytree

from fedjax_graph.core import aggregation, communication, faults, mesh
from fedjax_graph.core.aggregation import Stacked
from fedjax_graph.core.algorithm import Metrics
from fedjax_graph.core.clients import Cohort
from fedjax_graph.core.errors import InputError

Kind = Literal["none", "ckks"]
Mean = Callable[..., tuple[Stacked, Metrics]]

POLY_MODULUS_DEGREE = 4096  # N: of 128-bit security with at most 109 bits of primes
COEFF_MOD_BIT_SIZES = (60, 40)  # a ciphertext's prime; one that encryption alone uses
SCALE = 2.0**40
LIMIT = 2.0**18  # of a sum's magnitude, half of what the first prime and scale leave


def check(kind: str, argument: str = "encryption") -> None:
    """Checks before a run starts that nothing is missing for it.

    Args:
      kind: of encryption.
      argument: what says so, for the message.

    Raises:
      InputError: if the kind is unknown, or its package cannot be imported or is not
        TenSEAL as we know it.
    """
    if kind not in get_args(Kind):
        raise InputError(f"{argument}={kind}: expected {' or '.join(get_args(Kind))}")
    if kind == "ckks":
        _tenseal(argument)
        try:
            process_ckks()
        except (AttributeError, TypeError, ValueError, RuntimeError) as error:
            raise InputError(
                f"{argument}=ckks: the tenseal found makes no keys ({error}); run "
                "`pip install --force-reinstall 'fedjax-graph[ckks]'`"
            ) from error


def mean(kind: Kind, argument: str = "encryption") -> Mean:
    """Factory of the weighted mean over clients, in the clear or encrypted.

    - none: `aggregation.weighted_mean`, without metrics.
    - ckks: the same sum_i (N_i / N) theta_i. Each client multiplies by its own share
      and encrypts, the controller adds ciphertexts, the clients decrypt; see `CKKS`.
      On one device only.

    Metrics of ckks, float32 scalars (so bytes are rounded to 24 bits):
    - encryption_bytes: serialised ciphertexts, one vector up and the sum down for each
      client of weight > 0. Keys, exchanged once, are not counted.
    - encryption_seconds: wall time on the host to encrypt, add, decrypt and serialise,
      all clients one after another; as each decrypts the same sum, that counts once.
    - encryption_error: largest absolute difference from the sum in the clear, both in
      float64.

    Ciphertexts are made in an `io_callback`: fresh randomness and measured time are no
    pure function of its arguments, and a pure callback may be left out or called twice.
    It is unordered, as data order the calls, so it can be mapped and stand in any loop.

    Returns:
      (stacked pytree of [K, ...], cohort, sent=None) -> (pytree of [1, ...], metrics).
      `sent` is a pytree of bool like `stacked`, public, whose leaves broadcast against
      [1, ...], or, without the client axis, [...]: what is not sent is 0 in the result.

    Raises:
      InputError: as `check` does; when it is called, if there are several devices, or
        `sent` does not broadcast to one row.
    """
    check(kind, argument)
    if kind == "none":
        return _plain_mean
    return functools.partial(_encrypted_mean, argument=argument)


def encrypted_mean(stacked: Stacked, cohort: Cohort) -> Stacked:
    """`aggregation.weighted_mean` under CKKS, whose bytes are in the ledger.

    A ciphertext in place of the numbers that crossed in the clear, in each direction.

    Raises:
      InputError: see `mean`.
    """
    leaves = jax.tree.leaves(stacked)
    size = len(cohort.indices)
    num_chunks = -(-sum(x.size // size for x in leaves) // (POLY_MODULUS_DEGREE // 2))
    clear = sum(x.nbytes for x in leaves)
    added = size * num_chunks * ciphertext_bytes() - clear
    communication.book(up=added, down=added)
    return mean("ckks", "secure_aggregation")(stacked, cohort)[0]


@functools.cache
def ciphertext_bytes() -> int:
    """The size of a serialised ciphertext, full or not, up to a byte or two."""
    return len(process_ckks().encrypt(np.zeros(1)))


def total(*costs: Metrics) -> Metrics:
    """Sums up the metrics of several means, scalars or stacked by a loop.

    Bytes and seconds are summed, the error is the largest; {} without encryption.
    """

    def join(name):
        reduce = jnp.max if name == "encryption_error" else jnp.sum
        return reduce(jnp.stack([reduce(cost[name]) for cost in costs]))

    return {name: join(name) for name in costs[0]}


class CKKS:
    """Holds the keys of a federation, and does what each side does with numbers.

    Clients share one secret key. The controller's context is made of what they would
    send it, the public parameters: it adds, but can neither encrypt nor decrypt.

    Vectors are cut into chunks of N / 2 = 2048 slots, a ciphertext each. With nothing
    but additions to do, one prime is enough: 32 bytes a number, against 59 with N =
    8192 and primes of 60, 40 and 60 bits (83 with another 40). The largest error of the
    sums of a million numbers of 3 clients was 1.5e-8 in a dozen runs; it does not
    depend on the numbers, and grows as the root of the number of clients.
    """

    def __init__(self) -> None:
        ts = self._tenseal = _tenseal()
        self.client = ts.context(
            ts.SCHEME_TYPE.CKKS,
            POLY_MODULUS_DEGREE,
            coeff_mod_bit_sizes=list(COEFF_MOD_BIT_SIZES),
            n_threads=1,  # a ciphertext at a time
        )
        self.client.global_scale = SCALE
        public = self.client.copy()
        public.make_context_public()
        parameters = public.serialize(save_public_key=False, save_relin_keys=False)
        self.controller = ts.context_from(parameters, 1)

    def encrypt(self, chunk: np.ndarray) -> bytes:
        """Encrypts up to N / 2 numbers of a client."""
        return self._tenseal.ckks_vector(self.client, chunk).serialize()

    def add(self, messages: Sequence[bytes]) -> bytes:
        """Adds ciphertexts at the controller, one from each client."""
        summed, *others = (
            self._tenseal.ckks_vector_from(self.controller, one) for one in messages
        )
        for other in others:
            summed.add_(other)
        return summed.serialize()

    def decrypt(self, message: bytes) -> np.ndarray:
        """Decrypts at a client, into float64."""
        return np.array(self._tenseal.ckks_vector_from(self.client, message).decrypt())

    def encrypted_sum(
        self, vectors: Sequence[np.ndarray]
    ) -> tuple[np.ndarray, int, int]:
        """Sums vectors that the controller does not see.

        A sum beyond `LIMIT` could wrap round, and NaN and infinity have no ciphertext:
        if a magnitude is beyond `LIMIT` / K, a number is not finite, or nobody sends
        any, nothing is sent and the sum is NaN.

        Args:
          vectors: of each client its own [P].

        Returns:
          The sum [P] float64, bytes from the clients, bytes to them: each receives it.
        """
        own = np.asarray(vectors, np.float64)
        num_clients, num_slots = len(own), POLY_MODULUS_DEGREE // 2
        if not num_clients or not np.all(np.abs(own) <= LIMIT / num_clients):
            return np.full(own.shape[1:], np.nan), 0, 0
        summed, up, down = np.zeros(own.shape[1]), 0, 0
        for start in range(0, len(summed), num_slots):
            chunk = slice(start, start + num_slots)
            messages = [self.encrypt(row[chunk]) for row in own]
            answer = self.add(messages)
            summed[chunk] = self.decrypt(answer)
            up += sum(map(len, messages))
            down += num_clients * len(answer)
        return summed, up, down


@functools.cache
def process_ckks() -> CKKS:
    """Returns the keys of this process, made when first needed."""
    return CKKS()


def _tenseal(argument: str = "encryption") -> types.ModuleType:
    try:
        import tenseal
    except (ImportError, OSError) as error:
        raise InputError(
            f"{argument}=ckks needs the package tenseal; run "
            "`pip install 'fedjax-graph[ckks]'`"
        ) from error
    return tenseal


def _plain_mean(
    stacked: Stacked, cohort: Cohort, sent: Any = None
) -> tuple[Any, Metrics]:
    merged = aggregation.weighted_mean(stacked, cohort)
    if sent is None:
        return merged, {}
    _check_sent(stacked, sent)
    return jax.tree.map(lambda x, kept: jnp.where(kept, x, 0), merged, sent), {}


def _check_sent(stacked: Stacked, sent: Any) -> None:
    def check_one(x, kept):
        row = (1, *x.shape[1:])
        try:
            fits = jnp.broadcast_shapes(jnp.shape(kept), row) == row
        except ValueError:
            fits = False
        if not fits:
            raise InputError(
                f"sent has a leaf of shape {jnp.shape(kept)}, expected one that "
                f"broadcasts to {row}"
            )

    jax.tree.map(check_one, stacked, sent)


def _encrypted_mean(
    stacked: Stacked, cohort: Cohort, sent: Any = None, *, argument: str
) -> tuple[Any, Metrics]:
    if mesh.num_devices() > 1:
        raise InputError(
            f"{argument}=ckks runs on one device, not {mesh.num_devices()}: run with "
            "num_cpu_devices=1 on a CPU, else let one accelerator be visible"
        )
    shares = aggregation.shares_of(cohort.weights)
    own = jax.tree.map(lambda x: jax.vmap(jnp.multiply)(shares, x), stacked)
    vectors = jax.vmap(lambda tree: ravel_pytree(tree)[0])(own)
    first, unravel = ravel_pytree(jax.tree.map(lambda x: x[:1], own))
    flags = jnp.ones(first.shape, bool)
    if sent is not None:
        _check_sent(stacked, sent)
        flags, _ = ravel_pytree(
            jax.tree.map(lambda x, kept: jnp.broadcast_to(kept, x[:1].shape), own, sent)
        )
    _refuse_overflow(vectors, cohort.weights > 0, flags, argument)
    number = jax.ShapeDtypeStruct((), jnp.float32)
    results = jax.ShapeDtypeStruct(first.shape, jnp.float32), (number,) * 3
    summed, cost = io_callback(_sum_on_host, results, vectors, cohort.weights, flags)
    names = ("encryption_bytes", "encryption_seconds", "encryption_error")
    return unravel(summed), dict(zip(names, cost, strict=True))


def _refuse_overflow(
    vectors: jax.Array, is_real: jax.Array, sent: jax.Array, argument: str
) -> None:
    """Refuses finite shares [K, P] that `CKKS.encrypted_sum` does not sum."""
    most = LIMIT / jnp.maximum(jnp.sum(is_real), 1)
    is_beyond = jnp.isfinite(vectors) & (jnp.abs(vectors) > most)
    is_beyond &= is_real[:, None] & sent
    faults.refuse(
        jnp.any(is_beyond),
        f"{argument}=ckks holds numbers up to {LIMIT:g} over the number of clients, "
        "and a client's share of the mean has a larger one",
    )


def _sum_on_host(vectors, weights, sent):
    """Sums what is sent [P] of [K, P] over real clients: [P], (bytes, seconds, error).

    Calls nothing of JAX, which would wait for the program that waits for this.
    """
    is_real, sent = np.asarray(weights) > 0, np.asarray(sent)
    own = np.asarray(vectors)[np.ix_(is_real, sent)].astype(np.float64)
    ckks = process_ckks()
    start = time.perf_counter()
    summed, up, down = ckks.encrypted_sum(own)
    seconds = time.perf_counter() - start
    error = np.max(np.abs(summed - own.sum(axis=0)), initial=0)
    spread = np.zeros(len(sent), np.float32)
    spread[sent] = summed
    return spread, tuple(map(np.float32, (up + down, seconds, error)))
