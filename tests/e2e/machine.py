"""What tests with processes ask of the machine that runs them, which may be a loaded one: how long
they wait, a port of their own, and folders that only failures leave behind."""
import atexit
import pathlib
import random
import shutil
import socket
import sys
import tempfile

PATIENCE = 300  # s, for what must happen: only a hang takes so long


def free_port():
    """Not one of those that the kernel gives out by itself: it might go to a connection of another
    test before the program that it is meant for listens."""
    while True:
        port = random.randrange(10000, 32000)
        with socket.socket() as s:
            try:
                s.bind(("127.0.0.1", port))
                return port
            except OSError:
                pass


folders, failures = [], []


def folder(prefix):
    """Short enough for sockets. It goes with this process, unless something failed."""
    folders.append(pathlib.Path(tempfile.mkdtemp(prefix=prefix, dir="/tmp")))
    return folders[-1]


def failed(what="a test"):
    failures.append(what)


def uncaught(kind, *more):
    failed(kind.__name__)
    sys.__excepthook__(kind, *more)


@atexit.register
def leave():
    for f in folders:
        if not failures:
            shutil.rmtree(f, ignore_errors=True)
        elif f.exists():
            print(f"kept: {f}", flush=True)


sys.excepthook = uncaught
