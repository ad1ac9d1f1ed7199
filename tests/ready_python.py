"""`python -m nandoctor` in processes that have torch already: importing it is most of what a short command takes.

Run as a script, this file is the process that they are forked from: it imports and runs nothing else.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent


class ReadyPython:
    """Starts commands one after the other, each in a fork of one process; leave it as a context to end that one."""

    def __enter__(self):
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"}
        self._server = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        return self

    def __exit__(self, *error):
        self._server.communicate()

    def nandoctor(self, *arguments, cwd, environment=None, merged=False):
        """What `python -m nandoctor` gives in the folder; `merged`, what it says on either stream is in `stdout`."""
        with tempfile.NamedTemporaryFile() as output, tempfile.NamedTemporaryFile() as errors:
            task = {"arguments": list(map(str, arguments)), "cwd": str(cwd)}
            task["environment"] = {**os.environ, **(environment or {})}
            task["files"] = [os.devnull, output.name, output.name if merged else errors.name]
            self._server.stdin.write(json.dumps(task) + "\n")
            self._server.stdin.flush()
            code = int(self._server.stdout.readline())
            printed, said = (file.read().decode("utf-8") for file in (output, errors))
        return subprocess.CompletedProcess(task["arguments"], code, printed, said)


def serve():
    for name in ("pipeline", "renderers.page"):
        importlib.import_module(f"nandoctor.{name}")
    for line in sys.stdin:
        child = os.fork()
        if not child:
            become(**json.loads(line))  # which ends as a process of its own does
        sys.stdout.write(f"{os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}\n")
        sys.stdout.flush()


def become(arguments, cwd, environment, files):
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    for descriptor, path in enumerate(files):
        os.dup2(os.open(path, os.O_RDWR | os.O_APPEND), descriptor)
    sys.argv, sys.path[0] = ["nandoctor", *arguments], cwd
    runpy.run_module("nandoctor", run_name="__main__", alter_sys=True)
    sys.exit()


if __name__ == "__main__":
    serve()
