"""Draws how far FAVOR+ is from exact softmax attention, for sizes of heads, inputs and features.

python examples/approximation_error.py [--output approximation_error.png]
"""

import argparse

import matplotlib
import tensorflow as tf

from favor_keras.diagnostics import approximation_error

NUM_FEATURES = (16, 64, 256, 1024, 4096)
CASES = [(16, 0.5), (64, 0.5), (16, 1.0), (64, 1.0)]


def measure(head_size, deviation, kernel, length=64):
    """The errors for normal queries and keys of a standard deviation."""
    query, key, value = tf.random.stateless_normal([3, 1, length, 1, head_size], seed=[head_size, 0])
    return approximation_error(deviation * query, deviation * key, value, NUM_FEATURES, kernel)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", default="approximation_error.png", help="the picture to write")
    parser.add_argument("--kernel", default="softmax", choices=["softmax", "softmax_hyperbolic", "softmax_trig"])
    arguments = parser.parse_args(argv)
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    print(f"{'head size':>9} {'deviation':>9} {'features':>9} {'matrix error':>13} {'output error':>13}")
    for head_size, deviation in CASES:
        rows = measure(head_size, deviation, arguments.kernel)
        for row in rows:
            print(
                f"{head_size:9} {deviation:9} {row['num_features']:9} "
                f"{row['matrix_error']:13.3f} {row['output_error']:13.3f}"
            )
        label = f"heads of {head_size}, standard deviation {deviation}"
        axes.loglog(NUM_FEATURES, [row["matrix_error"] for row in rows], marker="o", label=label)
    axes.axhline(1.0, color="grey", linestyle=":", label="error as large as the weights")
    axes.set(
        xlabel="random features",
        ylabel="relative error of the attention weights",
        title=f"Kernel {arguments.kernel}: unbiased is not yet accurate",
    )
    axes.legend()
    figure.savefig(arguments.output, dpi=120)
    print(f"Wrote {arguments.output}")


if __name__ == "__main__":
    main()
