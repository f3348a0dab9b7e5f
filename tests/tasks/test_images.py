"""The image task: local training written out in loops, and its scores."""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import numpy.testing as npt
import optax
import pytest

from fedjax_graph.core import graphs
from fedjax_graph.core.errors import InputError
from fedjax_graph.core.optimizers import OptimizerConfig
from fedjax_graph.data.images.label_shards import ImageData
from fedjax_graph.models import resnet
from fedjax_graph.tasks import augmentation
from fedjax_graph.tasks import images as task_images
from fedjax_graph.tasks.images import ImageTask

# Of what jax 0.10 compiles quickly (`tests/conftest.py`), ResNet9's gradient is wrong.
EMITTERS = {"xla_cpu_use_fusion_emitters": True}
careful_jit = functools.partial(
    jax.jit, compiler_options=EMITTERS if jax.__version_info__ < (0, 11) else None
)

NUM_CLIENTS, NUM_PLACES, NUM_IMAGES, SIZE, NUM_CLASSES = 3, 7, 20, 16, 4
CONFIG = ImageTask(
    width=2,
    num_classes=NUM_CLASSES,
    batch_size=3,
    local_epochs=2,
    augment=False,
    eval_batch_size=4,
)


@pytest.fixture(scope="module")
def data() -> ImageData:
    """Three clients of 7, 5 and 6 images, the last two padded by images of others."""
    rng = np.random.default_rng(0)
    mask = np.ones((NUM_CLIENTS, NUM_PLACES), np.float32)
    mask[1, [2, 6]] = mask[2, 0] = 0
    pixels = rng.integers(0, 256, (NUM_IMAGES, SIZE, SIZE, 3))
    return ImageData(
        images=pixels.astype(np.uint8),
        labels=rng.integers(0, NUM_CLASSES, NUM_IMAGES).astype(np.int32),
        indices=rng.permuted(
            np.tile(np.arange(NUM_IMAGES, dtype=np.int32), (NUM_CLIENTS, 1)), axis=1
        )[:, :NUM_PLACES],
        mask=mask,
        mean=np.array([0.5, 0.4, 0.6], np.float32),
        std=np.array([0.2, 0.3, 0.25], np.float32),
        graph=graphs.from_adjacency(np.eye(NUM_CLIENTS)),
        client_ids=np.arange(NUM_CLIENTS, dtype=np.int32),
        client_weights=np.array([7, 5, 6], np.float32),
    )


@pytest.fixture(scope="module")
def task():
    return CONFIG.build()


@pytest.fixture(scope="module")
def models(task):
    """Leaves [K, ...], far apart, with labels that differ between images."""
    rng = np.random.default_rng(1)

    def draw(path, x):
        name = path[-1].key
        low = {"scale": 0.8, "var": 0.8, "bias": 0.2}.get(name, -0.4)
        return rng.uniform(low, low + 0.8, (NUM_CLIENTS, *x.shape)).astype(np.float32)

    shapes = jax.eval_shape(task.init, jax.random.key(0))
    return jax.tree_util.tree_map_with_path(draw, shapes)


def row(tree, k):
    return jax.tree.map(lambda x: x[k], tree)


def assert_close(left, right, **tolerance):
    tolerance = {"rtol": 1e-4, "atol": 1e-5} | tolerance
    jax.tree.map(lambda a, b: npt.assert_allclose(a, b, **tolerance), left, right)


# --- The rate and the optimizer ------------------------------------------------------


def test_the_rate_rises_to_a_quarter_and_falls_to_the_end():
    config = dataclasses.replace(ImageTask().optimizer, name="sgd", momentum=None)
    optimizer = dataclasses.replace(config, weight_decay=0.0).build(80, 20)

    def step(state, gradient):
        update, state = optimizer.update(gradient, state)
        return state, -update

    _, rates = jax.lax.scan(step, optimizer.init(jnp.zeros(())), jnp.ones(80))
    epochs = (np.arange(80) + 1) / 4
    rising = 0.4 * epochs / 5
    falling = 0.4 + (0.001 - 0.4) * (epochs - 5) / 15
    npt.assert_allclose(rates, np.where(epochs <= 5, rising, falling), rtol=1e-4)
    assert rates[0] > 0
    npt.assert_allclose(np.asarray(rates)[[19, 79]], [0.4, 0.001], rtol=1e-4)


def nesterov(config, steps_per_epoch, params, gradients):
    """All steps on one array, in NumPy."""
    trace = 0
    for step, gradient in enumerate(gradients):
        quarter = config.local_epochs / 4
        knots = [0, quarter, config.local_epochs]
        rates = [0, config.optimizer.learning_rate, config.optimizer.last_learning_rate]
        rate = np.interp((step + 1) / steps_per_epoch, knots, rates)
        gradient = gradient + config.optimizer.weight_decay * params
        trace = config.optimizer.momentum * trace + gradient
        params = params - rate * (gradient + config.optimizer.momentum * trace)
    return params


def test_the_optimizer_is_nesterov_momentum_with_weight_decay():
    decayed = dataclasses.replace(ImageTask().optimizer, weight_decay=0.1)
    config = dataclasses.replace(ImageTask(), local_epochs=4, optimizer=decayed)
    optimizer = config.optimizer.build(4 * 3, 4)
    rng = np.random.default_rng(0)
    params, gradients = rng.normal(size=5), rng.normal(size=(12, 5))

    def step(carry, gradient):
        params, state = carry
        updates, state = optimizer.update(gradient, state, params)
        return (optax.apply_updates(params, updates), state), None

    start = jnp.asarray(params, jnp.float32)
    (moved, _), _ = jax.lax.scan(step, (start, optimizer.init(start)), gradients)
    expected = nesterov(config, 3, params, gradients)
    assert np.abs(expected - params).max() > 0.5
    npt.assert_allclose(moved, expected, rtol=1e-4, atol=1e-5)


# --- Batches -------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [3, 7, 100])
def test_an_epoch_sees_every_image_once(batch_size):
    indices = np.arange(10, 17, dtype=np.int32)
    mask = np.array([1, 1, 0, 1, 1, 1, 0], np.float32)
    batches = task_images.epoch_batches(jax.random.key(0), indices, mask, batch_size, 3)
    steps = -(-7 // batch_size)
    assert batches.indices.shape == (3 * steps, min(batch_size, 7))
    seen = np.asarray(batches.indices).reshape(3, -1)
    counts = np.asarray(batches.mask).reshape(3, -1)
    orders = [tuple(own[count > 0]) for own, count in zip(seen, counts, strict=True)]
    for order in orders:
        assert sorted(order) == [10, 11, 13, 14, 15]
    assert len(set(orders)) == 3
    keys = np.asarray(jax.random.key_data(batches.key))
    assert len(np.unique(keys, axis=0)) == 3 * steps


def test_a_last_batch_that_is_not_full_may_be_dropped():
    indices, mask = np.arange(10, 17, dtype=np.int32), np.ones(7, np.float32)
    key = jax.random.key(0)
    kept, whole = (
        task_images.epoch_batches(key, indices, mask, 3, 2, drop_last)
        for drop_last in (True, False)
    )
    assert kept.indices.shape == (2 * 2, 3) and np.all(kept.mask == 1)
    first_of_each = np.asarray(whole.indices).reshape(2, 3, 3)[:, :2].reshape(-1, 3)
    npt.assert_array_equal(kept.indices, first_of_each)
    with pytest.raises(InputError, match="drop_last: 7 examples .* batch_size=8"):
        task_images.epoch_batches(key, indices, mask, 8, 1, drop_last=True)


def test_other_keys_give_other_orders():
    indices, mask = np.arange(30, dtype=np.int32), np.ones(30, np.float32)
    first, second = (
        np.asarray(
            task_images.epoch_batches(jax.random.key(k), indices, mask, 30, 1).indices
        )
        for k in (0, 1)
    )
    assert np.any(first != second)


# --- Training ------------------------------------------------------------------------


def scaled(data, indices):
    return ((data.images[indices] / 255 - data.mean) / data.std).astype(np.float32)


def train(config, data, start, batches, augment=lambda key, images: images):
    """Each step by hand, from the batches cut to their real images."""
    model = resnet.ResNet9(config.width, config.num_classes)
    params, structure = jax.tree.flatten(start["params"])
    stats, traces, total, count = start["batch_stats"], [0] * len(params), 0, 0
    steps_per_epoch = len(batches.indices) // config.local_epochs
    own = config.optimizer

    @careful_jit
    def gradients(params, stats, images, labels):
        def loss(params):
            logits, changed = model.apply(
                {"params": jax.tree.unflatten(structure, params), "batch_stats": stats},
                images,
                jnp.ones(len(images)),
                mutable=["batch_stats"],
            )
            log_probability = jax.nn.log_softmax(logits)
            total = jnp.sum(log_probability[jnp.arange(len(labels)), labels])
            return -total, changed["batch_stats"]

        return jax.value_and_grad(loss, has_aux=True)(params)

    for step, (indices, mask) in enumerate(
        zip(batches.indices, batches.mask, strict=True)
    ):
        images = augment(batches.key[step], scaled(data, indices))[mask > 0]
        labels = data.labels[indices[mask > 0]]
        (loss, stats), grads = gradients(params, stats, images, labels)
        rate = np.interp(
            (step + 1) / steps_per_epoch,
            [0, config.local_epochs / 4, config.local_epochs],
            [0, own.learning_rate, own.last_learning_rate],
        )
        for i, (x, grad) in enumerate(zip(params, grads, strict=True)):
            # As released: the sum's gradient, decay times and rate over the batch size.
            grad = grad + own.weight_decay * config.batch_size * x
            traces[i] = own.momentum * traces[i] + grad
            grad = grad + own.momentum * traces[i]
            params[i] = x - rate / config.batch_size * grad
        total, count = total + loss, count + len(labels)
    return jax.tree.unflatten(structure, params), stats, total / count


@pytest.fixture(scope="module")
def update():
    """(config, model, client, key, data) -> LocalResult, without adjustment."""

    @functools.cache
    def program(config):
        task = config.build()

        def one(start, own, key, data):
            return task.update(start, own, key, data, None, 0)

        return task, careful_jit(one)

    def run(config, start, k, key, data):
        task, one = program(config)
        return one(start, row(task.client_data(data), k), key, data)

    return run


STEPS = dataclasses.replace(CONFIG.optimizer, learning_rate=0.02, weight_decay=0.01)
TRAINED = dataclasses.replace(CONFIG, augment=True, optimizer=STEPS)


@pytest.mark.parametrize(
    ("client", "augment"), [pytest.param(0, False, marks=pytest.mark.slow), (1, True)]
)
def test_local_training_is_a_loop_of_steps(data, models, update, client, augment):
    config = dataclasses.replace(TRAINED, augment=augment)
    start, key = row(models, client), jax.random.key(5)
    result = update(config, start, client, key, data)
    batches = task_images.epoch_batches(
        key, data.indices[client], data.mask[client], 3, 2
    )
    batches = batches._replace(
        indices=np.asarray(batches.indices), mask=np.asarray(batches.mask)
    )
    views = [augmentation.augment] if augment else []
    params, stats, loss = train(config, data, start, batches, *views)
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), params, start["params"])
    assert min(jax.tree.leaves(moved)) > 5e-4
    assert_close(result.model["params"], params)
    assert_close(result.model["batch_stats"], stats)
    npt.assert_allclose(result.loss, loss, rtol=1e-4)


def test_a_term_weighs_as_much_as_the_images_of_its_batch(data, models, task):
    """One that is 1 adds 1 to the mean loss, where batches are not full as well."""
    start, own = row(models, 1), row(task.client_data(data), 1)

    def one(embed):
        return lambda params, seen, key: jnp.float32(1)

    losses = [
        careful_jit(
            lambda start, own, key, data, term=term: (
                task.update(start, own, key, data, None, 0, term=term).loss
            )
        )(start, own, jax.random.key(5), data)
        for term in (None, one)
    ]
    npt.assert_allclose(losses[1] - losses[0], 1, rtol=1e-5)


def test_adjustment_comes_first_and_its_state_is_returned(data, models, task):
    """Gradients set to 0 leave weight decay alone; the state counts the steps."""

    def init(params):
        del params
        return jnp.int32(0)

    def stop(grads, state, params=None):
        del params
        return jax.tree.map(jnp.zeros_like, grads), state + 1

    adjust = optax.GradientTransformation(init, stop)
    start = row(models, 0)
    result = careful_jit(lambda *args: task.update(*args, adjust, 0))(
        start, row(task.client_data(data), 0), jax.random.key(0), data
    )
    assert result.opt_state[0] == 6
    kernel = start["params"]["head"]["kernel"].astype(np.float64)
    expected = nesterov(CONFIG, 3, kernel, np.zeros((6, 1, 1)))
    assert np.abs(expected - kernel).max() > 1e-5
    npt.assert_allclose(result.model["params"]["head"]["kernel"], expected, rtol=1e-5)


class MeanColour(nn.Module):
    """A linear map of an image's mean colour, which counts the batches it is shown."""

    @nn.compact
    def __call__(self, images, mask=None):
        count = self.variable("batch_stats", "count", jnp.zeros, ())
        count.value += 1
        return nn.Dense(NUM_CLASSES, name="head")(images.mean(axis=(1, 2)))


@pytest.mark.parametrize(("drop_last", "num_steps"), [(True, 2), (False, 3)])
def test_a_last_batch_that_is_not_full_is_a_step_unless_dropped(
    data, quick_jit, drop_last, num_steps
):
    """Of five images in batches of two."""
    changes = {"batch_size": 2, "local_epochs": 1, "drop_last": drop_last}
    config = dataclasses.replace(CONFIG, optimizer=OptimizerConfig("sgd"), **changes)
    update = task_images.client_update(MeanColour(), config)
    head = {"kernel": np.ones((3, NUM_CLASSES)), "bias": np.zeros(NUM_CLASSES)}
    start = {"params": {"head": head}, "batch_stats": {"count": 0.0}}
    own = data.indices[0][:5], np.ones(5, np.float32)
    run = quick_jit(lambda *args: update(*args, None, 0))
    after = run(start, own, jax.random.key(1), data).model
    assert after["batch_stats"]["count"] == num_steps


def test_a_client_of_padding_alone_stays_finite(data, models, update):
    nobody = data._replace(mask=np.zeros_like(data.mask))
    start = row(models, 0)
    result = update(TRAINED, start, 0, jax.random.key(0), nobody)
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(result.model))
    assert_close(result.model["batch_stats"], start["batch_stats"])
    assert result.loss == 0


# --- Scores --------------------------------------------------------------------------


def expected_logits(data, models, k):
    model = resnet.ResNet9(CONFIG.width, NUM_CLASSES)
    variables = row(models, k)
    logits = [model.apply(variables, scaled(data, [p]))[0] for p in data.indices[k]]
    return np.array(logits, np.float64)


@pytest.fixture(scope="module")
def probabilities(data, models):
    logits = np.stack([expected_logits(data, models, k) for k in range(NUM_CLIENTS)])
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


def test_predictions_are_probabilities_of_the_clients_own_models(
    data, models, task, probabilities
):
    outputs = careful_jit(task.predict)(models, data)
    assert outputs.shape == (NUM_CLIENTS, NUM_PLACES, NUM_CLASSES)
    npt.assert_allclose(outputs, probabilities, rtol=1e-4, atol=1e-6)
    assert np.abs(probabilities[0] - probabilities[1]).max() > 0.01


def test_a_model_without_a_number_has_no_error(data, models, task):
    """Its most likely class would be the first of all, right by chance."""
    broken = jax.tree.map(lambda x: jnp.asarray(x).at[0].set(jnp.nan), models)
    scores = careful_jit(task.evaluate)(broken, data)
    assert np.isnan(scores["error"]) and np.isnan(scores["cross_entropy"])


def test_scores_are_those_of_the_clients_own_images(data, models, task, probabilities):
    # Labels that the models get right more or less often.
    guesses = probabilities.argmax(axis=-1)
    labels = np.array(data.labels)
    labels[data.indices[0][:5]] = guesses[0][:5]
    data = data._replace(labels=labels)
    accuracy, entropy = [], []
    for k in range(NUM_CLIENTS):
        right, losses = [], []
        for i, index in enumerate(data.indices[k]):
            if data.mask[k, i]:
                right.append(guesses[k, i] == labels[index])
                losses.append(-np.log(probabilities[k, i, labels[index]]))
        accuracy.append(100 * np.mean(right))
        entropy.append(np.mean(losses))
    assert len(set(accuracy)) > 1
    scores = careful_jit(task.evaluate)(models, data)
    npt.assert_allclose(scores["accuracy_by_client"], accuracy, rtol=1e-5)
    npt.assert_allclose(scores["cross_entropy"], np.mean(entropy), rtol=1e-4)
    npt.assert_allclose(scores["accuracy"], np.mean(accuracy), rtol=1e-5)
    npt.assert_allclose(scores["error"], 1 - np.mean(accuracy) / 100, rtol=1e-5)


def test_a_leaf_may_be_shared_while_others_are_not(data, models, task):
    evaluate = careful_jit(task.evaluate)
    for own_heads, own_rest in ((True, False), (False, True), (False, False)):

        def share(path, x, own_heads=own_heads, own_rest=own_rest):
            return x if (own_heads if task.is_head(path) else own_rest) else x[:1]

        mixed = jax.tree_util.tree_map_with_path(share, models)
        full = jax.tree.map(
            lambda x: np.broadcast_to(x, (NUM_CLIENTS, *x.shape[1:])), mixed
        )
        assert_close(evaluate(mixed, data), evaluate(full, data))


def test_the_head_is_the_last_kernel(models, task):
    names = [
        jax.tree_util.keystr(path)
        for path, _ in jax.tree_util.tree_leaves_with_path(models)
        if task.is_head(path)
    ]
    assert names == ["['params']['head']['kernel']"]


def client_metrics(accuracy, weights):
    """Of clients with 1000 images each."""
    accuracy = np.asarray(accuracy, np.float32)
    return task_images.client_metrics(
        np.full(len(accuracy), 1000.0),
        10 * accuracy,
        1000 * (100 - accuracy),
        np.asarray(weights, np.float32),
    )


@pytest.mark.parametrize(
    ("num_clients", "size"), [(1, 1), (20, 1), (21, 2), (40, 2), (41, 3), (100, 5)]
)
def test_groups_are_a_twentieth_of_the_clients_rounded_up(num_clients, size):
    accuracy = np.random.default_rng(0).permutation(num_clients) * 0.7 + 5
    scores = client_metrics(accuracy, np.ones(num_clients))
    ordered = np.sort(accuracy)
    for name, group in {
        "mean_accuracy": ordered,
        "best_5_percent": ordered[-size:],
        "worst_5_percent": ordered[:size],
    }.items():
        npt.assert_allclose(scores[name], group.mean(), rtol=1e-5)
        npt.assert_allclose(scores[f"{name}_client_std"], group.std(), rtol=1e-4)
    npt.assert_allclose(scores["cross_entropy"], 100 - accuracy.mean(), rtol=1e-5)


def test_padded_clients_leave_the_scores_alone():
    rng = np.random.default_rng(0)
    accuracy = rng.uniform(20, 80, 30)
    expected = client_metrics(accuracy, np.ones(30))
    padded = np.insert(accuracy, [0, 9, 9, 30], [0, 100, 0, 100])
    weights = np.insert(np.ones(30), [0, 9, 9, 30], 0)
    scores = careful_jit(client_metrics_of)(padded, weights)
    by_client = scores.pop("accuracy_by_client")
    assert_close(by_client[weights > 0], expected.pop("accuracy_by_client"))
    assert_close(scores, expected)


def test_where_nobody_has_images_there_are_no_scores():
    scores = client_metrics(np.full(4, 50.0), np.zeros(4))
    for name in ("error", "cross_entropy", "accuracy", "worst_5_percent"):
        assert np.isnan(scores[name]), name


def client_metrics_of(accuracy, weights):
    """`client_metrics` under `jit`."""
    count = jnp.full(len(accuracy), 1000.0)
    return task_images.client_metrics(
        count, 10 * accuracy, 1000 * (100 - accuracy), weights
    )


def test_clients_without_images_in_a_split_are_left_out():
    scores = task_images.client_metrics(
        np.array([10.0, 0, 10]), np.array([4.0, 0, 8]), np.zeros(3), np.ones(3)
    )
    npt.assert_allclose(scores["accuracy"], 60)
    npt.assert_allclose(scores["worst_5_percent"], 40)


# --- As part of a larger program -----------------------------------------------------


def test_programs_hold_no_data(data, models, task):
    """Data come in as arguments: nothing of them is a constant of the program."""
    program = jax.make_jaxpr(task.evaluate)(models, data)
    assert sum(np.size(x) for x in program.consts) < 100


@pytest.mark.slow
def test_seeds_may_be_mapped_and_rounds_scanned(data, models):
    task = dataclasses.replace(CONFIG, augment=True, local_epochs=1).build()
    data = jax.device_put(data)

    def one_round(model, key):
        own = row(task.client_data(data), 0)
        result = task.update(model, own, key, data, None, 0)
        return result.model, result.loss

    keys = jax.random.split(jax.random.key(2), (2, 2))  # seeds, rounds

    def run(model, keys):
        return jax.lax.scan(one_round, model, keys)

    start = row(models, 0)
    last, losses = careful_jit(jax.vmap(run, (None, 0)))(start, keys)
    one = careful_jit(one_round)
    for seed in range(2):
        model, expected = start, []
        for key in keys[seed]:
            model, loss = one(model, key)
            expected.append(loss)
        npt.assert_allclose(losses[seed], expected, rtol=1e-3)
        assert_close(row(last, seed), model, rtol=1e-2, atol=1e-3)
    assert losses[0, 1] != losses[1, 1]


# --- Splits without images ------------------------------------------------------------


@pytest.mark.parametrize("num_images", [0, NUM_IMAGES])
@pytest.mark.parametrize("is_shared", [True, False])
def test_a_split_without_places_scores_nobody(
    num_images, is_shared, data, task, models
):
    """As one of padding alone does: no client counts, and none has an accuracy."""
    data = jax.device_put(data)
    images, labels = data.images[:num_images], data.labels[:num_images]
    none = data._replace(
        images=images, labels=labels, indices=data.indices[:, :0], mask=data.mask[:, :0]
    )
    own = jax.tree.map(lambda x: x[:1], models) if is_shared else models
    scores = task.evaluate(own, none)
    padded = task.evaluate(own, data._replace(mask=0 * data.mask))
    assert scores.keys() == padded.keys()
    npt.assert_array_equal(scores["accuracy_by_client"], np.zeros(NUM_CLIENTS))
    means = {name: x for name, x in scores.items() if name != "accuracy_by_client"}
    assert all(np.isnan(x) for x in means.values())
    assert task.predict(own, none).shape == (NUM_CLIENTS, 0, NUM_CLASSES)
    one = jax.tree.map(lambda x: x[0], (own, task.client_data(none)))
    seen = task.embed(*one, none)
    assert seen.embeddings.shape == (0, 4 * CONFIG.width) and seen.labels.shape == (0,)


@pytest.mark.parametrize("drop_last", [True, False])
def test_nobody_trains_without_images(drop_last, data, models):
    data = jax.device_put(data)
    none = data._replace(indices=data.indices[:, :0], mask=data.mask[:, :0])
    task = dataclasses.replace(CONFIG, drop_last=drop_last).build()
    own = jax.tree.map(lambda x: x[0], (models, task.client_data(none)))
    with pytest.raises(InputError, match="images of a client to train on = 0: expect"):
        task.update(*own, jax.random.key(0), none, None, 0)
