#!/usr/bin/env python3
"""Measures what #include <mixtape.h> costs a file: header_cost.py ROOT COMPILER.

The promise is 1.5 seconds. Processor time is compared, not elapsed time, the best of several runs,
-O2 as a user's file would be compiled. It is meant for a machine that takes one second for a file
of standard headers; on a slower one, or one that others slow down, both take longer, and the limit
grows by as much as the standard headers do.
"""

import os
import pathlib
import subprocess
import sys
import tempfile

LIMIT_SECONDS = 1.5
STANDARD = ["algorithm", "functional", "memory", "sstream", "string", "vector"]
STANDARD_SECONDS = 1.0
RUNS = 8


def cpu_seconds(command):
    before = os.times()
    subprocess.run(command, check=True)
    after = os.times()
    return (after.children_user - before.children_user
            + after.children_system - before.children_system)


def main():
    root, compiler = pathlib.Path(sys.argv[1]), sys.argv[2]
    best = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, headers in (("mixtape", ["mixtape.h"]), ("standard", STANDARD)):
            text = "".join(f"#include <{header}>\n" for header in headers) + "int main() {}\n"
            pathlib.Path(folder, name + ".cpp").write_text(text, encoding="utf-8")
        for _ in range(RUNS):  # in turns, so that both see the same machine
            for name in ("mixtape", "standard"):
                seconds = cpu_seconds([compiler, "-std=c++20", "-O2", f"-I{root}",
                                       f"-I{root}/engine/public", "-c",
                                       str(pathlib.Path(folder, name + ".cpp")), "-o", os.devnull])
                best[name] = min(seconds, best.get(name, seconds))
    limit = LIMIT_SECONDS * max(1.0, best["standard"] / STANDARD_SECONDS)
    print(f"mixtape.h: {best['mixtape']:.2f} s of processor time a file, limit {limit:.2f} s "
          f"(standard headers: {best['standard']:.2f} s)")
    return 0 if best["mixtape"] <= limit else 1


if __name__ == "__main__":
    sys.exit(main())
