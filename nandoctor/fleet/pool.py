"""The workers of a triage: processes on this machine, or the workers of a Dask cluster."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import forkserver
from queue import SimpleQueue
from typing import Any, TypeVar

from nandoctor.errors import NanDoctorError
from nandoctor.machine import available_memory, count_cores, limit_memory

T = TypeVar("T")

_LEAST_NBYTES = 1 << 30
"""The memory that a worker needs for torch and a small model: no more workers are started than fit."""
_SHARE = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Workers:
    """An executor and the number of calls that it runs at once; `is_death` is True for the error of a dead worker."""

    executor: Executor
    size: int
    is_death: Callable[[BaseException], bool]


@contextmanager
def open_workers(*, jobs: int | None, scheduler: str | None, memory: int | None) -> Iterator[Workers]:
    """Yield workers of the cluster at `scheduler`, else `jobs` processes here, each limited to `memory` bytes.

    Raises:
        NanDoctorError: there is no such cluster, it has no workers, or Dask is not installed.
    """
    if scheduler is not None:
        with _open_cluster(scheduler) as workers:
            yield workers
        return
    room = available_memory()
    if jobs is None:
        jobs = count_cores() if room is None else min(count_cores(), max(room // _LEAST_NBYTES, 1))
    if memory is None and room is not None:
        memory = max(int(_SHARE * room / jobs), _LEAST_NBYTES)
    executor = SingleProcesses(jobs, memory=memory)
    try:
        yield Workers(executor=executor, size=jobs, is_death=lambda error: isinstance(error, BrokenProcessPool))
    finally:
        executor.shutdown(wait=False, cancel_futures=True)


class SingleProcesses(Executor):
    """Processes that live until the end, in one pool each: one that dies loses no other's work.

    At most `size` calls may be waiting for a result at a time.
    """

    def __init__(self, size: int, *, memory: int | None) -> None:
        self._memory = memory
        self._num_threads = max(count_cores() // size, 1)
        self._lock = threading.Lock()
        self._pools = {self._start() for _ in range(size)}
        self._idle: SimpleQueue[ProcessPoolExecutor] = SimpleQueue()
        for pool in self._pools:
            self._idle.put(pool)

    def _start(self) -> ProcessPoolExecutor:
        with _off_the_working_directory():
            return ProcessPoolExecutor(
                max_workers=1,
                mp_context=_context(),
                initializer=_prepare_worker,
                initargs=(self._memory, self._num_threads),
            )

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Run the call in an idle process; wait for one, as results arrive before their process is idle again."""
        pool = self._idle.get()
        with self._lock, _off_the_working_directory():
            try:
                future = pool.submit(fn, *args, **kwargs)  # which starts the process
            except KeyboardInterrupt:
                pid = getattr(getattr(forkserver, "_forkserver", None), "_forkserver_pid", None)
                if pid is not None:
                    os.kill(pid, signal.SIGKILL)
                raise
        future.add_done_callback(lambda done: self._release(pool, done))
        return future

    def _release(self, pool: ProcessPoolExecutor, done: Future[Any]) -> None:
        broken = not done.cancelled() and isinstance(done.exception(), BrokenProcessPool)
        try:
            if broken:
                with self._lock:
                    if pool in self._pools:  # not after `shutdown`, which breaks them itself
                        self._pools.remove(pool)
                        pool = self._start()
                        self._pools.add(pool)
        finally:
            self._idle.put(pool)  # a broken one if no other can be made: it refuses the next call

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Stop the processes; without `wait` they are killed, whatever they are doing."""
        with self._lock:
            pools, self._pools = self._pools, set()
        for pool in pools:
            processes = list((getattr(pool, "_processes", None) or {}).values())
            pool.shutdown(wait=wait, cancel_futures=cancel_futures)
            if not wait:
                for process in processes:
                    process.kill()


def _context() -> multiprocessing.context.BaseContext:
    """Return how processes start: each is forked from one that has imported what a replay needs, and has run nothing.

    A fork of this process would lack torch's threads. Call it in `_off_the_working_directory`.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods() or sys.platform == "darwin":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["nandoctor.pipeline"])
    # Ctrl-C goes to all processes of a terminal: that one, still importing, would print a traceback.
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGINT, signal.SIG_IGN) if is_main else None
    try:
        forkserver.ensure_running()
    finally:
        if before is not None:
            signal.signal(signal.SIGINT, before)
    return context


@contextmanager
def _off_the_working_directory() -> Iterator[None]:
    """Start processes without the working directory on their import path while the context is open.

    They take over our path only after their first imports, which a random.py beside a stranger's dump could hijack.
    """
    before = os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        yield
    finally:
        del os.environ["PYTHONSAFEPATH"]
        os.environ.update({} if before is None else {"PYTHONSAFEPATH": before})


def _prepare_worker(memory: int | None, num_threads: int) -> None:
    """Prepare a process: it leaves Ctrl-C to the parent, ends with it, and writes nothing to its standard output."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.dup2(2, 1)  # what a model prints is not part of the table
    if memory is not None:
        limit_memory(memory)
    import torch  # noqa: PLC0415  (only workers need it)

    torch.set_num_threads(num_threads)


def _end_with_parent() -> None:
    """Exit when the parent ends: if it is killed it cannot stop its processes, which would wait for work forever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


@contextmanager
def _open_cluster(address: str) -> Iterator[Workers]:
    try:
        from distributed import Client  # noqa: PLC0415  (an extra)
        from distributed.scheduler import KilledWorker  # noqa: PLC0415
    except ImportError as error:
        raise NanDoctorError(
            "A cluster needs Dask, which is not installed.", remedy="Install it: pip install 'nandoctor[fleet]'."
        ) from error
    try:
        client = Client(address, timeout="20s", set_as_default=False)
    except (OSError, ValueError) as error:
        raise NanDoctorError(
            f"There is no Dask scheduler at {address}: {error}.",
            remedy="Start one with `dask scheduler` and workers with `dask worker ADDRESS --nthreads 1`.",
        ) from error
    with contextlib.closing(client):
        size = sum(client.nthreads().values())
        if not size:
            raise NanDoctorError(
                f"The cluster at {address} has no workers.", remedy="Start some: `dask worker ADDRESS --nthreads 1`."
            )
        executor = client.get_executor(pure=False, retries=0)
        yield Workers(executor=executor, size=size, is_death=lambda error: isinstance(error, KilledWorker))
