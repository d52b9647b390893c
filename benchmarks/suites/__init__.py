"""One module per suite; see `benchmarks`."""
