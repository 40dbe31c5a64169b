#!/usr/bin/env python3
"""What the router costs beside other programs in its place, in turns in one run: nginx as a proxy that
looks at nothing, and PyPI's sglang-router, with one worker behind it and with a prefill and a decode
worker as ours has. Behind those stands an nginx that answers every request with the bytes that ours answers;
behind ours tests/router/fake_worker, so nobody computes.

  small    chat completions of a few words, 16 tokens, not streamed
  large    the same with a body of 220 KB; how much of the cost is JSON, chat encoding and tokenizer
           (threads of the pool), how much the loop's
  events   streams of one token per event and ms, so a message, a read and a write for every event; behind
           the others a program that sends the events that ours sends, at the same pace

Only the program under test runs on the first core; load (Debian's wrk) and workers on the second. Requests per
second are thus those of one core, if it is busy (the column says how much of the time); CPU time is the
kernel's account of the process and holds on a loaded machine too.

usage: bench_peers.py BUILD [--model DIR] [--sglang PYTHON] [--runs N] [--seconds S]
  --model    whose tokenizer (default: the bundled model)
  --sglang   a Python that has PyPI's sglang-router (python3 -m venv V; V/bin/pip install sglang-router)
  --seconds  of load in each turn

Figures, no verdict: medians of N turns, and their range."""
import argparse
import asyncio
import contextlib
import json
import os
import pathlib
import re
import signal
import socket
import statistics
import subprocess
import tempfile
import time
import urllib.request

from bench_router import MODEL, Router, free_port

SMALL = "@fast The tide turned at noon and the crew wrote down the depth below the keel."
PROSE = ("In the morning {} ships left harbour {}; the pilot's log says \"wind from the west, {} knots\", "
         "and the clerk, who had counted twice, wrote: cargo[{}] = {} sacks of salt.\n")
LARGE_BYTES, TOKENS = 220_000, 16
STREAMS, EVENTS = 32, 1000  # at a time; of each


def body_of(content, **more):
    return json.dumps({"model": "needle", "messages": [{"role": "user", "content": content}], **more}).encode()


def large_content():
    lines = ["@fast "]
    size = i = 0
    while size < LARGE_BYTES:
        i += 1
        lines.append(PROSE.format(i, i * 7919 % 1000, i * 31 % 60, i, i * i))
        size += len(json.dumps(lines[-1]))
    return "".join(lines)


def pin(pid, core):
    """All threads that there are; later ones inherit it."""
    for task in pathlib.Path(f"/proc/{pid}/task").iterdir():
        os.sched_setaffinity(int(task.name), {core})


def cpu_ns(pid):
    """CPU time of a process with the threads that have ended (clock_getcpuclockid(3))."""
    return time.clock_gettime_ns(~pid << 3 | 2)


def until(ready, what):
    end = time.monotonic() + 60
    while not ready():
        assert time.monotonic() < end, f"{what} is not ready"
        time.sleep(0.05)


def post(port, body):
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/chat/completions", body,
                                     {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as r:
        return r.read()


def bytes_and_events(port, body):
    """Of a whole answer as it is on the wire."""
    with socket.create_connection(("127.0.0.1", port), 30) as s:
        s.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
                  b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        got = b"".join(iter(lambda: s.recv(1 << 16), b""))
    assert got.startswith(b"HTTP/1.1 200"), got[:300]
    return len(got), got.count(b"data: ")


def answers(port, body):
    try:
        return bool(post(port, body))
    except OSError:
        return False


class Ours:
    name = "tandem-router"

    def __init__(self, stack, build, model):
        router = stack.enter_context(Router(build, model))
        self.port, self.pid = router.port, router.router.pid
        pin(self.pid, 0)
        pin(router.fake.pid, 1)

    def loop_ns(self):
        """The first thread's alone; the others are libuv's pool."""
        return int(pathlib.Path(f"/proc/{self.pid}/task/{self.pid}/schedstat").read_text().split()[0])


class Nginx:
    """One worker process; `server` is what stands in its server block."""
    name = "nginx"

    def __init__(self, stack, core, server, more=""):
        folder = pathlib.Path(tempfile.mkdtemp(prefix="td-nginx-", dir="/tmp"))
        self.port = free_port()
        (folder / "conf").write_text(f"""
            daemon off; worker_processes 1; pid {folder}/pid; error_log {folder}/error.log;
            events {{ worker_connections 1024; }}
            http {{
                access_log off; keepalive_requests 1000000000; client_max_body_size 1m; client_body_buffer_size 512k;
                client_body_temp_path {folder}; proxy_temp_path {folder}; fastcgi_temp_path {folder};
                uwsgi_temp_path {folder}; scgi_temp_path {folder};
                {more}
                server {{ listen 127.0.0.1:{self.port}; {server} }}
            }}""")
        p = subprocess.Popen(["nginx", "-e", folder / "error.log", "-p", folder, "-c", folder / "conf"])
        stack.callback(stop, p)
        children = pathlib.Path(f"/proc/{p.pid}/task/{p.pid}/children")
        until(lambda: children.read_text().split(), "nginx")
        self.pid = int(children.read_text().split()[0])
        pin(self.pid, core)


class Streamer:
    """A backend that answers every request with these events, one a ms."""

    def __init__(self, stack, events):
        self.port = free_port()
        pid = os.fork()
        if pid == 0:
            try:
                os.sched_setaffinity(0, {1})
                asyncio.run(self.serve([b"%x\r\n%s\r\n" % (len(e), e) for e in events]))
            finally:
                os._exit(1)
        stack.callback(lambda: (os.kill(pid, signal.SIGKILL), os.waitpid(pid, 0)))

    async def serve(self, chunks):
        streams = {}

        async def client(reader, writer):
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                while True:
                    head = await reader.readuntil(b"\r\n\r\n")
                    size = re.search(rb"content-length: *(\d+)", head, re.I)
                    await reader.readexactly(int(size[1]) if size else 0)
                    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
                                 b"Transfer-Encoding: chunked\r\n\r\n")
                    streams[writer] = 0
            streams.pop(writer, None)
            writer.close()

        async with await asyncio.start_server(client, "127.0.0.1", self.port):
            due = time.monotonic()
            while True:
                due += 0.001
                await asyncio.sleep(max(0, due - time.monotonic()))
                for w, i in list(streams.items()):
                    w.write(chunks[i])
                    streams[w] = i + 1
                    if i + 1 == len(chunks):
                        w.write(b"0\r\n\r\n")
                        del streams[w]


class Sglang:
    def __init__(self, stack, python, workers, name):
        self.name, self.port = name, free_port()
        log = tempfile.TemporaryFile()
        p = subprocess.Popen([python, "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port",
                              str(self.port), "--prometheus-port", str(free_port()), "--log-level", "error",
                              "--disable-health-check", *workers], stdout=log, stderr=log)
        stack.callback(stop, p)
        self.pid = p.pid
        until(lambda: answers(self.port, body_of(SMALL, max_tokens=TOKENS)), name)
        pin(self.pid, 0)


def stop(p):
    p.send_signal(signal.SIGTERM)
    try:
        p.wait(10)
    except subprocess.TimeoutExpired:
        p.kill()
        p.wait()


def load(port, script, connections, seconds):
    """Requests answered, bytes received, seconds."""
    out = subprocess.run(["taskset", "-c", "1", "wrk", "-t1", f"-c{connections}", f"-d{seconds}", "--timeout", "30",
                          "-s", script, f"http://127.0.0.1:{port}/v1/chat/completions"],
                         capture_output=True, text=True, check=True).stdout
    n, failed, size, us = map(int, re.search(r"DONE (\d+) (\d+) (\d+) (\d+)", out).groups())
    assert failed == 0, f"{failed} of {n} requests failed"
    return n, size, us / 1e6


SCRIPT = """wrk.method = "POST"
wrk.headers["Content-Type"] = "application/json"
wrk.body = io.open("%s", "rb"):read("*a")
done = function(s) print(string.format("DONE %%d %%d %%d %%d", s.requests, s.errors.status + s.errors.timeout
    + s.errors.read + s.errors.write + s.errors.connect, s.bytes, s.duration)) end
"""


def show(title, unit, programs, of):
    def row(values, base):
        middle = statistics.median(values)
        return f"{middle:10.1f} ({min(values):8.1f} to {max(values):8.1f}){middle / statistics.median(base):8.2f}"

    mine = of[programs[0].name]
    print(f"\n{title}\n{'':28}{f'CPU, us/{unit}':>32}{'of ours':>8}{f'{unit}s/s':>32}{'of ours':>8}{'busy':>6}")
    for p in programs:
        f = of[p.name]
        print(f"{p.name:28}{row(f['us'], mine['us'])}{row(f['rate'], mine['rate'])}"
              f"{100 * statistics.median(f['busy']):5.0f}%", flush=True)
    us, pool, loop = (statistics.median(mine[k]) for k in ("us", "pool", "loop"))
    print(f"of ours in the pool (JSON, chat encoding, tokenizer): {pool:.1f} us, in the loop: {loop:.1f} us; "
          f"per second and core: {1e6 / us:.0f}")


def bench(title, unit, body, connections, programs, args):
    folder = pathlib.Path(tempfile.mkdtemp(prefix="td-bench-", dir="/tmp"))
    script = folder / "load.lua"
    (folder / "body").write_bytes(body)
    script.write_text(SCRIPT % (folder / "body"))
    of = {p.name: {k: [] for k in ("us", "rate", "busy", "loop", "pool")} for p in programs}
    whole = {}
    for p in programs:
        whole[p.name] = bytes_and_events(p.port, body)
        load(p.port, script, connections, 1)  # connections to the workers, buffers
    for turn in range(args.runs):
        for p in programs[turn % len(programs):] + programs[:turn % len(programs)]:
            loop, cpu = p.loop_ns() if isinstance(p, Ours) else 0, cpu_ns(p.pid)
            n, size, took = load(p.port, script, connections, args.seconds)
            cpu = cpu_ns(p.pid) - cpu
            loop = p.loop_ns() - loop if isinstance(p, Ours) else 0
            if unit == "event":  # by bytes, because streams are cut off at the end
                n = size * whole[p.name][1] / whole[p.name][0]
            for key, value in (("us", cpu / 1e3 / n), ("rate", n / took), ("busy", cpu / 1e9 / took),
                               ("loop", loop / 1e3 / n), ("pool", (cpu - loop) / 1e3 / n)):
                of[p.name][key].append(value)
    show(title, unit, programs, of)


def peers(stack, args, port, prefill):
    """Programs in front of these backends. A prefill worker's answer is awaited before anything is passed on."""
    proxy = ("proxy_pass http://backend; proxy_http_version 1.1; proxy_set_header Connection ''; "
             "proxy_set_header Host $host; proxy_buffering off;")
    programs = [Nginx(stack, 0, f"location / {{ {proxy} }}",
                      f"upstream backend {{ server 127.0.0.1:{port}; keepalive 64; keepalive_requests 1000000000; }}")]
    if args.sglang:
        url, first = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{prefill}"
        programs += [Sglang(stack, args.sglang, ["--worker-urls", url], "sglang-router, one worker"),
                     Sglang(stack, args.sglang, ["--pd-disaggregation", "--prefill", first, "--decode", url],
                            "sglang-router, two workers")]
    return programs


def main():
    p = argparse.ArgumentParser(usage=__doc__)
    p.add_argument("build", type=pathlib.Path)
    p.add_argument("--model", type=pathlib.Path, default=MODEL)
    p.add_argument("--sglang")
    p.add_argument("--runs", type=int, default=5)
    p.add_argument("--seconds", type=int, default=1)
    args = p.parse_args()
    small = body_of(SMALL, max_tokens=TOKENS)
    large = body_of(large_content(), max_tokens=TOKENS)
    stream = body_of("word " * EVENTS, max_tokens=EVENTS, stream=True)
    with contextlib.ExitStack() as stack:
        ours = Ours(stack, args.build.resolve(), args.model)
        reply = post(ours.port, small).decode()
        assert "'" not in reply and "$" not in reply, reply
        fixed = f"location / {{ default_type application/json; return 200 '{reply}'; }}"
        backends = [Nginx(stack, 1, fixed).port for _ in range(2)]
        programs = [ours, *peers(stack, args, *backends)]
        bench(f"small: body of {len(small)} bytes, answer of {len(reply)}, 64 connections", "request", small, 64,
              programs, args)
        bench(f"large: body of {len(large)} bytes, 8 connections", "request", large, 8, programs, args)
        events = [e + b"\n\n" for e in post(ours.port, stream).split(b"\n\n") if e.startswith(b"data: ")]
        streamer = Streamer(stack, events).port
        until(lambda: answers(streamer, small), "the streamer")
        bench(f"events: {STREAMS} streams of {len(events)} events", "event", stream, STREAMS,
              [ours, *peers(stack, args, streamer, backends[1])], args)


if __name__ == "__main__":
    main()
