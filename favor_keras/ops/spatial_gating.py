"""The spatial gating unit of gMLP: half of the channels, mixed along the sequence, gates the other half.

    output_i = u_i * (sum_j W_ij v_j + b_i),    W [n, n], b [n],

elementwise in the channels; over all j, or over j <= i if causal. A sequence shorter than n uses the
leading block of W. A gate may have H heads: W [H, n, n] and b [H, n], each for its own D / H of the
channels. A Toeplitz matrix is given by its diagonals, W_ij = w_{i - j + n - 1}, from the upper right
corner to the lower left.

W is tied to places in the sequence, so a key mask leaves the places to the positions that it keeps:
they are numbered as if the others had been cut out. Padding on either side or inside then changes
nothing, and a sequence in pieces can be padded differently in every piece. The state is the v that
have come so far, each at its place, and how many they are:

    gate_inputs [B, n, D],    position [B].

Whole sequences multiply by one W. Pieces, whose places differ between the examples of a batch, and
masks over pairs take the rows of W that they need, [H, B, T, n], and multiply by those.
"""

import math

import tensorflow as tf

from favor_keras.ops.precision import full_precision

STATE_NAMES = ("gate_inputs", "position")


def zero_state(batch_size, length, size, dtype="float32"):
    """The state before the first token, with room for `length` tokens of `size` channels."""
    return {"gate_inputs": tf.zeros([batch_size, length, size], dtype), "position": tf.zeros([batch_size], dtype)}
