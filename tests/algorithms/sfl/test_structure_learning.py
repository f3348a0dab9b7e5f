"""The graph learner against golden numbers, NumPy and planted communities."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpy.testing as npt
import pytest
from scipy.cluster.vq import ClusterError, kmeans2
from scipy.spatial.distance import cdist, pdist, squareform
from scipy.special import comb

from fedjax_graph.algorithms.sfl import structure_learning
from fedjax_graph.algorithms.sfl.structure_learning import (
    GraphConstructor,
    StructureConfig,
    construct,
    init_constructor,
    keep_strongest,
    similarities,
    squared_distances,
    structure_loss,
)
from fedjax_graph.models.normalization import unit_rows

TARGETS = ["distance", "similarity"]


# --- Golden numbers -------------------------------------------------------------------


@pytest.fixture(scope="module")
def golden(reference):
    prefix = "GraphConstructor/"
    return {
        name.removeprefix(prefix): np.asarray(value, np.float32)
        for name, value in reference.items()
        if name.startswith(prefix)
    }


@pytest.fixture(scope="module")
def constructor(golden):
    return GraphConstructor(*(golden[name] for name in GraphConstructor._fields))


def test_the_constructor_is_that_of_the_reference(golden, constructor):
    adjacency = np.asarray(construct(constructor))
    npt.assert_allclose(adjacency, golden["adjacency"], atol=1e-5)
    assert np.any(adjacency > 0)
    npt.assert_array_equal(adjacency * adjacency.T, 0)  # one-way


def test_distances_are_those_of_the_reference(golden):
    squares = squared_distances(golden["client_parameters"])
    npt.assert_allclose(np.sqrt(squares), golden["distances"], atol=1e-5)


def test_the_loss_is_that_of_the_reference(golden):
    loss = structure_loss(golden["adjacency"], golden["distances"], 36)
    npt.assert_allclose(loss, golden["loss"], rtol=1e-5)


def test_all_parts_of_a_constructor_are_drawn_apart():
    parts = init_constructor(jax.random.key(0), jnp.arange(4), 4)
    assert len({np.asarray(x).tobytes() for x in parts}) == len(parts) == 6


def test_a_mutual_graph_is_symmetric_and_written_out(constructor):
    first, second = (
        np.tanh(3 * (np.asarray(e, float) @ w + b))
        for e, w, b in (
            (constructor.embedding_1, constructor.kernel_1, constructor.bias_1),
            (constructor.embedding_2, constructor.kernel_2, constructor.bias_2),
        )
    )
    scores = (first @ second.T + second @ first.T) / 5
    adjacency = np.asarray(construct(constructor, is_mutual=True))
    npt.assert_allclose(adjacency, 1 / (1 + np.exp(-3 * scores)), atol=1e-5)
    npt.assert_allclose(adjacency, adjacency.T, atol=1e-6)
    assert adjacency.min() > 0 and adjacency.max() < 1


def test_rows_of_unit_norm():
    matrix = np.array([[3.0, 4], [0, 0], [1e-6, 0], [-2, 0]], np.float32)
    npt.assert_allclose(
        unit_rows(matrix), [[0.6, 0.8], [0, 0], [1, 0], [-1, 0]], rtol=1e-6
    )
    slope = jax.grad(lambda x: unit_rows(x).sum())(matrix)
    assert np.all(np.isfinite(slope))


def stacked_models(num_clients, offset=0.0, seed=0):
    rng = np.random.default_rng(seed)
    shapes = {"kernel": (4, 5), "bias": (5,), "scale": ()}
    return {
        name: np.float32(offset + rng.normal(size=(num_clients, *shape)))
        for name, shape in shapes.items()
    }


def planted(num_clients, seed):
    """Four groups: a common model, a part of each group, a part of each client."""
    rng = np.random.default_rng(seed)
    groups = rng.permutation(np.arange(num_clients) % 4)
    shapes = {"kernel": (20, 10), "bias": (10,), "head": (10, 5)}
    return groups, {
        name: np.float32(
            3 * rng.normal(size=shape)
            + 0.3 * rng.normal(size=(4, *shape))[groups]
            + 0.3 * rng.normal(size=(num_clients, *shape))
        )
        for name, shape in shapes.items()
    }


# --- Distances ------------------------------------------------------------------------


def flatten(stacked):
    return np.hstack([x.reshape(len(x), -1) for x in stacked.values()]).astype(float)


@pytest.mark.parametrize("most_bytes", [2**28, 7 * 4 * 6, 1])
@pytest.mark.parametrize("offset", [0.0, 1e4])
def test_distances_are_those_of_scipy(most_bytes, offset):
    """Chunks of all, 6 and 1 of the columns; the models' common part cancels."""
    stacked = stacked_models(7, offset)
    squares = np.asarray(squared_distances(stacked, most_bytes=most_bytes))
    expected = squareform(pdist(flatten(stacked), "sqeuclidean"))
    npt.assert_allclose(squares, expected, rtol=1e-3 if offset else 1e-5)
    npt.assert_array_equal(np.diagonal(squares), 0)


def test_distances_of_equal_models_are_zero_and_none_is_negative():
    stacked = stacked_models(3, offset=100.0)
    stacked = {name: np.concatenate([x, x]) for name, x in stacked.items()}
    squares = np.asarray(squared_distances(stacked))
    assert np.all(squares >= 0)
    npt.assert_allclose(squares[:3, 3:].diagonal(), 0, atol=1e-3)
    npt.assert_allclose(squares, squares.T, atol=1e-3)


def test_similarities_are_a_kernel_as_wide_as_the_spread():
    points = np.random.default_rng(0).normal(size=(6, 3))
    squares, is_real = cdist(points, points) ** 2, np.array([1, 1, 0, 1, 1, 1], bool)
    pairs = is_real[:, None] & is_real & ~np.eye(6, dtype=bool)
    ours = np.asarray(similarities(jnp.float32(squares), pairs))
    chosen = squares[pairs]
    expected = np.exp(-2 * (chosen - chosen.min()) / chosen.std())
    npt.assert_allclose(ours[pairs], expected, rtol=1e-4)
    npt.assert_array_equal(ours[~pairs], 0)
    assert ours.max() == 1


def test_similarities_of_equal_models_or_of_nobody_are_finite():
    pairs = ~np.eye(3, dtype=bool)
    npt.assert_array_equal(similarities(jnp.zeros((3, 3)), pairs), pairs)
    npt.assert_array_equal(similarities(jnp.ones((3, 3)), np.zeros((3, 3), bool)), 0)


@pytest.mark.parametrize("count", [1, 3, 8, 20])
def test_the_strongest_entries_of_a_row_are_kept(count):
    matrix = np.random.default_rng(0).uniform(0.1, 1, (8, 8)).astype(np.float32)
    kept = np.asarray(keep_strongest(matrix, matrix, count))
    for row, expected in zip(kept, matrix, strict=True):
        weakest = np.sort(expected)[-min(count, 8)]
        npt.assert_array_equal(row, np.where(expected >= weakest, expected, 0))


# --- Learning -------------------------------------------------------------------------

SMALL = {"embedding_size": 6, "num_neighbours": 4}
KEY = jax.random.key(3)


@pytest.fixture(scope="module")
def learn(quick_jit):
    """`structure_learning.learn` of any clients, compiled once for each config."""

    @functools.cache
    def compiled(config):
        return quick_jit(functools.partial(structure_learning.learn, config))

    def learn(stacked, target="distance", ids=None, is_real=None, key=KEY, **settings):
        num_clients = len(jax.tree.leaves(stacked)[0])
        graph = compiled(StructureConfig(target, **settings))(
            stacked,
            np.arange(num_clients) if ids is None else ids,
            np.ones(num_clients, bool) if is_real is None else is_real,
            key,
        )
        return np.asarray(graph)

    return learn


@pytest.mark.parametrize("target", TARGETS)
def test_learnt_rows_are_few_shares_of_others(learn, target):
    graph = learn(stacked_models(9), target, **SMALL)
    assert np.all(graph >= 0)
    npt.assert_allclose(graph.sum(axis=1), 1, rtol=1e-5)
    assert np.all((graph > 0).sum(axis=1) <= 4)
    is_alone = np.diagonal(graph) > 0
    assert np.all(graph[is_alone].max(axis=1) == 1) and not np.all(is_alone)


def written_out(stacked, key, num_epochs, rate, decay, size):
    """`distance` in NumPy: gradients by differences, plain descent."""
    distances = squareform(pdist(flatten(stacked)))
    first = structure_learning.init_constructor(key, jnp.arange(len(distances)), size)
    parts = [np.asarray(x, float) for x in first]
    sizes = np.cumsum([x.size for x in parts])[:-1]

    def adjacency(v):
        e1, e2, w1, b1, w2, b2 = (
            x.reshape(like.shape)
            for x, like in zip(np.split(v, sizes), parts, strict=True)
        )
        m1, m2 = np.tanh(3 * (e1 @ w1 + b1)), np.tanh(3 * (e2 @ w2 + b2))
        return np.maximum(np.tanh(3 * (m1 @ m2.T - m2 @ m1.T)), 0)

    def unit(matrix):
        norms = np.linalg.norm(matrix, axis=1, keepdims=True)
        return matrix / np.where(norms > 0, norms, 1)

    def loss(v):
        return np.mean((unit(adjacency(v)) - unit(distances)) ** 2)

    v = np.concatenate([x.ravel() for x in parts])
    for _ in range(num_epochs):
        steps = 1e-6 * np.eye(len(v))
        slope = np.array([(loss(v + d) - loss(v - d)) / 2e-6 for d in steps])
        v = v - rate * (slope + decay * v)
    return adjacency(v)


def test_the_released_training_is_written_out(learn):
    """10 epochs of SGD(0.01, weight decay 1e-4), then rows of sum 1."""
    stacked = stacked_models(5)
    A = written_out(stacked, KEY, num_epochs=10, rate=0.01, decay=1e-4, size=2)
    sums = A.sum(axis=1, keepdims=True)
    expected = np.where(sums > 0, A / np.where(sums > 0, sums, 1), np.eye(5))
    ours = learn(stacked, embedding_size=2)
    npt.assert_allclose(ours, expected, atol=1e-5)
    at_first = construct(structure_learning.init_constructor(KEY, jnp.arange(5), 2))
    assert np.abs(A - at_first).max() > 1e-4  # it was trained


def test_training_brings_the_graph_closer_to_the_similarities(learn):
    stacked, size = stacked_models(12), 6
    squares = squared_distances(stacked)
    pairs = ~np.eye(12, dtype=bool)
    target = similarities(squares, pairs)
    first = structure_learning.init_constructor(KEY, jnp.arange(12), size)
    before = structure_loss(construct(first, is_mutual=True) * pairs, target, 144)
    graph = learn(stacked, "similarity", embedding_size=size)
    assert structure_loss(graph, target, 144) < 0.6 * before


@pytest.mark.parametrize("target", TARGETS)
def test_graphs_are_drawn_anew_from_each_key(learn, target):
    stacked = stacked_models(9)
    graphs = [learn(stacked, target, key=jax.random.key(s), **SMALL) for s in (0, 1)]
    assert not np.array_equal(*graphs)


ORDER = np.random.default_rng(0).permutation(40)
IDS = np.random.default_rng(1).permutation(100)[:40]


def assert_close(graph, expected, target):
    """300 steps of Adam carry rounding far: similarities are compared by row."""
    if target == "distance":
        npt.assert_allclose(graph, expected, atol=1e-4)
    else:
        moved = np.abs(graph - expected).sum(
            axis=1
        )  # 2 for rows that have no edge alike
        assert np.mean(moved) < 0.2


@pytest.mark.parametrize("num_neighbours", [40, 6])
def test_permuting_clients_permutes_the_graph(learn, num_neighbours):
    """Many entries of the one-way graph are exactly 1, and tie."""
    check_permutation(learn, "distance", num_neighbours)


def test_permuting_clients_permutes_the_graph_of_similarities(learn):
    check_permutation(learn, "similarity", num_neighbours=30)


def check_permutation(learn, target, num_neighbours):
    _, stacked = planted(40, 0)
    permuted = {name: x[ORDER] for name, x in stacked.items()}
    graph, of_permuted = (
        learn(models, target, ids, num_neighbours=num_neighbours)
        for models, ids in ((stacked, IDS), (permuted, IDS[ORDER]))
    )
    assert_close(of_permuted, graph[np.ix_(ORDER, ORDER)], target)
    unmoved = np.abs(of_permuted - graph).sum(axis=1)
    assert np.mean(unmoved) > 0.5  # the order does tell


@pytest.mark.parametrize("target", TARGETS)
def test_padded_clients_neither_get_nor_give(learn, target):
    _, stacked = planted(30, 0)
    graph = learn(stacked, target, IDS[:30])
    padded = {
        name: np.concatenate([x[:4], np.full((2, *x.shape[1:]), 5, "f"), x[4:]])
        for name, x in stacked.items()
    }
    is_real = np.insert(np.ones(30, bool), 4, [False, False])
    ids = np.insert(IDS[:30], 4, [200, 201])
    with_padding = learn(padded, target, ids, is_real)
    assert_close(with_padding[np.ix_(is_real, is_real)], graph, target)
    npt.assert_array_equal(with_padding[np.ix_(is_real, ~is_real)], 0)
    npt.assert_array_equal(with_padding[~is_real], np.eye(32)[~is_real])


def count_equations(jaxpr):
    inner = jax.tree.leaves([list(e.params.values()) for e in jaxpr.eqns])
    jaxprs = [getattr(x, "jaxpr", x) for x in inner if hasattr(x, "eqns")]
    return len(jaxpr.eqns) + sum(map(count_equations, jaxprs))


@pytest.mark.parametrize("target", TARGETS)
def test_the_program_does_not_grow_with_the_clients(target):
    def program(num_clients):
        def traced(stacked, ids, is_real, key):
            config = StructureConfig(target, **SMALL)
            return structure_learning.learn(config, stacked, ids, is_real, key)

        shapes = stacked_models(num_clients), jnp.arange(num_clients)
        is_real = jnp.ones(num_clients, bool)
        return count_equations(jax.make_jaxpr(traced)(*shapes, is_real, KEY).jaxpr)

    assert program(64) == program(8) > 100


# --- Planted communities --------------------------------------------------------------


def adjusted_rand_index(first, second):
    """1 for the same groups, 0 on average for random ones (Hubert, Arabie, 1985)."""
    table = np.array(
        [
            [np.sum((first == a) & (second == b)) for b in set(second)]
            for a in set(first)
        ]
    )
    together = comb(table, 2).sum()
    rows, columns = (comb(table.sum(axis), 2).sum() for axis in (1, 0))
    by_chance = rows * columns / comb(len(first), 2)
    return (together - by_chance) / ((rows + columns) / 2 - by_chance)


def test_the_adjusted_rand_index_on_cases_by_hand():
    def index(first, second):
        return adjusted_rand_index(np.array(first), np.array(second))

    assert index([0, 0, 1, 1], [5, 5, 2, 2]) == 1
    assert index([0, 0, 1, 1], [0, 1, 0, 1]) == pytest.approx(-0.5)
    # Pairs: 4 in the first, 2 in the second, 1 in both; chance 4 * 2 / 10.
    first, second = [0, 0, 0, 1, 1], [0, 0, 1, 1, 2]
    assert index(first, second) == pytest.approx((1 - 0.8) / (3 - 0.8))
    rng = np.random.default_rng(0)
    assert abs(index(rng.integers(4, size=900), rng.integers(4, size=900))) < 0.02


def spectral_clusters(graph, num_clusters):
    """Normalised cut: k-means on the first eigenvectors of the Laplacian."""
    weights = graph + graph.T
    scale = 1 / np.sqrt(weights.sum(axis=1))
    _, vectors = np.linalg.eigh(-weights * scale[:, None] * scale)
    points = vectors[:, :num_clusters]
    points = points / np.linalg.norm(points, axis=1, keepdims=True)
    best = np.inf
    for seed in range(20):
        try:
            centres, found = kmeans2(
                points, num_clusters, minit="++", rng=seed, missing="raise"
            )
        except ClusterError:
            continue
        spread = np.sum((points - centres[found]) ** 2)
        if spread < best:
            best, labels = spread, found
    return labels


def test_spectral_clusters_of_blocks_are_the_blocks():
    blocks = np.kron(np.eye(3), np.ones((5, 5))) + 0.01
    found = spectral_clusters(blocks, 3)
    assert adjusted_rand_index(found, np.repeat(np.arange(3), 5)) == 1


@pytest.mark.parametrize("num_clients, seed", [(12, 3), (20, 4), (60, 0), (100, 2)])
def test_similarities_find_planted_communities(learn, num_clients, seed):
    groups, stacked = planted(num_clients, seed)
    graph = learn(stacked, "similarity", key=jax.random.key(seed))
    index = adjusted_rand_index(spectral_clusters(graph, 4), groups)
    assert index > 0.9


def test_distances_link_one_way_and_find_no_communities(learn):
    """The released target links as chance would: on other draws it is -0.02 to 0.05."""
    groups, stacked = planted(100, 2)
    graph = learn(stacked, "distance")
    others = graph * ~np.eye(100, dtype=bool)
    npt.assert_array_equal(others * others.T, 0)
    assert np.any(others > 0)
    index = adjusted_rand_index(spectral_clusters(graph, 4), groups)
    assert abs(index) < 0.15
    is_inside = groups[:, None] == groups
    by_chance = (is_inside.sum() - 100) / (100 * 99)
    npt.assert_allclose((others * is_inside).sum() / others.sum(), by_chance, atol=0.05)
