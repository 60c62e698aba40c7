#!/usr/bin/env python3
"""Plants one fault of each kind in a small tree and expects layering.py to name it."""

import pathlib
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import layering  # noqa: E402  (found through the path set above)

GOOD = {
    "engine/CMakeLists.txt": "target_sources(mixtape PRIVATE\n  device.cpp\n  tensor.cpp\n)",
    "engine/device.h": "#include <string>\n",
    "engine/device.cpp": '#include "engine/device.h"\n',
    "engine/tensor.h": '#include "engine/device.h"\n',
    "engine/tensor.cpp": '#include "engine/tensor.h"\n#include "kernels/cast.h"\n',
    "engine/public/mixtape.h": '#include "engine/tensor.h"\n#include "nn/module.h"\n',
    "kernels/cast.h": '#include "engine/device.h"\n',
    "nn/module.h": '#include "engine/tensor.h"\n',
    "examples/CMakeLists.txt": "mixtape_example(a)",
    "examples/a/main.cpp": "#include <mixtape.h>\n",
}
# Each fault: the file it changes, its content, and what the report must say.
FAULTS = [
    ("kernels/cast.h", '#include "engine/tensor.h"\n', "kernels/cast.h (kernels)"),
    ("engine/device.h", '#include "kernels/cast.h"\n', "engine/device.h (engine leaf)"),
    ("engine/device.cpp", '#include "engine/tensor.h"\n', "engine/device.cpp (engine leaf)"),
    ("engine/device_cuda.cpp", '#include "engine/tensor.h"\n', "engine/device_cuda.cpp (engine"),
    ("engine/tensor.h", '#include "nn/module.h"\n', "engine/tensor.h (engine)"),
    ("nn/module.h", "#include <cuda_runtime.h>\n", "reached from mixtape.h"),
    ("nn/module.h", '  #  include "optim/sgd.h"\n', '"optim/sgd.h" is not a file'),
    ("nn/module.h", '#include "mixtape.h"\n', "includes mixtape.h"),
    ("engine/forgotten.cpp", "", "engine/forgotten.cpp: in no CMakeLists.txt"),
    ("examples/b/main.cpp", "", "examples/b/main.cpp: in no CMakeLists.txt"),
    ("engine/sor.cpp", "", "engine/sor.cpp: in no CMakeLists.txt"),
]


def report(tree):
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder)
        for name, text in tree.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text, encoding="utf-8")
        return layering.violations(root)


def main():
    failures = [f"clean tree: {line}" for line in report(GOOD)]
    for name, text, expected in FAULTS:
        found = report({**GOOD, name: text})
        if not any(expected in line for line in found):
            failures.append(f"{name} = {text!r}: expected '{expected}', got {found}")
    print("\n".join(failures) or f"{len(FAULTS)} faults found")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
