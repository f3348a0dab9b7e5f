"""Label splits against what was asked for, node by node."""

import math

import hypothesis
import hypothesis.strategies as st
import numpy as np
import numpy.testing as npt
import pytest

from fedjax_graph.core.errors import InputError
from fedjax_graph.data.graphs import label_splits
from fedjax_graph.data.graphs.label_splits import (
    Halves,
    NodeSets,
    new_labels,
    non_iid,
    precision,
    stack,
    with_pseudo_labels,
)

SEEDS = st.integers(0, 2**32)
LABELS = np.random.default_rng(0).permutation(np.repeat([-1, 0, 1, 2, 3, 4], 60))
by_property = hypothesis.settings(deadline=None, derandomize=True, max_examples=30)


def rows(sets):
    """Lists of (node, label) of each task; checks types, shapes and padding."""
    assert sets.nodes.shape == sets.labels.shape == sets.mask.shape
    assert sets.nodes.dtype == sets.labels.dtype == np.int32
    assert sets.mask.dtype == np.float32
    for array in (sets.nodes, sets.labels):
        npt.assert_array_equal(array[sets.mask == 0], 0)
    assert np.all(np.diff(sets.mask, axis=-1) <= 0)  # padding stands last
    return [
        [(int(n), int(c)) for n, c, m in zip(*row, strict=True) if m]
        for row in zip(*sets, strict=True)
    ]


def nodes_of(sets):
    return [[node for node, _ in row] for row in rows(sets)]


def same(one, other):
    return all(
        np.array_equal(a, b)
        for split in one
        for half, other_half in zip(one[split], other[split], strict=True)
        for a, b in zip(half, other_half, strict=True)
    )


def fails(match, function, *args, **changes):
    with pytest.raises(InputError, match=match) as raised:
        function(*args, **changes)
    assert "\n" not in str(raised.value)


# --- Few labels of all classes --------------------------------------------------------


def small(labels=LABELS, **changes):
    sizes = dict(num_clients=7, labels_per_class=11, num_validation=40, num_test=50)
    return non_iid(labels, **{"num_classes": 5, **sizes, **changes})


@by_property
@hypothesis.given(st.integers(1, 70), st.integers(1, 30), SEEDS)
def test_non_iid_deals_each_node_once(num_clients, labels_per_class, seed):
    draw = small(num_clients=num_clients, labels_per_class=labels_per_class, seed=seed)
    assert list(draw) == ["train", "validation", "test"]
    pairs = [
        pair for halves in draw.values() for s in halves for r in rows(s) for pair in r
    ]
    nodes, labels = zip(*pairs, strict=True)
    assert len(set(nodes)) == len(nodes) == 5 * labels_per_class + 40 + 50
    npt.assert_array_equal(LABELS[list(nodes)], labels)

    support, query = (nodes_of(half) for half in draw["train"])
    sizes = [len(s) + len(q) for s, q in zip(support, query, strict=True)]
    assert len(sizes) == num_clients and max(sizes) - min(sizes) <= 1
    assert all(len(s) == math.ceil(n / 2) for s, n in zip(support, sizes, strict=True))
    counts = np.bincount(LABELS[np.concatenate(support + query).astype(int)])
    npt.assert_array_equal(counts, labels_per_class)

    for split, number in (("validation", 40), ("test", 50)):
        assert draw[split].support.nodes.shape == (1, 0)
        assert draw[split].query.nodes.shape == (1, number)
        assert draw[split].query.mask.all()


def test_non_iid_depends_on_the_seed_only():
    assert same(small(seed=3), small(seed=3))
    assert not same(small(seed=3), small(seed=4))


@pytest.mark.parametrize(
    "fewer, more",
    [
        ({"labels_per_class": 5}, {"labels_per_class": 25}),
        ({"num_train": 9}, {"num_train": 90}),
    ],
)
def test_fewer_training_nodes_are_a_subset(fewer, more):
    def trained(draw):
        return {n for half in draw["train"] for row in nodes_of(half) for n in row}

    fewer, more = trained(small(**fewer)), trained(small(**more))
    assert fewer < more


def test_clients_do_not_change_what_is_tested():
    few, many = small(num_clients=2), small(num_clients=30)
    for split in ("validation", "test"):
        assert same({split: few[split]}, {split: many[split]})


def test_classes_are_mixed_over_clients_and_halves():
    for sets in small(num_clients=5, labels_per_class=30)["train"]:
        assert all(len({label for _, label in row}) > 2 for row in rows(sets))


def test_nodes_are_drawn_uniformly():
    """Every node of a class is as likely to be in a set, also of small classes."""
    labels = np.repeat([0, 1], [30, 12])
    trained, tested = np.zeros(42), np.zeros(42)
    for seed in range(2000):
        draw = non_iid(
            labels,
            num_classes=2,
            num_clients=2,
            labels_per_class=10,
            num_validation=1,
            num_test=11,
            seed=seed,
        )
        for half in draw["train"]:
            trained[np.concatenate(nodes_of(half)).astype(int)] += 1 / 2000
        tested[nodes_of(draw["test"].query)[0]] += 1 / 2000
    npt.assert_allclose(trained, np.where(labels, 10 / 12, 10 / 30), atol=0.05)
    share = np.where(
        labels, 2 / 12, 20 / 30
    )  # not trained on; half of these are tested
    npt.assert_allclose(tested, share / 2, atol=0.05)


def test_the_released_codes_training_nodes_are_of_any_class():
    draw = small(num_train=100, num_clients=8)
    trained = np.concatenate([n for half in draw["train"] for n in nodes_of(half)])
    assert len(set(trained)) == 100
    assert len(set(np.bincount(LABELS[trained.astype(int)]))) > 1


def test_owners_get_their_nodes():
    owners = np.random.default_rng(1).integers(0, 4, len(LABELS)).astype(np.int32)
    draw = small(num_clients=6, owners=owners)  # clients 4 and 5 own nothing
    dealt = small(num_clients=6)
    own = [s + q for s, q in zip(*map(nodes_of, draw["train"]), strict=True)]
    for client, nodes in enumerate(own):
        npt.assert_array_equal(owners[nodes] if nodes else [], client)
    assert own[4] == own[5] == []
    even = {n for half in dealt["train"] for row in nodes_of(half) for n in row}
    assert {n for nodes in own for n in nodes} == even
    fails(
        r"owners has clients from 0 to 3, expected 0 to 2",
        small,
        owners=owners,
        num_clients=3,
    )


def test_validation_takes_what_is_left():
    draw = small(num_test=240)
    assert draw["test"].query.nodes.shape == (1, 240)
    assert draw["validation"].query.nodes.shape == (1, 5)
    fails(
        r"num_test = 245: 55 training nodes leave 245 labelled nodes",
        small,
        num_test=245,
    )


def test_a_class_of_just_as_many_nodes_is_enough():
    labels = np.repeat([0, 1], [80, 200])
    draw = non_iid(labels, num_classes=2, num_test=100)
    assert not np.any(draw["test"].query.labels == 0)
    fails(
        r"labels_per_class = 81: class 0 has only 80 labelled nodes; ask for fewer",
        non_iid,
        labels,
        num_classes=2,
        labels_per_class=81,
    )


@pytest.mark.parametrize(
    "match, changes",
    [
        (r"num_train = 301: there are only 300 labelled nodes", {"num_train": 301}),
        (r"num_train = 0: expected .* at least 1", {"num_train": 0}),
        (
            r"labels_per_class = 0: expected .* at least 1",
            {"labels_per_class": 0},
        ),
        (r"num_clients = 0: expected .* at least 1", {"num_clients": 0}),
        (r"num_clients = 9999: expected 1 to .*, a node for", {"num_clients": 9999}),
        (r"num_test = 0: expected .* at least 1", {"num_test": 0}),
        (
            r"num_validation = 0: expected .* at least 1",
            {"num_validation": 0},
        ),
        (r"seed = -1: expected .* at least 0", {"seed": -1}),
        (r"labels has the label 4, expected 0 to 3 for 4 classes", {"num_classes": 4}),
        (r"labels_per_class = 11: class 5 has only 0", {"num_classes": 6}),
    ],
)
def test_non_iid_names_what_is_wrong(match, changes):
    fails(match, small, **changes)


# --- Classes that no client has trained on --------------------------------------------


def few_shot(labels=LABELS, **changes):
    sizes = dict(num_clients=3, nodes_per_class=5, labels_per_class=2, num_score=6)
    return new_labels(
        labels, **{"num_classes": 5, "num_new_classes": 2, **sizes, **changes}
    )


def assert_encoded(support, query, num_support, num_query):
    """One task: its classes in order, each with as many nodes; returns the classes."""
    assert not set(node for node, _ in support) & set(node for node, _ in query)
    decoded = {}
    for sets, number in ((support, num_support), (query, num_query)):
        assert len({node for node, _ in sets}) == len(sets)
        for code in (0, 1):
            classes = [LABELS[node] for node, label in sets if label == code]
            assert len(classes) == number
            assert decoded.setdefault(code, classes[0]) >= 0
            npt.assert_array_equal(classes, decoded[code])
        assert len(sets) == 2 * number
    assert decoded[0] != decoded[1]
    return tuple(int(decoded[code]) for code in (0, 1))


@by_property
@hypothesis.given(
    st.integers(1, 5), st.integers(2, 7), st.integers(1, 5), st.integers(1, 7), SEEDS
)
def test_tasks_are_of_few_classes(clients, nodes, labelled, score, seed):
    draw = few_shot(
        num_clients=clients,
        nodes_per_class=nodes,
        labels_per_class=labelled,
        num_score=score,
        seed=seed,
    )
    sizes = {
        "train": (math.ceil(nodes / 2), nodes // 2),
        "validation": (labelled, score),
        "test": (labelled, score),
    }
    for split, (num_support, num_query) in sizes.items():
        tasks = list(zip(*map(rows, draw[split]), strict=True))
        assert len(tasks) == clients
        for task in tasks:
            classes = assert_encoded(*task, num_support, num_query)
            assert (
                set(classes) == {3, 4} if split == "test" else set(classes) < {0, 1, 2}
            )

    def used(split):
        return {n for half in draw[split] for row in nodes_of(half) for n in row}

    assert not used("train") & used("validation")


def test_both_orders_of_the_classes_are_drawn():
    labels = np.repeat(np.arange(5), 500)
    draw = few_shot(labels, num_clients=60)
    trained, validated = (draw[split].query.nodes for split in ("train", "validation"))
    assert np.any(labels[trained[:, 0]] != labels[validated[:, 0]])
    for split, num_pairs in (("train", 6), ("validation", 6), ("test", 2)):
        query = draw[split].query
        first = labels[query.nodes[np.arange(60), np.argmin(query.labels, axis=1)]]
        last = labels[query.nodes[np.arange(60), np.argmax(query.labels, axis=1)]]
        assert len(set(zip(first.tolist(), last.tolist(), strict=True))) == num_pairs


def test_new_labels_depend_on_the_seed_only():
    assert same(few_shot(seed=5), few_shot(seed=5))
    assert not same(few_shot(seed=5), few_shot(seed=6))


def test_tasks_of_more_labels_share_the_training_and_the_scored_nodes():
    few, more = few_shot(), few_shot(labels_per_class=9)
    assert same({"train": few["train"]}, {"train": more["train"]})
    npt.assert_array_equal(few["test"].query.nodes, more["test"].query.nodes)
    for less, all_ in zip(
        rows(few["test"].support), rows(more["test"].support), strict=True
    ):
        assert set(less) < set(all_)
    other = few_shot(num_score=20)
    assert same({"train": few["train"]}, {"train": other["train"]})


def test_a_clients_task_does_not_depend_on_the_others():
    few, many = few_shot(num_clients=2), few_shot(num_clients=4)
    for split in ("train", "test"):
        for half, other in zip(few[split], many[split], strict=True):
            assert rows(half) == rows(other)[:2]


def test_validation_leaves_out_classes_with_too_few_nodes_left():
    labels = np.repeat([0, 1, 2, 3, 4], [9, 200, 200, 60, 60])
    draw = few_shot(labels, num_clients=12)
    assert 0 in labels[draw["train"].query.nodes]
    assert set(labels[draw["validation"].query.nodes].ravel()) == {1, 2}
    fails(
        r"labels_per_class \+ num_score = 8: 1 of the 3 training classes have as many "
        r"nodes left to validate on, expected 2; ask for fewer",
        few_shot,
        np.repeat([0, 1, 2, 3, 4], [9, 9, 200, 60, 60]),
        num_clients=12,
    )


@pytest.mark.parametrize(
    "match, changes",
    [
        (
            r"nodes_per_class = 61: class 0 has only 60 labelled",
            {"nodes_per_class": 61},
        ),
        (
            r"labels_per_class \+ num_score = 61: class 3 has only 60 labelled nodes",
            {"labels_per_class": 41, "num_score": 20},
        ),
        (
            r"num_new_classes = 3: expected at most half of the 5",
            {"num_new_classes": 3},
        ),
        (
            r"num_new_classes = 0: expected .* at least 1",
            {"num_new_classes": 0},
        ),
        (r"num_clients = 0: expected .* at least 1", {"num_clients": 0}),
        (
            r"nodes_per_class = 1: expected .* at least 2",
            {"nodes_per_class": 1},
        ),
        (
            r"labels_per_class = 0: expected .* at least 1",
            {"labels_per_class": 0},
        ),
        (r"num_score = 0: expected .* at least 1", {"num_score": 0}),
        (r"seed = -1: expected .* at least 0", {"seed": -1}),
        (r"labels has the label 4, expected 0 to 3 for 4 classes", {"num_classes": 4}),
    ],
)
def test_new_labels_name_what_is_wrong(match, changes):
    fails(match, few_shot, **changes)


# --- Self-training --------------------------------------------------------------------


def pseudo_by_loops(train, probabilities, allowed, number):
    """For each client: pseudo-labels for support and for query, by sorting tuples."""
    result = []
    for client, (support, query) in enumerate(zip(*map(rows, train), strict=True)):
        labelled = {node for node, _ in support + query}
        halves = ([], [])
        for c in range(probabilities.shape[2]):
            found = [
                (-max(p), node)
                for node, p in enumerate(probabilities[client].tolist())
                if allowed[node] and node not in labelled and p.index(max(p)) == c
            ]
            for rank, (_, node) in enumerate(sorted(found)[:number]):
                halves[rank % 2].append((node, c))
        result.append(halves)
    return result


@by_property
@hypothesis.given(st.integers(0, 12), SEEDS)
def test_pseudo_labels_are_the_surest_of_each_class(number, seed):
    draw = small(labels_per_class=2, seed=seed)
    rng = np.random.default_rng(seed)
    # few values, so that there are ties
    scores = rng.integers(1, 5, (7, len(LABELS), 5)).astype(np.float32)
    probabilities = scores / scores.sum(axis=2, keepdims=True)
    allowed = rng.random(len(LABELS)) < 0.8
    enlarged, pseudo = with_pseudo_labels(draw, probabilities, allowed[None], number)
    expected = pseudo_by_loops(draw["train"], probabilities, allowed, number)
    for half, sets in enumerate(enlarged["train"]):
        own = rows(draw["train"][half])
        assert rows(sets) == [a + b[half] for a, b in zip(own, expected, strict=True)]
    assert [set(row) for row in rows(pseudo)] == [set(s + q) for s, q in expected]
    assert enlarged["validation"] is draw["validation"]
    assert enlarged["test"] is draw["test"]


def test_each_client_labels_its_own_nodes():
    owners = np.arange(len(LABELS)) % 7
    draw = small(owners=owners, labels_per_class=6)  # enough for all
    is_own = owners == np.arange(7)[:, None]
    probabilities = np.tile(np.eye(5)[np.maximum(LABELS, 0)], (7, 1, 1))
    enlarged, pseudo = with_pseudo_labels(draw, probabilities, is_own, 3)
    for client, nodes in enumerate(nodes_of(pseudo)):
        assert len(nodes) == 15
        npt.assert_array_equal(owners[nodes], client)
    for sets in enlarged["train"]:
        assert all(len(set(nodes)) == len(nodes) for nodes in nodes_of(sets))


def test_a_client_without_labels_adds_none():
    """Five labels for seven clients: two have a model that nobody trained."""
    draw = small(labels_per_class=1)
    probabilities = np.tile(np.eye(5)[np.maximum(LABELS, 0)], (7, 1, 1))
    allowed = np.ones((1, len(LABELS)), bool)
    enlarged, pseudo = with_pseudo_labels(draw, probabilities, allowed, 3)
    halves = zip(*(nodes_of(half) for half in draw["train"]), strict=True)
    counts = [len(support) + len(query) for support, query in halves]
    assert 0 < np.count_nonzero(counts) < 7
    for count, nodes in zip(counts, nodes_of(pseudo), strict=True):
        assert bool(count) == bool(len(nodes))
    for before, after in zip(draw["train"], enlarged["train"], strict=True):
        pairs = zip(counts, nodes_of(before), nodes_of(after), strict=True)
        for count, old, new in pairs:
            assert count or len(old) == len(new) == 0


@by_property
@hypothesis.given(SEEDS)
def test_scored_nodes_are_known_by_all_their_copies(seed):
    """So that no client pseudo-labels a copy of what is validated or tested on."""
    rng = np.random.default_rng(seed)
    copies = rng.integers(0, 60, len(LABELS))
    draw = small(seed=seed)
    scored = {
        copies[node]
        for split in ("validation", "test")
        for node in nodes_of(draw[split].query)[0]
    }
    expected = [node in scored for node in copies]
    npt.assert_array_equal(label_splits.is_scored(draw, copies), expected)


def test_precision_counts_nodes_with_a_label():
    pseudo = NodeSets(
        nodes=np.array([[0, 1, 2], [3, 0, 0]], np.int32),
        labels=np.array([[0, 1, 1], [2, 0, 0]], np.int32),
        mask=np.array([[1, 1, 1], [1, 0, 0]], np.float32),
    )
    assert precision(pseudo, np.array([0, 1, 0, 0])) == 50
    assert precision(pseudo, np.array([0, -1, 0, 2])) == pytest.approx(200 / 3)
    none = pseudo._replace(mask=np.zeros((2, 3), np.float32))
    assert math.isnan(precision(none, np.array([0, 1, 0, 0])))


# --- Draws together -------------------------------------------------------------------


def test_stacked_draws_are_the_draws():
    owners = np.random.default_rng(2).integers(0, 7, len(LABELS))
    draws = [small(seed=seed, owners=owners) for seed in range(4)]
    stacked = stack(draws)
    assert set(stacked) == set(draws[0])
    for split, halves in stacked.items():
        assert isinstance(halves, Halves)
        for half, sets in enumerate(halves):
            sizes = [draw[split][half].nodes.shape for draw in draws]
            assert sets.nodes.shape == (4, *max(sizes))
            for i, draw in enumerate(draws):
                one = NodeSets(*(array[i] for array in sets))
                assert rows(one) == rows(draw[split][half])
    assert len({draw["train"].support.nodes.shape for draw in draws}) > 1


# --- Real graphs ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, num_classes, num_new_classes",
    [("cora", 7, 2), ("citeseer", 6, 2), ("coauthor_cs", 15, 3)],
)
def test_the_papers_sizes_can_be_had(data_dir, name, num_classes, num_new_classes):
    with np.load(data_dir / f"{name}.npz") as arrays:
        labels = arrays["labels"]
    draw = label_splits.non_iid(labels, num_classes=num_classes)
    sizes = [
        len(s) + len(q) for s, q in zip(*map(nodes_of, draw["train"]), strict=True)
    ]
    assert sum(sizes) == 80 * num_classes
    assert draw["test"].query.nodes.shape == (1, 1000)
    assert draw["validation"].query.nodes.shape == (1, 500)
    for labelled in (2, 6, 10):
        draw = label_splits.new_labels(
            labels,
            num_classes=num_classes,
            num_new_classes=num_new_classes,
            labels_per_class=labelled,
        )
        assert draw["train"].support.nodes.shape == (50, 5 * num_new_classes)
        assert draw["test"].support.nodes.shape == (50, labelled * num_new_classes)
        assert draw["test"].query.nodes.shape == (50, 20 * num_new_classes)
        assert draw["validation"].query.nodes.shape == (50, 20 * num_new_classes)
