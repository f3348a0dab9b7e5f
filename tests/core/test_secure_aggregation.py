"""Masked sums against sums in the clear; what a server sees in each mode."""

import jax
import jax.numpy as jnp
import numpy as np
import numpy.testing as npt
import pytest

from fedjax_graph.algorithms import get_method, make_config
from fedjax_graph.algorithms.fed_avg import FedAvgConfig, fed_avg
from fedjax_graph.algorithms.fed_dc import fed_dc
from fedjax_graph.algorithms.scaffold import scaffold
from fedjax_graph.core import (
    aggregation,
    channel,
    encryption,
    faults,
    mesh,
    secure_aggregation,
)
from fedjax_graph.core.channel import ChannelConfig
from fedjax_graph.core.clients import Cohort
from fedjax_graph.core.communication import bytes_per_round
from fedjax_graph.core.errors import InputError
from fedjax_graph.core.misbehaviour import Misbehaviour, attackers
from fedjax_graph.driver.divergence import Divergence
from tests.algorithms import quadratic
from tests.algorithms.problems import all_problems
from tests.algorithms.quadratic import QuadraticTask
from tests.algorithms.tiny_methods import TINY

KEY = jax.random.key(3)
NUM_CLIENTS, SIZE = 6, 4000
PARTIES = jnp.array([1, 2, 5, 8, 9, 11])
UNIT = 2.0**-secure_aggregation.FRACTION_BITS


def integers(seed=0):
    """uint32 [C, P] over the whole range."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, 2**32, (NUM_CLIENTS, SIZE), dtype=np.uint32)


def models(seed=0):
    rng = np.random.default_rng(seed)
    shapes = {"kernel": (3, 2), "bias": (2,), "scale": ()}
    return {
        name: rng.normal(size=(NUM_CLIENTS, *shape)).astype(np.float32)
        for name, shape in shapes.items()
    }


def cohort_of(weights):
    return Cohort(PARTIES, jnp.asarray(weights, jnp.float32))


@pytest.fixture(scope="module")
def messages(quick_jit):
    return quick_jit(secure_aggregation.messages)


@pytest.fixture(scope="module")
def unmasked_sum(quick_jit):
    return quick_jit(secure_aggregation.unmasked_sum)


@pytest.mark.parametrize(
    "present", [[1] * 6, [1, 0, 1, 1, 0, 1], [0, 0, 1, 0, 0, 0], [0] * 6]
)
def test_masks_cancel_exactly_whoever_drops_out(messages, unmasked_sum, present):
    present = np.array(present, bool)
    sent = messages(integers(), PARTIES, present, KEY)
    total = unmasked_sum(sent, PARTIES, present, KEY)
    npt.assert_array_equal(total, integers()[present].sum(axis=0, dtype=np.uint32))
    npt.assert_array_equal(np.asarray(sent)[~present], 0)


def test_each_message_is_uniform_noise_whatever_the_model(messages):
    """By the bits that are set, the highest byte, and what two models have in common.

    Bounds are of five standard errors.
    """
    everybody = np.ones(NUM_CLIENTS, bool)
    zeros = np.zeros((NUM_CLIENTS, SIZE), np.uint32)
    sent = np.asarray(messages(zeros, PARTIES, everybody, KEY))
    bits = np.unpackbits(sent.view(np.uint8), axis=1)
    npt.assert_allclose(bits.mean(axis=1), 0.5, atol=5 * 0.5 / np.sqrt(32 * SIZE))
    for row in sent:
        counts = np.bincount(row >> 24, minlength=256)
        chi_square = np.sum((counts - SIZE / 256) ** 2) / (SIZE / 256)
        assert abs(chi_square - 255) < 5 * np.sqrt(2 * 255)
    correlation = np.corrcoef(sent) - np.eye(NUM_CLIENTS)
    assert np.abs(correlation).max() < 0.3  # all six sum to 0, so -0.2 each
    assert np.all(sent.sum(axis=0, dtype=np.uint32) == 0)
    again = np.asarray(messages(zeros, PARTIES, everybody, jax.random.key(4)))
    assert np.mean(again == sent) < 0.01


def test_what_remains_hidden_after_a_drop_out(messages):
    """Seeds that are revealed are those of pairs with who has gone: others stay."""
    present = np.array([1, 1, 1, 1, 1, 0], bool)
    zeros = np.zeros((NUM_CLIENTS, SIZE), np.uint32)
    sent = np.asarray(messages(zeros, PARTIES, present, KEY))
    gone = jnp.arange(NUM_CLIENTS) == 5
    for index in range(5):
        known = secure_aggregation.mask(jnp.int32(index), gone, PARTIES, KEY, (SIZE,))
        left = sent[index] - np.asarray(known)
        bits = np.unpackbits(left.view(np.uint8))
        assert abs(bits.mean() - 0.5) < 5 * 0.5 / np.sqrt(32 * SIZE)


@pytest.mark.parametrize("weights", [[2, 1, 5, 3, 4, 1], [3, 0, 1, 0, 0, 5], [0] * 6])
def test_the_masked_mean_is_the_mean_up_to_rounding(weights, quick_jit):
    merged = quick_jit(secure_aggregation.secure_mean(KEY))(
        models(), cohort_of(weights)
    )
    mean = aggregation.weighted_mean(models(), cohort_of(weights))
    for name, expected in mean.items():
        assert merged[name].shape == expected.shape
        npt.assert_allclose(merged[name], expected, atol=NUM_CLIENTS * UNIT + 1e-6)


def test_several_devices_have_the_same_masks(quick_jit):
    mean = secure_aggregation.secure_mean(KEY)
    alone = quick_jit(mean)(models(), cohort_of([1] * 6))
    with jax.set_mesh(mesh.make_mesh(devices=jax.devices()[:2])):
        shared = jax.tree.map(jnp.asarray, models())
        together = quick_jit(mean)(shared, cohort_of([1] * 6))
    jax.tree.map(npt.assert_array_equal, together, alone)


def test_numbers_that_do_not_fit_are_refused_in_one_line(quick_jit):
    large = models() | {"scale": np.full(NUM_CLIENTS, 1025.0, np.float32)}
    mean = secure_aggregation.secure_mean(KEY)
    with pytest.raises(InputError, match="masks holds numbers up to 1024, and a "):
        mean(large, cohort_of([1] * 6))
    assert np.isnan(quick_jit(mean)(large, cohort_of([1] * 6))["bias"]).all()
    for x in large.values():
        x[1] = np.nan  # sends nothing
    large["scale"][[0, 2, 3, 4, 5]] = -1024.0
    merged = mean(large, cohort_of([1, 0, 1, 1, 1, 1]))
    npt.assert_allclose(merged["scale"], [-1024])


def test_a_compiled_round_tells_a_watch_why_and_the_run_says_it(quick_jit):
    reasons = []
    watch = faults.Watch(
        lambda *found: None, explain=lambda *found: reasons.append(found)
    )
    large = models() | {"scale": np.full(NUM_CLIENTS, 1025.0, np.float32)}
    with faults.watching(watch, jnp.int32(1)):
        quick_jit(secure_aggregation.secure_mean(KEY))(large, cohort_of([1] * 6))
    jax.effects_barrier()
    ((round_, reason),) = reasons
    assert round_ == 1
    divergence = Divergence("fed_avg", "stop")
    with pytest.raises(InputError, match=f"server computed is not; {reason}; try"):
        nan = np.array([np.nan])
        divergence.check_losses(1, nan, lambda watch: watch.explain(1, reason))


def test_each_pair_of_clients_has_a_mask_of_its_own(quick_jit):
    """Also those with the same sum of ids, as 1 and 9, 2 and 8."""
    mask = quick_jit(secure_aggregation.mask, static_argnums=4)
    alone = np.eye(NUM_CLIENTS, dtype=bool)
    pairs = [(i, j) for i in range(NUM_CLIENTS) for j in range(i)]
    drawn = np.stack([mask(i, alone[j], PARTIES, KEY, (50,)) for i, j in pairs])
    assert len(np.unique(drawn)) == drawn.size
    for row, (i, j) in zip(drawn, pairs, strict=True):
        npt.assert_array_equal(row + mask(j, alone[i], PARTIES, KEY, (50,)), 0)


def test_each_round_has_masks_of_its_own(monkeypatch):
    """Else the server would see what changed between two of them."""
    seen, take_sum = [], secure_aggregation.unmasked_sum

    def spied(sent, *args):
        seen.append(np.asarray(sent))
        return take_sum(sent, *args)

    monkeypatch.setattr(secure_aggregation, "unmasked_sum", spied)
    config = ChannelConfig(secure_aggregation="masks")
    own = {"w": jnp.ones((6, 100))}
    for key in jax.random.split(KEY):
        sent = channel.Sent({"w": jnp.zeros((1, 100))}, PARTIES, jnp.ones(6), key)
        aggregate = channel.through(config, aggregation.weighted_mean, sent)
        aggregate(own, cohort_of([1] * 6))
    first, second = seen
    assert np.mean(first == second) < 0.01
    assert len(np.unique(first - second)) > 590


@pytest.mark.parametrize("attack", ["sign_flip", "scaling"])
def test_attackers_attack_behind_masks_as_well(attack):
    conduct = Misbehaviour(byzantine_fraction=0.5, attack=attack, attack_scale=3.0)
    config = ChannelConfig(secure_aggregation="masks", misbehaviour=conduct)
    own, weights = models(), jnp.ones(6)
    start = jax.tree.map(lambda x: jnp.full_like(x[:1], 0.5), own)
    ids = jnp.arange(6) + 20
    sent = channel.Sent(start, ids, weights, KEY)
    aggregate = channel.through(config, aggregation.weighted_mean, sent)
    merged = aggregate(own, Cohort(jnp.arange(6), weights))
    lies = np.asarray(attackers(conduct, ids, weights))
    assert lies.sum() == 3
    factor = np.where(lies, {"sign_flip": -3.0, "scaling": 3.0}[attack], 1)
    for name, x in own.items():
        moved = factor.reshape(-1, *[1] * (x.ndim - 1)) * (x - 0.5)
        npt.assert_allclose(merged[name][0], 0.5 + moved.mean(axis=0), atol=1e-4)


# --- The modes of a round -------------------------------------------------------------


@pytest.mark.parametrize("mode", ["none", "masks", "ckks"])
def test_what_the_server_sees_of_clients(mode, monkeypatch):
    """Plain: each model. Masks: noise, and the sum. CKKS: bytes, which differ."""
    seen = []
    if mode == "masks":
        take_sum = secure_aggregation.unmasked_sum
        monkeypatch.setattr(
            secure_aggregation,
            "unmasked_sum",
            lambda sent, *args: seen.append(np.asarray(sent)) or take_sum(sent, *args),
        )
    elif mode == "ckks":
        pytest.importorskip(
            "tenseal", reason="TenSEAL, of the extra [ckks], is missing"
        )
        ckks = encryption.process_ckks()
        add = ckks.add
        monkeypatch.setattr(ckks, "add", lambda sent: seen.append(sent) or add(sent))

    def plain(stacked, cohort):
        seen.append(stacked["w"])
        return aggregation.weighted_mean(stacked, cohort)

    config = ChannelConfig(secure_aggregation=mode)
    sent = channel.Sent({"w": jnp.zeros((1, 3))}, PARTIES, jnp.ones(6), KEY)
    aggregate = plain if mode == "none" else aggregation.weighted_mean
    own = {"w": jnp.tile(jnp.array([1.0, -2.0, 0.5]), (6, 1))}
    merged = channel.through(config, aggregate, sent)(own, cohort_of([1] * 6))
    npt.assert_allclose(merged["w"], own["w"][:1], atol=6 * UNIT)
    (found,) = seen
    if mode == "none":
        npt.assert_array_equal(found, own["w"])
    elif mode == "masks":
        in_the_clear = np.asarray(secure_aggregation.to_fixed_point(own["w"] / 6))
        assert not np.any(found == in_the_clear)
        assert len(np.unique(found)) == found.size  # though all models are the same
        total = in_the_clear.sum(axis=0, dtype=np.uint32)
        off = (found.sum(axis=0, dtype=np.uint32) - total).view(np.int32)
        assert np.abs(off).max() <= 6  # each rounds up or down by chance
    else:
        assert all(isinstance(message, bytes) for message in found)
        assert len(set(found)) == 6  # though all models are the same
        clear = np.asarray(own["w"][0] / 6, np.float64).tobytes()
        assert not any(clear in message for message in found)


@pytest.mark.parametrize("mode", ["masks", "ckks"])
def test_a_round_with_drop_outs_is_that_in_the_clear(mode, quick_jit):
    if mode == "ckks":
        pytest.importorskip(
            "tenseal", reason="TenSEAL, of the extra [ckks], is missing"
        )
    data = quadratic.make_data()

    def after_rounds(mode):
        config = FedAvgConfig(
            QuadraticTask(),
            participation=0.8,
            misbehaviour=Misbehaviour(dropout_rate=0.3),
            secure_aggregation=mode,
        )
        *_, (state, _) = quadratic.run(fed_avg(config), data, quick_jit)
        return quadratic.to_rows(state.models)

    npt.assert_allclose(after_rounds(mode), after_rounds("none"), atol=3e-5)


def test_the_ledger_has_what_each_mode_adds():
    data, size = quadratic.make_data(), 4 * 9  # bytes of a model

    def bytes_of(mode, **conduct):
        config = FedAvgConfig(
            QuadraticTask(),
            secure_aggregation=mode,
            misbehaviour=Misbehaviour(**conduct),
        )
        method = fed_avg(config)
        state = method.init(KEY, data)
        return bytes_per_round(method.round, state, data, KEY)

    clear = 5 * size
    assert bytes_of("none") == (clear, clear)
    assert bytes_of("masks") == (clear + 5 * 32, clear + 5 * 4 * 32)
    revealed = 2 * 3 * 32  # at most, of five
    dropping = bytes_of("masks", dropout_rate=0.1)
    assert dropping == (clear + 5 * 32 + revealed, clear + 5 * 4 * 32)
    pytest.importorskip("tenseal")
    added = 5 * (encryption.ciphertext_bytes() - size)
    assert bytes_of("ckks") == (clear + added, clear + added)


@pytest.mark.parametrize("mode", ["masks", "ckks"])
@pytest.mark.parametrize(
    "factory, settings, words",
    [
        (fed_avg, {"aggregator": "median"}, "nothing but the plain mean of models"),
        (fed_avg, {"aggregation_noise": 0.1}, "nothing but the plain mean of models"),
        (scaffold, {}, "send control variates besides"),
        (fed_dc, {}, "send gradients besides"),
    ],
)
def test_what_needs_each_model_is_refused(mode, factory, settings, words):
    with pytest.raises(InputError, match=f"secure_aggregation={mode}.*{words}"):
        factory(FedAvgConfig(QuadraticTask(), secure_aggregation=mode, **settings))


HIDING = [
    pytest.param(problem, name, id=f"{name}-{problem.TASK['kind']}")
    for problem, methods in TINY.items()
    for name in methods
    if issubclass(get_method(name).config_type, ChannelConfig)
]


@pytest.fixture(scope="module")
def problems(train):
    return all_problems(train)


@pytest.mark.parametrize(("problem", "name"), HIDING)
def test_what_cannot_be_hidden_is_refused_before_a_round(
    problem, name, problems, monkeypatch
):
    """Or methods before it would be trained in vain; traced, not compiled.

    What is not refused is hidden, and counts keys, where anything crosses.
    """
    masked = []
    count = secure_aggregation._count_keys
    monkeypatch.setattr(
        secure_aggregation,
        "_count_keys",
        lambda *args: masked.append(args) or count(*args),
    )
    values = TINY[problem][name] | {"secure_aggregation": "masks"}
    try:
        method = get_method(name).factory(make_config(name, values))
    except InputError as error:
        assert "secure_aggregation=masks" in str(error)
        return
    data = problems[problem].train
    state = jax.eval_shape(method.init, KEY, data)
    crossing = 0
    for phase in method.phases or (method,):
        crossing += bytes_per_round(phase.round, state, data, KEY).up
    sends_models = crossing and name != "at_without_fedavg"  # which sends h_c alone
    assert bool(masked) == bool(sends_models)


@pytest.mark.parametrize("size", [2e-5, 2.5e-5, -2e-5])
def test_small_numbers_of_many_clients_are_not_lost(size, quick_jit):
    """Shares of half a unit: by chance up or down, within five standard errors."""
    num_clients, num_numbers = 40, 500
    stacked = {"w": jnp.full((num_clients, num_numbers), size)}
    cohort = Cohort(jnp.arange(num_clients), jnp.ones(num_clients))
    merged = quick_jit(secure_aggregation.secure_mean(KEY))(stacked, cohort)
    error = 5 * 0.5 * UNIT * np.sqrt(num_clients / num_numbers)
    npt.assert_allclose(np.mean(merged["w"]), size, atol=error)
    assert error < 0.2 * abs(size)


@pytest.mark.parametrize("others", [{}, {"w": jnp.ones((3, 2), jnp.bfloat16)}])
def test_masked_means_of_counts_are_rounded_to_the_nearest(others):
    """Shares of 5 / 3 are no whole numbers of units; a sum below 5 is not 4."""
    rows = {"n": jnp.full((3, 1), 5)} | others
    for seed in range(20):
        mean = secure_aggregation.secure_mean(jax.random.key(seed))
        merged = mean(rows, Cohort(jnp.arange(3), jnp.ones(3)))
        assert merged["n"].dtype == rows["n"].dtype
        npt.assert_array_equal(merged["n"], [[5]])


def test_masked_means_have_the_precision_of_the_models():
    rows = {"w": jnp.ones((6, 3), jnp.bfloat16), "b": jnp.ones((6, 1))}
    merged = secure_aggregation.secure_mean(KEY)(rows, cohort_of([1] * 6))
    assert (merged["w"].dtype, merged["b"].dtype) == (jnp.bfloat16, jnp.float32)
