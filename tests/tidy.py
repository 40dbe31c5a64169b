#!/usr/bin/env python3
"""Rules of the tree that a reviewer should not have to remember.

Floors: common <- proto, kernels <- router, prefill, decode; inside common: base <- auth, kv, text, io
and auth <- xfer. proto and kernels never see each other, nor do the roles; deploy and tests are included by
nobody. Includes are written from the top of the tree. Besides: every file starts with a comment
that says why it exists, no file outgrows one subject, and unsafe calls stay out.

usage: tidy.py [TREE]      exit code 1 and one line per finding
"""
import pathlib
import re
import sys

MAY_INCLUDE = {
    "common/base": {"common/base"},
    "common/auth": {"common/auth", "common/base"},
    "common/kv": {"common/kv", "common/base"},
    "common/text": {"common/text", "common/base"},
    "common/io": {"common/io", "common/base"},
    "common/xfer": {"common/xfer", "common/auth", "common/base"},
    "proto": {"proto", "common"},
    "kernels": {"kernels", "common"},
    "router": {"router", "proto", "kernels", "common"},
    "prefill": {"prefill", "proto", "kernels", "common"},
    "decode": {"decode", "proto", "kernels", "common"},
    "deploy": {"deploy", "proto", "kernels", "common", "router", "prefill", "decode"},
    "tests": {"tests", "deploy", "proto", "kernels", "common", "router", "prefill", "decode"},
}
BANNED = {
    r"\bsprintf\s*\(": "snprintf",
    r"\bstrcpy\s*\(": "snprintf or memcpy",
    r"\bstrcat\s*\(": "snprintf",
    r"\bgets\s*\(": "fgets",
    r"\batoi\s*\(": "strtol with its end checked",
    r"\brand\s*\(": "a seeded generator",
    r"\busleep\s*\(": "a timer",
    r"\bgetenv\s*\(": "a setting of common/base/config.h",
    r"\b(TODO|FIXME|XXX)\b": "the work itself, or an issue",
}
# Where a ban does not hold (a floor or one file), and why.
EXEMPT = {
    ("common/xfer", r"\bgetenv\s*\("): "UCX itself is configured by its environment",
    ("tests", r"\bgetenv\s*\("): "TANDEM_TEST_DATA names the folder of large test data",
    ("common/base/notify.c", r"\bgetenv\s*\("): "NOTIFY_SOCKET and WATCHDOG_USEC are systemd's interface",
}
MAX_LINES = 600


def floor_of(path):
    for name in sorted(MAY_INCLUDE, key=len, reverse=True):
        if path == name or path.startswith(name + "/"):
            return name
    return None


def strip_comments(text):
    """Comments and strings blanked, line structure kept."""
    pattern = re.compile(r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', re.S)
    return pattern.sub(lambda m: re.sub(r"[^\n]", " ", m.group()), text)


def check(tree):
    findings = []
    files = [p for p in sorted(tree.rglob("*")) if p.suffix in (".c", ".h", ".cu", ".cuh")]
    for p in files:
        path = p.relative_to(tree).as_posix()
        floor = floor_of(path)
        if floor is None or path.split("/")[0].startswith("build"):
            continue
        text = p.read_text(encoding="utf-8")
        if not text.lstrip().startswith("/*"):
            findings.append(f"{path}:1: expected a first comment that says why the file exists")
        lines = text.count("\n")
        generated = "unicode_table" in path
        if lines > MAX_LINES and not generated:
            findings.append(f"{path}: {lines} lines, expected at most {MAX_LINES}: one subject a file")
        for n, line in enumerate(text.split("\n"), 1):
            m = re.match(r'\s*#\s*include\s+"([^"]+)"', line)
            if not m:
                continue
            target = m.group(1)
            target_floor = floor_of(target)
            if not (tree / target).exists() and target_floor is None and not target.endswith(".pb-c.h"):
                findings.append(f"{path}:{n}: include {target} is not written from the top of the tree")
            elif target_floor is not None:
                allowed = MAY_INCLUDE[floor]
                if not any(target_floor == a or target_floor.startswith(a + "/") for a in allowed):
                    findings.append(f"{path}:{n}: {floor} may not include {target_floor} ({target})")
        code = strip_comments(text)
        for ban, instead in BANNED.items():
            if (floor, ban) in EXEMPT or (path, ban) in EXEMPT:
                continue
            searched = text if "TODO" in ban else code
            for m in re.finditer(ban, searched):
                n = searched.count("\n", 0, m.start()) + 1
                findings.append(f"{path}:{n}: {m.group().strip('( ')}: use {instead}")
    return len(files), findings


def main():
    tree = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).parent.parent)
    n, findings = check(tree.resolve())
    for f in findings:
        print(f)
    print(f"tidy: {n} files, {len(findings)} findings")
    return 1 if findings or n == 0 else 0


sys.exit(main())
