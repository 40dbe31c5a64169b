#!/usr/bin/env python3
"""Slabs over the tcp lane beside ucx_perftest's ucp_am_bw (Debian: ucx-utils) with messages of the
same size over the same interface. Both take turns, so that what else the machine does hits both; the
median of the pairs' ratios is the result. ucx_perftest polls without sleeping and has nobody who
copies the bytes to their place; the lane sleeps in poll, copies, and answers each slab.

usage: bench_tcp.py BUILD [pairs [slab MiB]]"""
import os
import pathlib
import random
import re
import statistics
import subprocess
import sys
import time

build = pathlib.Path(sys.argv[1]).resolve()
pairs = int(sys.argv[2]) if len(sys.argv) > 2 else 7
mib = int(sys.argv[3]) if len(sys.argv) > 3 else 8
ucx = dict(os.environ, UCX_TLS="tcp", UCX_NET_DEVICES="lo", UCX_WARN_UNUSED_ENV_VARS="n")


def perftest():
    port = str(random.randrange(20000, 30000))
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "env": ucx}
    with subprocess.Popen(["ucx_perftest", "-p", port], **quiet) as server:
        time.sleep(0.3)
        client = ["ucx_perftest", "127.0.0.1", "-p", port, "-t", "ucp_am_bw", "-s", str(mib << 20),
                  "-n", "40", "-w", "4", "-f"]
        out = subprocess.run(client, capture_output=True, text=True, env=ucx, timeout=120).stdout
        server.wait(timeout=30)
    last = out.strip().splitlines()[-1].split()
    return float(last[5]) * (1 << 20) / 1e9  # average, MB/s of 2^20 bytes


def lane():
    out = subprocess.run([build / "tests/common/xfer/bench_xfer", "tcp", str(mib), "7"], check=True,
                         capture_output=True, text=True, timeout=300).stdout
    return {m[1].strip(): float(m[2]) for m in re.finditer(r"^(.{12})\s+([0-9.]+) GB/s", out, re.M)}


seen = {}
for _ in range(pairs):
    before, ours, after = perftest(), lane(), perftest()
    ours["ucp_am_bw"] = (before + after) / 2
    for name, gbs in ours.items():
        seen.setdefault(name, []).append((gbs, gbs / ours["ucp_am_bw"]))
print(f"slab {mib} MiB, tcp over lo, medians of {pairs} turns")
for name, values in seen.items():
    gbs, share = (statistics.median(v[i] for v in values) for i in (0, 1))
    print(f"{name:12} {gbs:8.2f} GB/s  {100 * share:6.1f} % of ucp_am_bw")
