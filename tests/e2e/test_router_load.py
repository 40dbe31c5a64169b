#!/usr/bin/env python3
"""Load generators and shells as clients: PyPI's `aiperf` over streams of every API that it speaks, and
`curl -N`. See router_frame.py."""
import json
import os
import shutil
import subprocess
import sys
import time

from router_frame import body_of, main

REQUESTS = 30


def aiperf(s, kind):
    """What aiperf measured; it fails a stream that it cannot read."""
    out = s.dir / f"aiperf-{kind}"
    r = subprocess.run(["aiperf", "profile", "-m", "needle", "--url", s.url, "--endpoint-type", kind, "--streaming", "--tokenizer", s.folder,
                        "--concurrency", "8", "--request-count", str(REQUESTS), "--synthetic-input-tokens-mean", "50", "--output-tokens-mean", "20",
                        "--random-seed", "7", "--ui", "none", "--artifact-dir", out],
                       text=True, capture_output=True, timeout=200, env={**os.environ, "HF_HUB_DISABLE_TELEMETRY": "1"})
    assert r.returncode == 0, r.stdout[-3000:] + r.stderr[-1000:]
    return json.loads((out / "profile_export_aiperf.json").read_text())


def test_aiperf(s):
    if not shutil.which("aiperf"):
        print("the PyPI package aiperf is not installed")
        return
    for kind in ("chat", "responses", "messages"):
        before = s.seen().count("prefill prompt")
        got = aiperf(s, kind)
        assert got["request_count"]["avg"] == REQUESTS and got["error_summary"] == [] and got["is_complete"], (kind, got["error_summary"])
        assert got["time_to_first_token"]["avg"] > 0 and got["inter_token_latency"]["avg"] > 0, kind
        assert s.seen().count("prefill prompt") - before >= REQUESTS
        print(f"  {kind}: {REQUESTS} streams, first token {got['time_to_first_token']['avg']:.1f} ms, "
              f"{got['request_throughput']['avg']:.0f} requests/s")


def test_curl(s):
    """Chunks come as tokens do, not at the end."""
    words = "@slow " + "one two three four five " * 8
    p = subprocess.Popen(["curl", "-sN", "-H", "Content-Type: application/json", "-d", "@-", s.url + "/v1/chat/completions"],
                         stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    p.stdin.write(body_of(words, stream=True).decode())
    p.stdin.close()
    times, text, last = [], "", ""
    for line in p.stdout:
        last = line.strip() or last
        if line.startswith("data: {"):
            times.append(time.monotonic())
            for choice in json.loads(line[6:])["choices"]:
                text += choice["delta"].get("content") or ""
    assert p.wait(20) == 0 and (text, last) == (words, "data: [DONE]")
    assert times[-1] - times[0] > 0.02 * 30 and times[len(times) // 2] - times[0] > 0.02 * 10, "it came at once"


if __name__ == "__main__":
    sys.exit(main(globals()))
