#!/usr/bin/env python3
"""`tandem topology`: presets as recorded, and nothing wrong with them; every finding of --check with the
fault it is for, and gone with its cure; drop-ins from a sysfs of eight GPUs on two nodes, which systemd
accepts; the commands that follow.

usage: test_topology.py TANDEM CONFIG_DIR UNIT_DIR [unittest arguments]
       CONFIG_DIR: of the real model; UNIT_DIR: the built units"""
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

TANDEM, REAL, UNITS = pathlib.Path(sys.argv[1]).resolve(), pathlib.Path(sys.argv[2]), pathlib.Path(sys.argv[3])
RECORDED = pathlib.Path(__file__).parent / "presets"
PRESETS = {"4+4": (1, 1), "2x2+4": (2, 1), "2+2+2+2": (2, 2)}


def run(*args):
    return subprocess.run([TANDEM, "topology", *map(str, args)], text=True, capture_output=True)


class Topology(unittest.TestCase):
    def setUp(self):
        self.dir = pathlib.Path(tempfile.mkdtemp(prefix="tandem-topology-"))
        self.addCleanup(shutil.rmtree, self.dir)
        self.model("model")

    def model(self, name, **changes):
        """A folder with the real config.json, as NVFP4."""
        config = json.loads((REAL / "config.json").read_text())
        config["quantization_config"] |= {"quant_algo": "MIXED_PRECISION", "moe_quant_algo": "NVFP4"}
        (self.dir / name).mkdir()
        (self.dir / name / "config.json").write_text(json.dumps(config | changes))
        return self.dir / name

    def preset(self, name="4+4", *args):
        r = run(name, "--model", self.dir / "model", *args)
        self.assertEqual(r.returncode, 0, r.stderr)
        return r.stdout

    def check(self, text, *args, memory=96):
        """Exit code and findings of a configuration: [(level, who, sentence)]."""
        path = self.dir / "check.conf"
        path.write_text(text)
        sys_dir = self.dir / "no-sys"
        r = run("--check", path, "--sys", sys_dir, *(("--memory", memory) if memory else ()), *args)
        self.assertEqual(r.stderr, "")
        found = re.findall(rf"^(error|warning|note): {re.escape(str(path))}(?:: (router|\w+@\d+))?: (.*)$", r.stdout, re.M)
        self.assertEqual(len(r.stdout.splitlines()), 2 + len(found), r.stdout)
        errors = sum(level == "error" for level, _, _ in found)
        self.assertIn(f"{errors} error{'' if errors == 1 else 's'}", r.stdout.splitlines()[-1])
        self.assertEqual(r.returncode, 1 if errors else 0, r.stdout)
        return found

    def finding(self, text, level, who, *words, args=(), memory=96):
        """That one and no other."""
        found = self.check(text, *args, memory=memory)
        self.assertEqual([f[:2] for f in found], [(level, who)], found)
        for word in words:
            self.assertIn(word, found[0][2])
        return found[0][2]


class TestPresets(Topology):
    def test_as_recorded(self):
        for name in PRESETS:
            r = run(name)
            self.assertEqual((r.returncode, r.stderr), (0, ""))
            self.assertEqual(r.stdout, (RECORDED / f"{name}.conf").read_text())

    def test_nothing_is_wrong_with_them(self):
        for name in PRESETS:
            self.assertEqual(self.check(self.preset(name)), [], name)

    def test_every_gpu_has_one_worker(self):
        for name, (prefill, decode) in PRESETS.items():
            text = self.preset(name)
            gpus = [int(n) for line in re.findall(r"^device = cuda:(\S+)", text, re.M) for n in line.split(",")]
            self.assertEqual(gpus, list(range(8)))
            self.assertEqual(len(re.findall(r"^\[prefill@\d\]", text, re.M)), prefill)
            self.assertEqual(len(re.findall(r"^\[decode@\d\]", text, re.M)), decode)

    def test_set(self):
        text = self.preset("2+2+2+2", "--set", "tp=1", "--set", "device=cpu", "--set", "decode:max_running=40",
                           "--set", " log_level = debug", "--set", "decode@1:threads=3")
        self.assertEqual(len(re.findall(r"^tp = 1\b", text, re.M)), 2)
        self.assertEqual(len(re.findall(r"^device = cpu$", text, re.M)), 4)
        self.assertEqual(re.findall(r"^max_running = (\d+)", text, re.M), ["4", "40"])
        self.assertRegex(text.split("[prefill]")[0], r"(?m)^log_level = debug$")
        self.assertRegex(text, r"\[decode@1\]\ndevice = cpu\nthreads = 3\n")
        for wrong, word in [("nonsense=1", "nonsense"), ("decode:tp=9", "1 to 8"), ("cook:tp=2", "cook"),
                            ("decode@2:threads=2", "decode@2"), ("tp", "key=value")]:
            r = run("4+4", "--set", wrong)
            self.assertEqual((r.returncode, r.stdout), (2, ""), wrong)
            self.assertIn(word, r.stderr)

    def test_out(self):
        path, wants = self.dir / "out.conf", self.dir / "wants"
        wants.mkdir()
        for name in ("tandem-router.service", "tandem-prefill@0.service", "tandem-decode@3.service", "other@7.service"):
            (wants / name).touch()
        r = run("2x2+4", "--out", path, "--wants", wants)
        self.assertEqual((r.returncode, r.stderr), (0, ""))
        self.assertEqual(path.read_text(), run("2x2+4").stdout)
        self.assertEqual(r.stdout.splitlines()[-3:], [
            "sudo systemctl disable --now tandem-decode@3",
            "sudo systemctl enable tandem.target tandem-router tandem-prefill@0 tandem-prefill@1 tandem-decode@0",
            "sudo systemctl restart tandem.target"])
        for line in ("sudo systemctl enable tandem.target tandem-router tandem-prefill@0 tandem-prefill@1 "
                     "tandem-decode@0", "sudo systemctl restart tandem.target"):
            self.assertIn(f"#   {line}\n", path.read_text())
        path.write_text("mine")
        r = run("4+4", "--out", path)
        self.assertEqual((r.returncode, path.read_text()), (1, "mine"))
        self.assertIn("there already", r.stderr)

    def test_wrong_use(self):
        for args, word in [(("8+0",), "8+0"), ((), "preset"), (("4+4", "more"), "more"), (("--check",), "argument"),
                           (("--check", "a", "--units", "b"), "both"), (("--check", "a", "--out", "b"), "--out"),
                           (("--check", "a", "--memory", "x"), "--memory"), (("--nonsense",), "nonsense")]:
            r = run(*args)
            self.assertEqual((r.returncode, r.stdout), (2, ""), args)
            self.assertIn(word, r.stderr)
        r = run("--check", self.dir / "nowhere")
        self.assertEqual(r.returncode, 1)
        self.assertIn("No such file", r.stderr)


class TestInstances(Topology):
    def test_role_missing(self):
        text = self.preset().replace("cluster.prefill = 1", "cluster.prefill = 0").replace("[prefill@0]\ndevice = cuda:0,1,2,3\n", "")
        self.finding(text, "error", "", "no prefill worker", "router.colocate = on")
        self.assertEqual(self.check("router.colocate = on\n" + text), [])

    def test_section_of_nobody(self):
        text = self.preset("2+2+2+2").replace("cluster.decode = 2", "cluster.decode = 1")
        self.finding(text, "error", "", "[decode@1] in line", "cluster.decode = 1")

    def test_instance_without_a_section(self):
        text = self.preset("2+2+2+2").replace("[decode@1]", "[decode@0]").replace("cuda:6,7", "cuda:4,5")
        found = self.check(text)
        self.assertIn(("warning", "decode@1"), [f[:2] for f in found])
        self.assertIn("[decode@1]", [f for f in found if f[1] == "decode@1"][0][2])

    def test_order_of_sections(self):
        text = self.preset() + "\n[decode@0]\nmax_running = 64\n"
        self.finding(text, "warning", "", "[decode@0] stands in lines", "later one holds")
        text = self.preset() + "\n[decode]\nlog_level = debug\n"
        said = [f[2] for f in self.check(text)]
        self.assertEqual(len([s for s in said if "undoes what it shares with [decode@0]" in s]), 1, said)

    def test_enabled_units(self):
        wants = self.dir / "wants"
        wants.mkdir()
        names = ["tandem-router.service", "tandem-prefill@0.service", "tandem-decode@0.service"]
        for name in names:
            (wants / name).touch()
        self.assertEqual(self.check(self.preset(), "--wants", wants), [])
        (wants / "tandem-decode@1.service").touch()
        self.finding(self.preset(), "error", "decode@1", "disable --now tandem-decode@1", args=("--wants", wants))
        (wants / "tandem-decode@1.service").unlink()
        (wants / "tandem-decode@0.service").unlink()
        self.finding(self.preset(), "warning", "decode@0", "enable --now tandem-decode@0", args=("--wants", wants))


class TestGpus(Topology):
    def test_gpu_of_two_workers(self):
        text = self.preset().replace("cuda:4,5,6,7", "cuda:3,4,5,6")
        self.finding(text, "error", "", "GPU 3 ", "prefill@0 and decode@0", "180 %")
        shared = text.replace("[prefill]\n", "[prefill]\nmem_fraction = 50\n").replace(
            "[decode]\n", "[decode]\nmem_fraction = 50\n")
        shared = shared.replace("max_context = 1048576", "max_context = 65536").replace("= 8192", "= 512")
        self.finding(shared, "note", "", "GPU 3 is shared", "100 %", memory=141)

    def test_gpu_of_two_ranks(self):
        self.finding(self.preset().replace("cuda:4,5,6,7", "cuda:4,5,6,6"), "error", "", "GPU 6 ", "2 ranks")

    def test_tp_against_the_list(self):
        text = self.preset().replace("cuda:4,5,6,7", "cuda:4,5,6")
        self.finding(text, "error", "decode@0", "each of 4 ranks", "found 3", "set tp")
        self.finding(self.preset().replace("cuda:4,5,6,7", "gpu4"), "error", "decode@0", "gpu4")
        self.finding(self.preset("4+4", "--set", "decode:tp=3"), "error", "decode@0", "1, 2, 4 or 8")
        self.assertEqual(self.check(self.preset().replace("cuda:4,5,6,7", "cuda:4")), [])

    def test_gpu_that_is_not_there(self):
        sysfs(self.dir / "sys", 6)
        found = self.check(self.preset(), "--sys", self.dir / "sys")
        self.assertEqual([f[:2] for f in found], [("error", "decode@0")] * 2)
        self.assertIn("GPU 6 is not there, this machine has 0 to 5", found[0][2])

    def test_ranks_that_do_not_divide_the_model(self):
        model = self.model("two", num_attention_heads=64, o_groups=2)
        text = self.preset("4+4", "--set", f"model.dir={model}")
        found = self.check(text)
        self.assertEqual([f[:2] for f in found], [("error", "prefill@0"), ("error", "decode@0")])
        self.assertIn("4 ranks share the model's 2 output groups", found[1][2])
        self.assertEqual(self.check(text, memory=None)[:2], found)  # also where no card is known
        text = self.preset("2+2+2+2", "--set", f"model.dir={model}")
        self.assertEqual(self.check(text, memory=141), [])

    def test_ranks_on_the_cpu_have_a_thread_each(self):
        text = self.preset("4+4", "--set", "device=cpu", "--set", "tp=4", "--set", "decode:threads=3", "--set",
                           "prefill:threads=4")
        self.finding(text, "error", "decode@0", "threads: expected one for each of 4 ranks")


class TestLimits(Topology):
    def test_addresses(self):
        text = self.preset("4+4", "--set", "router.listen=127.0.0.1:99999")
        self.finding(text, "error", "router", "router.listen", "99999")
        tcp = ("--set", "cluster_key_file=/etc/tandem/cluster.key", "--set", "lane_device=eth1")
        for listen, control, clash in [("10.0.0.1:7700", "10.0.0.1:7700", True), ("0.0.0.0:7700", "10.0.0.1:7700", True),
                                       ("127.0.0.1:7700", "10.0.0.1:7700", False),
                                       ("10.0.0.1:8000", "10.0.0.1:7700", False)]:
            text = self.preset("4+4", *tcp, "--set", f"router.listen={listen}", "--set", f"router.control={control}")
            if clash:
                self.finding(text, "error", "router", "the same port")
            else:
                self.assertEqual(self.check(text), [])
        self.finding(self.preset("4+4", *tcp[2:], "--set", "router.control=10.0.0.1:7700"), "error", "router",
                     "cluster_key_file")
        self.finding(self.preset("4+4", *tcp[:2], "--set", "lane=tcp"), "error", "router", "lane_device")
        self.finding(self.preset("4+4", "--set", f"run_dir=/tmp/{'x' * 120}"), "error", "", "run_dir")

    def test_context(self):
        self.finding(self.preset("4+4", "--set", "prefill:max_context=65536"), "warning", "decode@0",
                     "1048576", "65536 of prefill@0", "above the first section")
        text = self.preset("4+4", "--set", "max_context=0", "--set", "prefill:max_context=65536")
        self.finding(text, "warning", "decode@0", "the checkpoint's")

    def test_counts(self):
        text = self.preset("2x2+4", "--set", "decode:max_prefill_peers=1")
        self.finding(text, "error", "decode@0", "max_prefill_peers = 1", "2 prefill workers", "set it to 2")
        text = self.preset("2+2+2+2", "--set", "router.max_requests=63")
        self.finding(text, "warning", "router", "= 63", "64 sequences", "at least 64")
        text = self.preset("4+4", "--set", "decode:reserve_tokens=1048576")
        self.finding(text, "warning", "decode@0", "reserve_tokens")

    def test_clocks(self):
        text = self.preset("4+4", "--set", "heartbeat_ms=3000")
        self.finding(text, "error", "router", "peer_timeout_ms = 5000", "at least 6000")


class TestAgreement(Topology):
    def test_settings_of_all(self):
        for key, value in [("run_dir", "/run/other"), ("cluster.prefill", "3")]:
            self.finding(self.preset("4+4", "--set", f"decode@0:{key}={value}"), "error", "decode@0", key, value)
            self.finding(self.preset("4+4", "--set", f"prefill@0:{key}={value}"), "error", "prefill@0", key, value)
        other = self.model("other")
        self.finding(self.preset("4+4", "--set", f"decode:model.dir={other}"), "error", "decode@0", "model.dir")

    def test_settings_of_workers(self):
        for key, value in [("numerics", "plain"), ("index_key_dtype", "fp8"), ("kv_dtype", "fp8"), ("index_topk", "256"),
                           ("score_dtype", "bf16"), ("index_sim4", "on"), ("kv_layout", "split"), ("random.seed", "7"), ("load_format", "random")]:
            self.finding(self.preset("4+4", "--set", f"decode:{key}={value}"), "error", "decode@0", f"{key} is",
                         "of prefill@0")

    def test_kinds_of_device(self):
        text = self.preset("4+4", "--set", "prefill@0:device=cpu")
        self.finding(text, "error", "decode@0", "the CPU and GPUs round differently")


class TestModel(Topology):
    def test_no_model(self):
        text = self.preset("4+4", "--set", "model.dir=/nowhere/at/all")
        self.finding(text, "error", "", "/nowhere/at/all", "model.dir")
        text = self.preset("4+4", "--set", "model.dir=/home/me/model")
        self.assertEqual([f[0] for f in self.check(text)], ["warning", "error"])

    def test_plan_that_does_not_fit(self):
        said = self.check(self.preset("2+2+2+2", "--set", "decode:mem_fraction=90"))
        self.assertEqual([f[:2] for f in said], [("error", "decode@0"), ("error", "decode@1")])
        largest = re.search(r"set max_context to at most (\d+)", said[0][2])[1]
        self.assertEqual(self.check(self.preset("2+2+2+2", "--set", "decode:mem_fraction=90", "--set",
                                                f"max_context={largest}")), [])

    def test_options_of_a_worker(self):
        text = self.preset("4+4", "--set", "max_context=1048576", "--set", "nvfp4_activations=on", "--set", "numerics=plain")
        self.assertEqual([f[:2] for f in self.check(text)], [("error", "prefill@0"), ("error", "decode@0")])

    def test_memory_that_nobody_told(self):
        self.finding(self.preset("4+4", "--set", "threads=1"), "note", "", "--memory GB", memory=None)


def sysfs(root, gpus, nodes=2, known=True):
    """GPUs 0.. on ascending addresses, the first half on node 0; beside them other devices."""
    def device(address, **files):
        d = root / "bus/pci/devices" / address
        d.mkdir(parents=True)
        for name, text in files.items():
            (d / name).write_text(text + "\n")
    per = -(-gpus // nodes)
    for i in reversed(range(gpus)):
        node = i // per
        device(f"0000:{0x11 + 0x10 * i:02x}:00.0", vendor="0x10de", **{"class": "0x030200"},
               numa_node=str(node if known else -1), local_cpulist=f"{node * 32}-{node * 32 + 31},{64 + node * 32}-{95 + node * 32}")
    device("0000:00:01.0", vendor="0x1022", **{"class": "0x030000"}, numa_node="0", local_cpulist="0-31")
    device("0000:11:00.1", vendor="0x10de", **{"class": "0x040300"}, numa_node="0", local_cpulist="0-31")


class TestUnits(Topology):
    def units(self, name, **kw):
        conf, self.units_dir = self.dir / "tandem.conf", self.dir / "units"
        conf.write_text(self.preset(name))
        self.units_dir.mkdir(exist_ok=True)
        sysfs(self.dir / "sys", 8, **kw)
        r = run("--units", conf, "--dir", self.units_dir, "--sys", self.dir / "sys", "--wants", self.dir / "none")
        self.assertEqual((r.returncode, r.stderr), (0, ""))
        found = {p.parent.name: p.read_text() for p in self.units_dir.rglob("topology.conf")}
        self.assertEqual(sorted(line for line in r.stdout.splitlines() if line.startswith("/")),
                         sorted(str(self.units_dir / name / "topology.conf") for name in found))
        self.assertIn("sudo systemctl daemon-reload\nsudo systemctl enable tandem.target", r.stdout)
        return found

    def test_near_the_gpus(self):
        found = self.units("2x2+4")
        self.assertEqual(sorted(found), [f"tandem-{w}.service.d" for w in ("decode@0", "prefill@0", "prefill@1")])
        decode = found["tandem-decode@0.service.d"]
        self.assertIn("# cuda:4 is 0000:51:00.0, node 1\n", decode)
        self.assertTrue(decode.endswith("[Service]\nCPUAffinity=32-63,96-127\nNUMAPolicy=preferred\nNUMAMask=1\n"), decode)
        prefill = found["tandem-prefill@1.service.d"]
        self.assertTrue(prefill.endswith("[Service]\nCPUAffinity=0-31,64-95\nNUMAPolicy=preferred\nNUMAMask=0\n"), prefill)

    def test_across_nodes(self):
        found = self.units("4+4", nodes=4)
        prefill = found["tandem-prefill@0.service.d"]
        self.assertTrue(prefill.endswith("[Service]\nCPUAffinity=0-31,64-95 32-63,96-127\n"), prefill)

    def test_where_there_is_nothing_to_say(self):
        self.assertEqual(self.units("4+4", nodes=1), {})
        shutil.rmtree(self.dir / "sys")
        self.assertEqual(self.units("4+4", known=False), {})
        shutil.rmtree(self.dir / "sys")
        (self.dir / "tandem.conf").write_text(self.preset("4+4", "--set", "device=cpu", "--set", "tp=1"))
        sysfs(self.dir / "sys", 8)
        r = run("--units", self.dir / "tandem.conf", "--dir", self.units_dir, "--sys", self.dir / "sys")
        self.assertEqual(r.stdout.splitlines()[0], "sudo systemctl daemon-reload")

    def test_systemd_accepts_them(self):
        if not shutil.which("systemd-analyze"):
            self.skipTest("systemd-analyze is not installed")
        for kw in ({}, {"nodes": 4}):
            with self.subTest(**kw):
                shutil.rmtree(self.dir / "sys", ignore_errors=True)
                self.units("2+2+2+2", **kw)
                for role in ("prefill", "decode"):
                    text = (UNITS / f"tandem-{role}@.service").read_text()
                    text = re.sub(r"^ExecStart=.*", f"ExecStart={TANDEM}", text, flags=re.M)
                    (self.units_dir / f"tandem-{role}@.service").write_text(text)
                names = [f"tandem-{role}@{i}.service" for role in ("prefill", "decode") for i in range(2)]
                r = subprocess.run(["systemd-analyze", "--man=no", "verify", *names], text=True, capture_output=True,
                                   cwd=self.units_dir, env=os.environ | {"SYSTEMD_UNIT_PATH": f"{self.units_dir}:"})
                if "Failed to initialize manager" in r.stderr or "Failed to setup" in r.stderr:
                    self.skipTest("systemd-analyze does not work here: " + r.stderr.strip())
                ours = [line for line in r.stderr.splitlines() if "tandem" in line or "topology" in line]
                self.assertEqual((r.returncode, ours), (0, []), r.stderr)


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0]] + sys.argv[4:], verbosity=2)
