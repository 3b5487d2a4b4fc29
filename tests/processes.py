"""Commands that tests run in separate processes."""

import subprocess

TIMEOUT_S = 120
_END_S = 40  # torchrun gives its ranks 30 s


def run_command(
    command: list, timeout_s: float = TIMEOUT_S, **options
) -> subprocess.CompletedProcess:
    """Run a command like subprocess.run and capture its text.

    A command that takes too long gets SIGTERM, so that torchrun also ends its ranks. `options` go
    to subprocess.Popen.
    """
    with subprocess.Popen(
        [*map(str, command)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    ) as process:
        try:
            stdout, stderr = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired as error:
            process.terminate()
            try:
                stdout, stderr = process.communicate(timeout=_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
            raise AssertionError(
                f"{error}; it had printed:\n{stdout}\nand to stderr:\n{stderr}"
            ) from None
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)
