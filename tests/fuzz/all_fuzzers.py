"""Every fuzzer."""

from tests.fuzz import datasets, formats, inputs, options, runs, specs

FUZZERS = [
    *specs.FUZZERS,
    *datasets.FUZZERS,
    *runs.FUZZERS,
    *options.FUZZERS,
    *inputs.FUZZERS,
    *formats.FUZZERS,
]
