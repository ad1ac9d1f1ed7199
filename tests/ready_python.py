"""Python in processes that have torch already: importing it is most of what a short command takes.

Run as a script, this file is the process that they are forked from: it imports what it is told, and runs nothing else.
"""

import atexit
import importlib
import json
import os
import runpy
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

ROOT = Path(__file__).parent.parent


class ReadyPython:
    """Runs programs one after the other, each in a fork of one process that has these modules.

    Leave it as a context to end that process.
    """

    def __init__(self, *modules):
        self._modules = modules

    def __enter__(self):
        self._folder = tempfile.TemporaryDirectory()
        self._files = [Path(self._folder.name) / name for name in ("output", "errors")]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"}
        command = [sys.executable, __file__, *self._modules]
        self._server = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        return self

    def __exit__(self, *error):
        self._server.communicate()
        self._folder.cleanup()

    def run(self, program, *arguments, cwd, environment=None, merged=False):
        """What the script or package gives in the folder; `merged`, what it says on either stream is in `stdout`."""
        self.start(program, *arguments, cwd=cwd, environment=environment, merged=merged)
        return self.finish()

    def start(self, program, *arguments, cwd, environment=None, merged=False):
        for path in self._files:
            path.write_bytes(b"")
        files = [os.devnull, str(self._files[0]), str(self._files[0 if merged else 1])]
        task = {"program": str(program), "arguments": list(map(str, arguments)), "cwd": str(cwd), "files": files}
        task["environment"] = {**os.environ, "PWD": str(cwd), **(environment or {})}
        self._server.stdin.write(json.dumps(task) + "\n")
        self._server.stdin.flush()

    def finish(self):
        code = int(self._server.stdout.readline())
        return subprocess.CompletedProcess([], code, *(path.read_text(encoding="utf-8") for path in self._files))


def serve():
    for name in sys.argv[1:]:
        importlib.import_module(name)
    for line in sys.stdin:
        child = os.fork()
        if not child:
            become(**json.loads(line))  # which ends as a process of its own does
        sys.stdout.write(f"{os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}\n")
        sys.stdout.flush()


def become(program, arguments, cwd, environment, files):
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    for descriptor, path in enumerate(files):
        os.dup2(os.open(path, os.O_RDWR | os.O_APPEND), descriptor)
    is_script = program.endswith(".py")
    sys.argv, sys.path[0] = [program, *arguments], str(Path(program).parent) if is_script else cwd
    try:
        if is_script:
            runpy.run_path(program, run_name="__main__")
        else:
            runpy.run_module(program, run_name="__main__", alter_sys=True)
    except SystemExit as asked:
        if isinstance(asked.code, str):
            sys.stderr.write(f"{asked.code}\n")
        end(1 if isinstance(asked.code, str) else asked.code or 0)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        end(1)
    end(0)


def end(code):
    """End as Python does, but leave all objects as they are: to take them apart copies each page, for a second."""
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


if __name__ == "__main__":
    serve()
