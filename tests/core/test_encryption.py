"""Encrypted means against means in the clear; what is sent, and who can read it."""

import itertools
import sys
import types

import hypothesis
import hypothesis.extra.numpy as arrays
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import numpy.testing as npt
import pytest

from fedjax_graph.core import aggregation, encryption, faults, mesh
from fedjax_graph.core.clients import Cohort
from fedjax_graph.core.errors import InputError

NUM_SLOTS = encryption.POLY_MODULUS_DEGREE // 2
ERROR = 2e-8  # of a sum over few clients
ROUNDING = 1e-6  # of float32, for numbers of magnitude 1
WEIGHTS = np.array([5, 0, 20, 7], np.float32)  # the second client is padding
SHARES = WEIGHTS.astype(float) / WEIGHTS.sum()


@pytest.fixture(scope="module")
def ckks() -> encryption.CKKS:
    pytest.importorskip("tenseal", reason="TenSEAL, of the extra [ckks], is missing")
    return encryption.process_ckks()


@pytest.fixture
def sums(ckks, monkeypatch):
    """What each call sends in the clear, in the order of the calls."""
    seen, run = [], ckks.encrypted_sum

    def record(vectors):
        seen.append(np.array(vectors))
        return run(vectors)

    monkeypatch.setattr(ckks, "encrypted_sum", record)
    return seen


def stacked_params():
    rng = np.random.default_rng(0)
    shapes = {"input": (1, 3, 2), "layers": {"bias": (21, 4)}, "scale": ()}
    return jax.tree.map(
        lambda shape: rng.normal(size=(len(WEIGHTS), *shape)).astype(np.float32),
        shapes,
        is_leaf=lambda x: isinstance(x, tuple),
    )


def marks():
    """Rows of the leaves, as `SuperNet.touched` gives them: [rows, 1, ...]."""
    layers = np.zeros((21, 1), bool)
    layers[[0, 4, 20]] = True
    return {
        "input": np.ones((1, 1, 1), bool),
        "layers": {"bias": layers},
        "scale": np.array(True),
    }


def cohort_of(weights=WEIGHTS):
    return Cohort(jnp.arange(len(weights)), jnp.asarray(weights))


def numpy_mean(stacked):
    return jax.tree.map(
        lambda x: np.einsum("k,k...->...", SHARES, x.astype(float))[None], stacked
    )


def assert_trees_close(tree, expected, atol):
    assert jax.tree.structure(tree) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(tree), jax.tree.leaves(expected), strict=True):
        assert x.shape == y.shape
        npt.assert_allclose(x, y, rtol=0, atol=atol)


# --- The host's part ------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, NUM_SLOTS, NUM_SLOTS + 1, 2 * NUM_SLOTS + 5])
def test_an_encrypted_sum_is_the_sum_and_counts_what_is_serialised(
    ckks, monkeypatch, size
):
    encrypt, add, sent, answered = ckks.encrypt, ckks.add, [], []
    monkeypatch.setattr(ckks, "encrypt", lambda x: sent.append(encrypt(x)) or sent[-1])
    monkeypatch.setattr(ckks, "add", lambda x: answered.append(add(x)) or answered[-1])
    vectors = list(np.random.default_rng(size).normal(size=(3, size)))
    summed, up, down = ckks.encrypted_sum(vectors)
    assert summed.shape == (size,)
    npt.assert_allclose(summed, np.sum(vectors, axis=0), rtol=0, atol=ERROR)
    num_chunks = -(-size // NUM_SLOTS)
    assert (len(sent), len(answered)) == (3 * num_chunks, num_chunks)
    assert up == sum(len(message) for message in sent)
    assert down == 3 * sum(len(message) for message in answered)
    assert all(60_000 < len(message) < 67_000 for message in sent + answered)


@hypothesis.settings(deadline=None, max_examples=25, derandomize=True)
@hypothesis.given(
    vectors=arrays.arrays(
        np.float64,
        st.tuples(st.integers(1, 4), st.integers(1, 5)),
        elements=st.floats(-6e4, 6e4),
    )
)
def test_the_error_does_not_depend_on_the_numbers(ckks, vectors):
    summed, _, _ = ckks.encrypted_sum(vectors)
    npt.assert_allclose(summed, vectors.sum(axis=0), rtol=1e-12, atol=ERROR)


def test_magnitudes_up_to_the_limit_are_summed(ckks):
    half = encryption.LIMIT / 2
    summed, _, _ = ckks.encrypted_sum([[half, -half, 1.0], [half, -half, half]])
    npt.assert_allclose(summed, [2 * half, -2 * half, half + 1], rtol=1e-9)


@pytest.mark.parametrize(
    "vectors",
    [
        [[1, np.nan]],
        [[1, 2], [np.inf, 1]],
        [[1, 2], [-1.001 * encryption.LIMIT / 2, 0]],
    ],
)
def test_what_is_not_finite_or_beyond_the_limit_is_not_sent(ckks, vectors):
    summed, up, down = ckks.encrypted_sum(vectors)
    npt.assert_array_equal(summed, [np.nan, np.nan])
    assert (up, down) == (0, 0)


def test_the_controller_adds_but_can_neither_read_nor_encrypt(ckks):
    tenseal = sys.modules["tenseal"]
    assert not ckks.controller.has_secret_key()
    messages = [ckks.encrypt(np.array([value, 1.0])) for value in (2.0, 5.0)]
    for message in (*messages, ckks.add(messages)):
        with pytest.raises(ValueError, match="secret_key"):
            tenseal.ckks_vector_from(ckks.controller, message).decrypt()
    with pytest.raises(ValueError, match="encryption"):
        tenseal.ckks_vector(ckks.controller, [1.0])
    npt.assert_allclose(ckks.decrypt(ckks.add(messages)), [7, 2], atol=ERROR)


def test_a_ciphertext_is_another_each_time_and_of_other_keys_unreadable(ckks):
    numbers = np.array([1.0, 2.0])
    message = ckks.encrypt(numbers)
    assert message != ckks.encrypt(numbers)
    npt.assert_allclose(ckks.decrypt(message), numbers, atol=ERROR)
    assert np.abs(encryption.CKKS().decrypt(message) - numbers).min() > 1


def test_the_keys_are_made_once(ckks):
    assert encryption.process_ckks() is ckks


# --- Means ----------------------------------------------------------------------------


def test_without_encryption_it_is_the_weighted_mean(quick_jit):
    stacked, sent = stacked_params(), marks()
    merged, metrics = quick_jit(encryption.mean("none"))(stacked, cohort_of())
    assert_trees_close(merged, numpy_mean(stacked), ROUNDING)
    assert metrics == {}
    merged, _ = quick_jit(encryption.mean("none"))(stacked, cohort_of(), sent)
    expected = jax.tree.map(lambda x, kept: x * kept, numpy_mean(stacked), sent)
    assert_trees_close(merged, expected, ROUNDING)


def test_an_encrypted_mean_is_that_in_the_clear(ckks, quick_jit):
    stacked = stacked_params()
    merged, metrics = quick_jit(encryption.mean("ckks"))(stacked, cohort_of())
    plain = aggregation.weighted_mean(stacked, cohort_of())
    assert_trees_close(merged, plain, ROUNDING)
    assert_trees_close(merged, numpy_mean(stacked), ROUNDING)
    assert 0 < metrics["encryption_error"] < ERROR
    assert metrics["encryption_seconds"] > 0
    one_message = len(ckks.encrypt(np.ones(3)))  # all leaves are one ciphertext
    assert metrics["encryption_bytes"] == pytest.approx(6 * one_message, rel=0.01)
    for value in metrics.values():
        assert (value.shape, value.dtype) == ((), jnp.float32)


def test_each_real_client_sends_its_share_and_padding_sends_nothing(sums, quick_jit):
    stacked = stacked_params()
    expected = numpy_mean(stacked)
    for leaf in jax.tree.leaves(stacked):
        leaf[1] = np.nan
    merged, _ = quick_jit(encryption.mean("ckks"))(stacked, cohort_of())
    assert_trees_close(merged, expected, ROUNDING)
    (vectors,) = sums
    leaves = [x.reshape(len(WEIGHTS), -1) for x in jax.tree.leaves(stacked)]
    own = np.concatenate(leaves, axis=1) * SHARES[:, None]
    npt.assert_allclose(vectors, own[[0, 2, 3]], rtol=1e-6)


@pytest.mark.parametrize("has_client_axis", [False, True])
def test_only_what_is_marked_is_sent(sums, quick_jit, has_client_axis):
    stacked, sent = stacked_params(), marks()
    expected = jax.tree.map(lambda x, kept: x * kept, numpy_mean(stacked), sent)
    stacked["layers"]["bias"][:, 1] = np.nan  # not sent
    if has_client_axis:
        sent = jax.tree.map(lambda kept: kept[None], sent)
    merged, _ = quick_jit(encryption.mean("ckks"))(stacked, cohort_of(), sent)
    assert_trees_close(merged, expected, ROUNDING)
    (vectors,) = sums
    assert vectors.shape == (3, 3 * 2 + 3 * 4 + 1)


def test_nothing_to_send_costs_nothing(ckks):
    nothing = jax.tree.map(np.zeros_like, marks())
    stacked = stacked_params()
    merged, metrics = encryption.mean("ckks")(stacked, cohort_of(), nothing)
    assert not any(x.any() for x in jax.tree.leaves(merged))
    assert metrics["encryption_bytes"] == metrics["encryption_error"] == 0


def test_a_diverged_client_makes_the_mean_nan(ckks):
    values = jnp.ones((4, 3)).at[2, 0].set(jnp.inf)
    merged, metrics = encryption.mean("ckks")(values, cohort_of())
    assert np.isnan(merged).all() and np.isnan(metrics["encryption_error"])


def test_shares_that_do_not_fit_are_refused_in_one_line(ckks, quick_jit):
    """A quarter of the limit over three clients; what is not sent may be larger."""
    most = encryption.LIMIT / 3 / SHARES[2]
    values = jnp.ones((4, 3)).at[2, 0].set(1.001 * most).at[1].set(1e9)
    mean = encryption.mean("ckks")
    with pytest.raises(InputError, match="ckks holds .* 262144 over the number of cl"):
        mean(values, cohort_of())
    reasons = []
    watch = faults.Watch(
        lambda *found: None, explain=lambda *found: reasons.append(found)
    )
    with faults.watching(watch, jnp.int32(1)):
        merged, _ = quick_jit(mean)(values, cohort_of())
        assert np.isnan(merged).all()
        quick_jit(mean)(values.at[2, 0].set(jnp.nan), cohort_of())
        merged, _ = quick_jit(mean)(values.at[2, 0].set(0.999 * most), cohort_of())
    jax.effects_barrier()
    ((round_, reason),) = reasons
    assert round_ == 1
    assert "a client's share of the mean has a larger one" in reason
    expected = [SHARES[2] * 0.999 * most + 1 - SHARES[2], 1, 1]
    npt.assert_allclose(merged[0], expected, rtol=1e-5)
    merged, _ = mean(values, cohort_of(), jnp.arange(3) > 0)
    npt.assert_allclose(merged, [[0, 1, 1]], atol=ROUNDING)


def scanned(one, factors):
    return jax.lax.scan(lambda _, factor: (None, one(factor)), None, factors)[1]


@pytest.mark.parametrize(
    "mapped", [scanned, jax.lax.map, lambda one, factors: jax.vmap(one)(factors)]
)
def test_means_in_loops_are_each_computed_once(sums, quick_jit, mapped):
    """On vectors of 160 kB, which JAX would copy in another thread."""
    values = np.random.default_rng(1).normal(size=(2, 40_000)).astype(np.float32)
    cohort, factors = cohort_of(np.array([1, 3], np.float32)), jnp.arange(1.0, 4)

    def one(factor):
        return encryption.mean("ckks")(factor * values, cohort)

    merged, metrics = quick_jit(lambda factors: mapped(one, factors))(factors)
    expected = np.average(values.astype(float), axis=0, weights=[1, 3])
    npt.assert_allclose(
        merged, factors[:, None, None] * expected, atol=5 * ROUNDING, rtol=0
    )
    assert len(sums) == 3
    assert metrics["encryption_error"].shape == (3,)
    assert metrics["encryption_error"].max() < ERROR


def test_a_mean_that_nobody_reads_is_still_computed(sums, quick_jit):
    values = jnp.ones((4, 2))

    def twice_but_unread(values):
        mean = encryption.mean("ckks")
        return mean(values, cohort_of()), mean(values, cohort_of()), 0

    quick_jit(lambda values: twice_but_unread(values)[2])(values)
    jax.effects_barrier()
    assert len(sums) == 2


def test_totals_sum_bytes_and_seconds_and_keep_the_largest_error():
    names = ("encryption_bytes", "encryption_seconds", "encryption_error")
    steps = dict(zip(names, jnp.array([[10.0, 20], [1, 2], [3e-9, 1e-9]]), strict=True))
    scores = dict(zip(names, jnp.array([5.0, 0.5, 2e-9]), strict=True))
    joined = encryption.total(steps, scores)
    npt.assert_allclose([joined[name] for name in names], [35, 3.5, 3e-9], rtol=1e-6)
    assert encryption.total({}, {}) == {}


# --- Refusals -------------------------------------------------------------------------


def test_an_unknown_kind_is_refused():
    with pytest.raises(InputError, match="encryption=rsa: expected none or ckks$"):
        encryption.check("rsa")


def test_without_tenseal_only_ckks_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "tenseal", None)  # its import fails
    encryption.check("none")
    for use, argument in itertools.product(
        (encryption.check, encryption.mean), ("encryption", "secure_aggregation")
    ):
        with pytest.raises(InputError) as raised:
            use("ckks", argument)
        assert str(raised.value) == (
            f"{argument}=ckks needs the package tenseal; run "
            "`pip install 'fedjax-graph[ckks]'`"
        )


def test_a_tenseal_of_another_kind_is_refused(monkeypatch):
    monkeypatch.setattr(encryption, "process_ckks", encryption.CKKS)  # no keys yet
    monkeypatch.setitem(sys.modules, "tenseal", types.ModuleType("tenseal"))
    with pytest.raises(
        InputError, match="the tenseal found makes no keys .*; run `pip"
    ):
        encryption.check("ckks")


@pytest.mark.parametrize(
    ("use", "argument"),
    [
        (lambda *args: encryption.mean("ckks")(*args), "encryption"),
        (encryption.encrypted_mean, "secure_aggregation"),
    ],
)
def test_several_devices_are_refused(ckks, use, argument):
    """In the words of who asked: a binary has a flag of one of these names alone."""
    words = f"^{argument}=ckks runs on one device, not 4: run with num_cpu_devices=1"
    with (
        jax.set_mesh(mesh.make_mesh(devices=jax.devices()[:4])),
        pytest.raises(InputError, match=words),
    ):
        use(jnp.ones((4, 2)), cohort_of())
