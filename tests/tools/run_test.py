#!/usr/bin/env python3
"""`mixtape run` with small shell programs: run_test.py MIXTAPE none|local|mpirun [MPIEXEC].

How the program's end becomes the command's, what is started again and when not, that signals reach the
program, and that no process of an attempt is left when the next one starts or the command has ended.
"""
import contextlib
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time

MPIRUN = ["--mpirun-args", "--allow-run-as-root --oversubscribe --bind-to none"]


class Run:
    """`mixtape run` in a folder of its own, where programs leave files to be looked at."""

    def __init__(self, mixtape, folder, *common):
        self.folder = folder
        self.common = [mixtape, "run", *common]

    def command(self, options, script):
        return [*self.common, *options, "--", "sh", "-c", script]

    def run(self, options, script, **environment):
        return subprocess.run(self.command(options, script), cwd=self.folder, capture_output=True, text=True, timeout=60,
                              env={**os.environ, **environment})

    def start(self, options, script):
        return subprocess.Popen(self.command(options, script), cwd=self.folder, stdout=subprocess.PIPE,
                                stderr=subprocess.PIPE, text=True)

    def file(self, name):
        path = self.folder / name
        return path.read_text() if path.exists() else ""

    def clear(self):
        for path in self.folder.iterdir():
            path.unlink()


def alive(pid):
    """Whether a process runs; one that has ended and waits for its parent does not."""
    try:
        return pathlib.Path("/proc", str(pid), "stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until(condition, what):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, f"not within 30 s: {what}"
        time.sleep(0.01)


def expect(result, code, pattern="", restarts=None):
    """The exit code, a pattern in stderr and the number of lines that tell of a restart."""
    told = len(re.findall(r"^mixtape run: attempt \d+ ended .*; restarts in", result.stderr, re.MULTILINE))
    if result.returncode != code or not re.search(pattern, result.stderr) or restarts not in (None, told):
        yield f"expected exit code {code}, /{pattern}/ and {restarts} restarts, got {result}"


def check_ends(run):
    """Exit codes, and how often the program is started again."""
    quick = ["--backoff", "0"]
    yield from expect(run.run(quick, "exit 0"), 0, r"\A\Z", 0)
    yield from expect(run.run([*quick, "--max-restarts", "2"], "echo $MIXTAPE_RESTART >> counts; exit 3"), 3,
                      r"attempt 3 ended .*: exit code 3; no restart: --max-restarts 2 are used up", 2)
    if run.file("counts") != "0\n1\n2\n":
        yield f"expected MIXTAPE_RESTART to count from 0 to 2, got {run.file('counts')!r}"
    yield from expect(run.run([*quick, "--max-restarts", "9"], "test $MIXTAPE_RESTART = 2"), 0, "attempt 2 ended", 2)
    yield from expect(run.run([*quick, "--max-restarts", "1"], "kill -9 $$"), 137, r"signal 9 \(Killed\); restarts", 1)
    yield from expect(run.run([*quick, "--max-restarts", "9"], "exit 2"), 2, "its options are wrong", 0)
    yield from expect(run.run([*quick, "--max-restarts", "0"], "exit 1"), 1, "--max-restarts is 0", 0)
    yield from expect(run.run([*quick, "--max-restarts", "99", "--give-up", "3"], "exit 1"), 1,
                      "3 failures in a row within 10 s", 2)
    # With a new checkpoint each time it goes on; the last two attempts write none.
    yield from expect(run.run([*quick, "--max-restarts", "99", "--give-up", "2", "--checkpoints", "."],
                              "test $MIXTAPE_RESTART -gt 4 || touch checkpoint-00000000000$MIXTAPE_RESTART.safetensors; exit 1"),
                      1, "attempt 7 ended .* 2 failures in a row without a new checkpoint", 6)


def check_programs(run):
    """What cannot be run is not started again."""
    script = run.folder / "script"
    script.write_text("not a program\n")
    for name, code, text in (("./nothing", 127, "no such file"), ("no-such-program", 127, "not found in PATH"),
                             ("./script", 126, "not an executable file"), (".", 127, "not found in PATH"),
                             ("./", 126, "not an executable file")):
        result = subprocess.run([*run.common, "--", name], cwd=run.folder, capture_output=True, text=True, timeout=60)
        yield from expect(result, code, text, 0)
    script.chmod(0o755)
    result = subprocess.run([*run.common, "--launcher", "none", "--", "./script"], cwd=run.folder, capture_output=True,
                            text=True, timeout=60)
    yield from expect(result, 126, "Exec format error", 0)
    result = subprocess.run([*run.common, "--launcher", "mpirun", "--mpirun", "no-mpirun", "--", "true"], cwd=run.folder,
                            capture_output=True, text=True, timeout=60)
    yield from expect(result, 127, "'no-mpirun': not found", 0)


def check_usage(run):
    for options, text in (([], "PROGRAM"), (["true"], "true"), (["-n", "0", "--", "true"], "--ranks"),
                          (["--launcher", "ssh", "--", "true"], "ssh"), (["--max-restarts", "-1", "--", "true"], "-1"),
                          (["--launcher", "none", "-n", "2", "--", "true"], "-n"),
                          (["--launcher", "local", "--mpirun-args", "x", "--", "true"], "--mpirun-args"),
                          (["-n", "2", "--mpirun-args", "'x", "--", "true"], "closing"), (["--"], "PROGRAM")):
        result = subprocess.run([*run.common, *options], cwd=run.folder, capture_output=True, text=True, timeout=60)
        if result.returncode != 2 or result.stderr.count("\n") != 1 or text not in result.stderr:
            yield f"{options}: expected exit code 2 and one line with {text}, got {result}"
    # What follows -- is the program's, whatever it looks like.
    words = ["[a]", "{}", "--", "--help", "-n", "", "a b", "info", "--max-restarts=x"]
    result = subprocess.run([*run.common, "--", "printf", "<%s>", *words], cwd=run.folder, capture_output=True, text=True,
                            timeout=60)
    if result.stdout != "".join(f"<{word}>" for word in words):
        yield f"expected the arguments {words}, got {result}"


def check_signals(run, started, options=(), ends=True):
    """SIGTERM and SIGINT are passed on, and end the command without a restart."""
    for number in (signal.SIGTERM, signal.SIGINT):
        run.clear()
        job = run.start([*options, "--max-restarts", "9", "--backoff", "0"],
                        "trap 'echo >> told; exit 1' TERM INT; echo $$ >> pids; while :; do sleep 0.05; done")
        wait_until(lambda: run.file("pids").count("\n") == started, "the program's start")
        pids = run.file("pids").split()
        job.send_signal(number)
        out, err = job.communicate(timeout=60)
        result = subprocess.CompletedProcess(job.args, job.returncode, out, err)
        yield from expect(result, 128 + number, f"ended by signal {int(number)}", 0)
        if ends and len(run.file("told")) != started:
            yield f"signal {number}: expected all of {started} to be told, got {result}"
        yield from (f"signal {number}: process {pid} is left" for pid in pids if alive(pid))
    # Between two attempts.
    job = run.start([*options, "--backoff", "300", "--max-backoff", "300"], "exit 1")
    assert "restarts in 300" in job.stderr.readline() or any("restarts in 300" in line for line in job.stderr)
    job.send_signal(signal.SIGTERM)
    job.communicate(timeout=60)
    if job.returncode != 143:
        yield f"SIGTERM while waiting: expected exit code 143, got {job.returncode}"


def check_stubborn(run):
    """Who ignores SIGTERM gets SIGKILL: after the grace time, or with a second signal."""
    script = "trap '' TERM; echo $$ > pids; while :; do sleep 0.05; done"
    for grace, signals in (("0.3", 1), ("600", 2)):
        run.clear()
        job = run.start(["--grace", grace], script)
        wait_until(lambda: run.file("pids").endswith("\n"), "the program's start")
        for _ in range(signals):
            job.send_signal(signal.SIGTERM)
            time.sleep(0.1)  # two of one kind at once are one
        job.communicate(timeout=60)
        if job.returncode != 143 or alive(run.file("pids").strip()):
            yield f"grace {grace}: expected exit code 143 and no process, got {job.returncode}"


def check_orphans(run):
    """Processes that a program leaves are ended before the next attempt, however they hid."""
    run.clear()
    result = run.run(["--max-restarts", "2", "--backoff", "0", "--grace", "0.3"],
                     # On the third attempt nobody of the first two may be left.
                     "for p in $(cat pids); do kill -0 $p 2>/dev/null && echo $p >> together; done\n"
                     "sleep 300 & echo $! >> pids\n"
                     "setsid sh -c 'trap \"\" TERM; echo $$ >> pids; while :; do sleep 0.05; done' &\n"
                     "(setsid sleep 300 & echo $! >> pids)\n"
                     "while test $(wc -l < pids) -lt $((3 * MIXTAPE_RESTART + 3)); do sleep 0.01; done\n"
                     "exit 1")
    yield from expect(result, 1, "are used up", 2)
    pids = run.file("pids").split()
    if len(pids) != 9 or run.file("together") or any(alive(pid) for pid in pids):
        yield f"orphans: expected 9 processes and none left, got {pids}, beside another attempt {run.file('together')!r}"


def check_killed(run, options=()):
    """Where the command itself is killed the program does not live on."""
    run.clear()
    job = run.start([*options], "echo $$ >> pids; exec sleep 300")
    wait_until(lambda: run.file("pids").endswith("\n"), "the program's start")
    job.kill()
    job.communicate(timeout=60)
    pid = run.file("pids").split()[0]
    deadline = time.monotonic() + 30
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    if alive(pid):
        yield f"killed: the program, process {pid}, lives on"


def check_local(run):
    result = run.run(["-n", "3"], "echo $RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $MASTER_ADDR:$MASTER_PORT "
                     "\"<$OMPI_COMM_WORLD_RANK>\" $MIXTAPE_RESTART; echo bad >&2; printf end",
                     RANK="7", OMPI_COMM_WORLD_RANK="5")
    lines = sorted(result.stdout.splitlines())
    ports = {re.sub(r".*:(\d+) .*", r"\1", line) for line in lines if ":" in line}
    expected = sorted([f"[{i}] {i}/3 {i}/3 127.0.0.1:{min(ports)} <> 0" for i in range(3)] + [f"[{i}] end" for i in range(3)])
    if lines != expected or sorted(result.stderr.splitlines()) != [f"[{i}] bad" for i in range(3)]:
        yield f"local: expected {expected}, got {result}"
    # One that ends badly ends the others; first with SIGTERM, then with SIGKILL.
    run.clear()
    result = run.run(["-n", "3", "--max-restarts", "1", "--backoff", "0", "--grace", "0.5"],
                     "echo $$ >> pids; while test $(wc -l < pids) -lt $((3 * MIXTAPE_RESTART + 3)); do sleep 0.01; done\n"
                     "test $RANK != 1 || exit 7\n"
                     "test $RANK != 0 || trap 'echo told >> told; exit 0' TERM; test $RANK != 2 || trap '' TERM\n"
                     "while :; do sleep 0.05; done")
    yield from expect(result, 7, "attempt 1 ended .*: rank 1: exit code 7; restarts", 1)
    if any(alive(pid) for pid in run.file("pids").split()) or len(run.file("pids").split()) != 6:
        yield f"local: expected no rank to be left of {run.file('pids')!r}, got {result}"
    yield from expect(run.run(["-n", "2", "--max-restarts", "0"], "test $RANK = 0 || kill -SEGV $$; sleep 300"), 139,
                      r"rank 1: signal 11 \(Segmentation fault\)", 0)
    # Long output comes whole, and a reader that goes away does not keep the ranks.
    result = run.run(["-n", "2"], "i=0; while test $i -lt 20000; do echo $RANK $i; i=$((i+1)); done")
    for rank in range(2):
        got = [line for line in result.stdout.splitlines() if line.startswith(f"[{rank}]")]
        if got != [f"[{rank}] {rank} {i}" for i in range(20000)]:
            yield f"local: expected 20000 lines of rank {rank}, got {len(got)}"


def check_mpirun(run):
    result = run.run(["-n", "2"], "echo $OMPI_COMM_WORLD_RANK$PMI_RANK \"<$RANK>\" $MIXTAPE_RESTART", RANK="7", WORLD_SIZE="9")
    if sorted(result.stdout.splitlines()) != ["0 <> 0", "1 <> 0"]:
        yield f"mpirun: expected two ranks without RANK, got {result}"
    run.clear()
    result = run.run(["-n", "2", "--max-restarts", "1", "--backoff", "0"],
                     "echo $$ >> pids; while test $(wc -l < pids) -lt $((2 * MIXTAPE_RESTART + 2)); do sleep 0.01; done\n"
                     "test $OMPI_COMM_WORLD_RANK$PMI_RANK = 0 || kill -9 $$; sleep 300")
    yield from expect(result, 137, r"attempt 1 ended .*: exit code 137, signal 9 \(Killed\); restarts", 1)
    pids = run.file("pids").split()
    if len(pids) != 4 or any(alive(pid) for pid in pids):
        yield f"mpirun: expected four processes and none left, got {pids}"
    # mpirun itself is killed: its ranks are found all the same.
    run.clear()
    job = run.start(["-n", "2", "--max-restarts", "1", "--backoff", "0", "--grace", "1"],
                    "trap '' TERM HUP; echo $$ >> pids; test $MIXTAPE_RESTART = 1 || while :; do sleep 0.05; done\n"
                    "for p in $(head -n 2 pids); do kill -0 $p 2>/dev/null && echo $p >> together; done; exit 0")
    wait_until(lambda: run.file("pids").count("\n") == 2, "two ranks")
    children = pathlib.Path(f"/proc/{job.pid}/task/{job.pid}/children")
    with contextlib.suppress(ProcessLookupError):
        os.kill(int(children.read_text().split()[0]), signal.SIGKILL)
    out, err = job.communicate(timeout=60)
    yield from expect(subprocess.CompletedProcess(job.args, job.returncode, out, err), 0, "signal 9", 1)
    if run.file("together"):
        yield f"mpirun: ranks {run.file('together')!r} of the killed mpirun lived beside the next attempt's"


def main():
    mixtape, group = os.path.abspath(sys.argv[1]), sys.argv[2]
    os.environ["OMPI_MCA_btl_vader_single_copy_mechanism"] = "none"
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        if group == "none":
            run = Run(mixtape, folder)
            checks = [check_ends(run), check_programs(run), check_usage(run), check_signals(run, 1), check_stubborn(run),
                      check_orphans(run), check_killed(run)]
        elif group == "local":
            run = Run(mixtape, folder, "--launcher", "local")
            checks = [check_local(run), check_signals(run, 2, ["-n", "2"]), check_killed(run, ["-n", "2"])]
        else:
            run = Run(mixtape, folder, "--mpirun", sys.argv[3], *MPIRUN)
            checks = [check_mpirun(run), check_signals(run, 2, ["-n", "2"], ends=False),
                      check_killed(run, ["-n", "2"])]
        failures = [failure for check in checks for failure in check]
    print("\n".join(failures) or f"{group}: as expected")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
