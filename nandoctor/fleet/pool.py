"""The workers of a triage: processes on this machine, a Dask cluster, or any executor of the user's."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import CancelledError, Executor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import cast
from unittest.mock import patch

from nandoctor.errors import NanDoctorError
from nandoctor.evidence.triage import DumpResult
from nandoctor.fleet.worker import Job, JobAnswer, run_job
from nandoctor.machine import available_memory, count_cores, limit_memory, torch_imported

_LEAST_NBYTES = 1 << 30
"""The memory that a worker needs for torch and a small model: no more workers are started than fit."""
_SHARE = 0.9


Workers = Callable[[Sequence[Job]], Generator[JobAnswer]]
"""Replay the files of a triage: they yield one answer for each job, as they come, and stop when they are closed."""


def _run_in_processes(size: int, memory: int | None, jobs: Sequence[Job]) -> Generator[JobAnswer]:
    """Answer the jobs in at most `size` processes that take one after the other, each limited to `memory` bytes.

    A process that dies costs its own file, and is replaced by another.
    """
    waiting, size = deque(jobs), min(size, len(jobs))
    idle: list[tuple[BaseProcess, Connection]] = []
    running: dict[Connection, tuple[BaseProcess, Job, float]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < size:
                process, connection = idle.pop() if idle else _start_process(memory, max(count_cores() // size, 1))
                running[connection] = process, waiting.popleft(), time.perf_counter()
                with contextlib.suppress(OSError):  # it ended while it was idle, and so gives no answer
                    connection.send(running[connection][1])
            for connection in cast(list[Connection], wait(running)):
                process, job, began = running[connection]
                try:
                    answer = connection.recv()
                    idle.append((process, connection))
                except (EOFError, OSError):
                    process.kill()  # if it lives on without the connection
                    answer = _died(job, BrokenProcessPool(), time.perf_counter() - began)
                del running[connection]
                yield answer
    finally:
        for process in (*(process for process, _ in idle), *(process for process, _, _ in running.values())):
            process.kill()


def _run_on(executor: Executor, jobs: Sequence[Job]) -> Generator[JobAnswer]:
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
        # A new process takes over our import path only after its first imports, which a random.py beside a stranger's
        # dump could hijack if the working directory were on its path. So could multiprocessing's own process, which
        # tracks them.
        with patch.dict(os.environ, PYTHONSAFEPATH="1"):
            yield partial(_run_in_processes, jobs, memory)


def _start_process(memory: int | None, num_threads: int) -> tuple[BaseProcess, Connection]:
    """Start a process that answers jobs, and return it with the connection to it."""
    context = multiprocessing.get_context("spawn")  # a fork of this process would lack torch's threads
    connection, its_own = context.Pipe()
    process = context.Process(target=_answer_jobs, args=(its_own, memory, num_threads))
    process.start()
    its_own.close()  # here: the connection ends with the process
    return process, connection


def _answer_jobs(connection: Connection, memory: int | None, num_threads: int) -> None:
    """Answer jobs, in a process that leaves Ctrl-C to its parent, ends with it, and prints on standard error alone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.dup2(2, 1)  # what a model prints is not part of the table
    if memory is not None:
        limit_memory(memory)
    with torch_imported():
        import torch  # noqa: PLC0415  (only workers need it)

    torch.set_num_threads(num_threads)
    with contextlib.suppress(EOFError, BrokenPipeError):  # the parent has ended
        while True:
            connection.send(run_job(connection.recv()))


def _end_with_parent() -> None:
    """Exit when the parent ends: if it is killed it cannot stop its processes, which would wait for work forever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


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
