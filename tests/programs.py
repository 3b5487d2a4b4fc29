"""Python programs in processes that are forked from one which has imported PyTorch.

They start in a tenth of the time of a new interpreter, and end as any program does: by Python's own
finalization, with its exit code. Where CUDA is in use they are new interpreters.
"""

import contextlib
import functools
import gc
import importlib
import json
import os
import random
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PRELOADED = [
    "torch.distributed.fsdp",
    "torch.distributed.elastic.multiprocessing.errors",
    "torch._dynamo",
    "distca.integrations.plain",
]
PRELOADED_IF_USED = [
    "distca.integrations.megatron",
    "distca.integrations.torchtitan",
    "distca.integrations.transformers",
    "transformers.models.llama.modeling_llama",
    "transformers.trainer",
    "trl.trainer.sft_trainer",
]
MAX_REQUEST_BYTES = 2**17
POLL_S = 0.02


class Program:
    """A forked program, with the methods of subprocess.Popen that tests use."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = _answer({"poll": self.pid})
        return self.returncode

    def wait(self, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            time.sleep(POLL_S)
        return self.returncode


def preloaded() -> list[str]:
    """Return the modules that forked processes share: of frameworks, those that tests import."""
    return PRELOADED + [name for name in PRELOADED_IF_USED if name in sys.modules]


def start(arguments: list, env: dict, stdout, stderr, cwd: Path | None = None):
    """Start `python arguments...` in a session of its own, with output to two open files."""
    import torch

    arguments = [*map(str, arguments)]
    if torch.cuda.is_available():  # which does not survive a fork
        settings = {"env": env, "cwd": cwd, "stdout": stdout, "stderr": stderr}
        return subprocess.Popen([sys.executable, *arguments], start_new_session=True, **settings)
    request = {"arguments": arguments, "env": env, "cwd": str(cwd or Path.cwd())}
    return Program(_answer(request, [stdout.fileno(), stderr.fileno()]))


def run_ranks(
    arguments: list, num_ranks: int, env: dict, cwd: Path | None = None, timeout_s: float = 120
) -> subprocess.CompletedProcess:
    """Run a program on several ranks as torchrun does: if one fails, the others are ended."""
    environments = [{**env, **place} for place in places(num_ranks, free_port())]
    return _run_together(arguments, environments, cwd, timeout_s)


def run_alone(
    arguments: list, env: dict, cwd: Path | None = None, timeout_s: float = 120
) -> subprocess.CompletedProcess:
    """Run a program in one process, without the variables of torchrun."""
    return _run_together(arguments, [env], cwd, timeout_s)


def _run_together(
    arguments: list, environments: list[dict], cwd: Path | None, timeout_s: float
) -> subprocess.CompletedProcess:
    with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:
        processes = [start(arguments, env, stdout, stderr, cwd) for env in environments]
        deadline, is_late = time.monotonic() + timeout_s, False
        while any(each.poll() is None for each in processes):
            is_late = time.monotonic() > deadline
            if is_late or any(each.returncode not in (None, 0) for each in processes):
                end(processes)
                break
            time.sleep(POLL_S)
        texts = []
        for file in (stdout, stderr):
            file.seek(0)
            texts.append(file.read())
    if is_late:
        raise AssertionError(
            f"{arguments} took {timeout_s} s; it had printed:\n" + "\n".join(texts)
        )
    failed = [each.returncode for each in processes if each.returncode]
    return subprocess.CompletedProcess(arguments, failed[0] if failed else 0, *texts)


def places(num_ranks: int, port: int) -> list[dict[str, str]]:
    """Return the variables by which the ranks of a node meet, as torchrun sets them."""
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    shared |= {"WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
    return [
        {name: str(value) for name, value in {**shared, "RANK": rank, "LOCAL_RANK": rank}.items()}
        for rank in range(num_ranks)
    ]


def free_port() -> int:
    """Return a port below those that systems hand out (from 32768 on Linux).

    No connection or store of tests at the same time takes it before ranks meet there.
    """
    while True:
        port = random.SystemRandom().randrange(20000, 32768)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port


def end(processes: list) -> None:
    for each in processes:
        if each.poll() is None:
            os.kill(each.pid, signal.SIGKILL)
            each.wait(timeout=10)


def survivors(processes: list) -> list[int]:
    """Return the processes that these programs started, or are, and that have not ended."""
    sessions, alive = {each.pid for each in processes}, []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            state, _, _, session = (process / "stat").read_text().rpartition(")")[2].split()[:4]
            if int(session) in sessions and state != "Z":
                alive.append(int(process.name))
    return alive


@functools.cache
def _connection() -> socket.socket:
    own, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    quiet = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}  # read once, by libraries
    subprocess.Popen(
        [sys.executable, __file__, str(other.fileno()), *preloaded()],
        pass_fds=[other.fileno()],
        stdin=subprocess.DEVNULL,
        env={**os.environ, **quiet, "PYTHONPATH": path},
    )
    other.close()
    return own


def _answer(request: dict, files: list[int] = ()) -> int | None:
    message = json.dumps(request).encode()
    assert len(message) <= MAX_REQUEST_BYTES, f"the request has {len(message)} bytes"
    socket.send_fds(_connection(), [message], files)
    return json.loads(_connection().recv(64))


def _serve(connection: socket.socket) -> list[str]:
    """Fork a process at each request. Return its arguments there."""
    while True:
        message, files, *_ = socket.recv_fds(connection, MAX_REQUEST_BYTES, 2)
        if not message:
            os._exit(0)
        request = json.loads(message)
        if "poll" in request:
            pid, status = os.waitpid(request["poll"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        else:
            answer = os.fork()
            if answer == 0:
                connection.close()
                _become(request, files)
                return request["arguments"]
            for each in files:
                os.close(each)
        connection.send(json.dumps(answer).encode())


def _become(request: dict, files: list[int]) -> None:
    os.setsid()
    for number, file in enumerate(files, start=1):
        os.dup2(file, number)
        os.close(file)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    sys.path[:0] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))


def _run(arguments: list[str]) -> None:
    if arguments[0] == "-m":
        sys.path.insert(0, os.getcwd())
        sys.argv = arguments[1:]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
        sys.argv = arguments
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    del sys.path[0]  # the folder of this file
    for name in sys.argv[2:]:
        importlib.import_module(name)
    gc.freeze()
    _run(_serve(socket.socket(fileno=int(sys.argv[1]))))
