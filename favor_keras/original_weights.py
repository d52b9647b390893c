"""Weights of the original PyTorch models, loaded into these layers; PyTorch itself is not needed.

The arrays come as a mapping of PyTorch's names to NumPy arrays: an opened .npz file, or

    arrays = {name: tensor.cpu().numpy() for name, tensor in model.state_dict().items()}

Nothing is loaded unless everything fits.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from favor_keras.layers import FastWeightsAttention, GMLPBlock
from favor_keras.models import CausalLM, DecoderBlock

ORIGINAL_FAST_WEIGHTS = {
    "feature_map": "dpfp",
    "update_rule": "delta",
    "short_convolution": 0,
    "output_norm": False,
    "output_gate": False,
    "use_decay": False,
    "use_bias": False,
}
ORIGINAL_DECODER_BLOCK = {"normalize_mixer_input": False, "activation": keras.activations.relu}
ORIGINAL_GMLP_BLOCK = {
    "activation": keras.activations.gelu,
    "gating_weights": "full",
    "num_heads": 1,
    "attention_size": 0,
    "short_convolution": 0,
}


def load_fast_weights_transformer(model, arrays):
    """Load an original fast-weights transformer, with its embedding and its output, into a `CausalLM`.

    The names, for the vocabulary size V, the hidden size d, H heads, the feed-forward size f and
    every layer N from 0 on, with PyTorch's order [out, in] and the heads one after the other in each
    projection:

        src_embed.weight                       [V, d]
        layers.N.attn.query.linear.weight      [d, d]
        layers.N.attn.key.linear.weight        [d, d]
        layers.N.attn.value.linear.weight      [d, d]
        layers.N.attn.gate.0.linear.weight     [H, d]
        layers.N.attn.output.weight, .bias     [d, d], [d]
        layers.N.norm_ff.weight, .bias         [d], [d]
        layers.N.feed_forward.layer1.weight, .bias    [f, d], [f]
        layers.N.feed_forward.layer2.weight, .bias    [d, f], [d]
        norm.weight, .bias                     [d], [d]
        generator.weight, .bias                [V, d], [V]

    A `transformer.` before a name is left out, and `attn.interpolation_weight` is `attn.gate`: some
    versions of the original call it so. The original also has `layers.N.norm_self_attn.weight` and
    `.bias`, but never uses them, as it does not normalise what goes into the attention: they may be
    there or not, and are passed over. The arrays do not tell the `nu` of the feature map: give the
    model the original's.

    Args:
        model: a `CausalLM` of the original's sizes and design, as in the example: `FastWeightsAttention`
            with its default options but for `nu`, `DecoderBlock`s without a norm before it and with
            ReLU, and no position embedding. It is built if it was not.
        arrays: mapping of names to NumPy arrays of real numbers.

    Raises:
        ValueError: if `model` has another design; or one that lists all names that are missing,
            unknown or doubled and all arrays of a wrong shape or dtype. The model is then as it was.

    References:
        arXiv:2102.11174

    Example:

    >>> import numpy as np
    >>> from favor_keras import CausalLM
    >>> from favor_keras.original_weights import load_fast_weights_transformer
    >>> model = CausalLM(
    ...     vocabulary_size=5,
    ...     hidden_size=4,
    ...     num_layers=1,
    ...     num_heads=2,
    ...     feed_forward_size=8,
    ...     mixer="fast_weights",
    ...     mixer_options={"feature_map": "dpfp", "nu": 1, "short_convolution": 0, "output_norm": False},
    ...     block_options={"normalize_mixer_input": False, "activation": "relu"},
    ... )
    >>> shapes = {
    ...     "src_embed.weight": (5, 4),
    ...     "layers.0.attn.query.linear.weight": (4, 4),
    ...     "layers.0.attn.key.linear.weight": (4, 4),
    ...     "layers.0.attn.value.linear.weight": (4, 4),
    ...     "layers.0.attn.gate.0.linear.weight": (2, 4),
    ...     "layers.0.attn.output.weight": (4, 4),
    ...     "layers.0.attn.output.bias": (4,),
    ...     "layers.0.norm_ff.weight": (4,),
    ...     "layers.0.norm_ff.bias": (4,),
    ...     "layers.0.feed_forward.layer1.weight": (8, 4),
    ...     "layers.0.feed_forward.layer1.bias": (8,),
    ...     "layers.0.feed_forward.layer2.weight": (4, 8),
    ...     "layers.0.feed_forward.layer2.bias": (4,),
    ...     "norm.weight": (4,),
    ...     "norm.bias": (4,),
    ...     "generator.weight": (5, 4),
    ...     "generator.bias": (5,),
    ... }
    >>> arrays = {name: np.random.default_rng(0).normal(size=shape) for name, shape in shapes.items()}
    >>> load_fast_weights_transformer(model, arrays)
    >>> bool(np.allclose(model.head.kernel, arrays["generator.weight"].T))
    True
    """
    _check_language_model(model)
    targets, unused = _targets_around_blocks(model), set()
    for i, block in enumerate(model.blocks):
        _check_design(f"model.blocks[{i}]", block, DecoderBlock, ORIGINAL_DECODER_BLOCK)
        _check_design(f"model.blocks[{i}].mixer", block.mixer, FastWeightsAttention, ORIGINAL_FAST_WEIGHTS)
        targets |= _prefixed(f"layers.{i}.", _targets_of_decoder_block(block))
        unused |= {f"layers.{i}.norm_self_attn.weight", f"layers.{i}.norm_self_attn.bias"}
    _assign(targets, arrays, unused)


def load_gmlp_block(block, arrays):
    """Load an original gMLP block into a `GMLPBlock`.

    The names, for the sizes of the `GMLPBlock`, d features, d_ffn = f and seq_len = n, in PyTorch's
    order [out, in]:

        norm.weight, norm.bias            [d], [d]
        proj1.weight, proj1.bias          [f, d], [f]
        sgu.norm.weight, sgu.norm.bias    [f / 2], [f / 2]
        sgu.weight, sgu.bias              [n, n], [n]
        proj2.weight, proj2.bias          [d, f / 2], [d]

    `sgu.weight[i, j]` is how much position i takes of position j, in the original and here.

    Args:
        block: a built `GMLPBlock` with the default options, sizes, `causal`, `dropout` and
            `survival_probability` excepted. The original leaves it to its caller to be causal.
        arrays: mapping of names to NumPy arrays of real numbers.

    Raises:
        ValueError: if `block` has another design or is not built; or one that lists all names that
            are missing or unknown and all arrays of a wrong shape or dtype. The block is then as it was.

    References:
        arXiv:2105.08050

    Example:

    >>> import numpy as np
    >>> from favor_keras import GMLPBlock
    >>> from favor_keras.original_weights import load_gmlp_block
    >>> block = GMLPBlock(d_ffn=8, seq_len=6, causal=True)
    >>> block.build((None, None, 4))
    >>> arrays = {
    ...     "norm.weight": np.ones(4),
    ...     "norm.bias": np.zeros(4),
    ...     "proj1.weight": np.full([8, 4], 0.1),
    ...     "proj1.bias": np.zeros(8),
    ...     "sgu.norm.weight": np.ones(4),
    ...     "sgu.norm.bias": np.zeros(4),
    ...     "sgu.weight": np.zeros([6, 6]),
    ...     "sgu.bias": np.ones(6),
    ...     "proj2.weight": np.full([4, 4], 0.2),
    ...     "proj2.bias": np.zeros(4),
    ... }
    >>> load_gmlp_block(block, arrays)
    >>> bool(np.allclose(block.proj1.kernel, arrays["proj1.weight"].T))
    True
    """
    _check_design("block", block, GMLPBlock, ORIGINAL_GMLP_BLOCK)
    if not block.built:
        raise ValueError("block must be built: call it or block.build((None, None, features)) first")
    _assign(_targets_of_gmlp_block(block), arrays)


def load_gmlp_model(model, arrays):
    """Load a stack of original gMLP blocks, with an embedding and an output, into a `CausalLM`.

    The names are those of `load_gmlp_block` after `layers.N.`, for every layer N from 0 on, and for
    the vocabulary size V and the hidden size d

        src_embed.weight              [V, d]
        norm.weight, norm.bias        [d], [d]
        generator.weight, .bias       [V, d], [V]

    A `transformer.` before a name is left out. The embedding is what goes into the first block: one
    that the original multiplies by sqrt(d) must come multiplied by it.

    Args:
        model: a `CausalLM` of the same sizes with `mixer="gmlp"`, `num_heads=1`,
            `mixer_options={"gating_weights": "full", "d_ffn": f}`, `max_length` = n and no position
            embedding. It is built if it was not.
        arrays: mapping of names to NumPy arrays of real numbers.

    Raises:
        ValueError: as for `load_fast_weights_transformer`.

    References:
        arXiv:2105.08050

    Example:

    >>> import numpy as np
    >>> from favor_keras import CausalLM
    >>> from favor_keras.original_weights import load_gmlp_model
    >>> options = {"gating_weights": "full", "d_ffn": 8}
    >>> model = CausalLM(5, 4, num_layers=1, num_heads=1, mixer="gmlp", mixer_options=options, max_length=6)
    >>> shapes = {
    ...     "src_embed.weight": (5, 4),
    ...     "layers.0.norm.weight": (4,),
    ...     "layers.0.norm.bias": (4,),
    ...     "layers.0.proj1.weight": (8, 4),
    ...     "layers.0.proj1.bias": (8,),
    ...     "layers.0.sgu.norm.weight": (4,),
    ...     "layers.0.sgu.norm.bias": (4,),
    ...     "layers.0.sgu.weight": (6, 6),
    ...     "layers.0.sgu.bias": (6,),
    ...     "layers.0.proj2.weight": (4, 4),
    ...     "layers.0.proj2.bias": (4,),
    ...     "norm.weight": (4,),
    ...     "norm.bias": (4,),
    ...     "generator.weight": (5, 4),
    ...     "generator.bias": (5,),
    ... }
    >>> arrays = {name: np.random.default_rng(0).normal(size=shape) for name, shape in shapes.items()}
    >>> load_gmlp_model(model, arrays)
    >>> bool(np.allclose(model.blocks[0].sgu.weight, arrays["layers.0.sgu.weight"]))
    True
    """
    _check_language_model(model)
    targets = _targets_around_blocks(model)
    for i, block in enumerate(model.blocks):
        _check_design(f"model.blocks[{i}]", block, GMLPBlock, ORIGINAL_GMLP_BLOCK)
        targets |= _prefixed(f"layers.{i}.", _targets_of_gmlp_block(block))
    _assign(targets, arrays)


# What must be what it is in the original.


def _check_language_model(model):
    """Raise a ValueError if this is not a `CausalLM` without positions; build it if it is."""
    if not isinstance(model, CausalLM):
        raise ValueError(f"model must be a CausalLM, received {model!r}")
    if model.position_embedding is not None:
        raise ValueError("model must have position_embedding=False, as the original, received one with True")
    if not model.built:
        model.build((None, None))


def _check_design(name, layer, layer_class, options):
    if not isinstance(layer, layer_class):
        raise ValueError(f"{name} must be a {layer_class.__name__}, received {layer!r}")
    for option, expected in options.items():
        received = getattr(layer, option)
        if received != expected:
            expected, received = (getattr(value, "__name__", repr(value)) for value in (expected, received))
            raise ValueError(f"{name} must have {option}={expected}, as the original, received {received}")


# Where the arrays go.


class _Target(NamedTuple):
    """A variable, the shape of its array in PyTorch, and whether that one is transposed."""

    variable: Any
    shape: tuple
    transposed: bool = False


def _unchanged(variable):
    return _Target(variable, tuple(variable.shape))


def _matrix(kernel, num_input_axes=1):
    """The target of [out, in], for a kernel that has its inputs on the first axes and then its outputs."""
    inputs, outputs = kernel.shape[:num_input_axes], kernel.shape[num_input_axes:]
    return _Target(kernel, (math.prod(outputs), math.prod(inputs)), transposed=True)


def _dense(layer, num_input_axes=1):
    return {"weight": _matrix(layer.kernel, num_input_axes), "bias": _unchanged(layer.bias)}


def _layer_norm(layer):
    return {"weight": _unchanged(layer.gamma), "bias": _unchanged(layer.beta)}


def _prefixed(prefix, targets):
    return {f"{prefix}{name}": target for name, target in targets.items()}


def _targets_around_blocks(model):
    return {
        "src_embed.weight": _unchanged(model.embedding.embeddings),
        **_prefixed("norm.", _layer_norm(model.norm)),
        **_prefixed("generator.", _dense(model.head)),
    }


def _targets_of_decoder_block(block):
    mixer = block.mixer
    return {
        "attn.query.linear.weight": _matrix(mixer.query_dense.kernel),
        "attn.key.linear.weight": _matrix(mixer.key_dense.kernel),
        "attn.value.linear.weight": _matrix(mixer.value_dense.kernel),
        "attn.gate.0.linear.weight": _matrix(mixer.beta_dense.kernel),
        **_prefixed("attn.output.", _dense(mixer.output_dense, num_input_axes=2)),
        **_prefixed("norm_ff.", _layer_norm(block.feed_forward_norm)),
        **_prefixed("feed_forward.layer1.", _dense(block.expand)),
        **_prefixed("feed_forward.layer2.", _dense(block.contract)),
    }


def _targets_of_gmlp_block(block):
    return {
        **_prefixed("norm.", _layer_norm(block.norm)),
        **_prefixed("proj1.", _dense(block.proj1)),
        **_prefixed("sgu.norm.", _layer_norm(block.sgu.norm)),
        "sgu.weight": _unchanged(block.sgu.weight),
        "sgu.bias": _unchanged(block.sgu.bias),
        **_prefixed("proj2.", _dense(block.proj2)),
    }


# From the arrays to the targets: first every check, then every assignment.


def _assign(targets, arrays, unused=frozenset()):
    """Assign every target its array; a ValueError before the first one if anything does not fit."""
    if not isinstance(arrays, Mapping):
        raise ValueError(f"arrays must be a mapping of names to NumPy arrays, received {type(arrays).__name__}")
    names = [_canonical(name) for name in arrays]
    found = {short: np.asarray(arrays[name]) for short, name in zip(names, arrays) if short not in unused}
    faults = [f"{name} is missing" for name in targets if name not in found]
    faults += [f"{name} is unknown" for name in found if name not in targets]
    faults += [f"{name} is there {names.count(name)} times" for name in found if names.count(name) > 1]
    for name in found.keys() & targets.keys():
        faults += _faults_of_array(name, found[name], targets[name].shape)
    if faults:
        raise ValueError(f"arrays do not fit the weights: {'; '.join(sorted(faults))}")
    for name, (variable, _, transposed) in targets.items():
        array = found[name].T if transposed else found[name]
        variable.assign(np.reshape(array, variable.shape))


def _canonical(name):
    """The name that our tables have, for that of any version of the original."""
    return name.removeprefix("transformer.").replace(".interpolation_weight.", ".gate.")


def _faults_of_array(name, array, shape):
    if array.shape != shape:
        yield f"{name} must have the shape {shape}, received {array.shape}"
    if not tf.as_dtype(array.dtype).is_floating:
        yield f"{name} must have a floating dtype, received {array.dtype}"
