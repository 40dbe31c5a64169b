#!/usr/bin/env python3
"""A public load generator as a client: PyPI's `aiperf` over streams of the chat API, and in tests/nightly of every
API that it speaks: it computes for half a minute each, and their own clients read them by day. See router_frame.py."""
import json
import os
import pathlib
import shutil
import subprocess
import sys

from router_frame import PATIENCE, main

REQUESTS = 30
KINDS = ("chat", "responses", "messages") if os.environ.get("TANDEM_TEST_WHOLE") else ("chat",)
# On the path, or where deploy/packages --with-tests puts it.
DATA = pathlib.Path(os.environ.get("XDG_DATA_HOME") or pathlib.Path.home() / ".local/share")
AIPERF = shutil.which("aiperf") or shutil.which(DATA / "tandem-tests/aiperf/bin/aiperf")


def aiperf(s, kind):
    """What aiperf measured; it fails a stream that it cannot read."""
    out = s.dir / f"aiperf-{kind}"
    r = subprocess.run([AIPERF, "profile", "-m", "needle", "--url", s.url, "--endpoint-type", kind, "--streaming", "--tokenizer", s.folder,
                        "--concurrency", "8", "--request-count", str(REQUESTS), "--synthetic-input-tokens-mean", "50", "--output-tokens-mean", "20",
                        "--random-seed", "7", "--ui", "none", "--workers-max", "1", "--record-processor-service-count", "1",
                        "--no-gpu-telemetry", "--no-server-metrics", "--artifact-dir", out],
                       text=True, capture_output=True, timeout=PATIENCE, env={**os.environ, "HF_HUB_DISABLE_TELEMETRY": "1"})
    assert r.returncode == 0, r.stdout[-3000:] + r.stderr[-1000:]
    return json.loads((out / "profile_export_aiperf.json").read_text())


def test_aiperf(s):
    for kind in KINDS:
        before = s.seen().count("prefill prompt")
        got = aiperf(s, kind)
        assert got["request_count"]["avg"] == REQUESTS and got["error_summary"] == [] and got["is_complete"], (kind, got["error_summary"])
        assert got["time_to_first_token"]["avg"] > 0 and got["inter_token_latency"]["avg"] > 0, kind
        assert s.seen().count("prefill prompt") - before >= REQUESTS
        print(f"  {kind}: {REQUESTS} streams, first token {got['time_to_first_token']['avg']:.1f} ms, "
              f"{got['request_throughput']['avg']:.0f} requests/s")


if __name__ == "__main__":
    if not AIPERF:
        print("the PyPI package aiperf is not installed")
        sys.exit(77)
    sys.exit(main(globals()))
