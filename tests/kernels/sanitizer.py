#!/usr/bin/env python3
"""Runs a test's program on the GPU under NVIDIA's compute-sanitizer: accesses outside of memory or
between threads without order end it with an error. Skipped where there is no GPU or no such tool.

usage: sanitizer.py memcheck|racecheck PROGRAM"""
import os
import pathlib
import shutil
import subprocess
import sys

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))
import gpu  # noqa: E402

FOUND = 99  # the exit code for what the tool finds, which no test uses


def main():
    check, program = sys.argv[1:]
    tool = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    why = gpu.missing() or (None if tool else "compute-sanitizer is not installed (it comes with the CUDA toolkit)")
    if why:
        print(f"skipped: {why}")
        return 77
    command = [tool, "--tool", check, "--error-exitcode", str(FOUND), "--print-limit", "20"]
    if check == "memcheck":  # calls that a driver refuses are the program's to judge: tests ask for some
        command += ["--report-api-errors", "no"]
    command.append(os.path.abspath(program))
    r = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    print(r.stdout)
    summed = [line for line in r.stdout.splitlines() if "SUMMARY" in line]
    if r.returncode == 0 and not any(" 0 errors" in line or " 0 hazards" in line for line in summed):
        print("the tool printed no summary of 0: it did not look")
        return 1
    return r.returncode


sys.exit(main())
