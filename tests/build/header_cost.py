#!/usr/bin/env python3
"""Measures what #include <mixtape.h> costs a file: header_cost.py ROOT COMPILER.

The promise is 1.5 seconds. Processor time of the best of eight runs is compared, not elapsed time,
so that a busy machine does not fail it; -O2 as a user's file would be compiled.
"""

import os
import pathlib
import subprocess
import sys
import tempfile

LIMIT_SECONDS = 1.5
RUNS = 8


def cpu_seconds(command):
    before = os.times()
    subprocess.run(command, check=True)
    after = os.times()
    return (after.children_user - before.children_user
            + after.children_system - before.children_system)


def main():
    root, compiler = pathlib.Path(sys.argv[1]), sys.argv[2]
    with tempfile.TemporaryDirectory() as folder:
        source = pathlib.Path(folder, "user.cpp")
        source.write_text("#include <mixtape.h>\nint main() {}\n", encoding="utf-8")
        command = [compiler, "-std=c++20", "-O2", f"-I{root}", f"-I{root}/engine/public", "-c",
                   str(source), "-o", os.devnull]
        best = min(cpu_seconds(command) for _ in range(RUNS))
    print(f"mixtape.h: {best:.2f} s of processor time a file, limit {LIMIT_SECONDS} s")
    return 0 if best <= LIMIT_SECONDS else 1


if __name__ == "__main__":
    sys.exit(main())
