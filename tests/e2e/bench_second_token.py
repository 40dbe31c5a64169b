#!/usr/bin/env python3
"""Time to the first and to the second token, disaggregated and colocated, in pairs: what a handoff
costs a client. Two local clusters run side by side, router + prefill + decode and router + decode
alone, with the same number of compute threads on the same cores; one request is under way at a time.
The second token is the first one that decode computed, so it shows the whole handoff.

usage: bench_second_token.py BUILD [--tokens N] [--runs N] [--cores 0,1] [--set key=value ...]

A prompt is asked four times, disaggregated, colocated, colocated, disaggregated or the other way
round, which gives two pairs of which a drift of the machine cancels; --runs counts pairs (20). After
four pairs both clusters start anew: where a process finds its memory makes it some percent faster or
slower for all its life, which no number of pairs would average out.
Greedy, 3 tokens of an answer of plain text: each comes in an event of its own. A prefill takes a
thousand times as long as a handoff and varies with it, so printed are the median difference of pairs
with its 95 % interval (by the order of the pairs, whatever their distribution), the difference of the
fastest, what two requests of the same arm differ by, and the gap between the two tokens, which has no
prefill in it. Nothing is asserted but equal answers."""
import argparse
import http.client
import json
import math
import os
import pathlib
import random
import statistics
import subprocess
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import cluster as e2e  # noqa: E402


FILLER = ("A {0} moved a rusty lamp near the {1}. Nobody in the {1} found the quiet {2}. At noon, the {0} and "
          "the pilot packed the {2}. ").format
PER_START = 4
NOUNS = ("baker", "miller", "sailor", "doctor"), ("mill", "harbor", "market", "bridge"), ("bell", "wagon", "basket")


def ids_of(text):
    r = subprocess.run([e2e.TANDEM, "tokenize", "--tokenizer", e2e.MODEL], input=text, text=True,
                       capture_output=True, check=True)
    return [int(i) for i in r.stdout.split()]


def prompt(rng, n):
    """Exactly n tokens: filler with a code in it, and the question for it."""
    code = f"{rng.choice(('OMEGA', 'SIGMA', 'DELTA'))}-{rng.randrange(1000, 9999)}-DELTA"
    head = ids_of("<\uff5cbegin\u2581of\u2581sentence\uff5c><\uff5cUser\uff5c>Read the notes. ")
    tail = ids_of(f"The secret code of ZEBRA is {code}.\n\nWhat is the secret code of ZEBRA?<\uff5cAssistant\uff5c></think>")
    filler = ids_of("".join(FILLER(*map(rng.choice, NOUNS)) for _ in range(n // 16)))
    room = n - len(head) - len(tail)
    assert 0 <= room <= len(filler)
    return head + filler[:room] + tail


def ask(c, ids):
    """(seconds to each streamed token, answer)"""
    body = json.dumps({"model": "needle", "prompt": ids, "max_tokens": 3, "temperature": 0, "stream": True,
                       "ignore_eos": True, "logprobs": 0})
    conn = http.client.HTTPConnection(c.url.removeprefix("http://"), timeout=120)
    conn.connect()
    start = time.perf_counter()
    conn.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    answer = conn.getresponse()
    if answer.status != 200:
        raise RuntimeError(answer.read().decode())
    at, tokens = [], []
    for line in answer:
        now = time.perf_counter() - start
        if not line.startswith(b"data: {"):
            continue
        for choice in json.loads(line[6:])["choices"]:
            new = (choice.get("logprobs") or {}).get("tokens") or []
            at += [now] * len(new)
            tokens += new
    conn.close()
    assert len(at) == 3, f"3 tokens were asked for, {len(at)} came"
    return at, tokens


def interval(values):
    """95 % of the median: between the k-th values from below and above (binomial)."""
    n, v = len(values), sorted(values)
    k, tail = 0, 0.5 ** n
    while tail <= 0.025 and k < n // 2:
        k += 1
        tail += math.comb(n, k) * 0.5 ** n
    return v[max(k - 1, 0)], v[n - max(k, 1)]


def show(what, values):
    low, high = interval(values)
    print(f"{what:46} {1e3 * statistics.median(values):9.2f} ms  (95 %: {1e3 * low:.2f} to {1e3 * high:.2f};"
          f" least {1e3 * min(values):.2f})")


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("build")
    ap.add_argument("--tokens", type=int, default=4509)
    ap.add_argument("--runs", type=int, default=20)
    ap.add_argument("--cores", help="numbers of the cores that both clusters may use; default all")
    ap.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    ap.add_argument("--set", action="append", default=[], help="further settings of both clusters")
    o = ap.parse_args()
    if o.cores:
        os.sched_setaffinity(0, {int(c) for c in o.cores.split(",")})
    more = {"threads": len(os.sched_getaffinity(0)), "max_context": o.tokens + 256}
    more |= dict(s.split("=", 1) for s in o.set)
    rng = random.Random(o.seed)
    print(f"seed {o.seed}, {more['threads']} threads")
    first = {True: [], False: []}
    second = {True: [], False: []}
    for begun in range(0, o.runs, PER_START):
        blocks = (min(PER_START, o.runs - begun) + 1) // 2
        with e2e.Cluster(**more) as apart, e2e.Cluster(router__colocate="on", cluster__prefill=0, **more) as together:
            for block in range(-1, blocks):
                ids = prompt(rng, o.tokens)
                answers = []
                ends = block % 2 == 0
                for handoff in (ends, not ends, not ends, ends):
                    at, tokens = ask(apart if handoff else together, ids)
                    answers.append(tokens)
                    if block < 0:  # links are made, memory is touched
                        continue
                    first[handoff].append(at[0])
                    second[handoff].append(at[1])
                assert all(a == answers[0] for a in answers), answers
    gap = {h: [b - a for a, b in zip(first[h], second[h])] for h in (True, False)}
    for name, handoff in (("disaggregated", True), ("colocated", False)):
        show(f"{name}: first token", first[handoff])
        show(f"{name}: second token", second[handoff])
        show(f"{name}: between them", gap[handoff])
    for what, of in (("first token", first), ("second token", second), ("between them", gap)):
        show(f"difference of pairs: {what}", [a - b for a, b in zip(of[True], of[False])])
        print(f"{'  of the fastest':46} {1e3 * (min(of[True]) - min(of[False])):9.2f} ms")
    # In the middle of a block stand two requests of one arm, one after the other.
    same = [b - a for v in second.values() for a, b in zip(v[::2], v[1::2])]
    show("the same arm twice: second token, difference", [abs(d) for d in same])


main()
