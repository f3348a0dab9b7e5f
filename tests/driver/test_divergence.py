"""Clients whose updates are not finite: named, left out, or let through."""

import contextlib
import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.testing as npt
import pytest

from fedjax_graph.algorithms.ditto import DittoConfig, ditto
from fedjax_graph.algorithms.fed_avg import FedAvgConfig, fed_avg
from fedjax_graph.core import faults, processes
from fedjax_graph.core.algorithm import FederatedAlgorithm, Phase, by_phase
from fedjax_graph.core.errors import InputError
from fedjax_graph.core.mesh import make_mesh
from fedjax_graph.driver import rounds
from fedjax_graph.driver.divergence import Divergence
from fedjax_graph.driver.writers import read_records
from tests.algorithms.quadratic import QuadraticTask, make_data

FAILING, NUM_ROUNDS = 2, 5  # the place of client 4; it fails from round 3 on
WEIGHTS = (2, 1, 5, 3, 4)


@dataclasses.dataclass(frozen=True)
class Failing(QuadraticTask):
    """The client with a mark in its data is not finite from round 3 on."""

    what: str = "params"
    value: float = jnp.nan

    def update(self, start, own, key, data, adjust, num_rounds):
        result = super().update(start, own, key, data, adjust, num_rounds)
        is_bad = (own[0][0, 0] == MARK) & (num_rounds >= 2)
        bad = jnp.where(is_bad, self.value, 0)
        if self.what == "loss":
            return result._replace(loss=result.loss + bad)
        model = jax.tree.map(lambda x: x + bad, result.model)
        return result._replace(model=model)


MARK = 0.12345


def make_splits(weights=WEIGHTS):
    data = make_data(weights)
    data = data._replace(features=data.features.at[FAILING, 0, 0].set(MARK))
    return dict.fromkeys(("train", "validation", "test"), data)


def run(on_nan, workdir=None, what="params", resume=False, value=jnp.nan, **config):
    algorithm = fed_avg(FedAvgConfig(Failing(what=what, value=value)))
    run_config = rounds.RunConfig(NUM_ROUNDS, on_nan=on_nan, keep_last=True, **config)
    args = "fake", algorithm, make_splits(), run_config, workdir, {}
    return rounds.run(*args, resume=resume)


def test_a_run_stops_with_round_and_client_and_its_last_good_checkpoint(tmp_path):
    with pytest.raises(InputError) as caught:
        run("stop", tmp_path, "loss", eval_every=2)
    message = str(caught.value)
    words = "fake: the training loss of round 3 is not finite: it began in round 3 with"
    assert message.startswith(f"{words} client 4; try a smaller learning rate")
    assert message.endswith("on_nan=skip_client") and "\n" not in message
    folder = tmp_path / "fake" / "checkpoints"
    assert [path.name for path in folder.iterdir()] == ["2"]


def test_of_a_cohort_the_client_that_failed_is_named():
    """By its id, not by its place among those who took part."""
    algorithm = fed_avg(FedAvgConfig(Failing(), participation=0.6))
    for seed in (0, 1):
        config = rounds.RunConfig(20, on_nan="stop", seeds=(seed,))
        with pytest.raises(InputError, match="is not finite.* with client 4;"):
            rounds.run("fake", algorithm, make_splits(), config, None, {})


def test_a_model_that_is_not_finite_is_not_saved_and_the_run_goes_on(tmp_path):
    with pytest.raises(InputError, match="the model after round 3 is not finite: it"):
        run("stop", tmp_path)
    folder = tmp_path / "fake" / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == ["1", "2"]
    resumed = run("skip_client", tmp_path, resume=True)
    whole = run("skip_client")
    jax.tree.map(npt.assert_array_equal, resumed.best_state, whole.best_state)


@pytest.mark.parametrize("value", [jnp.inf, -jnp.inf])
def test_a_model_that_is_infinite_is_not_saved(tmp_path, value):
    with pytest.raises(InputError, match="round 3 is not finite: it began .* client 4"):
        run("stop", tmp_path, value=value)
    folder = tmp_path / "fake" / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == ["1", "2"]


class SearchState(NamedTuple):
    num_rounds: jax.Array
    scores: jax.Array  # [3] minus infinity where nothing has been scored yet
    weights: jax.Array  # [3]


def search(**later):
    """Each round scores one of three in turn; the third forgets the second score.

    From round 4 on the first number of a field is what `later` says.
    """

    def round_(state, data, key):
        scores = state.scores.at[state.num_rounds % 3].set(0.5)
        scores = jnp.where(
            (state.num_rounds == 2) & (jnp.arange(3) == 1), -jnp.inf, scores
        )
        state = SearchState(state.num_rounds + 1, scores, state.weights + 1)
        for name, value in later.items():
            x = getattr(state, name)
            x = x.at[0].set(jnp.where(state.num_rounds >= 4, value, x[0]))
            state = state._replace(**{name: x})
        return state, {"train_loss": jnp.float32(1)}

    def init(key, data):
        return SearchState(jnp.int32(0), jnp.full(3, -jnp.inf), jnp.zeros(3))

    return FederatedAlgorithm(
        init,
        round_,
        evaluate=lambda state, data: {"loss": jnp.float32(1)},
        predict=lambda state, data: data.targets,
    )


@pytest.mark.parametrize("first", [1, 2, 3])
def test_what_was_infinite_from_the_start_may_be_so_again(tmp_path, first):
    """Also in a run that goes on from a checkpoint in which it was not."""
    args = "fake", search(), make_splits()
    rounds.run(*args, rounds.RunConfig(first), tmp_path, {})
    rounds.run(*args, rounds.RunConfig(6), tmp_path, {}, resume=True)
    assert len(read_records(tmp_path / "metrics.jsonl")) == 6


@pytest.mark.parametrize(
    "later",
    [{"scores": jnp.nan}, {"weights": jnp.nan}, {"weights": jnp.inf}],
    ids=str,
)
@pytest.mark.parametrize("first", [2, 6])
def test_another_number_that_is_not_finite_ends_the_run(tmp_path, later, first):
    args = "fake", search(**later), make_splits()
    with pytest.raises(InputError, match="the model after round 4 is not finite"):
        rounds.run(*args, rounds.RunConfig(first), tmp_path, {})
        rounds.run(*args, rounds.RunConfig(6), tmp_path, {}, resume=True)


def test_without_a_folder_a_model_that_is_not_finite_ends_the_run_as_well():
    """The loss of its last round, the third, is."""
    algorithm, config = fed_avg(FedAvgConfig(Failing())), rounds.RunConfig(3)
    with pytest.raises(InputError, match="the model after round 3 is not finite: it"):
        rounds.run("fake", algorithm, make_splits(), config)


@dataclasses.dataclass(frozen=True)
class Large(QuadraticTask):
    """Clients send a number that a protected sum does not hold, in round 2."""

    def update(self, start, own, key, data, adjust, num_rounds):
        result = super().update(start, own, key, data, adjust, num_rounds)
        scale = jnp.where(num_rounds == 1, 1e9, 1)
        return result._replace(model=jax.tree.map(lambda x: scale * x, result.model))


@pytest.mark.parametrize("on_nan", ["stop", "skip_client"])
@pytest.mark.parametrize(
    ("mode", "reason"),
    [
        ("masks", "secure_aggregation=masks holds numbers up to 1024, and a client's"),
        (
            "ckks",
            "secure_aggregation=ckks holds numbers up to 262144 over the number of",
        ),
    ],
)
def test_a_sum_that_does_not_hold_a_number_is_what_a_run_names(mode, reason, on_nan):
    """Not the clients of the next round, none of which is finite any more."""
    if mode == "ckks":
        pytest.importorskip(
            "tenseal", reason="TenSEAL, of the extra [ckks], is missing"
        )
    algorithm = fed_avg(FedAvgConfig(Large(), secure_aggregation=mode))
    config = rounds.RunConfig(NUM_ROUNDS, on_nan=on_nan)
    with pytest.raises(InputError, match=f"server computed is not; {reason}") as caught:
        rounds.run("fake", algorithm, make_splits(), config)
    assert "\n" not in str(caught.value)


def test_a_client_left_out_has_weight_0_in_that_round(tmp_path):
    skipped = run("skip_client", tmp_path)
    lines = read_records(tmp_path / "metrics.jsonl")
    expected = [None, None, [4], [4], [4]]
    assert [line.get("skipped_clients") for line in lines] == expected
    algorithm = fed_avg(FedAvgConfig(QuadraticTask()))
    data, key = make_splits()["train"], jax.random.key(0)
    state = algorithm.init(jax.random.fold_in(key, 0), data)
    round_of = jax.jit(algorithm.round)
    for line in lines:
        weights = jnp.array(WEIGHTS, jnp.float32)
        if line["round"] > 2:
            weights = weights.at[FAILING].set(0)
        own = data._replace(client_weights=weights)
        state, metrics = round_of(state, own, jax.random.fold_in(key, line["round"]))
        npt.assert_allclose(line["train_loss"], metrics["train_loss"], rtol=1e-5)
    jax.tree.map(
        lambda x, y: npt.assert_allclose(x[0], y, rtol=1e-5), skipped.best_state, state
    )


def test_where_nobody_is_left_a_run_stops():
    data = make_splits((0, 0, 5, 0, 0))
    algorithm = fed_avg(FedAvgConfig(Failing()))
    config = rounds.RunConfig(NUM_ROUNDS, on_nan="skip_client")
    with pytest.raises(InputError, match="round 3 .* began in round 3 with client 4"):
        rounds.run("fake", algorithm, data, config)


def run_seeds(algorithm, splits, workdir=None, **config):
    """Two seeds with features and targets of their own; client 4 alone has a weight."""

    def is_drawn(path):
        return path[-1].name in ("features", "targets")

    def beside(path, *leaves):
        return jnp.stack(leaves) if is_drawn(path) else leaves[0]

    splits = {
        name: jax.tree_util.tree_map_with_path(beside, *(own[name] for own in splits))
        for name in ("train", "validation", "test")
    }
    config = {"seeds": (0, 1), "is_drawn": is_drawn, "on_nan": "skip_client"} | config
    config = rounds.RunConfig(NUM_ROUNDS, **config)
    return rounds.run("fake", algorithm, splits, config, workdir, {})


ALONE = (0, 0, 5, 0, 0)


@pytest.mark.parametrize(
    ("round_", "is_trial", "who"),
    [
        (1, False, "all clients were finite, .* is not; it is too large"),
        (2, False, "it began in round 2 with client 7"),  # too large comes of it
        (0, False, "it began in round 2 with client 7"),  # of a seed that has stopped
        (1, True, "it began in round 2 with client 7"),
    ],
)
def test_what_came_first_is_named(round_, is_trial, who):
    divergence = Divergence("fake", "skip_client")

    def trace(flag):
        watched = faults.watching(divergence.watch, jnp.int32(round_))
        with watched, faults.trial() if is_trial else contextlib.nullcontext():
            faults.explain(flag, "it is too large")
        return flag

    jax.jit(trace)(jnp.bool_(True))
    jax.effects_barrier()
    is_finite = np.array([True, False])
    divergence.watch.report(2, np.array([3, 7]), np.ones(2), is_finite)
    with pytest.raises(InputError, match=f"round 2 is not finite: {who}"):
        divergence.check_losses(2, np.array([np.nan]), again=None)


def test_other_processes_ask_the_first_who_it_was(monkeypatch):
    """It alone is told of clients."""
    told = "yes", "it began in round 2 with client 7; try this"

    def gather(text=""):
        return [told[bool(text)], text]

    monkeypatch.setattr(processes, "gather", gather)
    divergence = Divergence("fake", "skip_client")
    message = "^fake: the training loss of round 2 is not finite: it began in round 2 w"
    with pytest.raises(InputError, match=message):
        divergence.check_losses(2, np.ones(1), lambda watch: None)


def unmarked(weights=ALONE):
    return dict.fromkeys(("train", "validation", "test"), make_data(weights))


@pytest.mark.parametrize("seeds_per_chunk", [None, 1])
def test_where_one_seed_loses_everybody_a_run_stops(seeds_per_chunk):
    """The other one does not; clients count for their seed."""
    algorithm = fed_avg(FedAvgConfig(Failing()))
    splits = make_splits(ALONE), unmarked()
    with pytest.raises(InputError, match="round 3 .* began in round 3 with client 4"):
        run_seeds(algorithm, splits, seeds_per_chunk=seeds_per_chunk)


@pytest.mark.parametrize("seeds_per_chunk", [None, 1])
def test_a_seed_that_has_stopped_loses_nobody(tmp_path, seeds_per_chunk):
    """It would from round 3 on; what it learns is the opposite of its validation."""
    splits = make_splits(ALONE), unmarked()
    for own, factor in zip(splits, (-100, 100), strict=True):
        targets = own["train"].targets.at[FAILING].multiply(factor)
        own["validation"] = own["train"]._replace(targets=targets)
    result = run_seeds(
        fed_avg(FedAvgConfig(Failing())),
        splits,
        tmp_path,
        patience=1,
        seeds_per_chunk=seeds_per_chunk,
    )
    assert list(result.best_round) == [1, NUM_ROUNDS]
    lines = read_records(tmp_path / "metrics.jsonl")
    assert not any("skipped_clients" in line for line in lines)


def test_a_seed_that_stopped_between_two_checkpoints_is_looked_at(tmp_path):
    """Its model is infinite after round 3, its last one."""
    splits = make_splits(ALONE), unmarked()
    for own in splits:
        targets = own["train"].targets.at[FAILING].multiply(100)
        own["validation"] = own["train"]._replace(targets=targets)
    algorithm = fed_avg(FedAvgConfig(Failing(value=jnp.inf)))
    config = {"patience": 1, "checkpoint_seconds": 1e6, "on_nan": "stop"}
    with pytest.raises(InputError, match="the model .* began in round 3 with client 4"):
        run_seeds(algorithm, splits, tmp_path, **config)
    lines = read_records(tmp_path / "metrics.jsonl")
    ran = [line["train_loss_by_seed"][0] is not None for line in lines]
    assert ran == [True, True, True, False, False]


@pytest.mark.parametrize("eval_every", [1, NUM_ROUNDS])
@pytest.mark.parametrize("seeds_per_chunk", [None, 1])
def test_a_phase_that_is_not_taken_loses_nobody(tmp_path, seeds_per_chunk, eval_every):
    """Side by side, all phases are computed; clients of the first fail from 3 on."""
    phases = [
        Phase(first, fed_avg(FedAvgConfig(task)).round)
        for first, task in ((1, Failing()), (3, QuadraticTask()))
    ]
    algorithm = fed_avg(FedAvgConfig(QuadraticTask()))._replace(
        round=by_phase(phases, lambda state: state.num_rounds), phases=tuple(phases)
    )
    splits = make_splits(), make_splits()
    config = {"seeds_per_chunk": seeds_per_chunk, "eval_every": eval_every}
    run_seeds(algorithm, splits, tmp_path, **config)
    lines = read_records(tmp_path / "metrics.jsonl")
    assert len(lines) == NUM_ROUNDS
    assert not any("skipped_clients" in line for line in lines)


class FailsIfPulled(QuadraticTask):
    """Nobody is finite from round 3 on where something is added to the gradients."""

    def update(self, start, own, key, data, adjust, num_rounds):
        result = super().update(start, own, key, data, adjust, num_rounds)
        bad = jnp.where((num_rounds >= 2) & (adjust is not None), jnp.nan, 0)
        return result._replace(model=jax.tree.map(lambda x: x + bad, result.model))


def test_where_one_of_a_rounds_cohorts_loses_everybody_a_run_stops():
    """Ditto's personal models fail, and the global one does not."""
    data = unmarked(WEIGHTS)
    config = rounds.RunConfig(NUM_ROUNDS, on_nan="skip_client", keep_last=True)
    with pytest.raises(InputError, match="round 3 .* began in round 3 with client"):
        rounds.run("fake", ditto(DittoConfig(FailsIfPulled())), data, config)
    rounds.run("fake", fed_avg(FedAvgConfig(FailsIfPulled())), data, config)


def test_what_is_not_finite_may_be_ignored(tmp_path):
    result = run("ignore", tmp_path)
    assert result.num_rounds == NUM_ROUNDS
    assert np.isnan(result.test["loss"]).all()
    losses = [line["train_loss"] for line in read_records(tmp_path / "metrics.jsonl")]
    assert [loss is None for loss in losses] == [False, False, False, True, True]


@pytest.mark.slow
def test_a_client_is_left_out_on_a_mesh_as_well(tmp_path, capfd):
    alone = run("skip_client", tmp_path / "alone")
    with jax.set_mesh(make_mesh(devices=jax.devices()[:2])):
        shared = run("skip_client", tmp_path / "shared")
    for name in ("alone", "shared"):
        lines = read_records(tmp_path / name / "metrics.jsonl")
        assert [x.get("skipped_clients") for x in lines] == [None, None, *[[4]] * 3]
    jax.tree.map(
        lambda x, y: npt.assert_allclose(x, y, rtol=1e-5),
        *(jax.device_get(result.best_state) for result in (alone, shared)),
    )
    assert "SPMD" not in capfd.readouterr().err
