#!/usr/bin/env python3
"""Time per token of answers with a form and with penalties, beside free ones of the same run: one
stream at a time, the ways in turn, medians.

usage: bench_structured.py BUILD [ROUNDS]"""
import pathlib
import statistics
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import cluster as e2e  # noqa: E402
import test_structured as forms  # noqa: E402

TOKENS = 300


def milliseconds(client, body):
    """Between the first and the last chunk, by tokens."""
    times, tokens = [], 0
    for chunk in client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **body):
        times.append(time.perf_counter())
        tokens = chunk.usage.completion_tokens if chunk.usage else tokens
    return (times[-1] - times[0]) / (tokens - 1) * 1e3


def main():
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 7
    with e2e.Cluster(max_context=4096, max_running=8) as c:
        client, bias = c.client(), forms.endless(c)
        free = forms.body("x", 1, TOKENS, logit_bias=bias)
        free["extra_body"]["ignore_eos"] = True
        ways = {
            "free": free,
            "penalties": free | {"frequency_penalty": 0.2, "presence_penalty": 0.1},
            "any object": forms.body("x", 1, TOKENS, logit_bias=bias, **forms.OBJECT),
            "a schema": forms.body("x", 1, TOKENS, logit_bias=bias, guided_json={
                "type": "object", "properties": {"list": {"type": "array", "items": {"type": "integer"}}},
                "required": ["list"], "additionalProperties": False}),
        }
        got = {name: [] for name in ways}
        for seed in range(rounds + 1):
            for name, body in ways.items():
                took = milliseconds(client, body | {"seed": seed})
                if seed > 0:  # the first round fills what is kept
                    got[name].append(took)
        base = statistics.median(got["free"])
        for name, took in got.items():
            m = statistics.median(took)
            print(f"{name:12} {m:6.3f} ms a token ({min(took):.3f} to {max(took):.3f}), {m / base:.2f} of free")


if __name__ == "__main__":
    main()
