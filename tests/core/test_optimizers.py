"""Optimizers against their definitions as loops in double precision."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import numpy.testing as npt
import optax
import pytest

from fedjax_graph.core.errors import InputError
from fedjax_graph.core.optimizers import (
    OptimizerConfig,
    Rule,
    parse,
    register_optimizer,
    register_schedule,
)
from tests import tables

NUM_STEPS, RATE = 6, 0.3
START = np.array([0.5, -1.0, 2.0])
CURVATURE = np.array([0.7, 2.0, 0.1])


def gradient(x, step):
    """Of a quadratic whose lowest point wanders; its signs change."""
    return CURVATURE * (x - np.cos(step + np.arange(3)))


def sgd(momentum=0.0, nesterov=False):
    trace = np.zeros(3)

    def update(g, step):
        nonlocal trace
        trace = momentum * trace + g
        return g + momentum * trace if nesterov else trace

    return update


def adam(beta_1=0.9, beta_2=0.999, epsilon=1e-8, first=0.0, yogi=False):
    """Kingma and Ba, 2015; with `yogi` Zaheer et al., 2018, as optax has it."""
    m, v = np.full(3, first), np.full(3, first)

    def update(g, step):
        nonlocal m, v
        m = beta_1 * m + (1 - beta_1) * g
        if yogi:
            v = v - (1 - beta_2) * np.sign(v - g**2) * g**2
        else:
            v = beta_2 * v + (1 - beta_2) * g**2
        scale = np.sqrt(v / (1 - beta_2 ** (step + 1)))
        return m / (1 - beta_1 ** (step + 1)) / (scale + epsilon)

    return update


def adagrad(epsilon=1e-7):
    total = np.full(3, 0.1)

    def update(g, step):
        nonlocal total
        total = total + g**2
        return g / np.sqrt(total + epsilon)

    return update


def clipped(g, norm):
    return g * min(1, norm / np.sqrt(np.sum(g**2)))


def follow(config, update, rate=lambda step: RATE, before=lambda g, x: g, decay=0.0):
    """Compares the steps of a config with those of a loop.

    Args:
      update: (gradient, step) -> what the rate multiplies.
      before: (gradient, params) -> gradient that `update` sees.
      decay: of the params, decoupled.
    """
    # Two leaves, so that a norm over all of them is told from a norm of each.
    optimizer = config.build(NUM_STEPS)
    params = {"a": jnp.asarray(START[:1]), "b": jnp.asarray(START[1:])}
    opt_state, x = optimizer.init(params), START.copy()
    for step in range(NUM_STEPS):
        g = gradient(x, step)
        ours = gradient(np.concatenate([params["a"], params["b"]]), step)
        grads = {"a": jnp.asarray(ours[:1]), "b": jnp.asarray(ours[1:])}
        updates, opt_state = optimizer.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        x = x - rate(step) * (update(before(g, x), step) + decay * x)
        found = np.concatenate([params["a"], params["b"]])
        npt.assert_allclose(found, x, rtol=1e-4, atol=1e-5)
    assert np.abs(x - START).max() > 0.1


OPTIMIZERS = {
    "sgd": ({}, sgd()),
    "sgd with momentum": ({"name": "sgd", "momentum": 0.9}, sgd(0.9)),
    "nesterov": ({"momentum": 0.9}, sgd(0.9, nesterov=True)),
    "adam": ({}, adam()),
    "adam with its own figures": (
        {"name": "adam", "momentum": 0.5, "second_momentum": 0.8, "epsilon": 0.1},
        adam(0.5, 0.8, 0.1),
    ),
    "adamw": ({}, adam()),
    "yogi": ({}, adam(epsilon=1e-3, first=1e-6, yogi=True)),
    "yogi with its own figures": (
        {"name": "yogi", "momentum": 0.5, "second_momentum": 0.8, "epsilon": 0.1},
        adam(0.5, 0.8, 0.1, first=1e-6, yogi=True),
    ),
    "adagrad": ({}, adagrad()),
    "adagrad with an epsilon": ({"name": "adagrad", "epsilon": 0.5}, adagrad(0.5)),
}


@pytest.mark.parametrize("case", OPTIMIZERS)
def test_an_optimizer_is_its_definition(case):
    fields, update = OPTIMIZERS[case]
    follow(OptimizerConfig(**{"name": case, "learning_rate": RATE} | fields), update)


def test_clipping_goes_by_the_norm_over_all_leaves():
    follow(
        OptimizerConfig("sgd", RATE, clip_norm=0.8),
        sgd(),
        before=lambda g, x: clipped(g, 0.8),
    )


def test_weight_decay_is_added_to_the_clipped_gradient():
    follow(
        OptimizerConfig("adam", RATE, weight_decay=0.4, clip_norm=0.8),
        adam(),
        before=lambda g, x: clipped(g, 0.8) + 0.4 * x,
    )


def test_weight_decay_of_adamw_is_added_to_the_update():
    follow(OptimizerConfig("adamw", RATE, weight_decay=0.4), adam(), decay=0.4)


def line(step):
    return RATE + (0.05 - RATE) * step / NUM_STEPS


def cosine(step):
    return 0.05 + (RATE - 0.05) * (1 + np.cos(np.pi * step / NUM_STEPS)) / 2


def triangle(step):
    """Up to the rate in a quarter of the steps, then down; at the end of a step."""
    end = (step + 1) / NUM_STEPS
    return (
        RATE * end / 0.25
        if end < 0.25
        else RATE + (0.05 - RATE) * (end - 0.25) / (0.75)
    )


@pytest.mark.parametrize(
    "name, rate", [("linear", line), ("cosine", cosine), ("triangular", triangle)]
)
def test_a_schedule_is_its_formula(name, rate):
    config = OptimizerConfig("sgd", RATE, schedule=name, last_learning_rate=0.05)
    follow(config, sgd(), rate)


def test_a_triangle_spans_whole_epochs():
    """Seven steps a pass, of four passes: the peak is at the end of the first."""
    config = OptimizerConfig("sgd", 1.0, schedule="triangular", last_learning_rate=0.4)
    optimizer = config.build(num_steps=28, num_epochs=4)
    state, rates = optimizer.init(jnp.zeros(())), []
    for _ in range(28):
        update, state = optimizer.update(jnp.ones(()), state)
        rates.append(-float(update))
    expected = np.interp(np.arange(1, 29), [0, 7, 28], [0, 1, 0.4])
    npt.assert_allclose(rates, expected, rtol=1e-5)


@pytest.mark.parametrize(
    "changes, is_linear",
    [
        ({}, True),
        ({"momentum": 0.9, "schedule": "cosine"}, True),
        ({"name": "nesterov", "momentum": 0.9}, True),
        ({"weight_decay": 0.1}, False),
        ({"clip_norm": 0.5}, False),
        ({"name": "adam"}, False),
    ],
)
def test_linear_is_what_a_linear_map_of_gradients_commutes_with(changes, is_linear):
    """Steps along M g are M times the steps along g."""
    rng = np.random.default_rng(0)
    gradients, mix = rng.normal(size=(NUM_STEPS, 3)), rng.normal(size=(4, 3))
    config = OptimizerConfig(**changes)
    optimizer = config.build(NUM_STEPS)

    def walk(gradients, x):
        state = optimizer.init(x)
        for g in gradients:
            updates, state = optimizer.update(jnp.asarray(g), state, x)
            x = x + updates
        return x

    inner = walk(gradients, jnp.zeros(3))
    outer = walk(gradients @ mix.T, jnp.ones(4)) - 1
    assert np.allclose(outer, mix @ inner, atol=1e-4) == is_linear
    assert config.is_linear == is_linear


# --- As text -------------------------------------------------------------------------

DEFAULT = OptimizerConfig("adam", 0.02, momentum=0.5, weight_decay=5e-6)


@pytest.mark.parametrize(
    "text, expected",
    [
        ("adam", DEFAULT),
        ("adam,learning_rate=0.5", dataclasses.replace(DEFAULT, learning_rate=0.5)),
        ("sgd", OptimizerConfig("sgd", 0.02, weight_decay=5e-6)),
        ("adam,stateful=true", dataclasses.replace(DEFAULT, stateful=True)),
        ("adam,stateful=false", DEFAULT),
        ("adam,momentum=none", dataclasses.replace(DEFAULT, momentum=None)),
        (
            "nesterov, momentum=0.9, schedule=cosine, clip_norm=1",
            OptimizerConfig(
                "nesterov", 0.02, 0.9, 5e-6, schedule="cosine", clip_norm=1.0
            ),
        ),
    ],
)
def test_text_names_an_optimizer_and_what_differs(text, expected):
    assert parse(text, DEFAULT) == expected


def test_one_of_ones_own_takes_no_name_that_is_taken():
    rule = Rule(lambda config, rate: optax.lion(rate))
    with tables.kept():
        register_optimizer("lion", rule)
        register_schedule("halved", lambda config, *_: lambda step: 0.5)
        found = parse("lion,schedule=halved", DEFAULT)
        assert (found.name, found.schedule) == ("lion", "halved")
        assert not found.is_elementwise
        with pytest.raises(InputError, match="optimizer 'lion' is taken"):
            register_optimizer("lion", rule)
        with pytest.raises(InputError, match="schedule 'cosine' is taken"):
            register_schedule("cosine", lambda *_: 1.0)
    with pytest.raises(InputError, match="unknown"):
        parse("lion", DEFAULT)
    with pytest.raises(InputError, match="optimizer 'lion': .* is no Rule"):
        register_optimizer("lion", optax.lion)


@pytest.mark.parametrize(
    "text, words",
    [
        ("lion", ["name 'lion'", "unknown", "sgd, nesterov, adam"]),
        ("sgd,rate=1", ["'rate=1'", "is no field", "learning_rate"]),
        ("sgd,momentum", ["momentum has no value, as in momentum="]),
        ("sgd,name=adam", ["'name=adam'", "is no field"]),
        ("sgd,momentum=much", ["momentum is 'much'", "expected a number"]),
        ("sgd,learning_rate=-1", ["learning_rate=-1", "0 or more"]),
        ("sgd,learning_rate=nan", ["learning_rate=nan", "finite"]),
        ("sgd,clip_norm=0", ["clip_norm=0", "above 0"]),
        ("adam,momentum=1", ["momentum=1", "below 1"]),
        ("sgd,schedule=steps", ["schedule 'steps'", "unknown", "cosine"]),
        ("sgd,epsilon=1", ["sgd", "has no epsilon"]),
        ("adagrad,momentum=0.9", ["adagrad", "has no momentum"]),
        ("nesterov", ["nesterov", "needs a momentum"]),
        ("adam,momentum=0.5,momentum=0.6", ["momentum is given twice"]),
        ("sgd,last_learning_rate=0.1", ["last_learning_rate=0.1: needs a schedule"]),
        ("adam,stateful=1", ["stateful is '1'", "expected true or false"]),
        ("adam,stateful=true,schedule=cosine", ["stateful=True: schedule=cosine"]),
        ("sgd,num_steps=9", ["num_steps=9: needs a schedule"]),
        ("sgd,schedule=cosine,num_steps=9.5", ["'9.5'", "expected an integer"]),
        ("sgd,schedule=cosine,num_steps=0", ["num_steps=0", "1 or more"]),
        (None, ["optimizer None: expected text"]),
    ],
)
def test_what_cannot_be_read_is_refused_in_one_line(text, words):
    with pytest.raises(InputError) as error:
        parse(text, OptimizerConfig())
    message = str(error.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def test_a_constant_rate_has_no_last_one():
    default = OptimizerConfig(schedule="cosine", last_learning_rate=0.01, num_steps=9)
    assert parse("sgd,schedule=constant", default) == OptimizerConfig()
    of_a_round = dataclasses.replace(default, num_steps=None)
    assert parse("sgd,num_steps=none", default) == of_a_round


@pytest.mark.parametrize("value", ["0.1", None, [0.1], True, np.True_])
def test_a_rate_that_is_no_number_is_refused(value):
    with pytest.raises(InputError, match="optimizer learning_rate=.*finite number"):
        OptimizerConfig(learning_rate=value)


def test_a_state_is_kept_by_who_has_a_place_for_it():
    with pytest.raises(InputError, match="stateful=True: only clients"):
        OptimizerConfig("adam", stateful=True).build()
    with pytest.raises(InputError, match="optimizer stateful='yes'"):
        OptimizerConfig("adam", stateful="yes")


@pytest.mark.parametrize("name", [["sgd"], None, 3])
def test_a_name_that_is_no_text_is_refused(name):
    for field in ("name", "schedule"):
        with pytest.raises(InputError, match=f"optimizer {field}=.*expected text"):
            OptimizerConfig(**{field: name})


@pytest.mark.parametrize("rate", [np.float32(0.5), jnp.float32(0.5), np.array(0.5)])
def test_scalars_of_other_libraries_become_numbers(rate):
    config = OptimizerConfig(learning_rate=rate)
    assert type(config.learning_rate) is float
    assert config == OptimizerConfig(learning_rate=0.5)


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"num_steps": -1}, "num_steps = -1: expected a whole number, at least 0"),
        ({"num_steps": "a"}, "num_steps = 'a': expected a whole number"),
        ({"num_steps": True}, "num_steps = True: expected a whole number"),
        ({"num_epochs": 0}, "num_epochs = 0: expected a whole number, at least 1"),
    ],
)
def test_what_counts_no_steps_is_refused(arguments, words):
    with pytest.raises(InputError, match=f"optimizer {words}"):
        OptimizerConfig().build(**arguments)


def test_a_schedule_without_its_number_of_steps_is_refused():
    with pytest.raises(InputError, match="'cosine' needs a number of steps"):
        OptimizerConfig(schedule="cosine").build()


def test_a_schedule_over_all_rounds_is_for_an_optimizer_that_lasts():
    config = OptimizerConfig("sgd", 1.0, schedule="linear", num_steps=4)
    optimizer = config.build()
    state, rates = optimizer.init(jnp.zeros(())), []
    for _ in range(6):
        update, state = optimizer.update(jnp.ones(()), state)
        rates.append(-float(update))
    npt.assert_allclose(rates, [1, 0.75, 0.5, 0.25, 0, 0])
    with pytest.raises(InputError, match="num_steps=4: .* begins anew in each of them"):
        config.build(2)


def test_a_config_outlives_json():
    config = OptimizerConfig("yogi", 0.5, 0.8, 0.1, "linear", 2.0, 0.95, 1e-3, 0.01)
    again = OptimizerConfig(**json.loads(json.dumps(dataclasses.asdict(config))))
    assert again == config
    assert hash(again) == hash(config)


def test_a_config_may_be_static_in_a_program():
    """Which is compiled once for equal configs."""
    traces = []

    def step(config, x):
        traces.append(config)
        return config.build().update(x, config.build().init(x), x)[0]

    run = jax.jit(step, static_argnums=0)
    for _ in range(2):
        npt.assert_allclose(run(OptimizerConfig("sgd", 0.5), jnp.float32(3)), -1.5)
    assert len(traces) == 1
