import tensorflow as tf


def is_xla():
    """Whether XLA will compile what is being traced: for choices of speed, which may be wrong."""
    try:  # what TensorFlow asks for its own loops; there is no public name for it
        from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext
    except ImportError:
        return False
    return GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph())
