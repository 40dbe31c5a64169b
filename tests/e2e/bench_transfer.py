#!/usr/bin/env python3
"""What a handoff takes behind a prompt's last chunk: one local cluster, one request at a time, 2 tokens
of an answer. Prints medians of the phases prefill and transfer as usage tells them, the bytes of KV
state that a prompt moves and how many of them behind its last chunk, and their rate over the transfer.

usage: bench_transfer.py BUILD [--tokens N] [--runs N] [--set key=value ...]

With a chunk as long as the prompt all bytes move behind it. The real model's state without its weights,
on a GPU: --set device=cuda:0 --set load_format=random --set random.layers=0,0,4,128,...,4,0 --set pool_pages=..."""
import argparse
import pathlib
import random
import statistics
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import cluster as e2e  # noqa: E402


def moved(c):
    """(bytes moved, of them before a last chunk ended) by the prefill worker so far"""
    ledger = c.fresh_ledgers()["prefill@0"]
    return ledger["bytes_moved"], ledger["bytes_before_last_chunk"]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("build")
    ap.add_argument("--tokens", type=int, default=4509)
    ap.add_argument("--runs", type=int, default=10)
    ap.add_argument("--set", action="append", default=[], help="further settings of both workers")
    o = ap.parse_args()
    settings = {"max_context": o.tokens + 256, "max_running": 2} | dict(s.split("=", 1) for s in o.set)
    rng = random.Random(1)
    phases = {"prefill": [], "transfer": [], "total": []}
    with e2e.Cluster(**settings) as c:
        for run in range(-1, o.runs):
            ids = [0] + [rng.randrange(7, 1700) for _ in range(o.tokens - 1)]
            if run == 0:
                before = moved(c)
            status, j = c.post("/v1/completions", {"model": "needle", "prompt": ids, "max_tokens": 2, "temperature": 0,
                                                   "ignore_eos": True, "return_timings": True})
            assert status == 200, j
            for name, values in phases.items():
                if run >= 0:  # links were made, memory was touched
                    told = j["usage"]["tandem"]
                    values.append((told["phases"] | told)[name])
        after = moved(c)
    all_bytes, early = ((b - a) / o.runs for a, b in zip(before, after))
    for name, values in phases.items():
        print(f"{name:9} {1e3 * statistics.median(values):9.2f} ms  (least {1e3 * min(values):.2f}, most {1e3 * max(values):.2f})")
    late = all_bytes - early
    print(f"a prompt of {o.tokens} tokens moves {all_bytes / 1e6:.1f} MB, {late / 1e6:.1f} MB behind its last chunk: "
          f"{late / 1e9 / statistics.median(phases['transfer']):.2f} GB/s")


main()
