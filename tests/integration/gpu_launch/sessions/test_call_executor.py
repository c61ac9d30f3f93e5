"""`gpu_launch.Executor` against the tests of the standard library's executors, on engines of this machine.

Of CPython's test_concurrent_futures run here: all of ExecutorTest, WaitTests and AsCompletedTests, and of
ExecutorShutdownTest what does not name an executor of concurrent.futures in the source of another program
(`test_interpreter_shutdown`, `test_submit_after_interpreter_shutdown`, `test_hang_gh83386`), for which there are tests
below. The tests of ThreadPool- and ProcessPoolExecutor look at their threads, processes and start methods; those of
futures, and of initializers with a logging queue, have no executor or a process pool of their own.
"""

from __future__ import annotations

import concurrent.futures
import gc
import os
import subprocess
import sys
import threading
import time
import unittest
from collections.abc import Callable
from concurrent.futures import BrokenExecutor
from typing import Any

import pytest

import gpu_launch
from gpu_launch.common.exchange import CannotPickle
from gpu_launch.errors import UsageError
from gpu_launch.sessions.call_executor import Executor
from gpu_launch.sessions.calls import RemoteTraceback
from gpu_launch.sessions.engine_workers import LOCAL, EngineWorkers

if sys.version_info >= (3, 12):
    from test.test_concurrent_futures.executor import ExecutorTest
    from test.test_concurrent_futures.test_as_completed import AsCompletedTests
    from test.test_concurrent_futures.test_shutdown import ExecutorShutdownTest
    from test.test_concurrent_futures.test_wait import WaitTests
else:
    from test.test_concurrent_futures import AsCompletedTests, ExecutorShutdownTest, ExecutorTest, WaitTests

WORKERS = 5


class SharedWorkers(EngineWorkers):
    """Engines that stay for all tests of the module, because their start takes seconds."""

    def __init__(self, shared: EngineWorkers, ids: list[int]) -> None:
        self._client, self._ids = shared._client, ids

    def start(self) -> list[int]:
        return list(self._ids)

    def cancel(self) -> None:
        """Their start does not wait."""

    def stop(self) -> None:
        """Keep them."""


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Five engines, and an executor type that uses them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("IPYTHONDIR", str(tmp_path_factory.mktemp("ipython")))
        shared = EngineWorkers(WORKERS, engines=LOCAL, nproc_per_node=1, model="")
        ids = shared.start()

        class SharedExecutor(Executor):
            def _build_workers(self, count: int, **_: Any) -> EngineWorkers:
                return SharedWorkers(shared, ids[:count])

        # The tests collect garbage often, which takes long with the objects of all imported modules.
        gc.freeze()
        yield SharedExecutor
        gc.unfreeze()
        shared.stop()


class Case(unittest.TestCase):
    """What the standard library's tests expect of their case: an executor with five workers."""

    worker_count = WORKERS
    executor_type: Any

    @pytest.fixture(autouse=True)
    def use_engines(self, engines: Any) -> None:
        type(self).executor_type = engines

    def setUp(self) -> None:
        self.executor = self.executor_type(max_workers=self.worker_count)

    def tearDown(self) -> None:
        self.executor.shutdown(wait=True)
        self.executor = None
        # No thread of the executor stays.
        assert "gpu_launch executor" not in {thread.name for thread in threading.enumerate()}


class TestExecutor(ExecutorTest, Case):  # type: ignore[misc]
    """`submit` and `map`."""


class TestWait(WaitTests, Case):  # type: ignore[misc]
    """`concurrent.futures.wait`."""


class TestAsCompleted(AsCompletedTests, Case):  # type: ignore[misc]
    """`concurrent.futures.as_completed`."""


class TestShutdown(Case):
    """`shutdown`, as far as the tests are not about processes of their own."""

    test_run_after_shutdown = ExecutorShutdownTest.test_run_after_shutdown
    test_hang_issue12364 = ExecutorShutdownTest.test_hang_issue12364
    test_cancel_futures = ExecutorShutdownTest.test_cancel_futures


# So that pytest does not collect them as tests of their own.
del ExecutorTest, WaitTests, AsCompletedTests, ExecutorShutdownTest, Case


def fail() -> None:
    raise LookupError("mine")


def test_notebooks_functions_and_the_workers_traceback(engines: Any) -> None:
    """Lambdas and closures work; an exception has the worker's traceback as its cause."""
    with engines(2) as executor:
        factor = 3
        assert list(executor.map(lambda value: value * factor, range(4))) == [0, 3, 6, 9]
        with pytest.raises(LookupError, match="mine") as caught:
            executor.submit(fail).result()
        assert isinstance(caught.value.__cause__, RemoteTraceback)
        assert 'raise LookupError("mine")' in str(caught.value.__cause__)
        assert "run_call" not in str(caught.value.__cause__)
        with pytest.raises(CannotPickle, match=r"the call\[1\]\[0\] cannot be pickled: cannot pickle '_thread.lock'"):
            executor.submit(print, threading.Lock()).result()
        with pytest.raises(CannotPickle, match=r"the result\[1\] cannot be pickled: cannot pickle '_thread.lock'"):
            executor.submit(threading.Lock).result()


def test_pending_calls_can_be_cancelled_and_running_ones_cannot(engines: Any) -> None:
    with engines(1) as executor:
        running = executor.submit(time.sleep, 0.3)
        while not running.running():
            time.sleep(0.01)
        pending = executor.submit(os.getpid)
        assert (running.cancel(), pending.cancel()) == (False, True)
    assert (running.result(), pending.cancelled()) == (None, True)


def test_initializer_runs_on_each_worker_before_its_calls(engines: Any) -> None:
    with engines(2, initializer=os.putenv, initargs=("GREETING", "hi")) as executor:
        assert executor.submit(subprocess.getoutput, "echo $GREETING").result() == "hi"
    with engines(2, initializer=fail) as executor, pytest.raises(BrokenExecutor, match="LookupError: mine"):
        executor.submit(os.getpid).result()


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ({"max_workers": 0}, ValueError, "max_workers must be greater than 0"),
        ({"nproc_per_node": 0}, UsageError, "nproc_per_node=0: a number of GPUs above 0"),
        ({"engines": "mine"}, UsageError, "engines='mine': one of gpuhub, local"),
        ({"initializer": 3}, TypeError, "initializer must be a callable"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_starts(given: Any, error: Any, text: str) -> None:
    with pytest.raises(error, match=text):
        gpu_launch.Executor(**given)


def test_a_worker_that_ends_fails_its_call_alone() -> None:
    """The others continue; without any worker left, all calls fail."""
    with Executor(2, engines=LOCAL) as executor:
        with pytest.raises(BrokenExecutor, match="The worker ended while it ran the call"):
            executor.submit(os._exit, 3).result()
        assert executor.submit(pow, 2, 8).result() == 256
        with pytest.raises(BrokenExecutor):
            executor.submit(os._exit, 3).result()
        with pytest.raises(BrokenExecutor, match="all workers have ended"):
            executor.submit(pow, 2, 8).result()


class FailingWorkers(EngineWorkers):
    """A worker whose socket fails when it is sent a call, or when its answer is read."""

    def __init__(self, function: str) -> None:
        self._function = function

    def start(self) -> list[int]:
        return [0]

    def submit(self, worker: int, payload: bytes, on_done: Callable[[int, Any], None]) -> None:
        if self._function == "submit":
            raise OSError("closed")
        on_done(worker, None)

    def read(self, done: Any) -> bytes:
        raise OSError("closed")

    def stop(self) -> None:
        """Nothing was started."""


@pytest.mark.parametrize("function", ["submit", "read"])
def test_all_calls_end_when_the_workers_cannot_be_used(function: str) -> None:
    """They, and calls that are submitted later, fail with the cause."""

    class FailingExecutor(Executor):
        def _build_workers(self, count: int, **_: Any) -> EngineWorkers:
            return FailingWorkers(function)

    with FailingExecutor(1) as executor:
        calls = [executor.submit(pow, 2, 8), executor.submit(pow, 2, 8)]
        concurrent.futures.wait(calls, timeout=60)
        for call in [*calls, executor.submit(pow, 2, 8)]:
            with pytest.raises(BrokenExecutor, match="the executor failed: OSError: closed") as caught:
                call.result(timeout=60)
            assert isinstance(caught.value.__cause__, OSError)


PROGRAM = """
import atexit, sys, time
import gpu_launch

def say(text):
    time.sleep(0.2)
    return text

def refuse():
    try:
        executor.submit(id, None)
    except RuntimeError as error:
        print(error)

atexit.register(refuse)
executor = gpu_launch.Executor(1, engines="local")
executor.submit(say, "apple").add_done_callback(lambda future: print(future.result()))
"""


def test_calls_end_before_the_interpreter_does(tmp_path: Any) -> None:
    """As with the standard executors, also without `shutdown`; afterwards nothing can be submitted."""
    environ = os.environ | {"IPYTHONDIR": str(tmp_path), "HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=environ, timeout=120, check=False
    )
    assert (done.returncode, done.stdout.splitlines(), done.stderr) == (
        0,
        ["apple", "cannot schedule new futures after interpreter shutdown"],
        "",
    )
