"""The workers of a triage: processes on this machine, a Dask cluster, or any executor of the user's."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import (
    FIRST_COMPLETED,
    CancelledError,
    Executor,
    Future,
    ProcessPoolExecutor,
    as_completed,
    wait,
)
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from nandoctor.errors import NanDoctorError
from nandoctor.evidence.triage import DumpResult
from nandoctor.fleet.worker import Job, JobAnswer, run_job
from nandoctor.machine import available_memory, count_cores, limit_memory, torch_imported

_LEAST_NBYTES = 1 << 30
"""The memory that a worker needs for torch and a small model: no more workers are started than fit."""
_SHARE = 0.9


Workers = Callable[[Sequence[Job]], Iterator[JobAnswer]]
"""Replay the files of a triage: they yield one answer for each job, as they come."""


def _run_in_processes(size: int, memory: int | None, jobs: Sequence[Job]) -> Iterator[JobAnswer]:
    """Run at most `size` processes at a time, each limited to `memory` bytes; a process that dies costs its own file.

    The code of each model gets processes of its own: two projects may have modules of the same name.
    """
    for place in dict.fromkeys(map(_code_of, jobs)):
        yield from _run_of_one_code(size, memory, deque(job for job in jobs if _code_of(job) == place))


def _run_of_one_code(size: int, memory: int | None, waiting: deque[Job]) -> Iterator[JobAnswer]:
    """Answer these jobs. Each process is a pool of its own, since the death of one ends a whole pool."""
    size = min(size, len(waiting))
    make_pool = partial(_make_pool, memory, max(count_cores() // size, 1))
    idle = [make_pool() for _ in range(size)]
    running: dict[Future[JobAnswer], tuple[Job, ProcessPoolExecutor, float]] = {}
    try:
        while waiting or running:
            while waiting and idle:
                future = _submit(idle[-1], waiting[0])
                running[future] = waiting.popleft(), idle.pop(), time.perf_counter()
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                job, pool, began = running.pop(future)
                error = future.exception()
                if error is not None:
                    _kill(pool)
                idle.append(pool if error is None else make_pool())
                yield future.result() if error is None else _died(job, error, time.perf_counter() - began)
    finally:
        for pool in (*idle, *(pool for _, pool, _ in running.values())):
            _kill(pool)


def _run_on(executor: Executor, jobs: Sequence[Job]) -> Iterator[JobAnswer]:
    """Give all jobs at once to an executor of the user's, or to that of a cluster."""
    futures = {executor.submit(run_job, job): job for job in jobs}
    for future in as_completed(futures):
        try:
            yield future.result()
        except (Exception, CancelledError) as error:  # the executor's own: `run_job` answers for those of a replay
            yield _died(futures[future], error)


@contextmanager
def open_workers(*, executor: Executor | None, jobs: int | None, scheduler: str | None) -> Iterator[Workers]:
    """Yield the executor or the cluster at `scheduler`, else `jobs` processes here, with equal shares of the memory.

    Without `jobs` there are as many as there are cores and memory for.

    Raises:
        NanDoctorError: there is no such cluster, it has no workers, or Dask is not installed.
    """
    if executor is not None:
        yield partial(_run_on, executor)
    elif scheduler is not None:
        with _open_cluster(scheduler) as workers:
            yield workers
    else:
        room = available_memory()
        if jobs is None:
            jobs = count_cores() if room is None else min(count_cores(), max(room // _LEAST_NBYTES, 1))
        memory = None if room is None else max(int(_SHARE * room / jobs), _LEAST_NBYTES)
        with _starting_processes():
            yield partial(_run_in_processes, jobs, memory)


def _make_pool(memory: int | None, num_threads: int) -> ProcessPoolExecutor:
    """Return a pool of one process, which starts with its first job."""
    return ProcessPoolExecutor(
        max_workers=1,
        mp_context=multiprocessing.get_context("spawn"),  # a fork of this process would lack torch's threads
        initializer=_prepare_worker,
        initargs=(memory, num_threads),
    )


def _submit(pool: ProcessPoolExecutor, job: Job) -> Future[JobAnswer]:
    """Give a job to the pool's process, and start that if need be; if it ended while it was idle, the job fails."""
    try:
        return pool.submit(run_job, job)
    except BrokenProcessPool as error:
        failed = Future[JobAnswer]()
        failed.set_exception(error)
        return failed


def _kill(pool: ProcessPoolExecutor) -> None:
    """End a pool whatever it is doing, as `kill_workers` does from Python 3.14 on."""
    processes = [*(getattr(pool, "_processes", None) or {}).values()]
    pool.shutdown(wait=False, cancel_futures=True)
    for process in processes:
        process.kill()


@contextmanager
def _starting_processes() -> Iterator[None]:
    """Make the processes that start in this context import nothing from the working directory.

    A new process takes over our import path only after its first imports, which a random.py beside a stranger's dump
    could hijack if the working directory were on its path. So could the process that counts the locks of a pool.
    """
    safe_path = os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        yield
    finally:
        del os.environ["PYTHONSAFEPATH"]
        os.environ.update({} if safe_path is None else {"PYTHONSAFEPATH": safe_path})


def _prepare_worker(memory: int | None, num_threads: int) -> None:
    """Prepare a process: it leaves Ctrl-C to the parent, ends with it, and writes nothing to its standard output."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.dup2(2, 1)  # what a model prints is not part of the table
    if memory is not None:
        limit_memory(memory)
    with torch_imported():
        import torch  # noqa: PLC0415  (only workers need it)

    torch.set_num_threads(num_threads)


def _end_with_parent() -> None:
    """Exit when the parent ends: if it is killed it cannot stop its processes, which would wait for work forever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _code_of(job: Job) -> str:
    """Return the file or package of the model that the user names; "" if the dump itself names it."""
    return str(job.settings.model or "").rpartition(":")[0]


def _died(job: Job, error: BaseException, elapsed_s: float = 0.0) -> JobAnswer:
    """Return the answer for a file whose worker gave none until it ended, by its deadline or otherwise."""
    name = type(error).__name__
    reason = f"Its worker gave no answer ({name}): it used too much memory, or the model's own code ended it."
    result = DumpResult(path=job.shown, key=job.key, outcome="died", reason=reason)
    if job.timeout_s is not None and elapsed_s >= job.timeout_s:
        result = replace(result, outcome="timed-out", reason=f"It took longer than {job.timeout_s:g} s (--timeout).")
    return JobAnswer(result=result)


@contextmanager
def _open_cluster(address: str) -> Iterator[Workers]:
    try:
        from distributed import Client  # noqa: PLC0415  (an extra)
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
        if not client.nthreads():
            raise NanDoctorError(
                f"The cluster at {address} has no workers.", remedy="Start some: `dask worker ADDRESS --nthreads 1`."
            )
        yield partial(_run_on, client.get_executor(pure=False, retries=0))
