#!/usr/bin/env python3
"""Every test that needs a GPU, one after the other, from what is built: programs, shared libraries, and
the folder meson-info, which lists the tests. So it runs as well where nothing can be built, from a
copy of the tree and of

    BUILD/{meson-info,kernels,router,prefill,decode,deploy,tests}    their programs alone

and needs neither meson nor ninja. Ends with `tests: N passed, N failed, N skipped`. Where no GPU can
be used that is one skip with its reason, and the exit code is 0.

usage: gpu.py                      exit code 1 where no GPU can be used, with the reason
       gpu.py BUILD [NAME...]      NAME: tests whose names contain one of these, not all
"""
import ctypes
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import summary

TREE = pathlib.Path(__file__).resolve().parents[1]
SHOWN = 60  # lines of a test that failed


def missing():
    """Why no GPU can be used here; None: one can. Asks the driver, so it is known before anything is built."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as e:
        return f"no GPU can be used here: expected NVIDIA's driver, found none ({e})"
    found = driver.cuInit(0)
    if found != 0:
        return f"no GPU can be used here: expected a driver that starts, found CUDA error {found} (nvidia-smi says more)"
    count = ctypes.c_int(0)
    driver.cuDeviceGetCount(ctypes.byref(count))
    return None if count.value > 0 else "no GPU can be used here: the driver expected at least one, found 0"


def tests_of(build, names):
    """The tests of meson's suite gpu as it wrote them down, with the paths that hold here."""
    info = build / "meson-info"
    was = json.loads((info / "meson-info.json").read_text())["directories"]

    def here(arg):
        if not arg.startswith("/"):
            return arg
        path = os.path.normpath(arg)
        if os.path.basename(path).startswith("python3"):
            return sys.executable
        for old, new in ((was["build"], build), (was["source"], TREE)):
            if path == old or path.startswith(old + "/"):
                return str(new) + path[len(old):]
        return arg

    for t in json.loads((info / "intro-tests.json").read_text()):
        if any(s.split(":")[-1] == "gpu" for s in t["suite"]) and (not names or any(n in t["name"] for n in names)):
            yield t["name"], [here(a) for a in t["cmd"]], {k: here(v) for k, v in t["env"].items()}, t["timeout"]


def run(build, name, command, env, limit):
    """A line of meson's test log."""
    # Where a tree was carried elsewhere, the model is not where it was when its tests were compiled.
    env = os.environ | env | {"TANDEM_TEST_MODEL": str(TREE / "deploy/models/needle")}
    begun = time.monotonic()
    try:
        p = subprocess.Popen(command, cwd=build, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                             stdin=subprocess.DEVNULL, text=True, errors="replace", start_new_session=True)
        said, code = p.communicate(timeout=limit)[0], p.returncode
    except subprocess.TimeoutExpired:
        os.killpg(p.pid, signal.SIGKILL)
        said, code = p.communicate()[0], f"no end after {limit} s"
    except OSError as e:
        said, code = str(e), "cannot be started"
    result = {0: "OK", 77: "SKIP"}.get(code, f"FAIL ({code})")
    took = time.monotonic() - begun
    print(f"{result:6} {took:7.1f} s  {name}", flush=True)
    if result not in ("OK", "SKIP"):
        print("\n".join(said.splitlines()[-SHOWN:]), flush=True)
    return {"name": name, "duration": took, "result": result, "stdout": said}


def main():
    why = missing()
    if len(sys.argv) < 2:
        print(why or "a GPU can be used here")
        return int(why is not None)
    if why:
        print(f"skipped gpu: {why}\ntests: 0 passed, 0 failed, 1 skipped")
        return 0
    build = pathlib.Path(sys.argv[1]).resolve()
    try:
        tests = list(tests_of(build, sys.argv[2:]))
    except OSError as e:
        sys.exit(f"gpu.py: {build} is no build folder: {e}")
    if not any(name == "kernels_cuda" for name, *_ in tests_of(build, [])):
        print(f"skipped gpu: {build} was built without CUDA (meson option cuda)\ntests: 0 passed, 0 failed, 1 skipped")
        return 0
    return summary.show([("gpu", run(build, *t)) for t in tests])


if __name__ == "__main__":
    sys.exit(main())
