#!/usr/bin/env python3
"""`tandem tokenize` as a script would use it: ids, the way back, exit codes, messages.

usage: test_cmd_tokenize.py PROGRAM...    (PROGRAM may be `tandem tokenize`)
Exit 77 without TANDEM_TEST_DATA.
"""
import os
import subprocess
import sys

DATA = os.environ.get("TANDEM_TEST_DATA", "")
FOLDER = DATA + "/models/needle-nvfp4"
if not DATA or not os.path.exists(FOLDER + "/tokenizer.json"):
    print("skipped: TANDEM_TEST_DATA with models/needle-nvfp4 is not there")
    sys.exit(77)


def run(*args, text=b"", code=0):
    done = subprocess.run(sys.argv[1:] + list(args), input=text, capture_output=True)
    assert done.returncode == code, (args, done.returncode, done.stderr)
    return done


def main():
    text = "<\uff5cUser\uff5c>The secret code\r\n of ZEBRA \u6bd5\U0001F642 is </think> 42.\n"
    text = text.encode()
    ids = run("--tokenizer", FOLDER, text=text).stdout
    assert ids.endswith(b"\n") and ids.count(b"\n") == 1, ids
    assert ids.split()[0] == b"3" and b"6" in ids.split(), ids  # the two added tokens
    assert run("--tokenizer", FOLDER, "--decode", text=ids).stdout == text
    raw = bytes(range(256)) * 400
    ids = run("--tokenizer", FOLDER, text=raw).stdout
    assert run("--tokenizer", FOLDER, "--decode", text=ids.replace(b" ", b"\n\t")).stdout == raw
    assert run("--tokenizer", FOLDER).stdout == b"\n"
    assert run("--tokenizer", FOLDER, "--decode").stdout == b""

    for bad in (b"x", b"1 -2", b"2048", b"99999999999999999999", b"1,2", b"12345678901234"):
        done = run("--tokenizer", FOLDER, "--decode", text=bad, code=1)
        assert b"expected token ids of 0..2047" in done.stderr, done.stderr
    done = run("--tokenizer", "/nonexistent", code=1)
    assert b"/nonexistent/tokenizer.json" in done.stderr, done.stderr
    if os.path.exists("/dev/full"):
        with open("/dev/full", "wb") as full:
            done = subprocess.run(sys.argv[1:] + ["--tokenizer", FOLDER], input=b"x", stdout=full,
                                  stderr=subprocess.PIPE)
        assert done.returncode == 1 and b"standard output" in done.stderr, done
    assert run("--help").stdout.startswith(b"usage: tandem tokenize")
    for wrong in ((), ("--tokenizer",), ("--tokenizer", FOLDER, "more"), ("--nonsense",),
                  ("--tokenizer", FOLDER, "--nonsense")):
        assert b"usage" in run(*wrong, code=2).stderr


main()
