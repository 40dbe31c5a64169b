#!/usr/bin/env python3
"""`tandem doctor` over emulated GPUs, with stand-ins for NVML and NCCL, all sound and then each at
fault in one way: the fault is found and named, nothing else is, a hang costs its time limit and no
more, and what does not depend on it is still looked at.

usage: test_doctor_gpus.py PROGRAM LIBRARIES MODEL [unittest arguments]"""
import concurrent.futures
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

HANG_S = 20
PROGRAM, LIBRARIES, MODEL = (pathlib.Path(p).resolve() for p in sys.argv[1:4])


class TestGpus(unittest.TestCase):
    def setUp(self):
        d = tempfile.TemporaryDirectory(prefix="tandem-doctor-", dir="/tmp")
        self.addCleanup(d.cleanup)
        self.config = pathlib.Path(d.name) / "tandem.conf"
        self.config.write_text(f"model.dir = {MODEL}\nrun_dir = {d.name}\nrouter.listen = 127.0.0.1:0\n")

    def examine(self, peers="gpus=3", nvml="", nccl="", args=("--all-gpus",), libraries=True):
        env = {k: v for k, v in os.environ.items() if k != "LD_LIBRARY_PATH"}
        env |= {"TD_PEERS": peers, "TD_NVML": nvml, "TD_NCCL": nccl}
        if libraries:
            env["LD_LIBRARY_PATH"] = str(LIBRARIES)
        r = subprocess.run([PROGRAM, "--config", self.config, "--json", *args], text=True, capture_output=True,
                           env=env, timeout=120)
        self.assertIn(r.returncode, (0, 1), r.stderr)
        findings = json.loads(r.stdout)["findings"]
        self.assertEqual(r.returncode, any(f["verdict"] == "error" for f in findings))
        return [f for f in findings if f["area"] in ("gpu", "pair", "nccl")]

    def finds(self, *expected, **kw):
        """Exactly these (verdict, words) are not fine."""
        findings = self.examine(**kw)
        text = "\n".join(f"{f['verdict']} {f['text']}" for f in findings)
        bad = [f for f in findings if f["verdict"] in ("warning", "error")]
        self.assertEqual(len(bad), len(expected), text)
        for verdict, words in expected:
            self.assertTrue(any(f["verdict"] == verdict and words in f["text"] and f["cure"] for f in bad),
                            f"{words}\n{text}")
        return findings

    def fine(self, findings, words):
        return [f["text"] for f in findings if f["verdict"] == "ok" and words in f["text"]]

    def test_sound(self):
        f = self.finds()
        self.assertEqual(len(self.fine(f, "kernels run and compute right")), 3)
        self.assertEqual(len(self.fine(f, "pinned memory")), 3)
        self.assertEqual(len(self.fine(f, "P2P, right bytes")), 3)
        self.assertTrue(self.fine(f, "NCCL 2.28.3: a sum"))
        self.assertTrue(self.fine(f, "over 3 ranks is right"))
        self.assertTrue(self.fine(f, "driver 580.65.06, 3 GPUs"))

    def test_those_that_are_configured(self):
        both = ("--set", "device=cuda:2", "--still", "--set")
        f = self.examine(peers="gpus=3", args=(*both, "mem_fraction=40"))
        if not self.fine(f, "kernels run"):
            self.skipTest("a build without CUDA")
        self.assertEqual(len(self.fine(f, "kernels run")), 1)
        self.assertTrue(self.fine(f, "cuda:2: its workers will take"))
        # Prefill and decode on one GPU share its memory.
        self.finds(("error", "cuda:2: its workers will take"), peers="gpus=3", args=(*both, "mem_fraction=60"))
        self.finds(("error", "cuda:4"), peers="gpus=3", args=("--set", "device=cuda:4"))

    def test_still(self):
        f = self.finds(peers="gpus=2 copy=0>1", args=("--all-gpus", "--still"))
        self.assertFalse(self.fine(f, "P2P"))

    def test_no_driver(self):
        self.assertEqual(self.finds(peers="none")[0]["verdict"], "skipped")

    def test_wrong_bytes(self):
        f = self.finds(("error", "cuda:0 and cuda:2: wrong words of 16384: 1 copied"), peers="gpus=3 copy=2>0")
        self.assertEqual(len(self.fine(f, "P2P, right bytes")), 2)
        self.assertIn("iommu=pt", [x for x in f if x["verdict"] == "error"][0]["cure"])

    def test_what_hangs(self):
        """Side by side: each waits for its time limit, which what is sound must meet on a busy machine."""
        late = f"did not end within {HANG_S} s"
        cases = [  # who hangs, the only finding, what is fine all the same
            (dict(peers="gpus=3 hang=1>0"), f"cuda:0 and cuda:1: copying between them {late}",
             {"P2P, right bytes": 2, "over 3 ranks is right": 1}),
            (dict(peers="gpus=3 stuck=1"), f"cuda:1 Emulated 1: opening it {late}",
             {"kernels run and compute right": 2, "over 2 ranks is right": 1}),
            (dict(peers="gpus=1", nvml="hang=1"), f"NVML (ECC, clocks, power, PCIe link, other processes): {late}",
             {"kernels run and compute right": 1}),
            (dict(peers="gpus=2", nccl="hang"), f"NCCL 2.28.3: summing over the ranks with 2 ranks {late}",
             {"P2P, right bytes": 1}),
            (dict(peers="gpus=2", nccl="stall"), f"NCCL 2.28.3: making the ranks' communicators with 2 ranks {late}",
             {"P2P, right bytes": 1})]

        def run(case):
            kw, words, fine = case
            f = self.finds(("error", words), args=("--all-gpus", "--limit", str(HANG_S)), **kw)
            for w, n in fine.items():
                self.assertEqual(len(self.fine(f, w)), n, (w, f))
        with concurrent.futures.ThreadPoolExecutor(len(cases)) as pool:
            for result in [pool.submit(run, c) for c in cases]:
                result.result()

    def test_a_pair_that_ends_its_process(self):
        f = self.finds(("error", "cuda:1 and cuda:2: copying between them ended the process (signal 6)"),
                       peers="gpus=3 die=1>2")
        self.assertEqual(len(self.fine(f, "P2P, right bytes")), 2)
        f = self.finds(("error", "copying between cuda:0 and cuda:1"), peers="gpus=3 lost=0>1")
        self.assertEqual(len(self.fine(f, "P2P, right bytes")), 2)

    def test_no_peers(self):
        self.finds(("warning", "cuda:0 and cuda:1: no P2P one way"), peers="gpus=2 far=1>0")
        self.finds(("warning", "no P2P (they are on different I/O hubs)"), peers="gpus=2 far=0>1 far=1>0",
                   nvml="p2p=3")

    def test_a_gpu_of_its_own_kind(self):
        f = self.finds(("error", "cuda:1 Emulated 1: this build has no kernels for compute capability 9.0"),
                       peers="gpus=3 old=1")
        self.assertEqual(len([x for x in f if "one of them does not work" in x["text"]]), 2)
        self.assertTrue(self.fine(f, "over 2 ranks is right"))
        self.finds(("error", "cuda:0 Emulated 0: a kernel gave 1 wrong values"), peers="gpus=2 mad=0")

    def test_nvml(self):
        for words, verdict, expected in (
                ("ecc_volatile=3@1", "error", "cuda:1: its memory is failing"),
                ("failed=1@0", "error", "could not be remapped"), ("pending=1@0", "warning", "waits for a reset"),
                ("ecc=0@1", "warning", "cuda:1: ECC is off"), ("throttle=0x48@0", "warning", "heat"),
                ("power=300000@1", "warning", "capped at 300 W of 600"), ("persistence=0@0", "warning", "persistence"),
                ("compute_mode=2@1", "error", "prohibits"), ("mig=1@1", "warning", "MIG"),
                ("pid=12345@0", "warning", "1 other process computes on it: 12345"),
                ("generation=3@1", "warning", "PCIe generation 3 under load"),
                ("lanes=8@1 generation=0 generation_max=0", "warning", "PCIe x8, it can x16")):
            self.finds((verdict, expected), peers="gpus=2", nvml=words)
        self.finds(peers="gpus=2", nvml="-ecc -power -throttle -mig -generation -lanes -persistence -clock -pending")
        f = self.finds(peers="gpus=2", nvml="init=9")
        self.assertTrue(any("Driver Not Loaded" in x["text"] and x["verdict"] == "skipped" for x in f))

    def test_no_libraries(self):
        f = self.examine(peers="gpus=1", libraries=False, args=("--all-gpus", "--still"))
        self.assertTrue(any(x["verdict"] == "skipped" and "libnvidia-ml.so.1" in x["text"] for x in f))
        self.assertFalse([x for x in f if x["verdict"] == "error"], f)

    def test_nccl(self):
        self.finds(("error", "1 wrong values in a sum over 3 ranks"), nccl="wrong")
        self.finds(("error", "making the ranks' communicators: unhandled system error"), nccl="fail")


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0]] + sys.argv[4:], verbosity=2)
