"""What every op and layer asks of a mask: 1 or True to keep, 0 or False to leave out."""

import tensorflow as tf


def checked_mask(mask, name, *shapes):
    """`mask` as a boolean tensor of one of the shapes; None stays None.

    Raises:
        ValueError: for another shape, or numbers other than 0 and 1 (in eager mode only).
    """
    if mask is None:
        return None
    mask = tf.convert_to_tensor(mask)
    if not any(mask.shape.is_compatible_with(shape) and mask.shape.rank for shape in shapes):
        expected = " or ".join(str(tf.TensorShape(shape)) for shape in shapes)
        raise ValueError(f"{name} must have the shape {expected}, received {mask.shape}")
    if mask.dtype == tf.bool:
        return mask
    as_boolean = tf.cast(mask, tf.bool)
    if tf.executing_eagerly() and not bool(tf.reduce_all(tf.cast(as_boolean, mask.dtype) == mask)):
        raise ValueError(f"{name} must contain only 1 (keep) and 0 (leave out), received other numbers")
    return as_boolean
