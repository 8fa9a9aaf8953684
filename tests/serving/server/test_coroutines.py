"""Coroutines that resume where their result is set."""

import asyncio

import pytest

from serving.server.coroutines import Result, Runner


def test_a_coroutine_resumes_where_its_result_is_set():
    first, second, seen = Result[int](), Result[int](), []

    async def add():
        seen.append(await first + await second)

    second.set(2)  # before anybody waits
    Runner(add()).run()
    assert (seen, first.is_done) == ([], False)
    first.set(1)
    assert seen == [3]


@pytest.mark.parametrize(
    ("end", "error"),
    [
        (lambda result, _: result.fail(OSError("gone")), OSError),
        (lambda _, runner: runner.cancel(), asyncio.CancelledError),
    ],
)
def test_an_error_is_raised_where_the_coroutine_waits(end, error):
    result, after, seen = Result[int](), Result[int](), []

    async def wait():
        with pytest.raises(error):
            await result
        seen.append(result.is_done)  # so nobody sets it any more
        seen.append(await after)

    runner = Runner(wait())
    runner.run()
    end(result, runner)
    after.set(5)
    assert seen == [True, 5]
