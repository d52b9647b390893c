"""A language model as a TensorFlow SavedModel, which needs none of this library to run."""

import inspect

import tensorflow as tf

from favor_keras.models.generation import Sampling, all_tokens


def export_text_model(model, characters, path):
    """Write a `CausalLM` and its characters as one SavedModel with six signatures.

    * `serving_default`: `token_ids` [B, T] to `logits` [B, T, V].
    * `prefill`: `token_ids` [B, T] to the `logits` of the last position [B, V] and a cache, each of its
      tensors under its own name. A model whose cache grows with the length also takes `max_length`, a
      number: how many positions there will be at most.
    * `decode_step`: `token_ids` [B, 1] and a cache to the `logits` [B, V] and the next cache.
    * `generate`: `prompt` [B] (strings), `num_characters`, `temperature` (0 takes the most likely
      character) and `seed` (int64) to `text` [B], the prompts with what comes after them.
    * `encode`: `text` [] (a string) to its `token_ids` [1, T], and the model's `max_length`, 0 for no limit.
    * `decode`: `token_ids` [B, T] to `text` [B].

    All numbers are int32 but the seed (int64) and the temperature (float32). `generate` raises an
    InvalidArgumentError for an empty prompt, one with unknown characters, and a text longer than the
    model's `max_length`; `encode` for an empty text and one with unknown characters.

    Args:
        model: a built `CausalLM`, one token per character.
        characters: its `favor_keras.text.Characters`.
        path: folder to write.

    Raises:
        ValueError: if the model is not built, or its vocabulary has another size.

    Example:

    >>> import tempfile, tensorflow as tf
    >>> from favor_keras import CausalLM, export_text_model
    >>> from favor_keras.text import Characters
    >>> characters = Characters.of("to be or not")
    >>> model = CausalLM(len(characters), hidden_size=16, num_layers=1, num_heads=2)
    >>> model.build((None, None))
    >>> folder = tempfile.mkdtemp()
    >>> export_text_model(model, characters, folder)
    >>> generate = tf.saved_model.load(folder).signatures["generate"]
    >>> result = generate(
    ...     prompt=tf.constant(["to be"]), num_characters=tf.constant(4), temperature=tf.constant(1.0),
    ...     seed=tf.constant(0, tf.int64))
    >>> len(result["text"][0].numpy())
    9
    """
    if not model.built:
        raise ValueError("model must be built, received one that is not: call it or its build method first")
    if len(characters) != model.vocabulary_size:
        raise ValueError(f"characters must be {model.vocabulary_size}, as the model has, received {len(characters)}")
    module = tf.Module()
    module.model, module.lookup = model, characters.lookup
    tf.saved_model.save(module, str(path), signatures=_signatures(model, characters))


def _signatures(model, characters):
    scalar = {"max_length": tf.TensorSpec([], tf.int32, "max_length")} if model.cache_grows else {}
    token_ids = {"token_ids": tf.TensorSpec([None, None], tf.int32, "token_ids")}

    def serve(inputs):
        return {"logits": model(inputs["token_ids"], training=False)}

    def prefill(inputs):
        cache = model.init_cache(tf.shape(inputs["token_ids"])[0], inputs.get("max_length"))
        return step({**inputs, **cache})

    def step(inputs):
        cache = {name: tensor for name, tensor in inputs.items() if name not in ("token_ids", "max_length")}
        logits, cache = model(inputs["token_ids"], cache=cache, training=False)
        return {"logits": logits[:, -1], **cache}

    def generate(inputs):
        return {"text": _continue(model, characters, **inputs)}

    def encode(inputs):
        token_ids, _ = _encode(characters, inputs["text"][None], "text")
        return {"token_ids": token_ids, "max_length": tf.constant(model.max_length or 0)}

    def decode(inputs):
        return {"text": characters.strings(inputs["token_ids"])}

    token = {"token_ids": tf.TensorSpec([None, 1], tf.int32, "token_ids")}
    text = {
        "prompt": tf.TensorSpec([None], tf.string, "prompt"),
        "num_characters": tf.TensorSpec([], tf.int32, "num_characters"),
        "temperature": tf.TensorSpec([], tf.float32, "temperature"),
        "seed": tf.TensorSpec([], tf.int64, "seed"),
    }
    return {
        "serving_default": _concrete(serve, token_ids),
        "prefill": _concrete(prefill, {**token_ids, **scalar}),
        "decode_step": _concrete(step, {**token, **_cache_specs(model)}),
        "generate": _concrete(generate, text),
        "encode": _concrete(encode, {"text": tf.TensorSpec([], tf.string, "text")}),
        "decode": _concrete(decode, token_ids),
    }


def _concrete(function, specs):
    """The graph of a function of a dict of tensors, which a SavedModel can take as a signature."""

    def by_name(**inputs):
        return function(inputs)

    parameters = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in specs]
    by_name.__signature__ = inspect.Signature(parameters)
    return tf.function(by_name, autograph=False).get_concrete_function(**specs)


def _cache_specs(model):
    """The tensors of the model's cache, of any batch size and, if it grows, any length."""
    small, large = (model.init_cache(size, size if model.cache_grows else None) for size in (2, 3))
    return {
        name: tf.TensorSpec(
            [a if a == b else None for a, b in zip(small[name].shape, large[name].shape)], small[name].dtype, name
        )
        for name in small
    }


def _encode(characters, texts, name):
    """Ids [B, T] of strings [B] and their mask."""
    ids = characters.ids(texts)
    unknown = tf.boolean_mask(tf.strings.unicode_split(texts, "UTF-8").values, ids.values < 0)
    checks = [
        _check(tf.size(unknown) == 0, f"{name} has unknown characters:", unknown),
        _check(tf.reduce_all(ids.row_lengths() > 0), f"{name} must not be empty"),
    ]
    with tf.control_dependencies(checks):
        return tf.maximum(ids.to_tensor(), 0), tf.sequence_mask(ids.row_lengths())


def _continue(model, characters, prompt, num_characters, temperature, seed):
    token_ids, mask = _encode(characters, prompt, "prompt")
    checks = [
        _check(num_characters >= 1, "num_characters must be at least 1, received", num_characters),
        _check(temperature >= 0, "temperature must be at least 0, received", temperature),
    ]
    if model.max_length is not None:
        length = tf.shape(token_ids)[1] + num_characters
        message = f"prompt and new characters must not exceed {model.max_length} together, received"
        checks.append(_check(length <= model.max_length, message, length))
    with tf.control_dependencies(checks):
        token_ids = tf.identity(token_ids)
    new_ids = all_tokens(model, token_ids, mask, num_characters, Sampling(temperature, None, None, seed))
    return prompt + characters.strings(new_ids)


def _check(condition, *message):
    return tf.debugging.Assert(condition, list(message), summarize=20)
