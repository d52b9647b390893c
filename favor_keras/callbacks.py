"""Keras callbacks."""

import keras


class RedrawProjections(keras.callbacks.Callback):
    """Draws the random projections of a model's attention layers anew during training.

    Every layer with a `redraw_interval` is redrawn each time the optimizer has made that many more
    steps, never in evaluation or prediction. The matrices depend on the layer's seed and its saved
    number of draws alone, so they are the same on all replicas, and a resumed training goes on with
    the ones that an uninterrupted one would have had.

    Raises:
        ValueError: when training starts, if no layer of the model has a `redraw_interval`.

    Example:

    >>> import keras, numpy as np
    >>> from favor_keras import RedrawProjections, SelfAttention
    >>> layer = SelfAttention(8, 2, projection_matrix_type="orthogonal", redraw_interval=2)
    >>> model = keras.Sequential([layer])
    >>> model.compile("sgd", "mse")
    >>> data = np.ones([12, 3, 8], "float32")
    >>> _ = model.fit(data, data, batch_size=2, verbose=0, callbacks=[RedrawProjections()])
    >>> int(layer.draws)
    3
    """

    def on_train_begin(self, logs=None):
        self._layers = [layer for layer in layers_within(self.model) if getattr(layer, "redraw_interval", 0)]
        if not self._layers:
            raise ValueError("RedrawProjections needs a model with a layer that has a redraw_interval, found none")
        for layer in self._layers:
            layer.is_redrawn_by_callback = True

    def on_epoch_begin(self, epoch, logs=None):
        # Not when training begins: a callback that restores a backup may come after this one.
        self._step = int(self.model.optimizer.iterations.numpy())

    def on_train_batch_end(self, batch, logs=None):
        # With steps_per_execution a batch of the callback is several steps.
        step = int(self.model.optimizer.iterations.numpy())
        for layer in self._layers:
            for _ in range(step // layer.redraw_interval - self._step // layer.redraw_interval):
                layer.redraw()
        self._step = step

    def on_train_end(self, logs=None):
        for layer in self._layers:
            layer.is_redrawn_by_callback = False


def layers_within(layer):
    """The layer itself and all layers in its attributes, at any depth, each once."""
    found, waiting = {}, [layer]
    while waiting:
        layer = waiting.pop()
        if id(layer) not in found:
            found[id(layer)] = layer
            waiting += [child for child in _elements(vars(layer)) if isinstance(child, keras.layers.Layer)]
    return list(found.values())


def _elements(structure):
    if isinstance(structure, dict):
        structure = list(structure.values())
    if not isinstance(structure, (list, tuple)):
        return [structure]
    return [element for child in structure for element in _elements(child)]
