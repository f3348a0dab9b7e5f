"""What every registered method must do. One without an entry in `TINY` fails.

Compiling is what takes the time, so a method has two programs, and several checks read
what they give:

- `System.step`, a round and its scores, of five clients all at once: a finite state,
  no recompilation for other keys, rounds and seeds, permuted clients; and the same
  without jit;
- `System.mapped`, the same in chunks of two clients, with two more clients of weight 0
  (so the last chunk is not full) and under `vmap` over two seeds: no difference.

Traced only, never compiled: a round is a scan body, and data are no constants.

Methods of any task share the round of `core.federated`, so what does not depend on the
method is checked where it is the method's own (`OWN_ROUNDS`): the same without jit, and
on `fed_avg` for each kind of task clients one after another. Chunks of other sizes,
cohorts, and a Python loop as the reference are in `tests/core`; searches are one scan,
which is compiled without jit as well.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import numpy.testing as npt
import pytest
from jax.extend import core as jex_core

from fedjax_graph.algorithms import REGISTRY, get_method, make_config
from fedjax_graph.core import trees
from fedjax_graph.core.algorithm import NO_LOSS
from fedjax_graph.core.errors import InputError
from tests.algorithms.problems import NUM_CLIENTS, NUM_PADDED, all_problems
from tests.algorithms.tiny_methods import CASES, CENTRALISED, SEARCHES, TINY
from tests.conftest import forget_programs_if_many

pytestmark = pytest.mark.usefixtures("rolled_scans")

OWN_ROUNDS = {"fed_avg", "fed_sgd", "graphfl", "scaffold", "sfl_star"}  # of any task
ABLATIONS = {  # `fl_agcns` with parts left out, `cnfgnn` without its aggregation
    "at_without_fedavg",
    "client_eo",
    "controller_eo",
}
# By default what others are special cases of, and one that clusters its clients; the
# others are compared with a reference in tests of their own, and conform nightly.
DEFAULT = OWN_ROUNDS | {
    "cnfgnn",
    "gcfl_plus",
    "historical_average",
    "persistence",
}
NIGHTLY = {"fed_avg-traffic_seq2seq"}  # of cnfgnn's model, which cnfgnn has here
LONG_WITHOUT_JIT = {"cnfgnn", "fed_sgd", "graphfl", "sfl_star"}  # 100 to 200 programs
KEYS = tuple(jax.random.key(seed) for seed in (5, 6))
FILLS = ("zero", "random")  # readings of clients of weight 0


def cases(default):
    """All of them; those of other methods are slow."""
    return [
        pytest.param(case, marks=[] if is_short else [pytest.mark.slow])
        for case, (name, _) in sorted(CASES.items())
        for is_short in [name in default and case not in NIGHTLY]
    ]


def assert_close(left, right, atol=1e-5):
    """Two trees of one structure; relative for figures above 1, as of mph."""
    assert jax.tree.structure(left) == jax.tree.structure(right)
    jax.tree.map(
        lambda a, b: npt.assert_allclose(a, b, rtol=atol, atol=atol), left, right
    )


class System:
    """A method with a tiny config, its first state and its two programs."""

    def __init__(self, name, problem, jit):
        self.name, self.problem, self.jit = name, problem, jit
        self.values = TINY[type(problem)][name]
        self.train = problem.train
        self.is_trained = get_method(name).is_trained
        self.shares_its_round = (
            get_method(name).takes_task and name not in OWN_ROUNDS
        ) or name == "at_without_fedavg"  # the aggregator is all that it has of its own
        self.num_traces = 0
        self.algorithm = self.build()
        self.init = jit(self.init_of(self.algorithm))
        self.state = self.init(KEYS[0], self.train)
        self.step = jit(self.step_of())
        self.traced = self.step.trace(self.state, self.train, KEYS[0])
        chunks = {"clients_per_chunk": 2} if self.has("clients_per_chunk") else {}
        self.mapped = jit(jax.vmap(self.step_of(**chunks), (0, None, 0)))

    def build(self, **changes):
        return get_method(self.name).factory(
            make_config(self.name, self.values | changes)
        )

    def has(self, field):
        fields = dataclasses.fields(get_method(self.name).config_type)
        return field in {f.name for f in fields}

    def init_of(self, algorithm):
        """(key, data before clients exchanged any) -> the first state."""
        return lambda key, data: algorithm.init(key, algorithm.prepared(data))

    def step_of(self, **changes):
        """A round -> (state, metrics, scores, outputs)."""
        algorithm = self.build(**changes)

        def step(state, data, key):
            self.num_traces += 1
            data = algorithm.prepared(data)
            state, metrics = algorithm.round(state, data, key)
            scores = algorithm.evaluate(state, data)
            return state, metrics, scores, algorithm.predict(state, data)

        return step


def is_of_optax(x):
    return type(x).__module__.startswith("optax.")


def run(step, state, data, keys=KEYS):
    """Two rounds -> what the last gives."""
    for key in keys:
        state, *others = step(state, data, key)
    return state, *others


@pytest.fixture(scope="module")
def problems(train):
    return all_problems(train)


@pytest.fixture(scope="module", params=cases(DEFAULT))
def system(request, problems, quick_jit):
    name, problem = CASES[request.param]
    yield System(name, problems[problem], quick_jit)
    forget_programs_if_many()


@pytest.mark.parametrize("case", sorted(CASES))
def test_a_best_state_has_all_that_is_scored(case, problems):
    """And nothing of an optimizer, nor what clients remember for their next round."""
    name, kind = CASES[case]
    data, values = problems[kind].train, TINY[type(problems[kind])][name]
    algorithm = get_method(name).factory(make_config(name, values))
    data = jax.eval_shape(algorithm.prepared, data)
    state = jax.eval_shape(algorithm.init, KEYS[0], data)
    kept = algorithm.kept(state)
    assert not jax.tree.leaves(
        [x for x in jax.tree.leaves(kept, is_leaf=is_of_optax) if is_of_optax(x)]
    )
    memories = getattr(kept, "memories", None)
    assert set(memories or ()) == ({"found"} if name == "fed_sage_plus" else set())
    left = trees.by_path(kept)
    for function in (algorithm.evaluate, algorithm.predict):

        def of(part, function=function):
            return function(*part)

        assert jax.eval_shape(of, (kept, data)) == jax.eval_shape(of, (state, data))
        is_read = trees.leaves_read(of, (state, data))
        paths = trees.by_path(state)
        assert {x for x, y in zip(paths, is_read, strict=False) if y} <= set(left)


@pytest.fixture(scope="module")
def outcome(system):
    return run(system.step, system.state, system.train)


@pytest.fixture(scope="module")
def padded_outcomes(system, outcome):
    """Of two seeds together, with clients of weight 0 -> for each fill, for each seed.

    The first seed is that of `outcome`, the second goes on from there.
    """
    if system.name in ABLATIONS:
        pytest.skip("the method that this is an ablation of is tested")
    first = with_padded_rows(system.problem, system.state)
    second = with_padded_rows(system.problem, outcome[0])
    states = jax.tree.map(lambda *x: jax.device_put(np.stack(x)), first, second)
    keys = [jnp.stack(pair) for pair in zip(KEYS, KEYS[::-1], strict=True)]
    both = {
        fill: run(system.mapped, states, system.problem.pad(fill), keys)
        for fill in FILLS
    }
    assert system.mapped._cache_size() == 1
    return {
        fill: [
            jax.tree.map(lambda x, i=i: x[i], jax.device_get(results)) for i in range(2)
        ]
        for fill, results in both.items()
    }


def test_no_method_is_forgotten():
    assert {name for name, _ in CASES.values()} == set(REGISTRY)
    for name, problem in CASES.values():
        fields = {f.name for f in dataclasses.fields(REGISTRY[name].config_type)}
        assert set(TINY[problem][name]) <= fields


def test_which_methods_read_what_clients_outside_of_the_cohort_keep():
    """A mean over all clients, of models, controls or gradients, or of neighbours."""
    made = {
        name: get_method(name).factory(make_config(name, TINY[problem][name]))
        for name, problem in CASES.values()
    }
    found = {name for name, method in made.items() if method.reads_all_clients}
    means = {"fed_dc", "scaffold", "sfl", "sfl_lg", "sfl_per", "sfl_star"}
    assert found == means | {"fed_sage_plus", "gcfl_plus", "gru_fmtl"}


def test_methods_say_which_share_of_the_clients_they_sample():
    for name, problem in CASES.values():
        fields = {x.name for x in dataclasses.fields(REGISTRY[name].config_type)}
        share = {"participation": 0.5} if "participation" in fields else {}
        method = get_method(name)
        built = method.factory(make_config(name, TINY[problem][name] | share))
        assert built.participation == share.get("participation", 1), name


def test_unknown_methods_are_refused():
    with pytest.raises(InputError, match="gru_fmtl"):
        get_method("no_such_method")


def test_two_rounds_leave_a_finite_state(system, outcome):
    state, metrics, scores, outputs = outcome
    for leaf in jax.tree.leaves(outcome):
        assert np.all(np.isfinite(leaf))
    assert set(metrics) >= {"train_loss"}
    assert set(scores) >= {*system.problem.SCORES, system.algorithm.monitor}
    assert outputs.shape == system.problem.outputs_shape
    before_and_after = zip(*map(jax.tree.leaves, (system.state, state)), strict=True)
    moved = [
        not np.array_equal(before, after)
        for before, after in before_and_after
        if jnp.issubdtype(after.dtype, jnp.inexact)  # no counter of rounds or steps
    ]
    assert any(moved) == system.is_trained


def test_a_round_of_nobody_leaves_a_finite_state(system, outcome):
    nobody = system.train._replace(client_weights=0 * system.train.client_weights)
    state, metrics, *_ = system.step(outcome[0], nobody, KEYS[0])
    loss = metrics.pop("train_loss")
    assert np.isfinite(loss) or loss == NO_LOSS
    assert loss == NO_LOSS or not hasattr(state, "models") or system.name in CENTRALISED
    for leaf in jax.tree.leaves((state, metrics)):
        assert np.all(np.isfinite(leaf))
    if system.name in CENTRALISED or not hasattr(state, "models"):
        return
    assert_close(state.models, outcome[0].models, 1e-6)
    if hasattr(state, "server_opt_state"):
        found, expected = state.server_opt_state, outcome[0].server_opt_state
        jax.tree.map(npt.assert_array_equal, found, expected)


def test_other_keys_and_rounds_compile_nothing(system, outcome):
    step = system.step
    assert step._cache_size() == 1
    traces = system.num_traces
    state = outcome[0]  # two rounds later
    other = run(step, state, system.train, (jax.random.key(77), jax.random.key(78)))[0]
    step(jax.device_put(jax.device_get(other)), system.train, jax.random.key(79))
    new_seed = jax.tree.map(lambda x: x + 1, jax.device_get(system.state))
    step(jax.device_put(new_seed), system.train, jax.random.key(80))
    assert step._cache_size() == 1
    assert system.num_traces == traces


@pytest.mark.parametrize("system", cases(DEFAULT - LONG_WITHOUT_JIT), indirect=True)
def test_without_jit_a_round_is_the_same(system):
    if system.name in SEARCHES or system.shares_its_round:
        pytest.skip("compiled without jit as well, or tested on another method")
    state, *_ = system.step(system.state, system.train, KEYS[0])
    ours = system.step(state, system.train, KEYS[1])[:2]
    assert_close(system.algorithm.round(state, system.train, KEYS[1]), ours)


def test_clients_one_after_another_change_nothing(system, outcome):
    """In two rounds; `outcome` has all clients at once."""
    if not system.has("clients_per_chunk"):
        assert not system.is_trained or system.name in CENTRALISED
    elif system.name == "fed_avg":
        step = system.jit(system.step_of(clients_per_chunk=1))
        assert_close(run(step, system.state, system.train), outcome)


def map_rows(problem, change, tree):
    """Changes the leaves of a state that have a row for each client, in NumPy.

    JAX would compile a program for each shape.
    """
    return jax.tree_util.tree_map_with_path(
        lambda path, x: change(x) if problem.is_of_clients(path, x) else x,
        jax.device_get(tree),
    )


def rows(problem, tree, indices):
    """The rows of some clients; of a matrix of clients by clients also the columns."""

    def pick(x):
        is_matrix = x.ndim == 2 and x.shape[0] == x.shape[1]
        return x[indices][:, indices] if is_matrix else x[indices]

    return map_rows(problem, pick, tree)


def with_padded_rows(problem, tree):
    """Rows for two more clients; a matrix gets rows and columns of the identity."""

    def extend(x):
        if x.shape != (NUM_CLIENTS, NUM_CLIENTS):
            return np.concatenate([x, x[: NUM_PADDED - NUM_CLIENTS]])
        matrix = np.eye(NUM_PADDED, dtype=x.dtype)
        matrix[:NUM_CLIENTS, :NUM_CLIENTS] = x
        return matrix

    return map_rows(problem, extend, tree)


def test_permuting_clients_permutes_outputs(system, outcome):
    order, problem = np.array([3, 0, 4, 1, 2]), system.problem
    permuted = jax.device_put(rows(problem, system.state, order))
    state, metrics, scores, outputs = run(system.step, permuted, problem.permute(order))
    expected_state, expected_metrics, expected_scores, expected_outputs = outcome
    assert_close(state, rows(problem, expected_state, order), 1e-4)
    assert_close(metrics, expected_metrics, 1e-4)
    assert_close(scores, expected_scores, 1e-4)
    assert_close(outputs, problem.outputs_of(order, expected_outputs), 1e-4)


@pytest.mark.parametrize("fill", FILLS)
def test_padding_chunks_and_seeds_change_nothing(
    system, outcome, padded_outcomes, fill
):
    """Clients of weight 0, two clients at a time, and two seeds under `vmap`.

    Sums come in another order, and an Adam turns what rounds to 0 into steps.
    """
    problem = system.problem
    alone = outcome, run(system.step, outcome[0], system.train, KEYS[::-1])
    for together, expected in zip(padded_outcomes[fill], alone, strict=True):
        state, metrics, scores, outputs = together
        assert_close(rows(problem, state, slice(NUM_CLIENTS)), expected[0], 3e-5)
        assert_close((metrics, scores), expected[1:3])
        assert_close(problem.outputs_of(range(NUM_CLIENTS), outputs), expected[3])


def test_a_first_state_does_not_depend_on_padding(system):
    problem = system.problem
    state = system.init(KEYS[0], problem.pad())
    assert_close(rows(problem, state, slice(NUM_CLIENTS)), system.state)


def types(tree):
    return jax.tree.map(lambda x: (x.shape, x.dtype, x.weak_type), tree)


def test_a_round_is_a_scan_body(system):
    """Its state comes out as it went in, so rounds may be scanned."""
    state, metrics, *_ = system.traced.out_info
    assert types(state) == types(system.state)
    for leaf in jax.tree.leaves(system.state):
        assert isinstance(leaf, jax.Array)
    if system.shares_its_round:
        return

    def scan(state, data, keys):
        data = system.algorithm.prepared(data)
        return jax.lax.scan(
            lambda s, k: system.algorithm.round(s, data, k), state, keys
        )

    final, stacked = jax.eval_shape(scan, system.state, system.train, jnp.stack(KEYS))
    assert types(final) == types(system.state)
    assert jax.tree.map(lambda x: x.shape, stacked) == jax.tree.map(
        lambda x: (2, *x.shape), metrics
    )


def test_first_states_depend_on_the_seed_and_nothing_else(system):
    again = system.jit(system.init_of(system.build()))(KEYS[0], system.train)
    assert_close(again, system.state, 0)
    if system.is_trained:
        other = system.init(KEYS[1], system.train)
        equal = jax.tree.map(np.array_equal, other, system.state)
        assert not all(jax.tree.leaves(equal))


def constant_bytes(jaxpr):
    """Bytes of arrays, not scalars, that a traced program has besides its arguments."""
    total = 0
    if isinstance(jaxpr, jex_core.ClosedJaxpr):
        total += sum(np.asarray(x).nbytes for x in jaxpr.consts)
        jaxpr = jaxpr.jaxpr
    for equation in jaxpr.eqns:
        for variable in equation.invars:
            if isinstance(variable, jex_core.Literal) and np.ndim(variable.val):
                total += np.asarray(variable.val).nbytes
        for value in equation.params.values():
            for part in value if isinstance(value, tuple | list) else (value,):
                if isinstance(part, jex_core.ClosedJaxpr | jex_core.Jaxpr):
                    total += constant_bytes(part)
    return total


def test_captured_constants_are_seen():
    big = jnp.arange(5000.0)
    captured = jax.make_jaxpr(jax.jit(lambda x: x + big))(big)
    assert constant_bytes(captured) >= 20_000
    assert constant_bytes(jax.make_jaxpr(lambda x: x + 1)(big)) < 100


def test_data_are_an_argument_not_a_constant(system):
    assert constant_bytes(system.traced.jaxpr) < 4096  # round, evaluate and predict
    init = jax.make_jaxpr(system.init_of(system.algorithm))(KEYS[0], system.train)
    assert constant_bytes(init) < 4096
