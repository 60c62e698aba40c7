#!/usr/bin/env python3
"""Checks the folder layering and the source lists: layering.py ROOT.

A file includes only from its own folder and from folders to its left in

    engine leaf < kernels < engine < ops < nn < optim < io < distributed < tools, examples

so that a reader can take the library one layer at a time. mixtape.h, which includes everything, is
exempt as a file, but neither it nor anything it reaches may include a backend's header. Every
source must stand in its folder's CMakeLists.txt: with no globs, a file left out is silently not
built. Prints one line for each violation and exits 1 if there is one.
"""

import os
import pathlib
import re
import sys

# Headers of engine/ that kernels may use. They and the sources that implement them (same name, or
# the name and a suffix, as in allocator_cuda.cpp; and engine/cuda/) use no other part of engine/.
LEAVES = {
    "allocator", "build_info", "caching_allocator", "check", "determinism", "device", "device_error",
    "dtype", "env", "half", "op_scope", "philox", "profile_events", "profile_hooks", "profile_kind",
    "profile_queue", "profile_recording", "scalar", "shape", "stream", "thread_pool", "thread_state",
    "transfer", "view",
}
LAYERS = {
    "engine leaf": 0, "kernels": 1, "engine": 2, "ops": 3, "nn": 4, "optim": 5, "io": 6,
    "distributed": 7, "tools": 8, "examples": 8,
}
LIBRARY = ["engine", "kernels", "ops", "nn", "optim", "io", "distributed"]
SOURCES = {".cpp", ".cu"}
HEADERS = {".h", ".cuh", ".def", ".inc"}
PUBLIC = "engine/public/mixtape.h"
INCLUDE = re.compile(r'^\s*#\s*include\s*(?:"([^"]+)"|<([^>]+)>)', re.MULTILINE)
# half.h takes CUDA's 16-bit types under nvcc only.
BACKEND = re.compile(r"^(Eigen/|unsupported/Eigen|cuda|cublas|cudnn|nccl|nvrtc|mpi\.h|dnnl|oneapi/|"
                     r"omp\.h|zlib\.h|jpeglib\.h|png\.h|cupti|nvtx)")
BACKEND_EXEMPT = {"engine/half.h"}


def is_leaf(path):
    """Whether a file of engine/ belongs to its leaf layer."""
    if path.parts[1] == "cuda":
        return True
    stem = path.stem
    return any(stem == leaf or (path.suffix in SOURCES | {".cuh"} and stem.startswith(leaf + "_"))
               for leaf in LEAVES)


def layer_of(name):
    """The layer of a path relative to the root, or None for what is outside of the order."""
    path = pathlib.PurePosixPath(name)
    top = path.parts[0]
    if name == PUBLIC:
        return None
    if top == "engine" and is_leaf(path):
        return "engine leaf"
    return top if top in LAYERS else None


def includes(root, name):
    """(quoted, angled) include names of one file."""
    text = (root / name).read_text(encoding="utf-8", errors="replace")
    found = INCLUDE.findall(text)
    return [q for q, _ in found if q], [a for _, a in found if a]


def files(root, folders, suffixes):
    for folder in folders:
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in suffixes and path.is_file():
                yield path.relative_to(root).as_posix()


def check_order(root):
    for name in files(root, LIBRARY + ["tools", "examples"], SOURCES | HEADERS):
        mine = layer_of(name)
        for target in includes(root, name)[0]:
            if target == "mixtape.h":
                if mine not in ("tools", "examples"):
                    yield f"{name}: includes mixtape.h; include the header that is needed"
                continue
            if not (root / target).is_file():
                yield f'{name}: "{target}" is not a file below the project\'s root'
                continue
            theirs = layer_of(target)
            if mine and theirs and LAYERS[theirs] > LAYERS[mine]:
                yield f"{name} ({mine}): includes {target} ({theirs}), a layer above it"
            if mine and mine not in ("tools", "examples") and target.startswith("tests/"):
                yield f"{name}: includes {target}; the library does not depend on its tests"


def check_public(root):
    """No backend header within reach of mixtape.h."""
    seen, pending = set(), [PUBLIC]
    while pending:
        name = pending.pop()
        if name in seen or not (root / name).is_file():
            continue
        seen.add(name)
        quoted, angled = includes(root, name)
        pending += quoted
        for target in quoted + angled:
            if BACKEND.match(target) and name not in BACKEND_EXEMPT:
                yield f"{name}: reached from mixtape.h, includes {target}"


def listed_sources(root):
    """The sources that the CMakeLists.txt files name, relative to the root."""
    folders = LIBRARY + ["tools", "examples", "tests"]
    for name in files(root, folders, {".txt"}):
        if not name.endswith("CMakeLists.txt"):
            continue
        text, folder = (root / name).read_text(encoding="utf-8"), os.path.dirname(name)
        for token in re.findall(r"[^\s()\"]+\.(?:cpp|cu)\b", text):
            yield os.path.normpath(os.path.join(folder, token))
        for example in re.findall(r"^mixtape_example\((\w+)\)", text, re.MULTILINE):
            yield f"{folder}/{example}/main.cpp"


def check_lists(root):
    """Every source stands in some CMakeLists.txt, by its path relative to that file."""
    listed = set(listed_sources(root))
    for name in files(root, LIBRARY + ["tools", "examples", "tests"], SOURCES):
        if name not in listed:
            yield f"{name}: in no CMakeLists.txt, so it is not built"


def violations(root):
    return [*check_order(root), *check_public(root), *check_lists(root)]


def main():
    found = violations(pathlib.Path(sys.argv[1]))
    for line in found:
        print(line)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
