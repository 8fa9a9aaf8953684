"""Map over a stream of items in several threads, with results in the order of the items."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from threading import Event, Semaphore, Thread
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def ordered_map(
    function: Callable[[Item], Result], items: Iterable[Item], threads: int, ahead: int
) -> Iterator[Result]:
    """Yield `function(item)` for each of `items`, in their order.

    One thread reads the items and `threads` threads call the function. At most `ahead` items are in flight.
    An exception of either is raised here, in order. Closing the iterator ends all threads.
    """
    begun: SimpleQueue[Future[Result] | None] = SimpleQueue()
    room, closed = Semaphore(ahead), Event()

    def read(pool: ThreadPoolExecutor) -> None:
        try:
            for item in items:
                room.acquire()
                if closed.is_set():
                    break
                begun.put(pool.submit(function, item))
            begun.put(None)
        except BaseException as error:  # raised again by the consumer
            failed: Future[Result] = Future()
            failed.set_exception(error)
            begun.put(failed)

    with ThreadPoolExecutor(threads) as pool:
        reader = Thread(target=read, args=(pool,))
        reader.start()
        try:
            while (future := begun.get()) is not None:
                result = future.result()
                room.release()
                yield result
        finally:
            closed.set()
            room.release()
            reader.join()
            pool.shutdown(cancel_futures=True)
