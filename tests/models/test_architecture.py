"""Architecture codes against a decoder in plain Python, counting and hand-made ones."""

import collections
import functools
import itertools
import json

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import numpy.testing as npt
import pytest

from fedjax_graph.core import mesh, sharding, trees
from fedjax_graph.core.errors import InputError
from fedjax_graph.models import architecture
from fedjax_graph.models.architecture import OPS, Choices, parse

PUBLISHED = [1, 6, 0, 0, 6, 54, 55, 5]  # for Cora; layers 2 and 3 are absent
decode_all = jax.jit(jax.vmap(lambda code: architecture.decode(code, "2022")))
canonical_all = jax.jit(jax.vmap(lambda code: architecture.canonical(code, "2022")))
random_codes = functools.partial(architecture.random_codes, space="2022")


def plain_decode(code):
    """The layers of a code as {layer: (op, source)}, and the leaves among them."""
    layers = {}
    for layer, gene in enumerate(code[1:-1], 1):
        if gene:
            predecessor = 0
            while gene > 12:
                gene, predecessor = gene - 12, predecessor + 1
            layers[layer] = (OPS[gene - 1], predecessor if predecessor in layers else 0)
    read = {source for _, source in layers.values()}
    return layers, set(layers) - read


def assert_decoded(codes):
    decoded = jax.tree.map(np.asarray, decode_all(jnp.asarray(codes)))
    for row, code in enumerate(np.asarray(codes).tolist()):
        network = trees.take(decoded, row)
        layers = {
            i + 1: (OPS[network.op[i]], network.source[i])
            for i in np.flatnonzero(network.is_present)
        }
        leaves = set(np.flatnonzero(network.is_leaf) + 1)
        assert (layers, leaves) == plain_decode(code), code
        assert (network.input_stage + 1, network.output_stage + 1) == (
            code[0],
            code[-1],
        )


def all_codes(num_layers):
    genes = [range(1, 6), *(range(12 * i + 1) for i in range(1, num_layers + 1))]
    return np.array(list(itertools.product(*genes, [3])))


valid_codes = st.integers(1, 7).flatmap(
    lambda num_layers: st.tuples(
        st.integers(1, 5),
        *(st.integers(0, 12 * i) for i in range(1, num_layers + 1)),
        st.integers(1, 5),
    )
)


def test_decoding_by_hand():
    network = architecture.decode_static(PUBLISHED, "2022")
    assert (network.input_stage, network.output_stage) == (0, 4)
    npt.assert_array_equal(network.is_present, [1, 0, 0, 1, 1, 1])
    assert [OPS[op] for op in network.op[[0, 3, 4, 5]]] == [
        *("APPNP", "APPNP", "APPNP", "AGNNConv")
    ]
    npt.assert_array_equal(network.source, [0, 0, 0, 0, 4, 4])
    npt.assert_array_equal(network.is_leaf, [1, 0, 0, 0, 1, 1])
    npt.assert_array_equal(network.is_fused("leaves"), network.is_leaf)
    npt.assert_array_equal(network.is_fused("all"), network.is_present)


def test_decoding_every_code_of_two_layers():
    assert_decoded(all_codes(2))


def test_decoding_every_predecessor_present_and_absent():
    """Layer 6 reads every layer in turn, with every subset of the others present."""
    codes = [
        [2, *(4 * np.array(present)), 12 * predecessor + 5, 4]
        for present in itertools.product([0, 1], repeat=5)
        for predecessor in range(6)
    ]
    assert_decoded(codes)


def test_decoding_drawn_codes():
    assert_decoded(random_codes(jax.random.key(0), 300, num_certain=0))


def test_static_decoding_while_tracing():
    traced = jax.jit(lambda x: x + len(architecture.decode_static([1, 5, 2]).op))
    assert traced(1) == 2


def test_equal_networks_have_equal_canonical_codes():
    codes = all_codes(2)
    names = collections.defaultdict(set)
    for code, canonical in zip(codes, np.asarray(canonical_all(codes)), strict=True):
        layers, _ = plain_decode(code)
        names[code[0], *layers.items()].add(tuple(canonical))
        assert plain_decode(canonical)[0] == layers
    assert all(len(codes) == 1 for codes in names.values())
    assert len(names) == 5 * (13 + 12 * 25)  # c_1 absent: 12 of layer 2's 25 repeat


def test_size_of_the_space():
    assert architecture.space_size() == 5**2 * 13 * 25 * 37 * 49 * 61 * 73
    assert architecture.space_size(2) == 5 * len(all_codes(2))


# --- Random codes --------------------------------------------------------------------


def assert_valid(codes):
    for code in np.asarray(codes).tolist():
        assert architecture.check(code).tolist() == code


def test_drawn_codes_as_released():
    codes = np.asarray(random_codes(jax.random.key(1), 4000))
    assert codes.shape == (4000, 8)
    assert_valid(codes[:200])
    absent = np.mean(codes[:, 1:-1] == 0, axis=0)
    assert not absent[:2].any()
    npt.assert_allclose(absent[2:], 0.2, atol=0.03)  # 4.7 standard deviations
    for index, largest in enumerate(architecture.largest_genes(6)):
        present = codes[codes[:, index] > 0, index]
        counts = np.bincount(present, minlength=largest + 1)[1:]
        expected = len(present) / largest
        deviation = np.sum((counts - expected) ** 2) / expected
        assert deviation < largest - 1 + 5 * (2 * largest) ** 0.5, index  # chi-square


def test_every_code_is_equally_likely():
    codes = random_codes(jax.random.key(2), 40000, 1, absence=None, num_certain=0)
    counts = collections.Counter(map(tuple, np.asarray(codes).tolist()))
    assert len(counts) == architecture.space_size(1) == 325
    expected = 40000 / 325
    deviation = sum((n - expected) ** 2 for n in counts.values()) / expected
    assert deviation < 324 + 5 * (2 * 324) ** 0.5


def test_draws_belong_to_their_key():
    draw = jax.jit(lambda seed: random_codes(jax.random.key(seed), 5))
    npt.assert_array_equal(draw(3), draw(3))
    assert (draw(3) != draw(4)).any()


@pytest.mark.parametrize("stages", [(3, 5), (3, 0), (0, 5)])
def test_given_stages(stages):
    """Of drawn codes, and of the values that genes may have."""
    codes = np.asarray(random_codes(jax.random.key(6), 300, 2, choices=Choices(stages)))
    free = np.asarray(random_codes(jax.random.key(6), 300, 2))
    npt.assert_array_equal(codes[:, 1:-1], free[:, 1:-1])
    allowed, anything = (
        architecture.is_gene(2, own) for own in (Choices(stages), Choices())
    )
    npt.assert_array_equal(allowed[1:-1], anything[1:-1])
    for index, stage in zip((0, -1), stages, strict=True):
        expected = [stage] if stage else [1, 2, 3, 4, 5]
        assert np.unique(codes[:, index]).tolist() == expected
        assert np.flatnonzero(allowed[index]).tolist() == expected


@pytest.mark.parametrize("space", ["paper", "2022"])
@pytest.mark.parametrize("draw", [random_codes, architecture.fair_codes])
def test_some_of_the_ops(draw, space):
    """Their genes alone occur, each about as often as any other of its layer."""
    ops = ("GINConv", "APPNP", "GatedGraphConv")
    codes = np.asarray(
        draw(jax.random.key(8), 3000, 2, space=space, choices=Choices(ops=ops))
    )
    numbers = [OPS.index(op) + 1 for op in ops]
    of_second = numbers + [12 + number for number in numbers]
    allowed = architecture.is_gene(2, Choices(ops=ops))
    for genes, mask, expected in zip(
        codes.T[1:-1], allowed[1:-1], (numbers, of_second), strict=True
    ):
        assert np.flatnonzero(mask).tolist() == [0, *expected]
        values, counts = np.unique(genes[genes > 0], return_counts=True)
        assert values.tolist() == expected
        assert counts.max() / counts.min() < 1.25
    assert np.unique(codes[:, 0]).tolist() == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    "ops", [(), "APPNP", ("GCN",), ("APPNP", "GINConv"), ("APPNP", "APPNP")]
)
def test_ops_that_are_not_some_of_all_in_order(ops):
    with pytest.raises(InputError, match="ops .*: expected a tuple of .*: GATConv, "):
        random_codes(jax.random.key(0), 1, choices=Choices(ops=ops))


@pytest.mark.parametrize("stages", [(6, 5), (-1, 0), (3,)])
def test_stages_that_are_none(stages):
    with pytest.raises(InputError, match="expected the activations .* 0 any, 1 Sigm"):
        random_codes(jax.random.key(0), 1, choices=Choices(stages))


@pytest.mark.parametrize(
    ("settings", "largest"),
    [({"absence": 1.0, "num_certain": 0}, 0), ({"absence": 0.0}, 72)],
)
def test_probability_of_absence(settings, largest):
    layers = random_codes(jax.random.key(5), 500, **settings)[:, 1:-1]
    assert jnp.max(layers) == largest
    assert jnp.all((layers == 0) == (largest == 0))


# --- Codes for people ----------------------------------------------------------------


@hypothesis.given(code=valid_codes)
def test_text_and_json_and_back(code):
    array = architecture.check(code)
    assert array.dtype == np.int32
    for text in (architecture.to_text(array), json.dumps(array.tolist())):
        npt.assert_array_equal(parse(text), code)
        npt.assert_array_equal(parse(f" {text}\n", len(code) - 2), code)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "code '': expected integers with commas"),
        ("3,6,x,5", "'3,6,x,5': expected integers with commas"),
        ("3,6.5,5", "expected integers with commas"),
        ("3,true,5", "expected integers with commas"),
        ("[[3],6,5]", "expected integers with commas"),
        ("[[3,6,5]", "expected integers with commas"),
        ("[3,6,5", "expected integers with commas"),
        ("[" * 3000, "code '.*expected integers with commas"),
        ("3," + "9" * 5000 + ",5", "expected integers with commas"),
        ("3,5", "at least 3 genes, the input stage, the layers .* got 2"),
        ("0,6,5", "code 0,6,5: input stage 0; expected one of 1 Sigmoid, 2 Tanh, 3 "),
        ("6,6,5", "input stage 6; expected one of .*, 5 Identity$"),
        ("3,6,0", "output stage 0; expected one of"),
        ("3,6,6", "output stage 6; expected one of"),
        ("3,-1,5", r"layer 1 is -1; expected 0 \(absent\) to 12, as"),
        ("3,13,5", "layer 1 is 13, which reads layer 1; expected 0 .* to 12, as a "),
        ("3,6,37,5", "layer 2 is 37, which reads layer 3; expected 0 .* to 24, as a "),
        ("3," + "9" * 30 + ",5", r"shape \(3,\) and type object: expected a row"),
    ],
)
def test_what_is_no_code(text, message):
    with pytest.raises(InputError, match=message) as error:
        parse(text)
    assert "\n" not in str(error.value)


def test_a_code_of_another_length():
    with pytest.raises(InputError, match="expected 8 genes, .* got 3"):
        parse("3,6,5", num_layers=6)


def test_a_code_is_a_row_of_integers():
    with pytest.raises(InputError, match="rows of unequal length: expected a row of i"):
        architecture.check([[1, 2, 3], [4]])
    with pytest.raises(InputError, match=r"shape \(1, 3\) and type int32"):
        architecture.check(np.array([[3, 6, 5]], np.int32))
    with pytest.raises(InputError, match=r"shape \(3,\) and type float64"):
        architecture.check([3.0, 6.0, 5.0])


def test_a_code_in_words():
    assert architecture.describe(PUBLISHED, "leaves", "2022").splitlines() == [
        "input stage: Sigmoid of a fully connected layer",
        "layer 1: APPNP of the input stage, fused",
        "layer 2: absent",
        "layer 3: absent",
        "layer 4: APPNP of the input stage",
        "layer 5: APPNP of layer 4, fused",
        "layer 6: AGNNConv of layer 4, fused",
        "output stage: Identity of a fully connected layer of the mean of layer 1, "
        "layer 5, layer 6",
    ]
    assert architecture.describe([3, 0, 4], "leaves", "2022").splitlines() == [
        "input stage: ReLU of a fully connected layer",
        "layer 1: absent",
        "output stage: Softmax of a fully connected layer of the input stage",
    ]


def test_a_code_as_a_diagram():
    labels, edges = architecture.diagram(PUBLISHED, "leaves", "2022")
    assert labels == {
        0: "input stage: Sigmoid",
        1: "layer 1: APPNP",
        4: "layer 4: APPNP",
        5: "layer 5: APPNP",
        6: "layer 6: AGNNConv",
        7: "output stage: Identity",
    }
    layers = [(0, 1), (0, 4), (4, 5), (4, 6)]
    assert edges == [*layers, (1, 7), (5, 7), (6, 7)]
    _, edges = architecture.diagram(PUBLISHED, "all", "2022")
    assert edges == [*layers, (1, 7), (4, 7), (5, 7), (6, 7)]
    assert architecture.diagram([1, 0, 0, 2]).edges == [(0, 3)]


def test_an_unknown_fusion():
    with pytest.raises(InputError, match="'sum'; known: leaves, all"):
        architecture.diagram(PUBLISHED, "sum")


def test_values_of_genes_are_those_of_valid_codes():
    table = architecture.is_gene(2)
    assert table.shape == (4, 25)
    for index, value in np.ndindex(table.shape):
        code = [1, 1, 1, 1]
        code[index] = value
        try:
            architecture.check(code)
            is_valid = True
        except InputError:
            is_valid = False
        assert table[index, value] == is_valid, code


def test_a_code_is_decoded_where_devices_share_the_work():
    code = (3, 2, 0, 14, 5)
    expected = jax.tree.map(np.asarray, architecture.decode(jnp.array(code)))
    found = []

    def share(rows):
        found.append(architecture.decode_static(code))
        return rows

    with jax.set_mesh(mesh.make_mesh(devices=jax.devices()[:2])):
        jax.eval_shape(sharding.concat_parts(share), jnp.ones(2))
    jax.tree.map(npt.assert_array_equal, found[0], expected)


# --- The paper's space ---------------------------------------------------------------


def test_a_code_of_the_paper_ends_at_its_first_0():
    """Codes are one network if and only if they are equal before their first 0."""
    codes = all_codes(2)
    named = jax.jit(jax.vmap(architecture.canonical))(codes)
    for code, name in zip(codes.tolist(), np.asarray(named).tolist(), strict=True):
        layers = code[1:-1]
        depth = layers.index(0) if 0 in layers else len(layers)
        assert name == [code[0], *layers[:depth], *[0] * (2 - depth), code[-1]]
        network = architecture.decode_static(code)
        assert network.is_present.tolist() == [i < depth for i in range(2)]
    _, counts = np.unique(named, axis=0, return_counts=True)
    assert counts.tolist().count(25) == 5 and counts.sum() == len(codes)


def test_every_layer_of_the_paper_reads_what_its_gene_says():
    code = [3, 6, 18, 7, 0, 54, 0, 5]  # APPNP; of it APPNP; AGNN of the input stage
    network = architecture.decode_static(code)
    npt.assert_array_equal(network.source, [0, 1, 0, 0, 0, 0])
    assert [OPS[op] for op in network.op[:3]] == ["APPNP", "APPNP", "AGNNConv"]
    assert architecture.diagram(code).edges == [(0, 1), (1, 2), (0, 3)] + [
        (i, 7) for i in (1, 2, 3)
    ]


def test_first_depths_of_the_paper_are_uniform():
    codes = np.asarray(architecture.random_codes(jax.random.key(3), 6000))
    assert_valid(codes[:100])
    is_present = np.cumprod(codes[:, 1:-1] > 0, axis=1)
    shares = np.bincount(is_present.sum(axis=1), minlength=7) / 6000
    npt.assert_allclose(shares, [0, *[1 / 6] * 6], atol=0.025)  # 5 deviations


def test_an_unknown_space():
    with pytest.raises(InputError, match="unknown space '2021'; known: paper, 2022"):
        architecture.decode_static([1, 5, 2], "2021")


def canonical_in(space):
    return jax.jit(jax.vmap(lambda code: architecture.canonical(code, space)))


@pytest.mark.parametrize("space", ["paper", "2022"])
def test_fair_codes_use_a_layers_weights_alike(space):
    num, num_layers = 100, 3
    draw = jax.jit(
        functools.partial(
            architecture.fair_codes, num=num, num_layers=num_layers, space=space
        )
    )
    codes = np.asarray(draw(jax.random.key(0)))
    is_present = codes[:, 1:-1] > 0
    for code in codes:
        architecture.check(code, num_layers)
    for layer in range(1, num_layers + 1):
        genes = codes[:, layer]
        counts = np.bincount(genes[genes > 0], minlength=12 * layer + 1)[1:]
        assert len(counts) == 12 * layer
        assert counts.max() - counts.min() <= 1
        ops = np.add.reduce(counts.reshape(-1, 12))
        assert ops.min() > 0
        networks = canonical_in(space)(codes)[:, layer]
        npt.assert_array_equal(np.sort(networks), np.sort(genes))  # no op moves
    if space == "paper":  # depths are drawn, and nothing follows a first 0
        assert np.all(is_present == np.cumprod(is_present, axis=1))
        assert set(is_present.sum(axis=1)) == {1, 2, 3}
    else:
        assert np.all(is_present)
    other = np.asarray(draw(jax.random.key(1)))
    assert np.any(other != codes)
