"""Image classification with ResNet9, as in SFL's Tables 2 and 3.

The local training is that of SFL's released code: Nesterov SGD on a rate that rises and
falls within each round, on cropped, mirrored and cut-out images. Its rate divided by
the batch size on a summed loss, with the decay times the batch size, is the same as
here: the sum divided by the batch size. That code drops a last batch that is not full,
as `drop_last` does; by default it is trained on here, with a step as much smaller.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_graph.core import arrays, batching, clients
from fedjax_graph.core.algorithm import Metrics
from fedjax_graph.core.checks import Checked, limited
from fedjax_graph.core.errors import InputError
from fedjax_graph.core.local import LocalResult, Model, local_steps
from fedjax_graph.core.masks import lowest, masked_mean
from fedjax_graph.core.optimizers import OptimizerConfig
from fedjax_graph.core.registry import Registry
from fedjax_graph.core.task import Embedded, Task, flipped, in_head
from fedjax_graph.data.images.label_shards import ImageData
from fedjax_graph.models.embeddings import apply_with_embeddings
from fedjax_graph.models.protocols import ImageModel, built
from fedjax_graph.models.resnet import ResNet9
from fedjax_graph.tasks import augmentation

GROUP_PERCENT = 5  # of the clients make the best and the worst group
GROUPS = ("mean_accuracy",) + tuple(
    f"{which}_{GROUP_PERCENT}_percent" for which in ("best", "worst")
)
TEST_METRICS = tuple(  # what a test is summed up by
    f"{name}{end}" for name in GROUPS for end in ("", "_client_std")
)


class Batch(NamedTuple):
    """One minibatch of a client's images."""

    indices: jax.Array  # [B] int32, indices into all images
    mask: jax.Array  # [B] float32, 0 for padding
    key: jax.Array  # of the augmentation


@dataclasses.dataclass(frozen=True)
class ImageTask(Checked):
    """Hyper-parameters of image classification; the defaults: the released code's."""

    kind: Literal["images"] = "images"
    model: str = "resnet9"  # a name of MODELS
    width: int = limited(64, lower=1)
    num_classes: int = limited(10, lower=1)
    image_shape: tuple[int, int, int] = dataclasses.field(  # height, width, channels
        default=(32, 32, 3), metadata={"of_data": True}
    )
    batch_size: int = limited(128, lower=1)
    local_epochs: int = limited(20, lower=1)
    optimizer: OptimizerConfig = OptimizerConfig(
        "nesterov",
        0.4,
        momentum=0.9,
        weight_decay=5e-4,
        schedule="triangular",
        last_learning_rate=0.001,
    )
    augment: bool = True
    drop_last: bool = False  # of an epoch's batches, where the last one is not full
    eval_batch_size: int = limited(256, lower=1)

    def __post_init__(self) -> None:
        """Checks types and limits; raises `InputError`."""
        super().__post_init__()
        if min(self.image_shape) < 1:
            raise InputError(
                f"image_shape={self.image_shape}: expected three sizes, 1 or more"
            )

    def module(self) -> ImageModel:
        """The model that clients train.

        Raises:
          InputError: if none is registered under this name, or it lacks what
            `ImageModel` asks for.
        """
        what = f"image model {self.model!r}"
        return built(MODELS.look_up(self.model), self, ImageModel, what)

    def build(self) -> Task:
        """The task's functions; raises as `module`."""
        model = self.module()
        return Task(
            init=lambda key: init(model, self.image_shape, key),
            client_data=lambda data: (data.indices, data.mask),
            update=client_update(model, self),
            evaluate=evaluate_images(model, self.eval_batch_size),
            predict=predict_images(model, self.eval_batch_size),
            is_head=in_head,
            embed=embed_images(model, self.eval_batch_size),
            num_classes=self.num_classes,
            flip_labels=lambda own, data, is_flipped: (
                own,
                data._replace(
                    labels=flipped(data.labels, self.num_classes, is_flipped)
                ),
            ),
            monitor="error",
        )


MODELS: Registry[Callable[[ImageTask], ImageModel]] = Registry(
    "image model",
    {"resnet9": lambda task: ResNet9(task.width, task.num_classes)},
    is_callable=True,
)
"""Name -> factory: the task's config -> module; see `register_model`."""
register_model = MODELS.registering()
"""Registers a model of one's own by a function of the task's config.

    register_model("mine", lambda task: ResNet9(task.width, task.num_classes))

or as a decorator of that function. The module that it returns offers what
`models.protocols.ImageModel` asks for.
"""


def init(model: ImageModel, image_shape: tuple[int, int, int], key: jax.Array) -> Model:
    """Fresh parameters and running statistics, for images [H, W, C]."""
    return {"batch_stats": {}} | model.init(key, jnp.zeros((1, *image_shape)))


# --- Training on one client ----------------------------------------------------------


def client_update(model: ImageModel, config: ImageTask) -> Callable[..., LocalResult]:
    """Factory of the local epochs of one client; see `Task.update`.

    The loss it reports is the mean over the images of all epochs. A term weighs as much
    as the images that a batch has.
    """

    def update(start, client_data, key, data: ImageData, adjust, num_rounds, term=None):
        del num_rounds
        indices, mask = client_data

        def loss(params, stats, batch):
            images = normalise(data, data.images[batch.indices])
            if config.augment:
                images = augmentation.augment(batch.key, images)
            (logits, changed), embeddings = apply_with_embeddings(
                model,
                {"params": params, "batch_stats": stats},
                images,
                batch.mask,
                mutable=["batch_stats"],
            )
            labels = data.labels[batch.indices]
            total = jnp.sum(batch.mask * cross_entropy(logits, labels))
            value = total / config.batch_size
            if term is not None:
                add = term(lambda other: apply_with_embeddings(model, other, images)[1])
                seen = Embedded(embeddings, labels, batch.mask, batch.mask)
                share = jnp.sum(batch.mask) / config.batch_size
                value += share * add(params, seen, batch.key)
            return value, changed.get("batch_stats", stats)

        batches = epoch_batches(
            key,
            indices,
            mask,
            config.batch_size,
            config.local_epochs,
            config.drop_last,
        )
        num_steps = len(batches.indices)
        optimizer = config.optimizer.build(num_steps, config.local_epochs)
        result = local_steps(loss, optimizer, adjust=adjust)(start, batches)
        total = result.loss * num_steps * config.batch_size
        num_images = jnp.maximum(jnp.sum(batches.mask), 1)
        return result._replace(loss=total / num_images)

    return update


def embed_images(model: ImageModel, batch_size: int) -> Callable[..., Embedded]:
    """Factory of one client's embeddings, of images without noise; see `Task.embed`."""

    def embed(variables: Model, client_data, data: ImageData, key=None) -> Embedded:
        del key  # there is no dropout
        indices, mask = client_data

        def of_batch(indices):
            images = normalise(data, data.images[indices])
            return apply_with_embeddings(model, variables, images)[1]

        embeddings = map_batches(of_batch, indices, batch_size)
        return Embedded(embeddings, data.labels[indices], mask, mask)

    return embed


def epoch_batches(
    key: jax.Array,
    indices: jax.Array,
    mask: jax.Array,
    batch_size: int,
    num_epochs: int,
    drop_last: bool = False,
) -> Batch:
    """Shuffled minibatches of `num_epochs` passes, `[num_epochs * steps, ...]`.

    A client's padding is spread over its batches; all clients take as many steps.

    Args:
      key: of the client and round.
      indices: [S], of the client's images.
      mask: [S], 0 for padding.
      batch_size: B; S is taken where it is less, unless `drop_last`.
      num_epochs: passes.
      drop_last: see `batching.shuffled_batches`, which raises for it.

    Raises:
      InputError: if there is no place for an image.
    """
    shuffle_key, augment_key = jax.random.split(key)
    size = indices.shape[0]
    arrays.check_count("images of a client to train on", size)
    order, is_filled = batching.shuffled_batches(
        shuffle_key,
        size,
        batch_size if drop_last else min(batch_size, size),
        num_epochs,
        drop_last,
    )
    keys = jax.random.split(augment_key, len(order))
    return Batch(indices[order], mask[order] * is_filled, keys)


def normalise(data: ImageData, pixels: jax.Array) -> jax.Array:
    """Standardises pixels by the training set's mean and deviation of each channel.

    Args:
      data: brings these.
      pixels: [..., C] uint8, of C channels.
    """
    return (pixels / jnp.float32(255) - data.mean) / data.std


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Computes the cross-entropy of each example.

    Args:
      logits: [B, classes].
      labels: [B].

    Returns:
      [B] float32.

    Raises:
      InputError: if the labels are not [B], or no known ones of the classes.
    """
    arrays.check_shape("labels", labels, logits.shape[:-1])
    arrays.check_indices("labels", labels, logits.shape[-1], "the classes")
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


# --- Scores --------------------------------------------------------------------------


def map_logits(
    model: ImageModel, batch_size: int, reduce: Callable[..., Any]
) -> Callable[[Model, ImageData], Any]:
    """Factory of a function of the logits of each client's images in a split.

    Args:
      model: applied with its running statistics.
      batch_size: images at once, at most.
      reduce: (logits [S, classes], labels [S], mask [S]) -> result, of ONE client.

    Returns:
      (models, data) -> results [K, ...]; the models' leaves are [1 or K, ...].
    """

    def one_client(variables, indices, mask, data):
        def logits_of(indices):
            return model.apply(variables, normalise(data, data.images[indices]))

        logits = map_batches(logits_of, indices, batch_size)
        return reduce(logits, data.labels[indices], mask)

    def run(models: Model, data: ImageData):
        chunk = clients.eval_clients_per_chunk()
        mapped = clients.map_rows(one_client, chunk)
        return mapped(models, data.indices, data.mask, shared=(data,))

    return run


def map_batches(
    fn: Callable[[jax.Array], jax.Array], indices: jax.Array, batch_size: int
) -> jax.Array:
    """`fn` of the indices [S] in batches of at most `batch_size`, one after another.

    The batches are as equal as can be, so that little is computed for padding; of no
    indices there is one, without any.

    Returns:
      [S, ...].
    """
    size = indices.shape[0]
    if not size:
        return fn(indices)
    num_batches = -(-size // batch_size)
    batches, _ = batching.batches(indices, -(-size // num_batches))
    results = jax.lax.map(fn, batches)
    return results.reshape(-1, *results.shape[2:])[:size]


def evaluate_images(
    model: ImageModel, batch_size: int
) -> Callable[[Model, ImageData], Metrics]:
    """Factory of `evaluate`: see `client_metrics`."""

    def count(logits, labels, mask):
        is_right = jnp.argmax(logits, axis=-1) == labels
        losses = cross_entropy(logits, labels)
        return jnp.sum(mask), jnp.sum(mask * is_right), jnp.sum(mask * losses)

    def evaluate(models: Model, data: ImageData):
        counts, right, losses = map_logits(model, batch_size, count)(models, data)
        return client_metrics(counts, right, losses, data.client_weights)

    return evaluate


def client_metrics(
    num_images: jax.Array,
    num_right: jax.Array,
    sum_cross_entropy: jax.Array,
    client_weights: jax.Array,
) -> dict[str, jax.Array]:
    """Scores over clients, each of which counts the same.

    The best and the worst 5 % of the clients, rounded up, are picked by their
    accuracy. Deviations are over the clients of a group, divided by their number.
    Clients of weight 0 and clients without images are left out; where none is left, as
    in a split without places, means are NaN.

    Args:
      num_images, num_right, sum_cross_entropy: [K], over a client's images.
      client_weights: [K], 0 = padding.

    Raises:
      InputError: if they have not the same shape.

    Returns:
      `error`, the mean share of wrong answers in [0, 1], by which the best round is
      chosen; `cross_entropy`; and accuracies in percent.
    """
    arrays.check_same_shape(
        num_images=num_images,
        num_right=num_right,
        sum_cross_entropy=sum_cross_entropy,
        client_weights=client_weights,
    )
    divisor = jnp.maximum(num_images, 1)
    accuracy = 100 * num_right / divisor
    is_real = (client_weights > 0) & (num_images > 0)
    group_size = -(-jnp.sum(is_real) * GROUP_PERCENT // 100)
    best = lowest(-accuracy, is_real, group_size)
    worst = lowest(accuracy, is_real, group_size)
    scores = {}
    for name, group in zip(GROUPS, (is_real, best, worst), strict=True):
        scores[name], scores[f"{name}_client_std"] = moments(accuracy, group)
    cross_entropy = moments(sum_cross_entropy / divisor, is_real)[0]
    none_left = ~jnp.any(is_real)
    scores = {name: jnp.where(none_left, jnp.nan, x) for name, x in scores.items()}
    cross_entropy = jnp.where(none_left, jnp.nan, cross_entropy)
    error = 1 - scores["mean_accuracy"] / 100
    return {
        "error": jnp.where(jnp.isfinite(cross_entropy), error, jnp.nan),
        "cross_entropy": cross_entropy,
        "accuracy": scores["mean_accuracy"],
        **scores,
        "accuracy_by_client": accuracy,
    }


def moments(values: jax.Array, group: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Mean and (population) standard deviation of values [K] over a group [K] bool."""
    mean = masked_mean(values, group)
    return mean, jnp.sqrt(masked_mean((values - mean) ** 2, group))


def predict_images(
    model: ImageModel, batch_size: int
) -> Callable[[Model, ImageData], jax.Array]:
    """Factory of `predict`: probabilities [K, S, classes] for the images of a split."""

    def probabilities(logits, labels, mask):
        del labels, mask
        return jax.nn.softmax(logits)

    return map_logits(model, batch_size, probabilities)
