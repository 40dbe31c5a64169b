#!/usr/bin/env python3
"""Compares our token ids with those of Hugging Face `tokenizers`, text by text, and decodes back.

usage: compare_hf.py ENCODE_FILE [TOKENIZER_DIR...] [--seed N] [--more] [--bench]
Without a folder: the bundled model's and DeepSeek-V3's tokenizer in TANDEM_TEST_DATA.

First the pieces that the splitters make (ids alone would hide a wrong piece whose bytes no merge
joins), then the ids. The text is made from a seed: Python's own sources and manual pages for prose
and code, every code point at least once alone among its neighbours and (if assigned) in several
surroundings, and random strings drawn from pools of whatever makes splitters differ; of prose, code
and strings --more takes four times as many. --bench measures one core instead.
Exit 77: `tokenizers` is not installed or a tokenizer is not there.
"""
import argparse
import glob
import gzip
import os
import random
import struct
import subprocess
import sys
import tempfile
import time
import unicodedata

WHITE = [chr(c) for c in (*range(9, 14), 0x20, 0x85, 0xA0, 0x1680, *range(0x2000, 0x200B), 0x2028,
                          0x2029, 0x202F, 0x205F, 0x3000)]


def sources(limit):
    """Prose and code of about `limit` bytes, as whole files."""
    files = sorted(glob.glob(os.path.join(os.path.dirname(os.__file__), "*.py")))
    files += sorted(glob.glob("/usr/share/man/man[1-8]/*.gz"))[:200]
    files += sorted(glob.glob("/usr/share/doc/*/copyright"))[:40]
    random.shuffle(files)
    total = 0
    for path in files:
        try:
            data = gzip.open(path).read() if path.endswith(".gz") else open(path, "rb").read()
        except OSError:
            continue
        text = data.decode("utf-8", "replace")
        total += len(data)
        yield text
        if total > limit:
            return


def code_points():
    """Every code point: in order, and the assigned ones in surroundings that decide splits."""
    valid = [c for c in range(0x110000) if not 0xD800 <= c < 0xE000]
    for i in range(0, len(valid), 4000):
        yield "".join(map(chr, valid[i:i + 4000]))
    # Blocks that any Unicode version may use, whatever the version of Python's tables.
    likely = [c for c in valid if c < 0x33480 and not 0xE000 <= c < 0xF900
              and not 0x4E80 <= c < 0x9F80 and not 0xAC80 <= c < 0xD780
              and not 0x17080 <= c < 0x18780 and not 0x20080 <= c < 0x33400] + \
             [*range(0xE0000, 0xE0200)]
    shapes = ["a{0}b {0}1{0}\n", "{0}{0} {0}.{0}\r\n", ".{0} \u4e00{0}\u3042 ",
              "\x01{0}\x01\x02{0}a "]
    out = []
    for c in likely:
        out.append(random.choice(shapes).format(chr(c)))
        if len(out) == 2000:
            yield "".join(out)
            out = []
    yield "".join(out)


def names(n):
    """Sentences of Unicode names with the characters they name."""
    for _ in range(n):
        words = []
        for _ in range(random.randrange(5, 60)):
            ch = chr(random.choice((random.randrange(0x20, 0x3000), random.randrange(0x10000),
                                    random.randrange(0x1F000, 0x1FB00))))
            words.append(unicodedata.name(ch, "no name").capitalize() + " is " + ch
                         if not 0xD800 <= ord(ch) < 0xE000 else "surrogate")
        yield ", ".join(words) + ".\n"


def pool(*ranges):
    return [chr(c) for lo, hi in ranges for c in range(lo, hi + 1)]


POOLS = [
    pool((0x41, 0x5A), (0x61, 0x7A)),
    pool((0x30, 0x39)),
    pool((0x21, 0x2F), (0x3A, 0x40), (0x5B, 0x60), (0x7B, 0x7E)),
    WHITE, ["\r", "\n", "\r\n", "\n\n", " ", "  ", "\t"], [" "],
    pool((0x00, 0x1F), (0x7F, 0x9F), (0x200B, 0x200F), (0x2060, 0x2064), (0xFFF9, 0xFFFF)),
    pool((0x4E00, 0x9FA5)), pool((0x9FA6, 0x9FFF), (0x3400, 0x3500), (0x20000, 0x20100)),
    pool((0x3040, 0x30FF)), pool((0x3000, 0x303F), (0xFF00, 0xFFEF)), pool((0xAC00, 0xAE00)),
    pool((0x0300, 0x036F), (0x20D0, 0x20F0), (0xFE00, 0xFE0F), (0x3099, 0x309A)),
    pool((0xC0, 0x17F)), pool((0x370, 0x3FF)), pool((0x400, 0x52F)), pool((0x590, 0x5FF)),
    pool((0x600, 0x6FF)), pool((0x900, 0x97F)), pool((0xE00, 0xE7F)), pool((0x1780, 0x17FF)),
    pool((0x660, 0x669), (0xFF10, 0xFF19), (0x2160, 0x2188), (0xB2, 0xB3), (0xBC, 0xBE),
         (0x1D7CE, 0x1D7FF), (0x3007, 0x3007), (0x3021, 0x3029)),
    pool((0x2010, 0x2027), (0x2030, 0x205E), (0xA1, 0xBF), (0x20A0, 0x20C0), (0x2190, 0x22FF)),
    pool((0x1F300, 0x1FAFF)) + ["\u200d", "\ufe0f", "\U0001F3FB"],
    ["\U0001F468\u200d\U0001F469\u200d\U0001F467", "\U0001F1E9\U0001F1EA", "1\ufe0f\u20e3",
     "e\u0301", "don't", "I'LL", "foo_bar", "x=>y;", "//", "http://", "${", "</", "3.14", "1,000"],
]


def mixtures(n, added):
    for i in range(n):
        pools = random.sample(POOLS, random.randrange(1, 6))
        if i % 7 == 0:
            pools.append(added)
        parts = []
        for _ in range(random.randrange(1, 120)):
            run = random.choice((1, 1, 1, 2, 3, 8))
            parts += random.choices(random.choice(pools), k=run)
        yield "".join(parts)


def long_runs():
    for unit in ("a", "ab", "\u00e9", "\u4e2d", " ", "\n", " \n", ".", "\x01", "A\u0301", "0",
                 "\u00a0"):
        yield unit * random.randrange(3000, 20000) + random.choice(("", "x", "1", "\u4e00", " "))
    letters = POOLS[0]
    yield "".join(random.choices(letters, k=300000))
    yield "".join(random.choices("ab", k=100000))


def corpus(added, times):
    yield ""
    yield from sources(700_000 * times)
    yield from code_points()
    yield from names(150 * times)
    yield from mixtures(2300 * times, added)
    yield from long_runs()


def run_ours(program, folder, texts, repeat=0):
    with tempfile.TemporaryDirectory() as tmp:
        with open(tmp + "/in", "wb") as f:
            for t in texts:
                b = t.encode()
                f.write(struct.pack("<I", len(b)) + b)
        cmd = [program, folder, tmp + "/in", tmp + "/out"] + ([str(repeat)] if repeat else [])
        done = subprocess.run(cmd, stdout=subprocess.PIPE, check=True)
        data = open(tmp + "/out", "rb").read()
    ids, at = [], 0
    while at < len(data):
        (n,) = struct.unpack_from("<I", data, at)
        ids.append(list(struct.unpack_from(f"<{n}i", data, at + 4)))
        at += 4 + 4 * n
    return ids, done.stdout


def first_difference(hf, ours, theirs):
    differ = (i for i, (a, b) in enumerate(zip(ours, theirs)) if a != b)
    i = next(differ, min(len(ours), len(theirs)))
    before = hf.decode(theirs[max(0, i - 4):i], skip_special_tokens=False)
    after = hf.decode(theirs[i:i + 4], skip_special_tokens=False)
    return (f"token {i}: ours {ours[i:i + 8]}, Hugging Face {theirs[i:i + 8]}, after "
            f"{ascii(before)}, theirs goes on {ascii(after)}")


def compare_pieces(program, hf, times):
    """Every code point that some Unicode version could assign, so placed that each class it could
    have gives other pieces; then mixtures."""
    texts, out = [], []
    for c in (*range(0xD800), *range(0xE000, 0x33480), *range(0xE0000, 0xE0200), 0x10FFFF):
        out.append("a{0}b.{0}1{0}\n \u4e00{0}\u3042{0} ".format(chr(c)))
        if len(out) == 1000:
            texts.append("".join(out))
            out = []
    texts += ["".join(out), *mixtures(1000 * times, ["<think>"]), *sources(150_000 * times)]
    ours, _ = run_ours(program, "split", texts)
    theirs = [[len(p) for p, _ in hf.pre_tokenizer.pre_tokenize_str(t)] for t in texts]
    bad = [i for i in range(len(texts)) if ours[i] != theirs[i]]
    for i in bad[:10]:
        k = next(k for k, (a, b) in enumerate(zip(ours[i], theirs[i])) if a != b)
        start = sum(theirs[i][:k])
        print(f"text {i}, piece {k}: ours {ours[i][k]} bytes, Hugging Face {theirs[i][k]}, of "
              f"{ascii(texts[i].encode()[start:start + 40].decode(errors='replace'))}")
    print(f"pieces: {len(texts)} texts, {sum(map(len, theirs))} pieces, {len(bad)} texts differ")
    return not bad and len(ours) == len(texts)


def compare(program, folder, hf, times):
    added = [t.content for t in hf.get_added_tokens_decoder().values()]
    some = random.sample(added, min(len(added), 40)) + ["<\uff5cUser\uff5c>", "<think>"]
    texts = list(corpus(some, times))
    size = sum(len(t.encode()) for t in texts)
    ours, _ = run_ours(program, folder, texts)
    theirs = [e.ids for e in hf.encode_batch_fast(texts, add_special_tokens=False)]
    bad = [i for i in range(len(texts)) if ours[i] != theirs[i]]
    for i in bad[:10]:
        print(f"text {i}:", first_difference(hf, ours[i], theirs[i]))
    print(f"{folder}: {len(texts)} texts, {size} bytes, {sum(map(len, theirs))} tokens, "
          f"{len(bad)} texts differ")
    return not bad and len(ours) == len(texts) and size >= 5_000_000


def bench(program, folder, hf):
    texts = list(sources(2_500_000)) + list(names(300))
    _, out = run_ours(program, folder, texts, repeat=5)
    n, seconds = out.split()
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        hf.encode_batch_fast(texts, add_special_tokens=False)
        best = min(best, time.perf_counter() - start)
    a, b = int(n) / float(seconds) / 1e6, int(n) / best / 1e6
    print(f"{folder}: {int(n)} bytes on one core: ours {a:.1f} MB/s, Hugging Face {b:.2f} MB/s, "
          f"{a / b:.1f} times")


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("program")
    ap.add_argument("folders", nargs="*")
    ap.add_argument("--seed", type=int, default=20260401)
    ap.add_argument("--more", action="store_true")
    ap.add_argument("--bench", action="store_true")
    args = ap.parse_args()
    if args.bench:
        os.environ["RAYON_NUM_THREADS"] = "1"
    try:
        import tokenizers
    except ImportError:
        print("skipped: the Python package tokenizers is not installed")
        sys.exit(77)
    if not args.folders:
        if "TANDEM_TEST_DATA" not in os.environ:
            print("skipped: TANDEM_TEST_DATA is not set")
            sys.exit(77)
        args.folders = [os.environ["TANDEM_TEST_DATA"] + f
                        for f in ("/models/needle-nvfp4", "/tokenizers/deepseek-v3")]
    missing = [f for f in args.folders if not os.path.exists(f + "/tokenizer.json")]
    if missing:
        print("skipped: no tokenizer.json in", *missing)
        sys.exit(77)
    print("seed", args.seed, "tokenizers", tokenizers.__version__)
    ok = True
    for folder in args.folders:
        random.seed(args.seed)
        hf = tokenizers.Tokenizer.from_file(folder + "/tokenizer.json")
        if args.bench:
            bench(args.program, folder, hf)
        else:
            if folder == args.folders[0]:
                ok = compare_pieces(args.program, hf, 4 if args.more else 1)
            ok = compare(args.program, folder, hf, 4 if args.more else 1) and ok
    sys.exit(0 if ok else 1)


main()
