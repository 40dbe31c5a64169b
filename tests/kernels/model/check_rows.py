"""Every weight of a checkpoint, decoded here by formula with numpy, must equal what td_weight_row
gave, bit for bit; and a quantised checkpoint must lie within its formats' rounding of the bf16 one.

usage: check_rows.py WEIGHT_ROWS MODEL_NAME    (needle-bf16 | needle-fp8fp4 | needle-nvfp4)
Looks in deploy/models/needle (needle-nvfp4) and $TANDEM_TEST_DATA/models; exit 77: not there.
"""
import glob
import json
import os
import subprocess
import sys

try:
    import numpy as np
except ImportError:
    print("skipped: numpy is not installed")
    sys.exit(77)

ROOT = os.path.dirname(os.path.abspath(__file__)) + "/../../.."


def find(name):
    places = [ROOT + "/deploy/models/needle"] if name == "needle-nvfp4" else []
    if os.environ.get("TANDEM_TEST_DATA"):
        places.append(os.environ["TANDEM_TEST_DATA"] + "/models/" + name)
    for p in places:
        if os.path.exists(p + "/config.json"):
            return p
    return None


def read(folder):
    """name -> (dtype, shape, bytes)"""
    tensors = {}
    for path in glob.glob(folder + "/*.safetensors"):
        blob = open(path, "rb").read()
        n = int.from_bytes(blob[:8], "little")
        for name, e in json.loads(blob[8:8 + n]).items():
            if name != "__metadata__":
                b, end = e["data_offsets"]
                tensors[name] = (e["dtype"], e["shape"], blob[8 + n + b:8 + n + end])
    return tensors


def e4m3():
    code = np.arange(256)
    exp, man = code >> 3 & 15, code & 7
    v = np.where(exp == 0, man * 2.0**-9, (1 + man / 8) * 2.0**(exp - 7.0))
    v[(code & 127) == 127] = np.nan
    return np.where(code & 128, -v, v)


E4M3, E2M1 = e4m3(), np.array([0, .5, 1, 1.5, 2, 3, 4, 6, -0., -.5, -1, -1.5, -2, -3, -4, -6])


def e2m1(data, rows):
    b = np.frombuffer(data, np.uint8).reshape(rows, -1)
    return np.stack([E2M1[b & 15], E2M1[b >> 4]], -1).reshape(rows, -1)


def e8m0(t):
    return 2.0**(np.frombuffer(t[2], np.uint8).reshape(t[1]).astype(np.float64) - 127)


def decode(tensors, name):
    dtype, shape, data = tensors[name]
    base = name.removesuffix(".weight")
    if dtype == "F32":
        v = np.frombuffer(data, "<f4")
    elif dtype == "BF16":
        v = (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
    elif dtype == "F8_E4M3":
        s = e8m0(tensors[base + ".scale"]).repeat(128, 0)[:shape[0]].repeat(128, 1)[:, :shape[1]]
        v = E4M3[np.frombuffer(data, np.uint8).reshape(shape)] * s
    elif dtype == "I8":
        v = e2m1(data, shape[0]) * e8m0(tensors[base + ".scale"]).repeat(32, 1)
    elif dtype == "U8":
        _, sshape, sdata = tensors[base + ".weight_scale"]
        s = E4M3[np.frombuffer(sdata, np.uint8).reshape(sshape)].repeat(16, 1)
        v = e2m1(data, shape[0]) * s * float(np.frombuffer(tensors[base + ".weight_scale_2"][2], "<f4")[0])
    else:
        raise SystemExit(f"{name}: unexpected dtype {dtype}")
    return v.astype(np.float32).reshape(-1)


def main():
    program, name = sys.argv[1:]
    folder = find(name)
    if not folder:
        print(f"skipped: {name} is read from $TANDEM_TEST_DATA/models, which is not there")
        return 77
    tensors, reference, seen, worst = read(folder), None, set(), {}
    if name != "needle-bf16" and find("needle-bf16"):
        reference = read(find("needle-bf16"))
    out = subprocess.run([program, folder], stdout=subprocess.PIPE, check=True).stdout
    at = 0
    while at < len(out):
        eol = out.index(b"\n", at)
        weight, rows, cols = out[at:eol].decode().split()
        n = int(rows) * int(cols)
        got = np.frombuffer(out, "<f4", n, eol + 1)
        at = eol + 1 + 4 * n
        want = decode(tensors, weight)
        if got.tobytes() != want.tobytes():
            i = int(np.flatnonzero(got.view(np.uint32) != want.view(np.uint32))[0])
            print(f"{weight}[{i}]: expected {want[i]!r}, found {got[i]!r}")
            return 1
        seen.add(weight)
        if reference:
            true, dtype = decode(reference, weight), tensors[weight][0]
            scale = float(np.abs(true).max()) or 1.0
            worst[dtype] = max(worst.get(dtype, 0), float(np.abs(got - true).max()) / scale)
    extra = (".scale", ".weight_scale", ".weight_scale_2", ".input_scale", ".tid2eid")
    missing = [k for k in tensors if k not in seen and not k.endswith(extra)]
    if missing:
        print(f"not given: {missing[:5]}")
        return 1
    # Half a step of the format at the largest value, and the scale's own rounding up.
    limit = {"F32": 0, "BF16": 0, "F8_E4M3": 1 / 16, "I8": 1 / 4, "U8": 1 / 4}
    print(f"{len(seen)} weights equal bit for bit; against bf16: {worst or 'not compared'}")
    return int(any(v > limit[k] for k, v in worst.items()))


sys.exit(main())
