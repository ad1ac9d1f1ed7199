"""The workers of a triage: processes on this machine, a Dask cluster, or any executor of the user's."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
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

from nandoctor.errors import NanDoctorError
from nandoctor.evidence.triage import DumpResult
from nandoctor.fleet.worker import Job, JobAnswer, run_job
from nandoctor.machine import available_memory, count_cores, limit_memory

_LEAST_NBYTES = 1 << 30
"""The memory that a worker needs for torch and a small model: no more workers are started than fit."""
_SHARE = 0.9


class Processes:
    """Processes on this machine, at most `size` at a time, each limited to `memory` bytes; None for no limit.

    The code of each model gets processes of its own: two projects may have modules of the same name.
    """

    def __init__(self, size: int, memory: int | None) -> None:
        self.size = size
        self._memory = memory

    def run(self, jobs: Sequence[Job]) -> Iterator[JobAnswer]:
        """Yield one answer for each job, as they come. A process that dies costs its own file."""
        for place in dict.fromkeys(map(_code_of, jobs)):
            waiting = deque(job for job in jobs if _code_of(job) == place)
            suspects: list[Job] = []
            while waiting:
                suspects += yield from self._run_until_broken(waiting)
            for job in suspects:
                yield self._run_alone(job)

    def _run_until_broken(self, waiting: deque[Job]) -> Generator[JobAnswer, None, list[Job]]:
        """Answer jobs until none is waiting or a process dies; return those that were running then.

        The death of one process ends the whole pool, so no more jobs are submitted than there are processes.
        """
        running: dict[Future[JobAnswer], Job] = {}
        with _open_pool(min(self.size, len(waiting)), self._memory) as pool:
            while waiting or running:
                try:
                    while waiting and len(running) < self.size:
                        future = _submit(pool, waiting[0])
                        running[future] = waiting.popleft()
                    done, _ = wait(running, return_when=FIRST_COMPLETED)
                    for future in done:
                        answer = future.result()
                        del running[future]
                        yield answer
                except BrokenProcessPool:
                    break
        return [*running.values()]

    def _run_alone(self, job: Job) -> JobAnswer:
        """Answer a job that was running when some process died, to know whether it was this one's."""
        began = time.perf_counter()
        with _open_pool(1, self._memory) as pool:
            try:
                return _submit(pool, job).result()
            except BrokenProcessPool as error:
                was_ended = job.timeout_s is not None and time.perf_counter() - began >= job.timeout_s
                return _timed_out(job) if was_ended else _died(job, error)


class Given:
    """An executor of the user's, or that of a cluster: it gets all jobs at once."""

    def __init__(self, executor: Executor, size: int = 0) -> None:
        self.size = size
        self._executor = executor

    def run(self, jobs: Sequence[Job]) -> Iterator[JobAnswer]:
        """Yield one answer for each job, as they come."""
        futures = {self._executor.submit(run_job, job): job for job in jobs}
        for future in as_completed(futures):
            try:
                yield future.result()
            except (Exception, CancelledError) as error:  # the executor's own: `run_job` answers for those of a replay
                yield _died(futures[future], error)


Workers = Processes | Given
"""What replays the files of a triage; `size` is the number of files at a time, 0 if it is not known."""


@contextmanager
def open_workers(
    *, executor: Executor | None, jobs: int | None, scheduler: str | None, memory: int | None
) -> Iterator[Workers]:
    """Yield the executor or the cluster at `scheduler`, else `jobs` processes here, each limited to `memory` bytes.

    Raises:
        NanDoctorError: there is no such cluster, it has no workers, or Dask is not installed.
    """
    if executor is not None:
        yield Given(executor)
    elif scheduler is not None:
        with _open_cluster(scheduler) as workers:
            yield workers
    else:
        yield _processes_for(jobs, memory)


def _processes_for(jobs: int | None, memory: int | None) -> Processes:
    room = available_memory()
    if jobs is None:
        jobs = count_cores() if room is None else min(count_cores(), max(room // _LEAST_NBYTES, 1))
    if memory is None and room is not None:
        memory = max(int(_SHARE * room / jobs), _LEAST_NBYTES)
    return Processes(jobs, memory)


@contextmanager
def _open_pool(size: int, memory: int | None) -> Iterator[ProcessPoolExecutor]:
    """Yield a pool of processes that are killed at the end, whatever they are doing."""
    with _starting_processes():
        pool = ProcessPoolExecutor(
            max_workers=size,
            mp_context=multiprocessing.get_context("spawn"),  # a fork of this process would lack torch's threads
            initializer=_prepare_worker,
            initargs=(memory, max(count_cores() // size, 1)),
        )
    try:
        yield pool
    finally:
        # `kill_workers` does this from Python 3.14 on.
        processes = [*(getattr(pool, "_processes", None) or {}).values()]
        pool.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            process.kill()


@contextmanager
def _starting_processes() -> Iterator[None]:
    """Start processes that leave Ctrl-C to this one and import nothing from the working directory.

    A new process takes over our import path only after its first imports, which a random.py beside a stranger's dump
    could hijack if the working directory were on its path. So could the process that counts the locks of a pool.
    """
    is_main = threading.current_thread() is threading.main_thread()
    safe_path, handler = os.environ.get("PYTHONSAFEPATH"), signal.getsignal(signal.SIGINT)
    os.environ["PYTHONSAFEPATH"] = "1"
    if is_main:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        if is_main:
            signal.signal(signal.SIGINT, handler)
        del os.environ["PYTHONSAFEPATH"]
        os.environ.update({} if safe_path is None else {"PYTHONSAFEPATH": safe_path})


def _submit(pool: ProcessPoolExecutor, job: Job) -> Future[JobAnswer]:
    with _starting_processes():
        return pool.submit(run_job, job)


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


def _code_of(job: Job) -> str:
    """Return the file or package of the model that the user names; "" if the dump itself names it."""
    return str(job.settings.model or "").rpartition(":")[0]


def _timed_out(job: Job) -> JobAnswer:
    reason = f"It took longer than {job.timeout_s:g} s (--timeout)."
    return JobAnswer(result=DumpResult(path=job.shown, key=job.key, outcome="timed-out", reason=reason))


def _died(job: Job, error: BaseException) -> JobAnswer:
    """Return the answer for a file whose worker gave none."""
    name = type(error).__name__
    reason = f"Its worker gave no answer ({name}): it used too much memory, or the model's own code ended it."
    return JobAnswer(result=DumpResult(path=job.shown, key=job.key, outcome="died", reason=reason))


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
        size = sum(client.nthreads().values())
        if not size:
            raise NanDoctorError(
                f"The cluster at {address} has no workers.", remedy="Start some: `dask worker ADDRESS --nthreads 1`."
            )
        yield Given(client.get_executor(pure=False, retries=0), size)
