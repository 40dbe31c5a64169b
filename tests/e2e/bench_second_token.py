#!/usr/bin/env python3
"""Time to the first and to the second token, disaggregated and colocated, in pairs: what a handoff
costs a client. Two local clusters run side by side, router + prefill + decode and router + decode
alone; each prompt is asked at one and at once at the other, in turns which is first, one request at
a time. The second token is the first one that decode computed, so it shows the whole handoff.

usage: bench_second_token.py BUILD [--tokens N] [--runs N] [--set key=value ...]     (4509, 20)
Greedy, 3 tokens of an answer of plain text: each comes in an event of its own. A difference is of one pair; printed is the median of pairs, with the
quartiles, because a prefill's own time varies more than the handoff takes. The gap between the two
tokens is the same difference without the prefill. Nothing is asserted but equal answers."""
import argparse
import http.client
import json
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


def show(what, values):
    q = statistics.quantiles(values, n=4)
    print(f"{what:34} {1e3 * statistics.median(values):9.2f} ms  (quartiles {1e3 * q[0]:.2f}, {1e3 * q[2]:.2f})")


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("build")
    ap.add_argument("--tokens", type=int, default=4509)
    ap.add_argument("--runs", type=int, default=20)
    ap.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    ap.add_argument("--set", action="append", default=[], help="further settings of both clusters")
    o = ap.parse_args()
    more = {"threads": 0, "max_context": o.tokens + 256} | dict(s.split("=", 1) for s in o.set)
    rng = random.Random(o.seed)
    print("seed", o.seed)
    first = {True: [], False: []}
    second = {True: [], False: []}
    with e2e.Cluster(**more) as apart, e2e.Cluster(router__colocate="on", cluster__prefill=0, **more) as together:
        for run in range(-1, o.runs):
            ids = prompt(rng, o.tokens)
            answers = []
            for handoff in ((True, False) if run % 2 else (False, True)):
                at, tokens = ask(apart if handoff else together, ids)
                answers.append(tokens)
                if run < 0:  # links are made, memory is touched
                    continue
                first[handoff].append(at[0])
                second[handoff].append(at[1])
            assert answers[0] == answers[1], answers
    for name, handoff in (("disaggregated", True), ("colocated", False)):
        show(f"{name}: first token", first[handoff])
        show(f"{name}: second token", second[handoff])
        show(f"{name}: between them", [b - a for a, b in zip(first[handoff], second[handoff])])
    show("difference: first token", [a - b for a, b in zip(first[True], first[False])])
    show("difference: second token", [a - b for a, b in zip(second[True], second[False])])
    show("difference: between them", [(sa - fa) - (sb - fb) for fa, sa, fb, sb in
                                      zip(first[True], second[True], first[False], second[False])])


main()
