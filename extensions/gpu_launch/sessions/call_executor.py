"""`gpu_launch.Executor`: an executor of concurrent.futures whose workers have GPUs of the cluster."""

from __future__ import annotations

import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import BrokenExecutor, Future
from concurrent.futures import Executor as StandardExecutor
from concurrent.futures import thread as _standard_threads  # noqa: F401 - see the end of this module
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from gpu_launch.errors import GpuLaunchError, UsageError
from gpu_launch.sessions import calls
from gpu_launch.sessions.engine_workers import LOCAL, EngineWorkers, WorkerGone

_ENGINES = ("gpuhub", LOCAL)


@dataclass
class _Call:
    """A submitted call."""

    future: Future[Any]
    payload: bytes
    #: It cannot be cancelled any more.
    is_running: bool = False


@dataclass(frozen=True)
class _Answer:
    """The end of a call."""

    worker: int
    #: The result, in the form that `EngineWorkers.read` takes.
    done: Any


class _Cancel:
    """The request to cancel the calls that were submitted before and do not run yet."""


#: Events of the dispatcher; None: the executor was shut down, or is not used any more.
_Event = _Call | _Answer | _Cancel | None
_Events = queue.SimpleQueue[_Event]


class Executor(StandardExecutor):
    """Runs calls on long-lived workers with GPUs, as `concurrent.futures.ProcessPoolExecutor` does on processes.

        with gpu_launch.Executor(max_workers=3, model="RTX 5090") as executor:
            losses = list(executor.map(train, [0.1, 0.01, 0.001]))

    Each worker is a container on a node of its own, with `nproc_per_node` GPUs of `model` (any). They are requested at
    the first call, all together, and kept until `shutdown`, or the end of the `with` block. One call at a time runs on
    each worker; a pending call can be cancelled, a running one cannot. An interrupt that leaves the `with` block
    cancels the pending calls, and the request while it waits for GPUs. Functions of the notebook, lambdas and closures
    can be called; arguments and results are pickled by cloudpickle.

    `initializer(*initargs)` is called once on each worker before its first call. With `engines="local"` the workers are
    processes of this machine without GPUs, to try a program.

    A worker that ends (`os._exit`, out of memory, a lost node) fails its call with BrokenExecutor, and the others
    continue; without any worker left, all calls fail so.

    Raises:
        ValueError: `max_workers` is not above 0.
        UsageError: `nproc_per_node` is not above 0, or there are no such engines.
    """

    def __init__(
        self,
        max_workers: int = 1,
        *,
        nproc_per_node: int = 1,
        model: str = "",
        initializer: Callable[..., object] | None = None,
        initargs: tuple[Any, ...] = (),
        engines: str = "gpuhub",
    ) -> None:
        if max_workers <= 0:
            raise ValueError("max_workers must be greater than 0")
        if nproc_per_node <= 0:
            raise UsageError(f"nproc_per_node={nproc_per_node}: a number of GPUs above 0 is needed.")
        if engines not in _ENGINES:
            raise UsageError(f"engines={engines!r}: one of {', '.join(_ENGINES)} is needed.")
        if initializer is not None and not callable(initializer):
            raise TypeError("initializer must be a callable")
        self._max_workers = max_workers
        self._initializer = calls.dump_call(initializer, initargs, {}) if initializer is not None else None
        self._workers = self._build_workers(max_workers, engines=engines, nproc_per_node=nproc_per_node, model=model)
        self._events: _Events = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._is_shut_down = False
        self._dispatcher: _Dispatcher | None = None
        # An executor that is dropped without a shutdown finishes its calls and releases the GPUs.
        self._finalizer = weakref.finalize(self, self._events.put, None)
        self._finalizer.atexit = False

    def _build_workers(self, count: int, **parts: Any) -> EngineWorkers:
        return EngineWorkers(count, **parts)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Schedule `fn(*args, **kwargs)` and return its future.

        Raises:
            RuntimeError: The executor, or the interpreter, was shut down.
        """
        future: Future[Any] = Future()
        payload, problem = b"", None
        try:
            payload = calls.dump_call(fn, args, kwargs)
        except Exception as error:  # noqa: BLE001 - as with processes, the future has it
            problem = error
        with self._lock:
            if self._is_shut_down:
                raise RuntimeError("cannot schedule new futures after shutdown")
            if _is_exiting.is_set():
                raise RuntimeError("cannot schedule new futures after interpreter shutdown")
            if problem is not None:
                future.set_exception(problem)
                return future
            if self._dispatcher is None:
                self._dispatcher = _Dispatcher(self._workers, self._events, self._initializer)
                _dispatchers.add(self._dispatcher)
                self._dispatcher.thread.start()
            self._events.put(_Call(future, payload))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Accept no more calls; end the workers when all calls have ended.

        Args:
            wait: Return when the GPUs are free.
            cancel_futures: Cancel the calls that do not run yet, and the request while it waits for GPUs.
        """
        with self._lock:
            self._is_shut_down = True
            dispatcher = self._dispatcher
        if dispatcher is None:
            return
        if cancel_futures:
            self._events.put(_Cancel())
            self._workers.cancel()
        self._events.put(None)
        if wait:
            dispatcher.thread.join()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown(cancel_futures=kind is not None and issubclass(kind, KeyboardInterrupt))


class _Dispatcher:
    """The thread that starts the workers, gives each one call at a time, and ends them."""

    def __init__(self, workers: EngineWorkers, events: _Events, initializer: bytes | None) -> None:
        self._workers, self.events, self._initializer = workers, events, initializer
        self._idle: list[int] = []
        self._pending: deque[_Call] = deque()
        self._running: dict[int, Future[Any]] = {}
        #: Why no call can run any more; empty while one can.
        self._broken = ""
        self._cause: BaseException | None = None
        self._is_closing = False
        self.thread = threading.Thread(target=self._run, name="gpu_launch executor", daemon=True)

    def _run(self) -> None:
        try:
            self._start()
            while not (self._is_closing and not self._pending and not self._running):
                try:
                    self._handle(self.events.get())
                    # After a cancelled start, the request to cancel the calls comes after them.
                    if not self._broken or self.events.empty():
                        self._dispatch()
                except Exception as error:  # noqa: BLE001 - ipyparallel raises whatever its sockets raise
                    self._fail(error)
        finally:
            # A thread's edge: its caller waits for the thread alone.
            self._workers.stop()

    def _fail(self, error: Exception) -> None:
        """End all calls, which cannot be sent or received any more."""
        self._broken, self._cause = f"the executor failed: {type(error).__name__}: {error}", error
        while self._running:
            self._break(self._running.popitem()[1])
        self._dispatch()

    def _break(self, future: Future[Any]) -> None:
        broken = BrokenExecutor(self._broken)
        broken.__cause__ = self._cause
        future.set_exception(broken)

    def _start(self) -> None:
        try:
            self._idle = self._workers.start()
            if self._initializer is not None:
                self._initialize()
        except GpuLaunchError as error:
            self._broken, self._cause = str(error), error
        except Exception as error:  # noqa: BLE001 - ipyparallel raises whatever its launchers raise
            self._broken, self._cause = f"the workers could not be started: {type(error).__name__}: {error}", error

    def _initialize(self) -> None:
        assert self._initializer is not None  # noqa: S101 - checked by the caller
        ended: queue.SimpleQueue[Any] = queue.SimpleQueue()
        for worker in self._idle:
            self._workers.submit(worker, self._initializer, lambda _, done: ended.put(done))
        for _ in self._idle:
            try:
                calls.load_result(self._workers.read(ended.get()))
            except BaseException as error:  # noqa: BLE001 - whatever the user's function raises
                self._broken = f"the initializer failed in a worker: {type(error).__name__}: {error}"
                self._cause = error

    def _handle(self, event: _Event) -> None:
        match event:
            case _Call():
                self._pending.append(event)
            case _Answer():
                self._finish(event)
            case _Cancel():
                for call in self._pending:
                    call.future.cancel()
            case None:
                self._is_closing = True

    def _finish(self, answer: _Answer) -> None:
        if (future := self._running.get(answer.worker)) is None:
            # The executor has failed since.
            return
        try:
            data = self._workers.read(answer.done)
        except WorkerGone as error:
            del self._running[answer.worker]
            future.set_exception(BrokenExecutor(f"The worker ended while it ran the call: {error}"))
            self._check_left()
            return
        del self._running[answer.worker]
        self._idle.append(answer.worker)
        try:
            result = calls.load_result(data)
        except BaseException as error:  # noqa: BLE001 - the call's own exception, or its result cannot be read here
            future.set_exception(error)
            return
        future.set_result(result)

    def _check_left(self) -> None:
        if not self._idle and not self._running and not self._broken:
            self._broken = "all workers have ended"

    def _dispatch(self) -> None:
        while self._pending and (self._broken or self._idle or self._pending[0].future.cancelled()):
            call = self._pending.popleft()
            if call.is_running or call.future.set_running_or_notify_cancel():
                call.is_running = True
                self._begin(call)

    def _begin(self, call: _Call) -> None:
        """Give a call to an idle worker; without one it is the first of those that wait."""
        while self._idle and not self._broken:
            worker = self._idle.pop()
            self._running[worker] = call.future
            try:
                self._workers.submit(worker, call.payload, self._note_done)
            except WorkerGone:
                del self._running[worker]
                self._check_left()
                continue
            return
        if self._broken:
            self._break(call.future)
        else:
            self._pending.appendleft(call)

    def _note_done(self, worker: int, done: Any) -> None:
        self.events.put(_Answer(worker, done))


#: Set when the interpreter ends: nothing can be submitted any more.
_is_exiting = threading.Event()
_dispatchers: weakref.WeakSet[_Dispatcher] = weakref.WeakSet()


def _finish_at_exit() -> None:
    """Let all calls end before the interpreter does, as the standard executors do."""
    _is_exiting.set()
    for dispatcher in list(_dispatchers):
        dispatcher.events.put(None)
        dispatcher.thread.join()


# Before threads can no longer be started; concurrent.futures does the same. Registered after it and so called before
# it: ipyparallel starts and stops workers with its executors.
threading._register_atexit(_finish_at_exit)  # type: ignore[attr-defined]
