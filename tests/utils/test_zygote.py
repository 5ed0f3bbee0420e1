"""Processes that tests fork behave as those that an interpreter starts."""

import os
import signal
import subprocess
import sys

import pytest

from tests.fixtures.zygote import behind, python

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")]
QUIET = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
SLEEP = "import time; print('here', flush=True)\nwhile True: time.sleep(0.05)"


def run(code: str, *words: str, **changes) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [python(), "-c", code, *words], capture_output=True, text=True, check=False, **changes
    )


def test_a_process_has_its_words_folder_environment_and_files(tmp_path):
    reading, writing = os.pipe()
    code = (
        "import os, sys; print(sys.argv[1:], os.getcwd(), os.environ['LEVEL']);"
        f"print(sys.stdin.read(), file=sys.stderr); os.write({writing}, b'more')"
    )
    done = run(
        code, "a", cwd=tmp_path, env=os.environ | {"LEVEL": "3"}, input="b", pass_fds=[writing]
    )
    assert (done.stdout, done.stderr) == (f"['a'] {tmp_path} 3\n", "b\n")
    assert os.read(reading, 9) == b"more"
    for file in (reading, writing):
        os.close(file)


@pytest.mark.parametrize(
    ("code", "ends", "told"),
    [
        ("import sys; sys.exit(3)", 3, ""),
        ("import sys; sys.exit('wrong')", 1, "wrong"),
        ("1 / 0", 1, "ZeroDivisionError"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, ""),
        ("import atexit; atexit.register(print, 'last')", 0, ""),
    ],
)
def test_it_ends_as_a_new_process_would(code, ends, told):
    done, usual = run(code), subprocess.run([sys.executable, "-Sc", code], capture_output=True)
    assert done.returncode == usual.returncode == ends
    assert told in done.stderr
    assert done.stdout == usual.stdout.decode()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_signal_to_the_stand_in_ends_the_process(number):
    process = subprocess.Popen(
        [python(), "-c", SLEEP], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout
    assert process.stdout.readline() == "here\n"
    assert behind(process.pid) != process.pid
    process.send_signal(number)
    _, told = process.communicate(timeout=60)  # until the process itself has closed its files
    assert process.returncode == -number
    assert ("KeyboardInterrupt" in told) == (number == signal.SIGINT)


def test_a_signal_that_arrives_with_the_process_is_not_lost():
    run("")  # the server has imported what it imports
    for _ in range(5):
        process = subprocess.Popen([python(), "-c", SLEEP], **QUIET)
        while (number := behind(process.pid)) == process.pid:
            pass
        os.kill(number, signal.SIGINT)
        assert process.wait(60) == -signal.SIGINT


def test_no_process_sees_what_another_did():
    code = "import flowalign; print(getattr(flowalign, 'mark', None)); flowalign.mark = 1"
    assert [run(code).stdout for _ in range(2)] == ["None\n", "None\n"]


def test_the_processes_that_it_starts_have_imported_torch_as_well():
    inner = "import sys; print('torch' in sys.modules)"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {inner!r}])"
    assert run(code).stdout == "True\n"
    other = "import subprocess, sys; subprocess.run([sys.executable, '-m', 'this'])"
    assert "Zen" in run(other).stdout
