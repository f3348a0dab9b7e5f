"""Rounds on cohorts that the host keeps, against rounds with all on the device."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.testing as npt
import pytest

from fedjax_graph.algorithms import get_method, make_config
from fedjax_graph.core import clients, mesh, trees
from fedjax_graph.core.errors import InputError
from fedjax_graph.core.misbehaviour import Misbehaviour
from fedjax_graph.driver import client_store
from fedjax_graph.driver.client_store import ClientStore
from tests.algorithms import quadratic

KEY, KEYS = jax.random.key(0), quadratic.KEYS
PARTICIPATION = 0.6  # three of five clients
IN_SHORT = ("ditto", "fed_avg")
METHODS = (*IN_SHORT, "fed_adam", "fed_att", "fed_per", "fed_prox")
METHODS += ("lg_fed_avg", "local")


@functools.cache
def make(method, participation=1.0, **settings):
    values = {"task": quadratic.QuadraticTask(), "participation": participation}
    return get_method(method).factory(make_config(method, values | settings))


def cohort_of(key, data):
    """Who takes part in a round of all clients with this key."""
    cohort_key = jax.random.split(jax.random.split(key)[0])[0]
    ids, weights = data.client_ids, data.client_weights
    cohort = clients.sample_cohort(cohort_key, ids, weights, PARTICIPATION)
    return np.asarray(cohort.indices)


def without_graph(data):
    return data._replace(graph=None)


DATA = without_graph(quadratic.make_data())
EVERYBODY = np.arange(quadratic.NUM_CLIENTS)


def rounds_of(store, data=DATA, keys=KEYS):
    return [store.round(cohort_of(key, data), key) for key in keys]


def assert_same(found, expected):
    jax.tree.map(lambda a, b: npt.assert_allclose(a, b, rtol=1e-6), found, expected)


@pytest.mark.parametrize(
    "method",
    [
        pytest.param(method, marks=[] if method in IN_SHORT else [pytest.mark.slow])
        for method in METHODS
    ],
)
def test_rounds_are_those_of_all_clients_on_the_device(method, quick_jit):
    history = quadratic.run(make(method, PARTICIPATION), DATA, quick_jit)
    store = ClientStore(make(method), DATA, KEY)
    assert_same(rounds_of(store), [metrics for _, metrics in history[1:]])
    assert_same(store.gather(EVERYBODY)[0], history[-1][0])
    assert store.num_rounds == 3


@pytest.mark.slow
def test_cohorts_are_shared_out_to_devices():
    """Three clients to two of them."""
    expected = rounds_of(ClientStore(make("ditto"), DATA, KEY))
    with jax.set_mesh(mesh.make_mesh(devices=jax.devices()[:2])):
        found = rounds_of(ClientStore(make("ditto"), DATA, KEY))
    jax.tree.map(lambda a, b: npt.assert_allclose(a, b, rtol=1e-5), found, expected)


def test_draws_do_not_depend_on_who_else_is_there():
    """Clients 2, 0 and 3 in a store of their own, in another order."""
    few = np.array([2, 0, 3])
    algorithm = make("ditto")
    store = ClientStore(algorithm, DATA, KEY)
    alone = ClientStore(algorithm, trees.take(DATA, few), KEY)
    for key in KEYS:
        store.round(few, key)
        alone.round(np.arange(3), key)
    assert_same(alone.gather(np.arange(3))[0], store.gather(few)[0])
    kept = store.gather(np.array([1, 4]))[0].models  # who never took part
    assert_same(kept, ClientStore(algorithm, DATA, KEY).gather(np.array([1, 4]))[0][1])


@pytest.fixture
def killed(monkeypatch):
    """Ends a round between the file that says what changes, and the change."""

    def kill(*_):
        raise KeyboardInterrupt

    def run(store, key):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(store, "_write", kill)
            store.round(cohort_of(key, DATA), key)

    return run


@pytest.mark.parametrize("is_mapped", [False, True])
def test_a_folder_outlives_the_process(tmp_path, killed, is_mapped):
    """Whose data may be a file as well; a kill within a round is as one after it."""
    data = DATA
    if is_mapped:
        np.save(tmp_path / "features.npy", DATA.features)
        mapped = np.load(tmp_path / "features.npy", mmap_mode="r")
        data = DATA._replace(features=mapped)
    whole = ClientStore(make("ditto"), DATA, KEY)
    rounds_of(whole)
    folder = tmp_path / "clients"
    rounds_of(ClientStore(make("ditto"), data, KEY, folder), keys=KEYS[:1])
    killed(ClientStore(make("ditto"), data, KEY, folder, resume=True), KEYS[1])
    store = ClientStore(make("ditto"), data, jax.random.key(9), folder, resume=True)
    assert store.num_rounds == 2
    rounds_of(store, keys=KEYS[2:])
    assert_same(store.gather(EVERYBODY)[0], whole.gather(EVERYBODY)[0])
    rows = np.load(folder / "clients.npy")["state.models.params.base"]
    npt.assert_array_equal(rows, whole.gather(EVERYBODY)[0].models["params"]["base"])


def test_a_round_that_could_not_be_written_is_run_again(tmp_path, monkeypatch):
    def fill(*_):
        raise OSError(28, "No space left on device")

    store = ClientStore(make("ditto"), DATA, KEY, tmp_path / "clients")
    for k, key in enumerate(KEYS):
        if k == 1:
            with monkeypatch.context() as patch, pytest.raises(OSError, match="space"):
                patch.setattr(client_store, "write_atomically", fill)
                store.round(cohort_of(key, DATA), key)
        assert store.num_rounds == k
        store.round(cohort_of(key, DATA), key)
    whole = ClientStore(make("ditto"), DATA, KEY)
    rounds_of(whole)
    assert_same(store.gather(EVERYBODY)[0], whole.gather(EVERYBODY)[0])


def test_a_store_is_refused_a_folder_that_another_has_written_to(tmp_path):
    """Their states would mix, so it writes nothing."""
    first = ClientStore(make("ditto"), DATA, KEY, tmp_path)
    second = ClientStore(make("ditto"), DATA, KEY, tmp_path, resume=True)
    rounds_of(second, keys=KEYS[:1])
    before = (tmp_path / client_store.TABLE).read_bytes()
    with pytest.raises(InputError, match="another store has written to it"):
        rounds_of(first, keys=KEYS[:1])
    assert (tmp_path / client_store.TABLE).read_bytes() == before
    rounds_of(second, keys=KEYS[1:])


def test_a_folder_may_hold_nothing_of_a_single_client(tmp_path):
    whole = ClientStore(make("fed_avg"), DATA, KEY)
    rounds_of(whole)
    rounds_of(ClientStore(make("fed_avg"), DATA, KEY, tmp_path), keys=KEYS[:1])
    store = ClientStore(make("fed_avg"), DATA, KEY, tmp_path, resume=True)
    rounds_of(store, keys=KEYS[1:])
    assert_same(store.gather(EVERYBODY)[0], whole.gather(EVERYBODY)[0])
    assert [path.name for path in tmp_path.iterdir()] == [client_store.LAST_ROUND]


def test_types_that_numpys_files_do_not_know_are_read_again(tmp_path):
    """Bfloat16, of what a client has and of what all share."""

    def init(key, data):
        rows = jnp.zeros((len(data.client_ids), 2), jnp.bfloat16)
        return {"rows": rows, "shared": jnp.zeros(3, jnp.bfloat16)}

    def round_(state, data, key):
        del data, key
        return jax.tree.map(lambda x: x + 1, state), {"train_loss": 0.0}

    counting = make("fed_avg")._replace(init=init, round=round_)
    ClientStore(counting, DATA, KEY, tmp_path).round(np.array([1, 3]), KEY)
    store = ClientStore(counting, DATA, KEY, tmp_path, resume=True)
    store.round(np.array([3, 4]), KEY)
    state, _ = store.gather(EVERYBODY)
    assert all(x.dtype == jnp.bfloat16 for x in state.values())
    npt.assert_array_equal(state["rows"][:, 0], np.array([0, 1, 0, 2, 1], np.float32))
    npt.assert_array_equal(state["shared"], np.full(3, 2, np.float32))


def test_first_states_are_made_for_some_clients_at_a_time(monkeypatch):
    whole = ClientStore(make("ditto"), DATA, KEY).gather(EVERYBODY)[0]
    monkeypatch.setattr(client_store, "CLIENTS_AT_ONCE", 2)
    assert_same(ClientStore(make("ditto"), DATA, KEY).gather(EVERYBODY)[0], whole)


@pytest.mark.parametrize("folder", [None, "clients"])
def test_a_client_gets_the_first_state_that_is_its_own(tmp_path, monkeypatch, folder):
    """Also in the last of chunks that do not divide the clients."""
    monkeypatch.setattr(client_store, "CLIENTS_AT_ONCE", 2)

    def init(key, data):
        del key
        return {"rows": data.client_ids[:, None] * jnp.arange(1, 8)}

    own = make("fed_avg")._replace(init=init)
    store = ClientStore(own, DATA, KEY, folder and tmp_path / folder)
    expected = np.outer(DATA.client_ids, np.arange(1, 8))
    npt.assert_array_equal(store.gather(EVERYBODY)[0]["rows"], expected)


@pytest.mark.parametrize(
    "method, data, words",
    [
        ("scaffold", DATA, "read what clients outside of the cohort keep"),
        ("fed_dc", DATA, "read what clients outside of the cohort keep"),
        ("sfl", quadratic.make_data(), "read what clients outside of the cohort keep"),
        ("graph_fed_avg", quadratic.make_data(), "the graph has 5 nodes"),
        ("ditto", DATA._replace(client_ids=jnp.zeros(5, int)), "two clients with"),
    ],
)
def test_what_a_cohort_does_not_suffice_for_is_refused(method, data, words):
    with pytest.raises(InputError, match=words):
        ClientStore(make(method), data, KEY)


def test_a_method_that_pulls_neighbours_together_is_refused():
    config = make_config("gru_fmtl", {"task": quadratic.QuadraticTask()})
    with pytest.raises(InputError, match="read what clients outside of the cohort"):
        ClientStore(get_method("gru_fmtl").factory(config), DATA, KEY)


def test_a_method_whose_clients_exchange_data_first_is_refused():
    method = make("fed_avg")._replace(exchange=lambda data: {})
    with pytest.raises(InputError, match="exchange data before the first round"):
        ClientStore(method, DATA, KEY)


@pytest.mark.parametrize("method", ["fed_avg", "gcfl_plus", "scaffold"])
def test_a_method_that_samples_by_itself_is_refused(method):
    with pytest.raises(InputError, match="participation=0.6: expected 1"):
        ClientStore(make(method, PARTICIPATION), DATA, KEY)


@pytest.mark.parametrize("method", ["fed_avg", "ditto"])
def test_who_attacks_is_drawn_among_all_clients(method):
    attacked = make(method, misbehaviour=Misbehaviour(byzantine_fraction=0.2))
    with pytest.raises(InputError, match="read what clients outside of the cohort"):
        ClientStore(attacked, DATA, KEY)


class WithMore(NamedTuple):
    """A split with arrays that the task does not read for its clients."""

    features: Any
    targets: Any
    client_ids: Any
    client_weights: Any
    graph: None = None
    means: Any = None  # shared by all


@pytest.mark.parametrize("size", [1, 4, 6])
def test_what_all_clients_share_stays_whole(size):
    more = WithMore(*DATA, means=np.arange(float(size)))
    store = ClientStore(make("ditto"), more, KEY)
    _, cohort = store.gather(np.array([1, 4]))
    npt.assert_array_equal(cohort.means, more.means)
    npt.assert_array_equal(cohort.targets, DATA.targets[np.array([1, 4])])
    assert store.gather(np.array([0]))[1].means is cohort.means  # crosses once


def test_what_may_be_shared_is_refused_where_it_has_a_row_for_each_client():
    more = WithMore(*DATA, means=np.arange(5.0))
    with pytest.raises(InputError, match="data.means: has 5 rows, as many as") as line:
        ClientStore(make("ditto"), more, KEY)
    assert "\n" not in str(line.value)
    reading = make("ditto")._replace(
        client_data=lambda data: (data.features, data.targets + data.means[:, None])
    )
    _, cohort = ClientStore(reading, more, KEY).gather(np.array([1, 4]))
    npt.assert_array_equal(cohort.means, [1, 4])


def test_a_state_of_pairs_of_clients_is_refused():
    pairs = make("fed_avg")._replace(
        init=lambda key, data: jnp.zeros(2 * data.client_ids.shape)
    )
    with pytest.raises(InputError, match=r"an array \(3, 3\) for 3 clients"):
        ClientStore(pairs, DATA, KEY)


@pytest.mark.parametrize(
    "indices, words",
    [([0, 0], "stands twice"), ([5], "has 5, expected 0 to 4"), ([[0]], "shape")],
)
def test_a_cohort_is_of_different_clients(indices, words):
    with pytest.raises(InputError, match=words):
        ClientStore(make("fed_avg"), DATA, KEY).gather(np.array(indices))


def damage(folder, name=client_store.LAST_ROUND):
    path = folder / name
    path.write_bytes(path.read_bytes()[:-40])


damage_table = functools.partial(damage, name=client_store.TABLE)


FEWER = trees.take(DATA, np.arange(3))
OTHERS = DATA._replace(client_ids=jnp.arange(5))


@pytest.mark.parametrize(
    "method, data, spoil, words",
    [
        ("ditto", DATA, damage, "cannot be resumed"),
        ("ditto", DATA, damage_table, "cannot be resumed"),
        ("ditto", FEWER, None, "number of clients"),
        ("ditto", OTHERS, None, "other client_ids"),
        ("fed_avg", DATA, None, "of another method"),
        ("ditto", DATA, "anew", "resume it or name a new folder"),
    ],
)
def test_another_folder_is_refused_in_one_line(tmp_path, method, data, spoil, words):
    ClientStore(make("ditto"), DATA, KEY, tmp_path)
    if callable(spoil):
        spoil(tmp_path)
    with pytest.raises(InputError, match=words) as refusal:
        ClientStore(make(method), data, KEY, tmp_path, resume=spoil != "anew")
    assert "\n" not in str(refusal.value)


def test_cohorts_are_drawn_without_replacement():
    drawn = [clients.draw_indices(key, 30, 10) for key in KEYS]
    for indices in drawn:
        assert len(np.unique(indices)) == 10 and (np.diff(indices) > 0).all()
        assert indices.min() >= 0 and indices.max() < 30
    assert not np.array_equal(drawn[0], drawn[1])
    npt.assert_array_equal(drawn[0], clients.draw_indices(KEYS[0], 30, 10))
    counts = np.zeros(12)
    for seed in range(300):
        counts[clients.draw_indices(jax.random.key(seed), 12, 4)] += 1
    assert np.abs(counts - 100).max() < 5 * np.sqrt(300 * 2 / 9)
    with pytest.raises(InputError, match="size=31: expected at most 30"):
        clients.draw_indices(KEY, 30, 31)
