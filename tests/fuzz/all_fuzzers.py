"""Every fuzzer."""

from tests.fuzz import datasets, deltas, formats, inputs, options, runs, serving, specs

FUZZERS = [
    *specs.FUZZERS,
    *datasets.FUZZERS,
    *runs.FUZZERS,
    *deltas.FUZZERS,
    *options.FUZZERS,
    *inputs.FUZZERS,
    *formats.FUZZERS,
    *serving.FUZZERS,
]
