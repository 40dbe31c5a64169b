#!/usr/bin/env python3
"""The shipped OpenAPI file and a running cluster say the same: PyPI's `schemathesis` sends what the file
describes, and what it does not, to a real cluster; nothing may fail inside, and nothing may be answered
that the file does not describe. A fixed seed, a bounded number of examples.

usage: test_openapi.py BUILD [EXAMPLES]"""
import json
import shutil
import subprocess
import sys

from cluster import TREE, WHOLE, Cluster, need

EXAMPLES = sys.argv[2] if len(sys.argv) > 2 else "12" if WHOLE else "5"
CHECKS = ("not_a_server_error,status_code_conformance,content_type_conformance,response_headers_conformance,"
          "response_schema_conformance,unsupported_method,allow_header_conformance,negative_data_rejection")


def pinned(spec):
    """The file with what only this deployment knows: its model."""
    schemas = spec["components"]["schemas"]
    for request in ("ChatRequest", "CompletionRequest", "ResponseRequest", "MessageRequest", "CountTokensRequest"):
        fields = schemas[request]["properties"]
        fields["model"] = {"const": "needle"}
    return spec


def main():
    need("openapi_spec_validator").validate(json.loads((TREE / "router" / "openapi.json").read_text()))
    program = shutil.which("schemathesis")
    if not program:
        print("the PyPI package schemathesis is not installed")
        return 77
    # Short answers, to have many: without a limit by default, with one by what a sequence may be.
    with Cluster(router__default_max_tokens=6, max_context=512, max_running=32, queue_timeout_ms=100000) as c:
        status, spec = c.get("/openapi.json")
        assert status == 200 and spec == json.loads((TREE / "router" / "openapi.json").read_text())
        file = c.dir / "openapi.json"
        file.write_text(json.dumps(pinned(spec)))
        # A method that the parser does not know, as QUERY may be, is answered with 501 before there is a path.
        (c.dir / "schemathesis.toml").write_text('[phases.coverage]\nunexpected-methods = ["get", "put", "post", "delete", "options", "patch", "trace"]\n')
        r = subprocess.run([program, "--config-file", c.dir / "schemathesis.toml", "run", file, "--url", c.url, "--checks", CHECKS, "--phases", "examples,coverage,fuzzing",
                            "--max-examples", EXAMPLES, "--seed", "20260806", "--continue-on-failure", "--suppress-health-check", "all",
                            "--request-timeout", "120", "--warnings", "off", "--generation-database", "none", "--no-color"],
                           cwd=c.dir, text=True, capture_output=True)
        print(r.stdout[-20000:], r.stderr[-4000:])
        assert r.returncode == 0, f"schemathesis: {r.returncode}"
        assert "No issues found" in r.stdout or "passed" in r.stdout, r.stdout[-500:]
        assert c.get("/ready")[0] == 200
        c.wait_baseline()
    return 0


if __name__ == "__main__":
    sys.exit(main())
