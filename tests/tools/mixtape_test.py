"""The `mixtape` command line as a user runs it: mixtape_test.py MIXTAPE."""
import subprocess
import sys


def run(*arguments):
    return subprocess.run([sys.argv[1], *arguments], capture_output=True, text=True, timeout=60)


def check(condition, result):
    assert condition, (result.returncode, result.stdout, result.stderr)


version = run("--version")
check(version.returncode == 0 and version.stdout.startswith("Mixtape "), version)
info = run("info")
check(info.returncode == 0 and "device: " in info.stdout, info)
usage = run("--help")
check(usage.returncode == 0 and "info" in usage.stdout, usage)
for arguments in ([], ["nothing"], ["info", "--nothing"], ["--nothing"]):
    bad = run(*arguments)
    check(bad.returncode == 2 and bad.stderr.startswith("mixtape: ") and
          bad.stderr.count("\n") == 1 and not bad.stdout, bad)
print("ok")
