"""Algorithms 1 and 2 of CNFGNN as loops over clients, batches and windows.

No scan and no vmap: a window at a time through `model.apply`, gradients averaged by
hand. The draws come from the same keys as the library's, the probabilities from NumPy.
"""

import functools

import jax
import numpy as np
import optax

from fedjax_graph.data.traffic.windows import TrafficData


def read_window(data: TrafficData, client: int, index: int):
    """Inputs and targets [12, 1, 2] of one window of one client."""
    start = int(data.starts[index])
    value = (np.asarray(data.speed[client]) - float(data.mean)) / float(data.std)
    frames = np.stack([value, np.asarray(data.clock)], axis=-1)
    window = frames[start : start + 24, None].astype(np.float32)
    return window[:12], window[12:]


def draw_batches(key, num_windows, batch_size, num_epochs, first_step, decay):
    """[(indices of windows, whether to feed the truth [12])] of all passes."""
    shuffle_key, feed_key = jax.random.split(key)
    indices = []
    for epoch_key in jax.random.split(shuffle_key, num_epochs):
        order = np.asarray(jax.random.permutation(epoch_key, num_windows))
        indices += [
            order[low : low + batch_size] for low in range(0, len(order), batch_size)
        ]
    draws = np.asarray(jax.random.uniform(feed_key, (len(indices), 12)))
    with np.errstate(over="ignore"):
        steps = first_step + np.arange(len(indices), dtype=np.float64)
        probability = decay / (decay + np.exp(steps / decay))
    return list(zip(indices, draws < probability[:, None], strict=True))


def draw_cohort(key, client_ids, size):
    """The clients with the smallest draws, by place."""
    if size == len(client_ids):
        return list(range(size))
    draws = [float(jax.random.uniform(jax.random.fold_in(key, i))) for i in client_ids]
    return sorted(np.argsort(draws)[:size].tolist())


def mean_of(trees):
    return jax.tree.map(lambda *x: np.mean(np.stack(x), axis=0), *trees)


def weighted_mean_of(trees, weights):
    return jax.tree.map(
        lambda *x: np.average(np.stack(x), axis=0, weights=weights).astype(np.float32),
        *trees,
    )


class Clients:
    """ClientUpdate of Algorithm 2 for a model."""

    def __init__(self, model, learning_rate, jit):
        optimizer = optax.adam(learning_rate)
        self.start = optimizer.init

        def loss(params, inputs, targets, embedding, feed):
            outputs = model.apply({"params": params}, inputs, embedding, targets, feed)
            return ((outputs - targets[..., 0]) ** 2).mean()

        def step(params, grads, opt_state):
            updates, opt_state = optimizer.update(grads, opt_state)
            return optax.apply_updates(params, updates), opt_state

        self.value_and_grad = jit(jax.value_and_grad(loss))
        self.step = jit(step)

    def update(self, params, data, client, embeddings, batches, pull=None):
        """Passes over one client's windows; also the mean of the batches' losses.

        Args:
          pull: parameters -> what is added to the gradient.
        """
        opt_state, losses = self.start(params), []
        for indices, feed in batches:
            values, grads = [], []
            for index in indices:
                value, grad = self.value_and_grad(
                    params,
                    *read_window(data, client, index),
                    embeddings[client, index][None],
                    feed,
                )
                values.append(value)
                grads.append(grad)
            grads = mean_of(grads)
            if pull is not None:
                grads = jax.tree.map(np.add, grads, pull(params))
            params, opt_state = self.step(params, grads, opt_state)
            losses.append(np.mean(values))
        return params, np.mean(losses)

    def train_cohort(self, rows, data, key, size, embeddings, batches_of):
        """Lines 7-14 of Algorithm 1 without the average.

        Args:
          rows: the model of each client.
          batches_of: key -> batches.

        Returns:
          {client: (params, loss)} of the cohort.
        """
        cohort_key, update_key = jax.random.split(key)
        ids = np.asarray(data.client_ids)
        return {
            client: self.update(
                rows[client],
                data,
                client,
                embeddings,
                batches_of(jax.random.fold_in(update_key, ids[client])),
            )
            for client in draw_cohort(cohort_key, ids, size)
        }


def merge(rows, trained, data, is_averaged):
    """FedAvg over the cohort, or each trained client's own; and the mean loss."""
    weights = [float(data.client_weights[client]) for client in trained]
    models, losses = zip(*trained.values(), strict=True)
    loss = np.average(losses, weights=weights)
    if is_averaged:
        return [weighted_mean_of(models, weights)] * len(rows), loss
    return [
        trained[client][0] if client in trained else row
        for client, row in enumerate(rows)
    ], loss


class Server:
    """ServerUpdate of Algorithm 1: the loss of the whole, end to end."""

    trained = 0  # of the arguments of the joint loss: the server's parameters

    def __init__(self, model, gn, learning_rate, jit):
        optimizer = optax.adam(learning_rate)
        self.start = optimizer.init

        def embed(server_params, rows, graph, inputs):
            hidden = [
                model.apply({"params": params}, x, method=model.encode)
                for params, x in zip(rows, inputs, strict=True)
            ]
            hidden = jax.numpy.stack(hidden)
            return gn.apply({"params": server_params}, graph, hidden)

        def joint_loss(server_params, rows, graph, inputs, targets, feed):
            embeddings = embed(server_params, rows, graph, inputs)
            total = 0.0
            for client, params in enumerate(rows):
                outputs = model.apply(
                    {"params": params},
                    inputs[client],
                    embeddings[client],
                    targets[client],
                    feed,
                )
                total += ((outputs - targets[client][..., 0]) ** 2).mean()
            return total

        def step(params, grads, opt_state):
            updates, opt_state = optimizer.update(grads, opt_state)
            return optax.apply_updates(params, updates), opt_state

        self.embed = jit(embed)
        self.value_and_grad = jit(jax.value_and_grad(joint_loss, self.trained))
        self.step = jit(step)

    def window(self, data, index):
        """Inputs and targets of all clients, [K, 12, 1, 2]."""
        windows = [read_window(data, k, index) for k in range(len(data.speed))]
        return tuple(np.stack(part) for part in zip(*windows, strict=True))

    def embed_all(self, server_params, rows, data):
        """h_G [K, S, H] of every window, lines 31-35."""
        columns = [
            self.embed(server_params, rows, data.graph, self.window(data, index)[0])
            for index in range(len(data.starts))
        ]
        return np.concatenate(columns, axis=1)

    def gradient(self, server_params, rows, data, indices, feed):
        """Of the joint loss, a mean over windows of a sum over clients."""
        parts = [
            self.value_and_grad(
                server_params, rows, data.graph, *self.window(data, index), feed
            )
            for index in indices
        ]
        values, grads = zip(*parts, strict=True)
        return np.mean(values), mean_of(grads)

    def update(self, server_params, opt_state, rows, data, batches):
        """Lines 19-30; also the mean loss of a client."""
        losses = []
        for indices, feed in batches:
            loss, grads = self.gradient(server_params, rows, data, indices, feed)
            server_params, opt_state = self.step(server_params, grads, opt_state)
            losses.append(loss / len(rows))
        return server_params, opt_state, np.mean(losses)


class Joint(Server):
    """Both halves trained end to end on the same loss."""

    trained = (1, 0)  # rows of clients, and the server's parameters

    def __init__(self, model, gn, client_rate, server_rate, jit):
        super().__init__(model, gn, server_rate, jit)
        self.client_optimizer = optax.adam(client_rate)

        def client_step(params, grads, opt_state):
            updates, opt_state = self.client_optimizer.update(grads, opt_state)
            return optax.apply_updates(params, updates), opt_state

        self.client_step = jit(client_step)


def joint_rounds(joint, start, data, keys, config, merged):
    """SL and its kin; yields (rows, server parameters, loss) after each round.

    Args:
      merged: `never`, `round` or `step`, when models are averaged; `one` for a single
        model that takes the sum of all gradients.
    """
    params, server_params = start
    num_clients = len(data.speed)
    rows = [params] * (1 if merged == "one" else num_clients)
    client_states = [joint.client_optimizer.init(row) for row in rows]
    server_state, num_steps = joint.start(server_params), 0
    weights = [float(x) for x in data.client_weights]

    def averaged(rows):
        return [weighted_mean_of(rows, weights)] * num_clients

    for key in keys:
        batches = draw_batches(
            key,
            len(data.starts),
            config.server_batch_size,
            1,
            num_steps,
            config.sampling_decay,
        )
        losses = []
        for indices, feed in batches:
            everybody = rows * num_clients if merged == "one" else rows
            loss, (row_grads, server_grads) = joint.gradient(
                server_params, everybody, data, indices, feed
            )
            if merged == "one":
                row_grads = [jax.tree.map(lambda *x: sum(x), *row_grads)]
            stepped = [
                joint.client_step(*one)
                for one in zip(rows, row_grads, client_states, strict=True)
            ]
            rows, client_states = map(list, zip(*stepped, strict=True))
            server_params, server_state = joint.step(
                server_params, server_grads, server_state
            )
            rows = averaged(rows) if merged == "step" else rows
            losses.append(loss / num_clients)
        num_steps += len(batches)
        rows = averaged(rows) if merged == "round" else rows
        shown = rows * num_clients if merged == "one" else rows
        yield shown, server_params, np.mean(losses)


def fed_avg_rounds(clients, params, data, keys, config, is_averaged):
    """GRU + FedAvg; yields the models of all clients and the loss after each round."""
    num_clients, num_windows = len(data.speed), len(data.starts)
    rows, num_steps, task = [params] * num_clients, 0, config.task
    size = max(1, round(config.participation * num_clients))
    embeddings = np.zeros((num_clients, num_windows, 0), np.float32)
    for key in keys:
        batches_of = functools.partial(
            draw_batches,
            num_windows=num_windows,
            batch_size=task.batch_size,
            num_epochs=task.local_epochs,
            first_step=num_steps,
            decay=task.sampling_decay,
        )
        trained = clients.train_cohort(rows, data, key, size, embeddings, batches_of)
        rows, loss = merge(rows, trained, data, is_averaged)
        num_steps += task.local_epochs * -(-num_windows // task.batch_size)
        yield rows, loss


def cnfgnn_rounds(clients, server, start, data, keys, config, is_averaged):
    """Algorithm 1; yields (rows, server parameters, both losses) after each round."""
    num_clients, num_windows = len(data.speed), len(data.starts)
    params, server_params = start
    rows, num_steps = [params] * num_clients, 0
    size = max(1, round(config.participation * num_clients))
    embeddings = np.zeros((num_clients, num_windows, config.hidden_size), np.float32)
    opt_state = server.start(server_params)
    for key in keys:
        client_key, server_key = jax.random.split(key)
        draw = functools.partial(
            draw_batches, num_windows=num_windows, decay=config.sampling_decay
        )
        batches_of = functools.partial(
            draw,
            batch_size=config.client_batch_size,
            num_epochs=config.client_rounds,
            first_step=num_steps,
        )
        trained = clients.train_cohort(
            rows, data, client_key, size, embeddings, batches_of
        )
        rows, client_loss = merge(rows, trained, data, is_averaged)
        num_steps += len(batches_of(client_key))
        batches = draw(
            server_key,
            batch_size=config.server_batch_size,
            num_epochs=config.server_rounds,
            first_step=num_steps,
        )
        server_params, opt_state, server_loss = server.update(
            server_params, opt_state, rows, data, batches
        )
        num_steps += len(batches)
        embeddings = server.embed_all(server_params, rows, data)
        yield rows, server_params, (client_loss, server_loss)
